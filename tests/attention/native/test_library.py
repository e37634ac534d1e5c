"""When the library is built and loaded, what is said, and what is recorded."""

# ruff: noqa: F811
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader

from native_fixtures import unprepared  # noqa: F401
from native_stubs import compiled, forget, write_compiler
from vicinal.attention.native import library
from vicinal.attention.native.cpu_features import runnable_variants
from vicinal.attention.native.library import (
    NativeState,
    attention_path,
    native_ready,
    native_status,
    prepare_native,
    prepare_native_for,
)
from vicinal.errors import VicinalError

OBJECTS = sorted(["binding.o", "vicinal_native.so", *(f"kernel-{each.name}.o" for each in runnable_variants())])


def said(capsys):
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_the_library_is_built_once_and_ready_then(unprepared, capsys):
    assert native_status().state is NativeState.NOT_BUILT
    assert not native_ready()
    assert attention_path() == "torch"
    assert not (unprepared / "cache").exists()  # to ask builds nothing

    status = prepare_native()
    assert status.state is NativeState.READY
    assert native_ready()
    assert compiled(unprepared) == OBJECTS
    (line,) = said(capsys)
    assert line.startswith("vicinal: building the native attention library, once, in about half a minute")
    assert line.endswith(str(unprepared / "cache" / "native"))
    assert status.path.parent == unprepared / "cache" / "native"
    assert sorted(file.name for file in status.path.parent.iterdir()) == [".lock", status.path.name]
    assert (status.variant, len(status.digest)) == (runnable_variants()[0].name, 12)
    assert str(unprepared / "c++") in status.compiler

    assert prepare_native() is native_status() is status
    assert compiled(unprepared) == OBJECTS
    assert said(capsys) == []


def test_several_threads_at_once_build_once(unprepared, capsys):
    with ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(lambda _: prepare_native(), range(8)))
    assert {id(status) for status in statuses} == {id(native_status())}
    assert compiled(unprepared) == OBJECTS
    assert len(said(capsys)) == 1


def test_records_name_variant_and_digest_on_a_cpu_only(unprepared):
    status = prepare_native()
    assert attention_path() == f"native {status.variant} {status.digest}"
    assert attention_path(torch.device("cpu")) == attention_path()
    assert attention_path(torch.device("meta")) == "torch"


def test_a_library_of_another_process_is_found(unprepared, monkeypatch, capsys):
    path = prepare_native().path
    forget(monkeypatch)
    said(capsys)
    assert native_status().state is NativeState.READY
    assert not native_ready()
    assert attention_path() == "torch"  # of this process, so far
    assert prepare_native().path == path
    assert native_ready()
    assert compiled(unprepared) == OBJECTS
    assert said(capsys) == []


def test_zero_switches_it_off(unprepared, monkeypatch, capsys):
    monkeypatch.setenv("VICINAL_NATIVE", "0")
    assert prepare_native().state is native_status().state is NativeState.OFF
    assert not native_ready()
    assert compiled(unprepared) == []
    assert said(capsys) == []
    monkeypatch.setenv("VICINAL_NATIVE", "1")
    assert prepare_native().state is NativeState.READY
    monkeypatch.setenv("VICINAL_NATIVE", "0")
    assert prepare_native().state is NativeState.OFF
    assert not native_ready()
    assert attention_path() == "torch"


def test_a_variant_can_be_chosen(unprepared, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.ops.vicinal_native, "set_variant", chosen.append)
    names = [each.name for each in runnable_variants()]
    for name in [*names, "1"]:
        monkeypatch.setenv("VICINAL_NATIVE", name)
        assert native_status().variant == prepare_native().variant == chosen[-1]
    assert chosen == [*names, names[0]]
    assert compiled(unprepared) == OBJECTS


@pytest.mark.parametrize("given", ["avx1024", "avx512", "yes"])
def test_an_impossible_variant_names_the_choices(unprepared, monkeypatch, given):
    monkeypatch.setattr("vicinal.attention.native.cpu_features.cpu_flags", lambda: frozenset({"avx2", "fma", "f16c"}))
    monkeypatch.setenv("VICINAL_NATIVE", given)
    problem = "this CPU cannot run it" if given == "avx512" else "there is no such variant"
    for call in (prepare_native, native_status):
        with pytest.raises(VicinalError, match=rf"VICINAL_NATIVE must be 0 .*avx2, portable, got '{given}': {problem}"):
            call()


def test_a_failed_build_is_one_line_with_a_log(unprepared, monkeypatch, capsys):
    (library.SOURCE / "kernel.cpp").write_text("int broken( {\n")
    status = prepare_native()
    assert status.state is NativeState.FAILED
    assert not native_ready()
    building, failed = said(capsys)
    assert "building" in building
    assert f"failed on kernel.cpp; see {status.log}" in failed
    assert "attention runs on torch's operations" in failed
    assert "error:" in status.log.read_text()
    assert not list(status.log.parent.glob(".building*"))

    # neither this process nor the next one tries the same again
    calls = compiled(unprepared)
    assert prepare_native() is status
    monkeypatch.setattr(library, "_prepared", None)
    assert native_status().state is prepare_native().state is NativeState.FAILED
    assert compiled(unprepared) == calls
    (line,) = said(capsys)
    assert "an earlier build failed; `vicinal doctor --build` tries again" in line

    assert prepare_native(retry=True).state is NativeState.FAILED
    assert len(compiled(unprepared)) > len(calls)
    (library.SOURCE / "kernel.cpp").write_text("")
    assert prepare_native(retry=True).state is NativeState.READY
    assert native_ready()


