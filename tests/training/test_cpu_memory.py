import ctypes
import subprocess
import sys

import pytest
import torch

from vicinal.training.cpu_memory import keep_freed_memory

# Frees and allocates 64 MB repeatedly, as always and then kept; prints the numbers of page faults.
PAGE_FAULTS = """
import resource, torch
from vicinal.training.cpu_memory import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for enabled in (False, True):
    with keep_freed_memory(enabled):
        for _ in range(10):
            torch.ones(2**24)
        before = faults()
        for _ in range(20):
            torch.ones(2**24)
        print(faults() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_freed_memory_is_kept():
    done = subprocess.run([sys.executable, "-c", PAGE_FAULTS], capture_output=True, text=True, check=True)
    plain, kept = map(int, done.stdout.split())
    assert kept < 1000
    assert plain > 10 * kept


def test_denormals_are_flushed_inside_and_kept_outside():
    tiny = torch.tensor([1e-40])
    with keep_freed_memory() as accepted:
        assert not accepted or (tiny * 0.5).item() == 0
    assert (tiny * 0.5).item() > 0
    with keep_freed_memory(False) as accepted:
        assert not accepted
        assert (tiny * 0.5).item() > 0
