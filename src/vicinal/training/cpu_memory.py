"""Allocator and denormal settings for training on a CPU.

A training step frees hundreds of megabytes of activations and allocates the same again. glibc serves large blocks by
mmap and returns them to the kernel at once, so every step takes a page fault for each page, which costs up to a third
of the step. Without mmap and without trimming, freed pages stay with the process. `benchmarks/training.py` measures it.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["keep_freed_memory"]

# Option numbers of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
TRAINING_OPTIONS = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1}
# glibc's dynamic thresholds cannot be turned on again; these are the values that they grow to.
RESTORED_OPTIONS = {M_MMAP_MAX: 65536, M_MMAP_THRESHOLD: 32 * 2**20, M_TRIM_THRESHOLD: 64 * 2**20}


@contextmanager
def keep_freed_memory(enabled: bool = True) -> Iterator[bool]:
    """Keeps freed memory in the process and flushes denormals, inside of `with`.

    torch's threads inherit the treatment of denormals from the thread that starts them, so enter this before torch has
    started its own.

    Args:
        enabled: with False, nothing is changed.

    Yields:
        Whether the allocator accepted the settings. False where the C library has no mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if not enabled or mallopt is None:
        yield False
        return
    torch.set_flush_denormal(True)
    accepted = [mallopt(option, value) for option, value in TRAINING_OPTIONS.items()]
    try:
        yield all(accepted)
    finally:
        torch.set_flush_denormal(False)
        for option, value in RESTORED_OPTIONS.items():
            mallopt(option, value)
