import json

import pytest
import torch

import vicinal
from vicinal.cli.export import run
from vicinal.training.model_path import model_folder


@pytest.fixture
def finished(tmp_path):
    model = vicinal.create_model("vit-micro", prior="gab", img_size=8, depth=1, num_classes=2, global_pool="token")
    vicinal.save(model, tmp_path / "runs" / "finished" / "model", class_names=["cat", "dog"])
    (tmp_path / "runs" / "finished" / "config.yaml").write_text("model: vit-micro\n")
    return tmp_path / "runs" / "finished"


def test_pt2_is_written_next_to_the_model(finished, capsys):
    run([str(finished), "--format", "pt2"])
    out, err = capsys.readouterr()
    file = finished / "model.pt2"
    assert out.startswith(f"wrote {file}: ")
    assert "any number of images" in out
    assert "batches of 1 and 3: outputs differ by at most" in out
    assert err == ""
    notes = {"class_names": ""}
    program = torch.export.load(file, extra_files=notes)
    images = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(program.module()(images), vicinal.load(finished / "model")(images))
    assert json.loads(notes["class_names"]) == ["cat", "dog"]


def test_onnx_is_the_default_and_a_file_is_overwritten_only_when_asked(finished, tmp_path, capfd):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    file = tmp_path / "cats.onnx"
    file.write_text("what was there")
    words = [str(finished / "model"), "--out", str(file), "--batch-size", "2"]
    with pytest.raises(vicinal.VicinalError, match="give another --out, or --overwrite"):
        run(words)
    assert file.read_text() == "what was there"
    run([*words, "--overwrite"])
    captured = capfd.readouterr()
    assert "takes 2 images at a time" in captured.out
    assert len(captured.out.splitlines()) == 2  # no word of the exporter's
    assert captured.err == ""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    images = torch.randn(2, 3, 8, 8)
    expected = vicinal.load(finished / "model")(images).detach()
    got = torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_an_ending_of_another_format_is_an_error(finished):
    with pytest.raises(vicinal.VicinalError, match=r"--format onnx; name it .*a\.onnx"):
        run([str(finished), "--out", "a.pt2"])


def test_a_run_is_a_run_folder_or_a_model_folder_or_on_the_hub(finished):
    assert model_folder(str(finished)) == finished / "model"
    assert model_folder(str(finished / "model")) == finished / "model"
    assert model_folder("hf-hub:me/cats") == "hf-hub:me/cats"


def test_what_is_no_run_is_told(finished):
    runs = finished.parent
    (runs / "begun").mkdir()
    (runs / "begun" / "config.yaml").write_text("model: vit\n")
    (runs / "finishes").mkdir()  # is no run, so it is not suggested
    (runs / "notes.txt").write_text("")
    for name, message in [
        ("finishd", f"there is no run .*finishd; did you mean {finished}?"),
        ("other", "there is no run .*other; expected the folder of a run"),
        ("none/other", "there is no run .*other; expected the folder of a run"),
        ("begun", "is not finished; `vicinal train --resume .*begun` continues it"),
        ("finishes", "is a folder without a run or a model; expected"),
        ("notes.txt", "is a file; expected"),
    ]:
        with pytest.raises(vicinal.VicinalError, match=message):
            model_folder(str(runs / name))
