"""Every random choice is a function of a few numbers, such as seed, epoch and image.

So the number of workers, and an interruption, change nothing.
"""

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch

__all__ = ["derive", "own_randomness", "reseed"]


def derive(*numbers: int) -> int:
    """63 bits that look random and depend on the numbers and their order only, on any machine.

    >>> from vicinal.data import derive
    >>> derive(0, 1), derive(1, 0)
    (2024819301478721300, 5250232019403110347)
    """
    text = ",".join(map(str, map(int, numbers)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def reseed(number: int) -> None:
    """Start the three generators that transforms draw from."""
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number)  # torch.manual_seed asks every device and takes 100 times as long


@contextlib.contextmanager
def own_randomness() -> Iterator[None]:
    """Leave the three generators as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
