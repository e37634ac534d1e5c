"""The builds of the kernel for instruction sets, and which of them this CPU can run."""

import platform
from dataclasses import dataclass
from pathlib import Path

__all__ = ["VARIANTS", "Variant", "cpu_flags", "runnable_variants"]

CPU_FILE = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Variant:
    """A build of the kernel for one instruction set."""

    name: str
    cpu_flags: tuple[str, ...]
    """What the CPU must have, as Linux names it in /proc/cpuinfo."""
    compiler_flags: tuple[str, ...]


_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
VARIANTS = (
    Variant(
        "avx512",
        ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c"),
        ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", *_AVX2_FLAGS, "-mprefer-vector-width=512"),
    ),
    Variant("avx2", ("avx2", "fma", "f16c"), _AVX2_FLAGS),
    Variant("portable", (), ()),
)
"""All variants, in the order of preference: the first that the CPU can run is used."""


def cpu_flags() -> frozenset[str]:
    """Returns the features of the CPU by the names of /proc/cpuinfo; none where there is no such file."""
    try:
        lines = CPU_FILE.read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")  # x86, ARM
    return frozenset(found.partition(":")[2].split())


def runnable_variants() -> tuple[Variant, ...]:
    """Returns the variants that this CPU can run, the preferred one first; there is always `portable`."""
    present = cpu_flags() if platform.machine() in ("x86_64", "AMD64") else frozenset()
    return tuple(each for each in VARIANTS if present.issuperset(each.cpu_flags))
