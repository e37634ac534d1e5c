"""A process whose library is not prepared, with sources of its own and an empty cache."""

import shutil
import sys
import types

import pytest
import torch

from native_stubs import forget, write_compiler, write_sources
from vicinal.attention.native import library


@pytest.fixture
def unprepared(tmp_path, monkeypatch):
    """Returns a folder with `source`, a counting compiler and an empty `cache`; libraries are not loaded."""
    if not sys.platform.startswith("linux") or shutil.which("g++") is None:
        pytest.skip("builds need Linux and g++")
    monkeypatch.setattr(library, "SOURCE", write_sources(tmp_path / "source"))
    forget(monkeypatch)
    monkeypatch.setattr(library, "_load", lambda file: None)
    monkeypatch.setattr(
        torch.ops, "vicinal_native", types.SimpleNamespace(set_variant=lambda name: None), raising=False
    )
    monkeypatch.setenv("VICINAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path)))
    monkeypatch.delenv("VICINAL_NATIVE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path
