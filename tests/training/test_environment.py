import ctypes
import subprocess
import sys

import pytest
import torch

from vicinal.training.environment import describe, keep_memory

# Frees and asks for 64 MB again and again; prints the page faults that this takes.
COUNT = """
import resource, torch
from vicinal.training.environment import keep_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

with keep_memory({wanted}):
    for _ in range(10):
        torch.ones(2**24)
    before = faults()
    for _ in range(20):
        torch.ones(2**24)
    print(faults() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_freed_memory_is_kept():
    plain, kept = (
        int(subprocess.run([sys.executable, "-c", COUNT.format(wanted=wanted)], capture_output=True, check=True).stdout)
        for wanted in (False, True)
    )
    assert kept < 1000
    assert plain > 10 * kept


def test_denormals_are_flushed_inside_and_kept_outside():
    tiny = torch.tensor([1e-40])
    with keep_memory() as taken:
        assert not taken or (tiny * 0.5).item() == 0
    assert (tiny * 0.5).item() > 0
    with keep_memory(False) as taken:
        assert not taken
        assert (tiny * 0.5).item() > 0


def test_the_environment_names_versions_and_machine():
    found = describe(torch.device("cpu"), processes=2, seed=3)
    assert (found["device"], found["processes"], found["seed"]) == ("cpu", 2, 3)
    assert found["threads"] == torch.get_num_threads()
    assert set(found["versions"]) >= {"torch", "timm", "vicinal", "accelerate"}
