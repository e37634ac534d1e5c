"""Finds the C++ compiler: `CXX` if it is set, else g++, else clang++."""

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass

__all__ = ["Compiler", "NoCompiler", "find_compiler"]

DEFAULTS = ("g++", "clang++")
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
        NoCompiler: there is none, or it does not run.
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
    return Compiler(command, done.stdout.strip())
