import numpy as np
import pytest
import torch

import vicinal
from vicinal.priors.parameters import get_parameters, get_parts, parameter_rows, set_parameters

GRID = vicinal.Grid(4, 5)


def build(spec):
    return vicinal.build_prior(spec, heads=3, grid=GRID)


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("gmm:kernels=2", {"sigma": (2, 3), "alpha": (2, 3)}),
        ("gab", {"sigma": (3,), "amplitude": (3,)}),
        ("conv", {"mu_row": (3,), "mu_column": (3,), "sigma": (3,)}),
        ("elm", {}),
        ("rpe", {}),
        ("none", {}),
    ],
)
def test_parameters_have_one_value_for_each_head_or_kernel_and_head(spec, shapes):
    assert {name: values.shape for name, values in get_parameters(build(spec)).items()} == shapes


def test_parameters_are_what_the_attributes_of_the_prior_show():
    prior = build("gmm:kernels=2+conv:centers=neighbors")
    mixture, convolution = prior.parts
    found = get_parameters(prior)
    assert np.array_equal(found["gmm.sigma"], mixture.sigma.detach().numpy())
    assert np.array_equal(found["conv.mu_row"], convolution.mu[:, 0].detach().numpy())
    assert np.array_equal(found["conv.mu_column"], convolution.mu[:, 1].detach().numpy())


def test_parts_of_the_same_kind_are_numbered():
    assert list(get_parts(build("gmm+gab"))) == ["gmm", "gab"]
    assert list(get_parts(build("gab+gmm:kernels=1+gab"))) == ["gab-1", "gmm", "gab-3"]
    prior = build("gmm")
    assert get_parts(prior) == {"": prior}


def test_rows_count_kernels_and_heads_from_1():
    values = {"sigma": np.array([[0.5, 1.0], [2.0, 0.1]], np.float32), "amplitude": np.array([3.0, 4.0], np.float32)}
    assert list(parameter_rows(values)) == [
        ("sigma", 1, 1, "0.5"),
        ("sigma", 1, 2, "1.0"),
        ("sigma", 2, 1, "2.0"),
        ("sigma", 2, 2, "0.1"),
        ("amplitude", "", 1, "3.0"),
        ("amplitude", "", 2, "4.0"),
    ]


@pytest.mark.parametrize(
    "spec",
    [
        "gmm:kernels=2,init=spread",
        "gmm:kernels=2,init=spread,share_heads=true",
        "gab",
        "gab:share_heads=false",
        "conv",
        "decay:learnable=true",
        "gmm:init=spread+gab+conv",
    ],
)
def test_set_parameters_makes_a_prior_like_the_one_that_was_listed(spec):
    torch.manual_seed(0)
    prior, other = build(spec), build(spec)
    with torch.no_grad():
        for parameter in prior.parameters():
            parameter.mul_(1 + 0.1 * torch.rand_like(parameter))
    assert set_parameters(other, get_parameters(prior))
    for wanted, found in zip(prior.values(), other.values(), strict=True):
        assert wanted is None if found is None else torch.allclose(wanted, found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spec", ["elm", "rpe", "rpe-mlp", "gmm+rpe"])
def test_set_parameters_changes_nothing_if_more_is_learned_than_listed(spec):
    prior = build(spec)
    before = [parameter.detach().clone() for parameter in prior.parameters()]
    assert not set_parameters(prior, {name: values + 1 for name, values in get_parameters(prior).items()})
    assert all(torch.equal(old, new) for old, new in zip(before, prior.parameters(), strict=True))


def test_set_parameters_refuses_other_names_and_shapes():
    prior = build("gmm:kernels=2")
    values = get_parameters(prior)
    assert not set_parameters(prior, {"sigma": values["sigma"]})
    assert not set_parameters(prior, {**values, "alpha": values["alpha"][:1]})
