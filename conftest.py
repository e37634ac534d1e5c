"""What holds for every test, and for the examples in docstrings: none leaves a trace for the next."""

import gc
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from vicinal.attention.native import prepare_native
from vicinal.priors import registry

# `fixed` draws the same examples in every run; `--hypothesis-profile=random`, in make test-slow, searches for others.
# Neither fails because a machine is busy.
WITHOUT_CLOCK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fixed", WITHOUT_CLOCK, derandomize=True)
settings.register_profile("random", WITHOUT_CLOCK, derandomize=False, print_blob=True)
settings.load_profile("fixed")
# Hypothesis also draws constants of all modules of ours that are imported by then, which depends on the tests before.
providers._get_local_constants = providers.Constants

# While tests are imported, collections find nothing: they took a third of that time.
gc.set_threshold(50_000, 20, 20)

# Processes that run tests side by side share the cores.
torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # of processes that tests start
# One cache for all processes that run tests, which stays for the next time and is not in the user's home: the native
# library takes half a minute to build.
os.environ.setdefault("VICINAL_CACHE", str(Path(__file__).parent / ".pytest_cache" / "vicinal"))


def pytest_collection_finish() -> None:
    """Makes garbage collections rare, and spares them the hundreds of thousands of objects that imports made.

    Loads the native library, as the first `attach` would: every test computes attention in the same way, whichever
    tests ran before it.
    """
    prepare_native()
    gc.set_threshold(10_000, 10, 10)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Random numbers of a test do not depend on the tests before it."""
    random.seed(0)
    np.random.seed(0)
    _seed_torch()


def _seed_torch() -> None:
    """Seeds torch on CPU and CUDA. `torch.manual_seed` keeps a traceback for each kind of device that is not in use."""
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
    """Seeds fixtures of a module or a session too: they are set up before `_seed`, by whichever test comes first."""
    if fixturedef.scope == "function":
        return (yield)
    with torch.random.fork_rng(devices=[]):
        _seed_torch()
        return (yield)


@pytest.fixture(autouse=True)
def _own_priors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


@pytest.fixture(autouse=True)
def _compiled_afresh() -> Iterator[None]:
    """Graphs kept by a class's code, and their limit, are of the whole process."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.utils.counters:
        dynamo.reset()
        dynamo.utils.counters.clear()
