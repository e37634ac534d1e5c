import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from vicinal.training import cpu_memory
from vicinal.training.cpu_memory import tune_cpu

# Frees and allocates 64 MB repeatedly, as always and then kept; prints the numbers of page faults.
PAGE_FAULTS = """
import resource, torch
from vicinal.training.cpu_memory import tune_cpu

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for enabled in (False, True):
    with tune_cpu(enabled):
        for _ in range(10):
            torch.ones(2**24)
        before = faults()
        for _ in range(20):
            torch.ones(2**24)
        print(faults() - before)
"""


def is_flushed():
    return (torch.tensor([1e-40]) * 0.5).item() == 0


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_freed_memory_is_kept():
    done = subprocess.run([sys.executable, "-c", PAGE_FAULTS], capture_output=True, text=True, check=True)
    plain, kept = map(int, done.stdout.split())
    assert kept < 1000
    assert plain > 10 * kept


def test_denormals_are_flushed_inside_and_kept_outside():
    tiny = torch.tensor([1e-40])
    with tune_cpu() as accepted:
        assert not accepted or (tiny * 0.5).item() == 0
    assert (tiny * 0.5).item() > 0
    with tune_cpu(False) as accepted:
        assert not accepted
        assert (tiny * 0.5).item() > 0


@pytest.fixture
def calls(monkeypatch):
    """Options that a C library of ours is given, in order."""
    calls = []

    def mallopt(option, value):
        calls.append((option, value))
        return 1

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(cpu_memory.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    return calls


def test_the_outermost_context_restores(calls):
    entered, left = list(cpu_memory.TRAINING_OPTIONS.items()), list(cpu_memory.RESTORED_OPTIONS.items())
    with tune_cpu() as accepted:
        assert accepted
        with tune_cpu():
            pass
        assert calls == entered * 2
        assert is_flushed()
    assert calls == entered * 2 + left
    assert not is_flushed()


def test_an_error_restores(calls):
    with pytest.raises(KeyError), tune_cpu():
        raise KeyError
    assert calls[-1] == list(cpu_memory.RESTORED_OPTIONS.items())[-1]
    assert not is_flushed()


def test_denormals_that_were_flushed_before_stay_flushed(calls):
    torch.set_flush_denormal(True)
    try:
        with tune_cpu():
            pass
        assert is_flushed()
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(("platform", "library"), [("darwin", None), ("linux", SimpleNamespace())])
def test_nothing_changes_without_mallopt(monkeypatch, platform, library):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(cpu_memory.ctypes, "CDLL", lambda name: library)
    with tune_cpu() as accepted:
        assert not accepted
        assert not is_flushed()
