"""Sources in place of the real ones, a compiler that counts its calls, and other processes that prepare the library."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from vicinal.attention.native import library

KERNEL = """
#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
extern "C" __attribute__((visibility("default"))) int JOIN(vicinal_stub_, VICINAL_VARIANT)() { return 1; }
"""
BINDING = "int vicinal_stub_binding() { return 1; }\n"  # without torch's headers, which take 20 s to compile

WRAPPER = """\
#!/bin/sh
case "$*" in *--version*) exec g++ --version;; esac
echo "$*" >> "{calls}"
{before}
exec g++ "$@"
"""

PREPARE = """
import sys, types
from pathlib import Path
import torch

torch.compiler.assume_constant_result = lambda function: function  # imports the compiler, which takes half of the start
from vicinal.attention.native import library

library.SOURCE = Path(sys.argv[1])
if {stubbed}:
    library._load = lambda file: open(file).close()
    torch.ops.vicinal_native = types.SimpleNamespace(set_variant=lambda name: None)
{code}
status = library.prepare_native()
print(status.state.name, status.path, sep="|")
"""


def write_sources(folder: Path, kernel: str = KERNEL, binding: str = BINDING) -> Path:
    """Writes sources into a new folder, and returns it."""
    folder.mkdir()
    (folder / "kernel.cpp").write_text(kernel)
    (folder / "binding.cpp").write_text(binding)
    (folder / "shared.h").write_text("")
    return folder


def write_compiler(folder: Path, before: str = "") -> Path:
    """Writes a compiler that appends its calls to `calls` in the folder, and runs shell code before each.

    Returns:
        The script.
    """
    script = folder / "c++"
    script.write_text(WRAPPER.format(calls=folder / "calls", before=before))
    script.chmod(0o755)
    return script


def compiled(folder: Path) -> list[str]:
    """Returns the names of the object files and the library that `write_compiler`'s was called for."""
    file = folder / "calls"
    lines = file.read_text().splitlines() if file.exists() else []
    return sorted(Path(line.split(" -o ")[1]).name for line in lines)


def start(source: Path, cache: Path, *, code: str = "", stubbed: bool = True, **variables: str) -> subprocess.Popen:
    """Starts a process that prepares the library and prints state and path; `code` runs before."""
    script = PREPARE.format(code=textwrap.dedent(code), stubbed=stubbed)
    environment = {**os.environ, "VICINAL_CACHE": str(cache), "VICINAL_NATIVE": "1", **variables}
    command = [sys.executable, "-c", script, str(source)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen) -> tuple[str, str, list[str]]:
    """Waits for a process of `start`. Returns the state, the path of the library, and the lines on stderr."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    state, path = out.splitlines()[-1].split("|")
    return state, path, err.splitlines()


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process one that has not prepared the library, until the test ends."""
    for name, value in {"_prepared": None, "_loaded": None, "_ready": False}.items():
        monkeypatch.setattr(library, name, value)
