"""Finds the C++ compiler: `CXX` if it is set, else g++, else clang++."""

import ctypes
import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass

__all__ = ["Compiler", "NoCompiler", "find_compiler"]

DEFAULTS = ("g++", "clang++")
LLVM_OPENMP = "__kmpc_fork_call"  # what clang calls for a parallel region; g++ calls GOMP_parallel
VERSION_SECONDS = 60


class NoCompiler(Exception):  # noqa: N818
    """There is no C++ compiler that can be used; the message says why."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler."""

    command: tuple[str, ...]
    """Its absolute path, behind a wrapper such as ccache, if `CXX` names one."""
    version: str
    """All that `--version` prints."""

    def __str__(self) -> str:
        first_line, *_ = self.version.splitlines() or [""]
        return f"{shlex.join(self.command)} ({first_line})" if first_line else shlex.join(self.command)


def find_compiler() -> Compiler:
    """Returns the C++ compiler.

    Raises:
        NoCompiler: there is none, it does not run, or its OpenMP runtime is not the one that torch has loaded.
    """
    if own := shlex.split(os.environ.get("CXX", "")):
        path = shutil.which(own[0])
        if path is None:
            raise NoCompiler(f"CXX is {own[0]}, which is not an executable file on PATH")
        return _checked((path, *own[1:]))
    path = next(filter(None, map(shutil.which, DEFAULTS)), None)
    if path is None:
        raise NoCompiler(f"there is no C++ compiler: neither {' nor '.join(DEFAULTS)} is on PATH, and CXX is not set")
    return _checked((path,))


def _checked(command: tuple[str, ...]) -> Compiler:
    try:
        done = subprocess.run(
            [*command, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NoCompiler(f"{shlex.join([*command, '--version'])} failed: {error}") from None
    if "clang" in done.stdout and not _has_symbol(LLVM_OPENMP):
        # To link LLVM's own would put two runtimes, with two pools of threads, into one process.
        raise NoCompiler(f"{command[0]} is clang, which needs LLVM's OpenMP runtime, and this torch has GNU's; use g++")
    return Compiler(command, done.stdout.strip())


def _has_symbol(name: str) -> bool:
    """Returns whether a library that torch has loaded defines a C function."""
    import torch  # noqa: F401

    return hasattr(ctypes.CDLL(None), name)
