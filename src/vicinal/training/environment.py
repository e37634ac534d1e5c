"""What a run should know of its machine, how its devices are set up, and how a CPU keeps freed memory."""

import ctypes
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

__all__ = ["describe", "keep_memory", "new_accelerator", "seed_everything"]

# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
KEEPING = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1}
# glibc's defaults cannot be asked for again; these are the values that its thresholds grow to by themselves.
USUAL = {M_MMAP_MAX: 65536, M_MMAP_THRESHOLD: 32 * 2**20, M_TRIM_THRESHOLD: 64 * 2**20}


def new_accelerator(cpu: bool, precision: str = "no", *, compiled: bool = False) -> Accelerator:
    """Devices and processes, as they were set up, in a precision of its own.

    Accelerate keeps the precision that a process began with; a later run, or an evaluation, may have another.
    """
    if AcceleratorState._shared_state:
        AcceleratorState._reset_state()
    return Accelerator(cpu=cpu, mixed_precision=precision, dynamo_backend="inductor" if compiled else None)


@contextmanager
def keep_memory(wanted: bool = True) -> Iterator[bool]:
    """Inside of `with`, the allocator keeps what is freed, and the CPU flushes denormals; False if it cannot.

    A step frees hundreds of megabytes of activations and asks for the same again. glibc serves large pieces by mmap
    and gives them back to the kernel at once, so each step faults every page anew, which costs up to a third of the
    step. With no mmap and no trimming, freed pages stay with the process. Threads inherit how denormals are treated
    from the thread that starts them, so this comes before torch starts its own. `benchmarks/training.py` measures it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if not wanted or mallopt is None:  # other C libraries have none
        yield False
        return
    torch.set_flush_denormal(True)
    taken = [mallopt(option, value) for option, value in KEEPING.items()]
    try:
        yield all(taken)
    finally:
        torch.set_flush_denormal(False)
        for option, value in USUAL.items():
            mallopt(option, value)


def seed_everything(seed: int) -> None:
    """Seed torch's generators for what comes next: starting weights, or drop path of one step."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a hundred times as long
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def describe(device: torch.device, processes: int, seed: int) -> dict[str, Any]:
    """What `environment.json` says."""
    packages = ("vicinal", "torch", "torchvision", "timm", "accelerate", "datasets", "numpy", "pillow")
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "vicinal"), *sys.argv[1:]]),
        "seed": seed,
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "processes": processes,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version(name) for name in packages},
        "git_commit": _commit(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    """The commit of the source that runs, with + if it was changed since; None if it is no checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", str(here)) else "")
    except (OSError, subprocess.SubprocessError):
        return None
