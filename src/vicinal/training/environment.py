"""Description of the machine and software that a run used, for `environment.json`."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from vicinal.attention.native import attention_path
from vicinal.attention.native.status import TORCH_PATH

__all__ = ["PACKAGES", "describe_environment", "path_notes", "processor_name"]

PACKAGES = ("vicinal", "torch", "torchvision", "timm", "accelerate", "datasets", "numpy", "pillow")


def describe_environment(device: torch.device, processes: int, seed: int) -> dict[str, Any]:
    """Returns the content of `environment.json`: time, command, device, attention path, versions and commit.

    Args:
        device: where the run trains.
        processes: number of processes.
        seed: of the run.
    """
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "pid": os.getpid(),
        "command": shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "vicinal"), *sys.argv[1:]]),
        "seed": seed,
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "processes": processes,
        "threads": torch.get_num_threads(),
        "attention": attention_path(device),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version(name) for name in PACKAGES},
        "git_commit": _git_commit(),
    }


def path_notes(record: Mapping[str, Any], attention: str) -> list[str]:
    """Returns a note if a run that is resumed computed attention in another way so far; else nothing.

    Args:
        record: its `environment.json`. That of an earlier version has no attention path: there was only torch's.
        attention: the path that it is resumed with.
    """
    before = [record, *record.get("resumed", [])][-1].get("attention", TORCH_PATH)
    if before == attention:
        return []
    remedy = "; VICINAL_NATIVE=0 continues with torch's" if before == TORCH_PATH else ""
    return [
        f"attention was computed by {before} so far and is by {attention} now: the last bits of the result will differ "
        f"from those of a run without interruption{remedy}"
    ]


def processor_name() -> str:
    """Returns the name of the CPU, or its architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _git_commit() -> str | None:
    """Returns the commit of this package's source, with a + if files were changed; None outside of a checkout."""
    source = Path(__file__).parent

    def git(*args: str) -> str:
        command = ["git", "-C", str(source), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", str(source)) else "")
    except (OSError, subprocess.SubprocessError):
        return None
