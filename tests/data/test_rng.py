import random

import numpy as np
import torch

from vicinal.data import derive_seed
from vicinal.data.rng import preserve_rng, reseed


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_derived_numbers_have_63_bits_and_do_not_repeat():
    numbers = {derive_seed(seed, epoch, index) for seed in range(10) for epoch in range(10) for index in range(100)}
    assert len(numbers) == 10_000
    assert 2**62 < max(numbers) < 2**63
    assert min(numbers) >= 0
    assert derive_seed(1, 23) != derive_seed(12, 3) != derive_seed(1, 2, 3)
    assert derive_seed(0, -1) != derive_seed(0, 1)


def test_derived_numbers_are_the_same_for_numpy_integers():
    assert derive_seed(np.int64(3), np.int32(4)) == derive_seed(3, 4)


def test_half_of_the_bits_are_set():
    ones = sum(derive_seed(0, index).bit_count() for index in range(2000)) / 2000
    assert abs(ones - 31.5) < 0.5


def test_reseeding_repeats_all_three_generators():
    reseed(derive_seed(1))
    first = drawn()
    reseed(derive_seed(2))
    assert all(a != b for a, b in zip(first, drawn(), strict=True))
    reseed(derive_seed(1))
    assert drawn() == first


def test_the_global_generators_are_left_as_they_were():
    reseed(5)
    expected = drawn()
    reseed(5)
    with preserve_rng():
        reseed(6)
        drawn()
    assert drawn() == expected
