"""Compiles the native library: `kernel.cpp` once for each CPU variant, `binding.cpp` once, then links them.

The compiler is called directly, with the paths of `torch.utils.cpp_extension`: kernels have flags of their own for each
variant, and nothing is shared with other builds, as the build folder of `cpp_extension.load` is.

Threads are those of the OpenMP runtime that torch has loaded, see `source/threads.h`. Sources are neither compiled with
OpenMP nor linked to a runtime, so g++ and clang++ build the same library, whichever runtime torch has.
"""

import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from vicinal.attention.native.compiler import Compiler
from vicinal.attention.native.cpu_features import Variant

__all__ = ["BuildError", "BuildPlan", "compile_library"]

SOURCE_SUFFIXES = (".cpp", ".h")
COMMON_FLAGS = ("-std=c++20", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden")
KERNEL_FLAGS = ("-O3", *COMMON_FLAGS)
BINDING_FLAGS = ("-O2", *COMMON_FLAGS)
LINK_FLAGS = ("-shared", "-lc10", "-ltorch_cpu", "-ltorch")
COMMAND_SECONDS = 900
"""Limit of one call of the compiler, for one that hangs."""


class BuildError(Exception):
    """A build that failed.

    Args:
        reason: one sentence.
        output: the command and all that it printed; empty for a failure that another try need not have.
    """

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.output = output


@dataclass(frozen=True)
class BuildPlan:
    """All that a library depends on."""

    source: Path
    """Folder of kernel.cpp, binding.cpp and headers."""
    compiler: Compiler
    variants: tuple[Variant, ...]
    """To compile: those that the CPU can run."""

    @cached_property
    def source_digest(self) -> str:
        """Digest of the sources and of the flags of all variants, as hexadecimal digits."""
        digest = hashlib.sha256(repr((KERNEL_FLAGS, BINDING_FLAGS, LINK_FLAGS)).encode())
        for file in sorted(self.source.iterdir()):
            if file.suffix in SOURCE_SUFFIXES:
                content = file.read_bytes()
                digest.update(f"{file.name} {len(content)}\n".encode() + content)
        return digest.hexdigest()

    @cached_property
    def key(self) -> str:
        """Digest of all that the library depends on, torch, compiler and CPU included, as hexadecimal digits.

        A home folder can be shared between machines that differ in any of them.
        """
        parts = (
            self.source_digest,
            torch.__version__,
            torch.version.git_version,
            self.compiler.command,
            self.compiler.version,
            self.variants,
            platform.machine(),
            platform.libc_ver(),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def compile_commands(self, folder: Path) -> dict[Path, list[str]]:
        """Returns the command for each object file in a folder, the longest first."""
        compiler = self.compiler.command
        binding = [*compiler, "-c", str(self.source / "binding.cpp"), *BINDING_FLAGS, *_torch_flags()]
        binding += [f"-DVICINAL_HAS_{each.name.upper()}" for each in self.variants if each.compiler_flags]
        commands = {folder / "binding.o": binding}
        for each in self.variants:
            kernel = [*compiler, "-c", str(self.source / "kernel.cpp"), *KERNEL_FLAGS, *each.compiler_flags]
            commands[folder / f"kernel-{each.name}.o"] = [*kernel, f"-DVICINAL_VARIANT={each.name}"]
        return {file: [*command, "-o", str(file)] for file, command in commands.items()}

    def link_command(self, objects: Sequence[Path], library: Path) -> list[str]:
        """Returns the command that links object files to a shared library."""
        from torch.utils.cpp_extension import library_paths

        folders = [f"-L{path}" for path in library_paths()]
        return [*self.compiler.command, *map(str, objects), *folders, *LINK_FLAGS, "-o", str(library)]


def compile_library(plan: BuildPlan, folder: Path) -> Path:
    """Compiles and links a library in an empty folder, with as many compilers at a time as there are cores.

    Args:
        plan: what to compile.
        folder: for the object files and the library.

    Returns:
        The library.

    Raises:
        BuildError: a command failed.
    """
    commands = plan.compile_commands(folder)
    running: list[subprocess.Popen[str]] = []
    with ThreadPoolExecutor(min(len(commands), os.cpu_count() or 1)) as pool:
        futures = [pool.submit(_run, command, folder, running) for command in commands.values()]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:  # Ctrl-C too
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.terminate()
            raise
    library = folder / "vicinal_native.so"
    _run(plan.link_command(list(commands), library), folder, running)
    return library


def _run(command: list[str], folder: Path, running: "list[subprocess.Popen[str]]") -> None:
    """Runs a command, with temporary files in `folder`, and appends it to `running`; raises BuildError if it fails."""
    shown, environment = shlex.join(command), {**os.environ, "TMPDIR": str(folder)}
    # A pipe would stay open until the compiler's own child ends, also where the compiler itself is stopped.
    with tempfile.TemporaryFile("w+", dir=folder, errors="replace") as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True, env=environment
            )
        except OSError as error:
            raise BuildError(f"{command[0]} does not run: {error.strerror}", shown) from None
        running.append(process)
        try:
            code = process.wait(COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise BuildError(f"{command[0]} did not end within {COMMAND_SECONDS} s") from None
        if code < 0:
            raise BuildError(f"{command[0]} was stopped by signal {-code}")
        if code > 0:
            output.seek(0)
            step = Path(command[command.index("-c") + 1]).name if "-c" in command else "the shared library"
            raise BuildError(f"{command[0]} failed on {step}", f"{shown}\n\n{output.read()}")


def _torch_flags() -> list[str]:
    from torch.utils.cpp_extension import include_paths

    folders = [word for path in include_paths() for word in ("-isystem", path)]
    return [*folders, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
