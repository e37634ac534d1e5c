"""Libraries on disk: several processes, builds that were killed, damaged files."""

import itertools
import shutil
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from native_stubs import compiled, finish, start, write_compiler, write_sources
from vicinal.attention.native.build import BuildPlan
from vicinal.attention.native.compiler import Compiler, find_compiler
from vicinal.attention.native.cpu_features import runnable_variants
from vicinal.attention.native.library_cache import LibraryCache

if not sys.platform.startswith("linux") or shutil.which("g++") is None:
    pytest.skip("builds need Linux and g++", allow_module_level=True)

VARIANTS = len(runnable_variants())
SLOWLY = 'case "$*" in *kernel.cpp*) touch "{folder}/begun"; sleep {seconds};; esac'


@pytest.fixture
def here(tmp_path):
    """Returns folders of the sources, the cache and the compiler, with its path."""
    return SimpleNamespace(
        folder=tmp_path,
        source=write_sources(tmp_path / "source"),
        cache=tmp_path / "cache",
        compiler=str(write_compiler(tmp_path)),
    )


def test_two_processes_at_once_build_once(here):
    write_compiler(here.folder, before=SLOWLY.format(folder=here.folder, seconds=0.5))
    processes = [start(here.source, here.cache, CXX=here.compiler) for _ in range(2)]
    results = [finish(process) for process in processes]
    assert {(state, path) for state, path, _ in results} == {("READY", results[0][1])}
    assert len(compiled(here.folder)) == VARIANTS + 2
    assert sorted(len(lines) for _, _, lines in results) == [0, 1]
    state, path, lines = finish(start(here.source, here.cache, CXX=here.compiler))
    assert (state, path, lines) == ("READY", results[0][1], [])
    assert len(compiled(here.folder)) == VARIANTS + 2


@pytest.mark.parametrize("stop", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_build_that_was_stopped_leaves_nothing_that_breaks_the_next(here, stop):
    write_compiler(here.folder, before=SLOWLY.format(folder=here.folder, seconds=5))
    # Tests that a script started in the background inherit from it that SIGINT is ignored.
    heeded = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    process = start(here.source, here.cache, code=heeded, CXX=here.compiler)
    while not (here.folder / "begun").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(stop)
    process.communicate()
    assert process.returncode != 0
    assert not list(here.cache.glob("native/*.so"))
    assert not list(here.cache.glob("native/*.log"))

    write_compiler(here.folder)
    state, path, lines = finish(start(here.source, here.cache, CXX=here.compiler))
    assert (state, len(lines)) == ("READY", 1)
    assert sorted(file.name for file in (here.cache / "native").iterdir()) == [".lock", path.rpartition("/")[2]]


@pytest.mark.parametrize("damage", [b"", b"not a library", "truncated"])
def test_a_damaged_library_is_built_again(here, damage):
    plan = BuildPlan(here.source, Compiler((here.compiler,), "1"), runnable_variants())
    cache = LibraryCache(plan, here.cache)
    file = cache.build(lambda: None)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if damage == "truncated" else damage)
    assert cache.find() is None
    assert LibraryCache(plan, here.cache).build(lambda: None).read_bytes() == cache.find().read_bytes()
    assert len(compiled(here.folder)) == 2 * (VARIANTS + 2)
    assert len(list(here.cache.glob("*.so"))) == 1


@pytest.mark.parametrize("change", ["compiler", "variants", "flags", "torch"])
def test_the_key_depends_on_all_that_a_library_depends_on(here, monkeypatch, change):
    compiler, variants = Compiler(("c++",), "1"), runnable_variants()
    before = BuildPlan(here.source, compiler, variants)
    assert before.key == BuildPlan(here.source, compiler, variants).key
    if change == "compiler":
        after = BuildPlan(here.source, Compiler(("c++",), "2"), variants)
    elif change == "variants":
        after = BuildPlan(here.source, compiler, ())
    else:
        key = before.key
        name = {"flags": "vicinal.attention.native.build.KERNEL_FLAGS", "torch": "torch.version.git_version"}[change]
        monkeypatch.setattr(name, ("-O1",) if change == "flags" else "0")
        after = BuildPlan(here.source, compiler, variants)
        assert before.key == key
    assert after.key != before.key
    assert (after.source_digest != before.source_digest) == (change == "flags")


def test_commands_have_the_flags_of_their_variant(here, tmp_path):
    plan = BuildPlan(here.source, Compiler(("c++",), "1"), runnable_variants())
    commands = {file.name: command for file, command in plan.compile_commands(tmp_path).items()}
    for each in runnable_variants():
        kernel = commands[f"kernel-{each.name}.o"]
        assert {f"-DVICINAL_VARIANT={each.name}", "-O3", *each.compiler_flags} <= set(kernel)
        assert ("-mavx2" in kernel) == (each.name != "portable")
        assert "-isystem" not in kernel
        assert (f"-DVICINAL_HAS_{each.name.upper()}" in commands["binding.o"]) == (each.name != "portable")
    link = plan.link_command([tmp_path / "a.o"], tmp_path / "a.so")
    assert "-fopenmp" not in [*link, *itertools.chain(*commands.values())]  # clang's own would need LLVM's runtime
    assert "-ltorch_cpu" in link


def test_an_installed_compiler_says_its_version(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    found = find_compiler()
    assert found.command[0].endswith("g++")
    assert found.version.splitlines()[0] in str(found)
    monkeypatch.setenv("CXX", "env g++ -g0")
    assert find_compiler().command[1:] == ("g++", "-g0")
