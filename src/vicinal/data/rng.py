"""Seeds derived from a few numbers, such as run seed, epoch and image index.

Every random choice is a function of these numbers, so neither the number of workers nor an interruption changes it.
"""

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch

__all__ = ["derive_seed", "preserve_rng", "reseed"]


def derive_seed(*numbers: int) -> int:
    """Returns a seed of 63 bits, a hash of the numbers in their order; the same on every machine.

    >>> from vicinal.data import derive_seed
    >>> derive_seed(0, 1), derive_seed(1, 0)
    (2024819301478721300, 5250232019403110347)
    """
    text = ",".join(map(str, map(int, numbers)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def reseed(seed: int) -> None:
    """Seeds the global generators of `random`, NumPy and torch on the CPU."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed also seeds all devices: 100 times as slow


@contextlib.contextmanager
def preserve_rng() -> Iterator[None]:
    """Restores the global generators of `random`, NumPy and torch on the CPU when the block ends."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
