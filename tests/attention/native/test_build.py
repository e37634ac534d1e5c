"""A library with operators of torch: built, loaded, and on torch's own OpenMP runtime."""

import shutil
import sys

import pytest

from native_stubs import finish, start, write_sources
from vicinal.attention.native.cpu_features import runnable_variants

KERNEL = """
#include <omp.h>
#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
long JOIN(threads_, VICINAL_VARIANT)() {
  long count = 0;
  #pragma omp parallel reduction(+ : count)
  count += 1;
  return count;
}
"""
BINDING = """
#include <torch/library.h>
long threads_portable();
#ifdef VICINAL_HAS_AVX2
long threads_avx2();
#endif
#ifdef VICINAL_HAS_AVX512
long threads_avx512();
#endif
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
static int64_t threads() { return threads_portable(); }
TORCH_LIBRARY(vicinal_native, m) {
  m.def("set_variant(str name) -> ()", set_variant);
  m.def("variant() -> str", variant);
  m.def("variants() -> str[]", variants);
  m.def("threads() -> int", threads);
}
"""
SHOW = """
import atexit
torch.set_num_threads(2)

def show():
    ops = torch.ops.vicinal_native
    runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.split("/")[-1]}
    print(ops.variant(), ",".join(ops.variants()), ops.threads(), len(runtimes), file=sys.stderr)

atexit.register(show)
"""


@pytest.mark.slow  # torch's headers
@pytest.mark.skipif(not sys.platform.startswith("linux") or shutil.which("g++") is None, reason="needs Linux and g++")
def test_a_library_is_loaded_with_its_operators_and_no_second_openmp(tmp_path):
    source = write_sources(tmp_path / "source", KERNEL, BINDING)
    names = [each.name for each in runnable_variants()]
    for building in (True, False):
        state, _, lines = finish(start(source, tmp_path / "cache", code=SHOW, stubbed=False, VICINAL_NATIVE="1"))
        assert (state, len(lines)) == ("READY", 1 + building), lines
        assert lines[-1] == f"{names[0]} {','.join(names)} 2 1"
    state, _, lines = finish(start(source, tmp_path / "cache", code=SHOW, stubbed=False, VICINAL_NATIVE="portable"))
    assert lines == [f"portable {','.join(names)} 2 1"]
