"""A library with operators of torch, by every compiler: built, loaded, and on torch's own OpenMP runtime."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from native_stubs import finish, start, write_sources
from vicinal.attention.native import library
from vicinal.attention.native.cpu_features import runnable_variants

pytestmark = [
    pytest.mark.slow,  # torch's headers
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the native library is for Linux"),
]
COMPILERS = [
    pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"no {name}"))
    for name in ("g++", "clang++")
]
BINDING = """
#include <torch/library.h>
#include <set>
#include <string>
#include <vector>
#include "threads.h"

static std::string chosen = "none";
static void set_variant(std::string name) { chosen = name; }
static std::string variant() { return chosen; }
static std::vector<std::string> variants() {
  std::vector<std::string> names;
#ifdef VICINAL_HAS_AVX512
  names.push_back("avx512");
#endif
#ifdef VICINAL_HAS_AVX2
  names.push_back("avx2");
#endif
  names.push_back("portable");
  return names;
}
static int64_t threads(int64_t workers) {
  std::vector<int> of_worker(workers, -1);
  vicinal::run_workers(workers, [&](int64_t worker) { of_worker[worker] = omp_get_thread_num(); });
  TORCH_CHECK(std::set<int>(of_worker.begin(), of_worker.end()).count(-1) == 0, "a worker did not run");
  return std::set<int>(of_worker.begin(), of_worker.end()).size();
}
TORCH_LIBRARY(vicinal_native, m) {
  m.def("set_variant(str name) -> ()", set_variant);
  m.def("variant() -> str", variant);
  m.def("variants() -> str[]", variants);
  m.def("threads(int workers) -> int", threads);
}
"""
SHOW = """
import atexit
torch.set_num_threads(2)

def show():
    ops = torch.ops.vicinal_native
    runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.split("/")[-1]}
    threads = [ops.threads(workers) for workers in (1, 2, 5)]
    print(ops.variant(), ",".join(ops.variants()), threads, len(runtimes), file=sys.stderr)

atexit.register(show)
"""


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_library_is_loaded_with_its_operators_and_no_second_openmp(compiler, tmp_path):
    source = write_sources(tmp_path / "source", binding=BINDING)
    shutil.copy(library.SOURCE / "threads.h", source)
    names, options = [each.name for each in runnable_variants()], {"code": SHOW, "stubbed": False, "CXX": compiler}
    for building in (True, False):
        state, _, lines = finish(start(source, tmp_path / "cache", **options))
        assert (state, len(lines)) == ("READY", 1 + building), lines
        assert lines[-1] == f"{names[0]} {','.join(names)} [1, 2, 2] 1"
    state, _, lines = finish(start(source, tmp_path / "cache", **options, VICINAL_NATIVE="portable"))
    assert lines == [f"portable {','.join(names)} [1, 2, 2] 1"]


@pytest.mark.skipif(shutil.which("clang++") is None, reason="no clang++")
def test_kernels_by_clang_equal_the_formula(tmp_path):
    tests = [str(Path(__file__).with_name(name)) for name in ("test_kernels.py", "test_operators.py")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "CXX": "clang++", "VICINAL_CACHE": str(tmp_path), "VICINAL_NATIVE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout.splitlines()[-1] or len(runnable_variants()) < 3
    assert list((tmp_path / "native").glob("*.so"))
