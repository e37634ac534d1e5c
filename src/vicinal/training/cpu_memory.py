"""Allocator and denormal settings for training on a CPU.

A training step frees hundreds of megabytes of activations and allocates the same again. glibc serves large blocks by
mmap and returns them to the kernel at once, so every step takes a page fault for each page, which costs up to a third
of the step. Without mmap and without trimming, freed pages stay with the process. `benchmarks/training.py` measures it.
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["tune_cpu"]

# Option numbers of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
TRAINING_OPTIONS = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1}
# glibc's dynamic thresholds cannot be turned on again; these are the values that they grow to.
RESTORED_OPTIONS = {M_MMAP_MAX: 65536, M_MMAP_THRESHOLD: 32 * 2**20, M_TRIM_THRESHOLD: 64 * 2**20}

_lock = threading.Lock()
_entered = 0  # number of contexts that are open in this process


@contextmanager
def tune_cpu(enabled: bool = True) -> Iterator[bool]:
    """Makes training on a CPU faster inside of `with`: keeps freed memory in the process and flushes denormals.

    >>> import torch, vicinal
    >>> model = vicinal.create_model("vit-micro", prior="gmm", img_size=8, in_chans=1)
    >>> with vicinal.tune_cpu():
    ...     loss = model(torch.randn(4, 1, 8, 8)).sum()
    ...     loss.backward()

    `vicinal train` does this by itself. Two settings of the process change, and change back when the last of nested
    contexts ends:

    - glibc's `mallopt`: large blocks no longer come from mmap, and free memory is not returned to the system, so a
      process keeps the memory of its largest step. After the context, glibc's thresholds have the values that they
      grow to by themselves: blocks from 32 MB on come from mmap, and 64 MB of free memory are kept.
    - `torch.set_flush_denormal`: numbers below 1.2e-38 in fp32 become 0. Afterwards they are computed again, or
      flushed if they were before. torch's threads inherit this from the thread that starts them, so enter the context
      before the first computation.

    Nothing changes where the C library has no `mallopt`, as on macOS, on Windows and with musl.

    Args:
        enabled: with False, nothing is changed.

    Yields:
        Whether the allocator accepted the settings.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if not enabled or mallopt is None:
        yield False
        return
    flushed = _flushes_denormals()
    try:
        yield _enter(mallopt)
    finally:
        torch.set_flush_denormal(flushed)
        _leave(mallopt)


def _enter(mallopt: Callable[[int, int], int]) -> bool:
    """Sets the options of training. Returns whether the allocator accepted all of them."""
    global _entered
    with _lock:
        _entered += 1
        torch.set_flush_denormal(True)
        accepted = [mallopt(option, value) for option, value in TRAINING_OPTIONS.items()]
        return all(accepted)


def _leave(mallopt: Callable[[int, int], int]) -> None:
    """Restores the allocator if no other context is open."""
    global _entered
    with _lock:
        _entered -= 1
        if not _entered:
            for option, value in RESTORED_OPTIONS.items():
                mallopt(option, value)


def _flushes_denormals() -> bool:
    """Returns whether the current thread computes 0 in place of a denormal."""
    return bool(torch.full((1,), 1e-38).mul(0.5) == 0)
