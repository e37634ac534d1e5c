"""`vicinal doctor`: versions, devices, compiler, caches, and how attention is computed on this machine."""

import json as json_
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vicinal.cli._flags import call_with_flags
from vicinal.errors import VicinalError
from vicinal.text_table import text_table

__all__ = ["run"]


def doctor(build: bool = False, json: bool = False) -> None:
    """Shows what vicinal finds on this machine, and how attention is computed, for a question or a bug report.

    Args:
        build: Build the native attention library now, also where a build failed before.
        json: Print one JSON document, and nothing else.
    """
    from vicinal.attention.native import NativeState, native_status, prepare_native

    status = prepare_native(retry=True) if build else native_status()
    found = examine()
    print(json_.dumps(found, indent=1) if json else as_text(found))
    if build and status.state is not NativeState.READY:
        raise VicinalError(f"the native library was not built: {status.reason}")


def examine() -> dict[str, Any]:
    """Returns versions, devices, compiler, the state of the native library and the sizes of caches, as JSON values."""
    from importlib.metadata import version

    import torch

    from vicinal.attention.native import native_status
    from vicinal.attention.native.cpu_features import VARIANTS, cpu_flags
    from vicinal.cache_folder import cache_folder
    from vicinal.training.environment import PACKAGES, processor_name

    status, folder = native_status(), cache_folder()
    used = {flag for variant in VARIANTS for flag in variant.cpu_flags}
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "platform": platform.platform(),
        "devices": [f"cpu ({processor_name()})", *_accelerators()],
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "cpu_features": sorted(used & cpu_flags()),
        "compiler": status.compiler or _compiler(),
        "attention": status.attention_path,
        "native": {
            "state": status.state.value,
            "reason": status.reason,
            "variant": status.variant,
            "digest": status.digest,
            "path": None if status.path is None else str(status.path),
            "log": None if status.log is None else str(status.log),
        },
        "cache": str(folder),
        "cache_bytes": _sizes(folder),
    }


def as_text(found: dict[str, Any]) -> str:
    """Returns what `examine` found as a table for people."""
    native, caches = found["native"], found["cache_bytes"]
    sizes = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in caches.items()) or "empty"
    rows = [
        *found["versions"].items(),
        ("system", found["platform"]),
        *(("device", device) for device in found["devices"]),
        ("threads", f"{found['threads']} of {found['cores']} cores"),
        ("CPU features", ", ".join(found["cpu_features"]) or "none that are used"),
        ("compiler", found["compiler"]),
        ("attention", f"on a CPU by {found['attention']}"),
        ("native library", f"{native['state']}: {native['reason']}"),
        ("cache", f"{found['cache']} ({sizes})"),
    ]
    return text_table(rows)


def _accelerators() -> list[str]:
    import torch

    present = torch.accelerator.current_accelerator(check_available=True)
    if present is None:
        return []
    names = [f"{present.type}:{index}" for index in range(torch.accelerator.device_count())]
    return [f"{name} ({torch.cuda.get_device_name(name)})" if present.type == "cuda" else name for name in names]


def _compiler() -> str:
    """Returns path and version of the compiler, or why there is none."""
    if sys.platform != "linux":
        return "not looked for: the native library is for Linux"

    from vicinal.attention.native.compiler import NoCompiler, find_compiler

    try:
        return str(find_compiler())
    except NoCompiler as error:
        return f"none: {error}"


def _sizes(folder: Path) -> dict[str, int]:
    """Returns the bytes in each folder of the cache, by name."""
    if not folder.is_dir():
        return {}
    return {
        each.name: sum(file.stat().st_size for file in each.rglob("*") if file.is_file() and not file.is_symlink())
        for each in sorted(folder.iterdir())
        if each.is_dir()
    }


def run(args: Sequence[str]) -> None:
    """Parses the arguments after `vicinal doctor`, examines the machine, and prints."""
    call_with_flags(doctor, "vicinal doctor", args)