def test_a_compiler_that_is_stopped_is_tried_again_by_the_next_process(unprepared, monkeypatch):
    write_compiler(unprepared, before="kill -9 $$")
    status = prepare_native()
    assert (status.state, status.log) == (NativeState.FAILED, None)
    assert "was stopped by signal 9" in status.reason
    monkeypatch.setattr(library, "_prepared", None)
    write_compiler(unprepared)
    assert prepare_native().state is NativeState.READY


def test_no_compiler_is_said_once(unprepared, monkeypatch, capsys):
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(unprepared / "source"))
    for _ in range(2):
        assert prepare_native().state is NativeState.NO_COMPILER
    (line,) = said(capsys)
    assert "there is no C++ compiler: neither g++ nor clang++ is on PATH" in line
    monkeypatch.setenv("CXX", "c+++")
    assert "CXX is c+++" in library._look_up()[0].reason


def test_of_several_processes_only_the_first_says_what_is_missing(unprepared, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "c+++")
    monkeypatch.setenv("RANK", "1")
    assert prepare_native().state is NativeState.NO_COMPILER
    assert said(capsys) == []


def test_a_cache_that_cannot_be_written_is_a_failed_build(unprepared, monkeypatch, capsys):
    monkeypatch.setenv("VICINAL_CACHE", str(unprepared / "c++"))  # a file
    status = prepare_native()
    assert status.state is NativeState.FAILED
    assert "cannot be written: Not a directory; set VICINAL_CACHE to another folder" in status.reason
    assert len(said(capsys)) == 1


def test_changed_sources_are_another_library(unprepared, monkeypatch):
    before = prepare_native()
    forget(monkeypatch)
    (library.SOURCE / "shared.h").write_text("// changed\n")
    after = prepare_native()
    assert before.path != after.path
    assert before.digest != after.digest
    assert before.path.exists()
    assert len(compiled(unprepared)) == 2 * len(OBJECTS)


def test_a_library_that_cannot_be_loaded_is_built_again_once(unprepared, monkeypatch, capsys):
    failures = [OSError("wrong ELF class")]

    def load(file):
        if failures:
            raise failures.pop()

    path = prepare_native().path
    forget(monkeypatch)
    monkeypatch.setattr(library, "_load", load)
    assert prepare_native().state is NativeState.READY
    assert len(compiled(unprepared)) == 2 * len(OBJECTS)

    forget(monkeypatch)
    failures += [OSError("wrong ELF class")] * 2
    status = prepare_native()
    assert status.state is NativeState.FAILED
    assert len(compiled(unprepared)) == 3 * len(OBJECTS)
    assert f"was built, but cannot be loaded; see {status.log}" in said(capsys)[-1]
    assert "wrong ELF class" in status.log.read_text()
    assert not path.exists()


def test_other_systems_and_missing_sources_are_silent(unprepared, monkeypatch, capsys):
    with monkeypatch.context() as darwin:
        darwin.setattr(sys, "platform", "darwin")
        assert prepare_native().state is NativeState.UNSUPPORTED
    monkeypatch.setattr(library, "_prepared", None)
    monkeypatch.setattr(library, "SOURCE", unprepared / "nothing")
    assert prepare_native().state is NativeState.UNSUPPORTED
    assert said(capsys) == []


class Prepared(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        status = prepare_native()
        return status.state.name, status.reason


def test_a_dataloader_worker_builds_nothing(unprepared):
    batches = DataLoader(Prepared(), num_workers=1, batch_size=None, multiprocessing_context="fork")
    ((state, reason),) = list(batches)
    assert state == "NOT_BUILT"
    assert "DataLoader worker" in reason
    assert compiled(unprepared) == []
    prepare_native()
    assert next(iter(batches))[0] == "READY"


def test_a_daemon_builds_nothing(unprepared, monkeypatch):
    monkeypatch.setattr("multiprocessing.process._current_process._config", {"daemon": True})
    assert prepare_native().state is NativeState.NOT_BUILT
    monkeypatch.setattr("multiprocessing.process._current_process._config", {})
    assert prepare_native().state is NativeState.READY


def test_nothing_is_built_while_compiling(unprepared, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert prepare_native().state is NativeState.NOT_BUILT
    assert compiled(unprepared) == []


def test_models_elsewhere_need_no_library(unprepared):
    prepare_native_for(torch.nn.Linear(1, 1, device="meta"))
    assert compiled(unprepared) == []
    prepare_native_for(torch.nn.Linear(1, 1))
    assert native_ready()


def test_variants_are_those_that_torch_finds_too(monkeypatch):
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    names = [each.name for each in runnable_variants()]
    assert names[-1] == "portable"
    capability = torch.backends.cpu.get_cpu_capability()
    if "ATEN_CPU_CAPABILITY" not in os.environ and capability in ("AVX2", "AVX512"):
        assert capability.lower() in names
