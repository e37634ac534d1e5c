import importlib.util
import json
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

import vicinal
from small_backbones import small
from vicinal.models import export as export_module
from vicinal.models.export import export


@pytest.fixture
def model():
    model = vicinal.create_model("vit-micro", prior="gmm:init=spread", img_size=(8, 12), depth=1, num_classes=3)
    model.pretrained_cfg["label_names"] = ["cat", "dog", "Hündin"]
    return model


def check_outputs(model, run, size, batches=(1, 2, 5)):
    model.eval()
    for batch in batches:
        images = torch.randn(batch, *size)
        with torch.no_grad():
            expected = model(images)
        assert expected.abs().max() > 0.01
        torch.testing.assert_close(run(images), expected, atol=1e-5, rtol=1e-4)


def open_onnx(file):
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return session, lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


HERE = str(torch.__path__[0]).encode()  # paths of this machine are nobody else's business


def test_onnx_takes_any_batch_and_carries_classes_and_preprocessing(model, tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    file = tmp_path / "model.onnx"
    exported = export(model, file, "onnx")
    assert exported.file == file
    assert 0 <= exported.difference < 1e-5
    assert list(tmp_path.iterdir()) == [file]
    session, run = open_onnx(file)
    assert session.get_inputs()[0].shape == ["batch", 3, 8, 12]
    check_outputs(model, run, (3, 8, 12))
    notes = session.get_modelmeta().custom_metadata_map
    assert json.loads(notes["class_names"]) == ["cat", "dog", "Hündin"]
    preprocessing = json.loads(notes["preprocessing"])
    assert preprocessing["input_size"] == [3, 8, 12]
    assert preprocessing["mean"] == [0.5, 0.5, 0.5]
    assert HERE not in file.read_bytes()


def test_pt2_takes_any_batch_and_carries_classes_and_preprocessing(model, tmp_path):
    file = tmp_path / "model.pt2"
    export(model, file, "pt2")
    notes = {"class_names": "", "preprocessing": ""}
    program = torch.export.load(file, extra_files=notes)
    check_outputs(model, program.module(), (3, 8, 12))
    assert json.loads(notes["class_names"]) == ["cat", "dog", "Hündin"]
    assert json.loads(notes["preprocessing"])["input_size"] == [3, 8, 12]


def test_pt2_holds_no_pickle(model, tmp_path):
    with zipfile.ZipFile(export(model, tmp_path / "model.pt2", "pt2").file) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    assert any(name.endswith("weight_0") for name in contents)
    for name, content in contents.items():
        assert HERE not in content, name
        assert not content.startswith((b"PK", b"\x80")), name  # what torch.save and pickle begin with


def test_a_file_of_one_batch_size_takes_that_one(model, tmp_path):
    exported = export(model, tmp_path / "model.pt2", "pt2", batch_size=4)
    assert exported.batches == (4,)
    run = torch.export.load(exported.file).module()
    check_outputs(model, run, (3, 8, 12), batches=(4,))
    with pytest.raises((RuntimeError, AssertionError)):
        run(torch.randn(3, 3, 8, 12))


def test_the_model_stays_as_it_is(model, tmp_path):
    model.bfloat16().train()
    before = {name: values.clone() for name, values in model.state_dict().items()}
    export(model, tmp_path / "model.pt2", "pt2")
    assert all(module.training for module in model.modules())
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())


@pytest.mark.parametrize("wrong", [1e-3, float("nan")])
def test_a_file_that_gives_other_outputs_is_not_left_behind(model, tmp_path, monkeypatch, wrong):
    def read(file):
        run = torch.export.load(file).module()
        return lambda images: run(images) + wrong * model.eval()(images).abs().max()

    monkeypatch.setitem(export_module.READERS, "pt2", read)
    file = tmp_path / "model.pt2"
    file.write_text("what was there")
    with pytest.raises(vicinal.VicinalError, match="outputs of the pt2 file"):
        export(model, file, "pt2", overwrite=True)
    assert [each.name for each in tmp_path.iterdir()] == ["model.pt2"]
    assert file.read_text() == "what was there"


def test_a_model_that_cannot_be_traced_is_an_error(tmp_path):
    class Unsteady(nn.Module):
        pretrained_cfg = {"input_size": (3, 8, 8)}  # noqa: RUF012

        def forward(self, x):
            return x.mean((2, 3)) if np.isfinite(x.sum().item()) and x.sum() > 0 else x.amax((2, 3))

    with pytest.raises(vicinal.VicinalError, match="cannot export Unsteady to pt2: "):
        export(Unsteady(), tmp_path / "model.pt2", "pt2")
    assert not list(tmp_path.iterdir())


def test_bad_input_is_told_before_anything_is_written(model, tmp_path, monkeypatch):
    file = tmp_path / "model.pt2"
    for arguments, message in [
        ((file, "pt"), "unknown format 'pt'; did you mean 'pt2'"),
        ((tmp_path, "pt2"), "it is a folder"),
        ((tmp_path / "none" / "model.pt2", "pt2"), "none does not exist"),
    ]:
        with pytest.raises(vicinal.VicinalError, match=message):
            export(model, *arguments)
    with pytest.raises(vicinal.VicinalError, match=r"batch_size .* got 0"):
        export(model, file, "pt2", batch_size=0)
    monkeypatch.setattr(export_module, "MAX_ONNX_BYTES", 1000)
    with pytest.raises(vicinal.VicinalError, match="too large for one ONNX file"):
        export(model, file, "onnx")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(vicinal.VicinalError, match=r"pip install 'vicinal\[onnx\]'"):
        export(model, file, "onnx")
    assert not list(tmp_path.iterdir())
    file.write_text("what was there")
    with pytest.raises(vicinal.VicinalError, match="already"):
        export(model, file, "pt2")
    assert file.read_text() == "what was there"


@pytest.mark.slow
@pytest.mark.parametrize("prior", ["gmm:init=spread", "gab"])
@pytest.mark.parametrize("name", ["vit", "swin", "cait", "pit", "t2t"])
def test_every_backbone_can_be_exported(name, prior, tmp_path):
    model = small(name, prior=prior)
    program = torch.export.load(export(model, tmp_path / "model.pt2", "pt2").file)
    check_outputs(model, program.module(), (3, 32, 32))
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    check_outputs(model, open_onnx(export(model, tmp_path / "model.onnx", "onnx").file)[1], (3, 32, 32))
