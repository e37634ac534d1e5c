"""The native library in this process: found in the cache or built, loaded into torch, with a variant for the CPU.

`attach`, `create_model` and `vicinal train` prepare it. A forward only asks whether it is ready: a build takes about
half a minute. `VICINAL_NATIVE` is `0` to switch it off, or the name of a variant; by default the best one is used.
"""

import multiprocessing
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from vicinal.attention.native.build import BuildError, BuildPlan
from vicinal.attention.native.compiler import NoCompiler, find_compiler
from vicinal.attention.native.cpu_features import runnable_variants
from vicinal.attention.native.library_cache import LibraryCache
from vicinal.attention.native.status import TORCH_PATH, NativeState, NativeStatus
from vicinal.attention.native.variant_choice import VARIABLE, chosen_variant, setting_value, variant_names

__all__ = [
    "NativeState",
    "NativeStatus",
    "attention_path",
    "native_ready",
    "native_status",
    "prepare_native",
    "prepare_native_for",
]

SOURCE = Path(__file__).parent / "source"
DIGEST_LENGTH = 12

_lock = threading.Lock()
_prepared: tuple[str, NativeStatus] | None = None  # by the value of VICINAL_NATIVE
_loaded: NativeStatus | None = None  # stays, whatever VICINAL_NATIVE becomes: a library cannot be unloaded
_ready = False


def native_ready() -> bool:
    """Returns whether the library is loaded and switched on in this process."""
    return _ready


def attention_path(device: torch.device | None = None) -> str:
    """Returns how attention is computed in this process, for records: `torch`, or such as `native avx2 3f9a0c1b2d4e`.

    Runs of different paths differ in their last bits.

    Args:
        device: of the model; the CPU by default, the only one for which there is a native library.
    """
    if not _ready or _prepared is None or (device is not None and device.type != "cpu"):
        return TORCH_PATH
    return _prepared[1].attention_path


def native_status() -> NativeStatus:
    """Returns the state of the library in this process, or what preparing it would find; builds and loads nothing.

    Raises:
        VicinalError: `VICINAL_NATIVE` has another value than 0, 1 and the variants that this CPU can run.
    """
    if _prepared is not None and _prepared[0] == setting_value():
        return _prepared[1]
    return _look_up()[0]


def prepare_native(*, retry: bool = False) -> NativeStatus:
    """Loads the library, and builds it before where that is needed and possible. Returns the state it is in then.

    Cheap after the first call. A build, a build that failed and a missing compiler are each one line on stderr, once
    per process. Nothing is built inside of torch.compile, a DataLoader worker or another daemon process.

    Args:
        retry: build again where that failed before, in this process or another one.

    Raises:
        VicinalError: `VICINAL_NATIVE` has another value than 0, 1 and the variants that this CPU can run.
    """
    global _prepared, _ready
    setting = setting_value()
    if not retry and _prepared is not None and _prepared[0] == setting:
        return _prepared[1]
    if torch.compiler.is_compiling():
        return NativeStatus(NativeState.NOT_BUILT, "nothing is built or loaded inside of torch.compile")
    with _lock:
        if not retry and _prepared is not None and _prepared[0] == setting:  # by another thread
            return _prepared[1]
        status, cache = _look_up(retry=retry)
        if cache is not None:
            status = _load_or_build(status, cache)
        if status.state is NativeState.NOT_BUILT:  # not here: a later call can
            return status
        if status.state is NativeState.READY:
            torch.ops.vicinal_native.set_variant(status.variant)
        if status.state in (NativeState.NO_COMPILER, NativeState.FAILED) and os.environ.get("RANK", "0") == "0":
            _say(f"attention runs on torch's operations, which is slower: {status.reason}")
        _prepared, _ready = (setting, status), status.state is NativeState.READY
        return status


def prepare_native_for(model: nn.Module) -> None:
    """Prepares the library for a model that is on a CPU."""
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type == "cpu":
        prepare_native()


def _look_up(*, retry: bool = False) -> tuple[NativeStatus, LibraryCache | None]:
    """Returns the state before anything is built or loaded, and the cache if there is something to load or build."""
    variants = runnable_variants()
    variant = chosen_variant(variants)
    if variant is None:
        return NativeStatus(NativeState.OFF, f"{VARIABLE}=0 switches the native library off"), None
    if _loaded is not None:
        return replace(_loaded, variant=variant.name), None
    if sys.platform != "linux":
        return NativeStatus(NativeState.UNSUPPORTED, "the native library is for Linux"), None
    if not SOURCE.is_dir():
        return NativeStatus(NativeState.UNSUPPORTED, "this installation has no C++ sources"), None
    try:
        compiler = find_compiler()
    except NoCompiler as error:
        return NativeStatus(NativeState.NO_COMPILER, str(error), variant.name), None
    plan = BuildPlan(SOURCE, compiler, variants)
    cache = LibraryCache(plan)
    status = NativeStatus(
        NativeState.NOT_BUILT,
        "it is built when a model is made or trained, or now by `vicinal doctor --build`",
        variant.name,
        plan.source_digest[:DIGEST_LENGTH],
        compiler=str(compiler),
    )
    if (file := cache.find()) is not None:
        return replace(status, state=NativeState.READY, reason=_built_for(plan), path=file), cache
    if cache.log.exists() and not retry:
        return _failed(status, cache, "an earlier build failed; `vicinal doctor --build` tries again"), None
    return status, cache


def _load_or_build(status: NativeStatus, cache: LibraryCache) -> NativeStatus:
    """Returns the state after loading the library, which is built if it is not in the cache, or cannot be loaded."""
    global _loaded

    def started() -> None:
        _say(f"building the native attention library, once, in about half a minute; it is kept in {cache.folder}")

    file, tried = status.path, False
    while True:
        if file is None:
            if (reason := _no_build_here()) is not None:
                return replace(status, state=NativeState.NOT_BUILT, reason=reason, path=None)
            try:
                file = cache.build(started, replace=tried)
            except BuildError as error:
                return _failed(status, cache, str(error))
            tried = True
        try:
            _load(file)
            break
        except OSError as error:
            if tried:
                cache.reject(file, f"{file.name} cannot be loaded: {error.__cause__ or error}")
                return _failed(status, cache, "the library was built, but cannot be loaded")
            file, tried = None, True
    _loaded = replace(status, state=NativeState.READY, reason=_built_for(cache.plan), path=file)
    return _loaded


def _built_for(plan: BuildPlan) -> str:
    return f"built for {variant_names(plan.variants)}"


def _load(library: Path) -> None:
    torch.ops.load_library(library)


def _failed(status: NativeStatus, cache: LibraryCache, reason: str) -> NativeStatus:
    """Returns the state of a build that failed, with its log where there is one."""
    log = cache.log if cache.log.exists() else None
    reason = f"{reason}; see {log}" if log else reason
    return replace(status, state=NativeState.FAILED, reason=reason, path=None, log=log)


def _no_build_here() -> str | None:
    """Returns why this process must not build; None if it can."""
    from torch.utils.data import get_worker_info

    if get_worker_info() is not None:
        return "it is not built, and a DataLoader worker does not build it"
    if multiprocessing.current_process().daemon:
        return "it is not built, and a daemon process does not build it"
    return None


def _say(text: str) -> None:
    print(f"vicinal: {text}", file=sys.stderr, flush=True)
