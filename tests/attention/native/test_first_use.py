"""What prepares the library: everything that makes a model on a CPU for attention of ours."""

import importlib

import pytest
import timm
import torch

import vicinal
from vicinal.attention.native import library


@pytest.fixture
def prepared(monkeypatch):
    """Returns a list to which every call of `prepare_native` appends."""
    calls: list[str] = []
    monkeypatch.setattr(library, "prepare_native", lambda: calls.append("prepared"))
    return calls


def timm_model():
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)


def test_attach_prepares_the_library_before_it_verifies(prepared, monkeypatch):
    def fail(*_):
        raise RuntimeError("verified")

    monkeypatch.setattr(importlib.import_module("vicinal.attachment.attach"), "verified", fail)
    with pytest.raises(RuntimeError, match="verified"):
        vicinal.attach(timm_model(), "gab")
    assert prepared


def test_priors_from_a_file_prepare_it(prepared, tmp_path):
    model = timm_model()
    vicinal.attach(model, "gab")
    file = vicinal.save_prior(model, tmp_path / "prior.safetensors")
    prepared.clear()
    vicinal.load_prior(timm_model(), file)
    assert prepared


def test_our_backbones_prepare_it_without_a_prior_too(prepared, tmp_path):
    model = vicinal.create_model("vit-micro", img_size=8)
    assert prepared
    vicinal.save(model, tmp_path / "model")
    for make in (lambda: vicinal.load(tmp_path / "model"), lambda: timm.create_model("vicinal_vit_micro", img_size=8)):
        prepared.clear()
        make()
        assert prepared


def test_models_of_others_and_on_other_devices_do_not(prepared):
    vicinal.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    with torch.device("meta"):
        vicinal.create_model("vit-micro", img_size=8)
    assert not prepared
