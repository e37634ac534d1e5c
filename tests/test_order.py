"""No test sees what the tests before it left: random numbers, registered priors."""

import random

import numpy as np
import pytest
import torch

import vicinal
from vicinal.priors import registry


@pytest.fixture(scope="module", params=["first", "second"])
def drawn(request):
    """A number drawn in a fixture of the module; the test before has drawn others."""
    return torch.rand(3)


def test_fixtures_of_a_module_draw_the_same_after_any_test(drawn):
    expected = torch.rand(3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn, expected)
    assert torch.equal(torch.rand(3), expected)  # the fixture leaves the random numbers of the test as they are


@pytest.mark.parametrize("turn", [1, 2])
def test_random_numbers_start_anew_in_every_test(turn):
    assert (random.random(), np.random.rand()) == (random.Random(0).random(), np.random.RandomState(0).rand())


def test_priors_that_tests_register_are_gone_after_them():
    assert all(cls.__module__.startswith("vicinal.") for cls in registry._registered.values()), vicinal.list_priors()
