import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import vicinal
from vicinal.attention.native import attention_path, library
from vicinal.cli.main import main


@pytest.fixture
def unprepared(tmp_path, monkeypatch):
    """Returns a folder with a cache of two libraries; this process has not prepared any."""
    for name, value in {"_prepared": None, "_loaded": None, "_ready": False}.items():
        monkeypatch.setattr(library, name, value)
    monkeypatch.setenv("VICINAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VICINAL_NATIVE", raising=False)
    (tmp_path / "cache" / "native").mkdir(parents=True)
    (tmp_path / "cache" / "native" / "a.so").write_bytes(bytes(1000))
    (tmp_path / "cache" / "native" / "b.so").write_bytes(bytes(500))
    return tmp_path


def document(capsys, *flags):
    code = main(["doctor", "--json", *flags])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def test_shows_versions_devices_and_the_attention_path(capsys):
    assert main(["doctor"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["vicinal"] == vicinal.__version__
    assert rows["torch"] == torch.__version__
    assert {"python", "timm", "torchvision", "accelerate", "compiler", "cache"} <= set(rows)
    assert rows["device"].startswith("cpu (")
    assert rows["threads"].startswith(f"{torch.get_num_threads()} of ")
    assert rows["attention"] == f"on a CPU by {attention_path()}"


def test_json_has_the_sizes_of_caches_and_why_attention_is_as_it_is(unprepared, monkeypatch, capsys):
    monkeypatch.setenv("VICINAL_NATIVE", "0")
    code, found, _ = document(capsys)
    assert code == 0
    assert (found["cache"], found["cache_bytes"]) == (str(unprepared / "cache"), {"native": 1500})
    assert found["attention"] == "torch"
    assert found["native"]["state"] == "off"
    assert "VICINAL_NATIVE=0" in found["native"]["reason"]


def test_to_look_builds_nothing(unprepared, monkeypatch, capsys):
    source = unprepared / "source"
    source.mkdir()
    monkeypatch.setattr(library, "SOURCE", source)
    monkeypatch.setattr(sys, "platform", "linux")
    compiler = SimpleNamespace(command=("c++",), version="1")
    monkeypatch.setattr(library, "find_compiler", lambda: compiler)
    code, found, err = document(capsys)
    assert (code, err, found["native"]["state"]) == (0, "", "not built")
    assert "vicinal doctor --build" in found["native"]["reason"]
    assert not (unprepared / "cache" / "native" / ".lock").exists()


def test_a_build_that_is_not_possible_is_an_error(unprepared, monkeypatch, capsys):
    monkeypatch.setattr(library, "SOURCE", unprepared / "nothing")
    code, found, err = document(capsys, "--build")
    assert (code, found["native"]["state"]) == (2, "unsupported")
    assert "vicinal: the native library was not built: this installation has no C++ sources" in err


def test_no_compiler_is_shown_with_its_reason(unprepared, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["doctor"]) == 0
    assert "none: CXX is no-such-compiler, which is not an executable file on PATH" in capsys.readouterr().out


def test_help_imports_nothing_heavy():
    code = "import sys; from vicinal.cli.main import main\n"
    code += "try: main(['doctor', '--help'])\nexcept SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
