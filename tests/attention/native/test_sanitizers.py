"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, on many shapes."""

import shutil
import subprocess
from pathlib import Path

import pytest

from vicinal.attention.native.cpu_features import runnable_variants
from vicinal.attention.native.library import SOURCE

HARNESS = Path(__file__).with_name("sanitized.cpp")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("variant", runnable_variants(), ids=lambda variant: variant.name)
def test_no_access_beyond_an_array_and_no_undefined_behavior(variant, tmp_path):
    program = tmp_path / "sanitized"
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    flags = ["-std=c++20", "-O2", "-g", "-Wno-psabi", *variant.compiler_flags, f"-DVICINAL_VARIANT={variant.name}"]
    sources = [str(HARNESS), str(SOURCE / "kernel.cpp")]
    command = ["g++", *flags, *sanitizers, f"-I{SOURCE}", *sources, "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-2000:]
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert done.stdout == "256 shapes\n"
