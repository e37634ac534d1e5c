"""`vicinal eval` on moved, changed and other data, and on runs that are not finished."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import vicinal
from photo_folders import config, interrupted, paint
from vicinal.cli.main import main
from vicinal.data import evaluation_tensor
from vicinal.data.transforms import Preprocessing


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("trained")
    return vicinal.train(config(paint(root / "photos"), root / "run"))


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run, whose data is at the place that config.yaml says."""
    shutil.copytree(trained.folder.parent, tmp_path / "x")
    text = (tmp_path / "x" / "run" / "config.yaml").read_text()
    (tmp_path / "x" / "run" / "config.yaml").write_text(text.replace(str(trained.folder.parent), str(tmp_path / "x")))
    return vicinal.Run(tmp_path / "x" / "run")


def evaluated(capsys, run, *words):
    """Returns the metrics that the command prints, and what it says beside them."""
    assert main(["eval", str(run.folder), "--json", *map(str, words)]) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out), printed.err


def right(run, files):
    """How many files a run gets right, one by one; the class is the name of the folder."""
    model = vicinal.load(run.folder)
    names, preprocessing = model.pretrained_cfg["label_names"], Preprocessing.of_model(model.pretrained_cfg)
    with torch.no_grad():
        found = [model(evaluation_tensor(Image.open(file), preprocessing)[None]).argmax().item() for file in files]
    return sum(names[number] == file.parent.name for number, file in zip(found, files, strict=True))


def test_data_that_moved_is_evaluated_on_the_same_splits(run, tmp_path, capsys):
    photos = tmp_path / "x" / "photos"
    photos.rename(tmp_path / "moved")
    assert main(["eval", str(run.folder)]) == 2
    said = capsys.readouterr().err
    assert "photos does not exist" in said
    assert "(--dataset) says where it is" in said
    for split in ("val", "test"):
        found, said = evaluated(capsys, run, "--split", split, "--dataset", f"folder:{tmp_path / 'moved'}")
        assert found["loss"] == pytest.approx(run.results[split]["loss"], rel=1e-12)
        assert found["confusion"] == run.results[split]["confusion"]
        assert said == ""


def test_changed_data_of_its_own_is_refused(run, tmp_path, capsys):
    (tmp_path / "x" / "photos" / "cat" / "003.png").unlink()
    assert main(["eval", str(run.folder)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("vicinal: --dataset must be the data that ")
    assert "1 removed (cat/003.png)" in said


def test_all_images_of_other_data_are_evaluated_with_the_classes_of_the_run(run, tmp_path, capsys):
    other = paint(tmp_path / "other", 7, classes=("wolf", "dog", "ant"))  # in another order, with bright wolves
    found, said = evaluated(capsys, run, "--dataset", f"folder:{other}")
    files = sorted((other / "dog").iterdir())
    assert found["class_names"] == ["cat", "dog"]
    assert found["images"] == 7
    assert found["top1"] == pytest.approx(right(run, files) / 7)
    assert sum(found["confusion"][1]) == 7
    assert "14 images" in said
    assert "ant, wolf" in said
    assert "has no images of cat" in said
    strangers = paint(tmp_path / "strangers", 3, classes=("wolf", "ant"))
    assert main(["eval", str(run.folder), "--dataset", f"folder:{strangers}"]) == 2
    assert "must have classes of the run (cat, dog), got ant, wolf" in capsys.readouterr().err


@pytest.mark.parametrize(("names", "used"), [(("Train", "test"), "test"), (("val",), "val"), (("train", "val"), "val")])
def test_the_test_split_of_other_data_is_used(run, tmp_path, capsys, names, used):
    for number, name in enumerate(names):
        paint(tmp_path / "other" / name, 4 + number, first=50 * (1 + number))
    found, said = evaluated(capsys, run, "--dataset", f"folder:{tmp_path / 'other'}")
    files = sorted((tmp_path / "other" / used).rglob("*.png"))
    assert (found["images"], found["top1"]) == (len(files), pytest.approx(right(run, files) / len(files)))
    assert said == ""


def test_images_that_were_trained_on_are_counted(run, tmp_path, capsys):
    other = paint(tmp_path / "other", 31)
    found, said = evaluated(capsys, run, "--dataset", f"folder:{other}")
    assert found["images"] == 62
    assert "48 of 62 images have name and size of images that" in said  # 12 of 60 were test images


def test_a_run_that_is_not_finished_is_opened_at_its_last_checkpoint(tmp_path, monkeypatch, capsys):
    photos = paint(tmp_path / "photos")
    settings = config(photos, tmp_path / "run", ema=0.5, prior="gmm", precision="fp64")
    folder = interrupted(monkeypatch, settings, step=7)
    run = vicinal.Run(folder)
    row = run.metrics[-1]
    capsys.readouterr()
    found, said = evaluated(capsys, run, "--split", "val")
    assert found["top1"] == row["val_top1"]
    assert found["loss"] == pytest.approx(row["val_loss"], rel=1e-5)
    assert said == f"vicinal: the run {folder} is not finished: its checkpoint after epoch 1 is used\n"
    with pytest.warns(UserWarning, match="is not finished"):
        model = vicinal.load(str(folder))
    assert model.pretrained_cfg["label_names"] == ["cat", "dog"]
    assert next(model.parameters()).dtype == torch.float32
    image = photos / "cat" / "000.png"
    assert main(["predict", str(folder), str(image), "--json"]) == 0
    printed = capsys.readouterr()
    (document,) = json.loads(printed.out)
    with torch.no_grad():
        tensor = evaluation_tensor(Image.open(image), Preprocessing.of_model(model.pretrained_cfg))
        expected = model(tensor[None])[0].softmax(0)
    for each in document["predictions"]:
        assert each["probability"] == pytest.approx(expected[each["class"]].item(), abs=1e-6)
    assert "is not finished" in printed.err
    assert main(["analyze", "masks", str(folder)]) == 0
    assert "is not finished" in capsys.readouterr().err
    shutil.rmtree(folder / "checkpoints")
    assert main(["predict", str(folder), str(image)]) == 2
    assert f"`vicinal train --resume {folder}` continues it" in capsys.readouterr().err


def test_analysis_takes_the_test_images_of_data_that_moved(run, tmp_path, capsys, monkeypatch):
    from vicinal.analysis import ImageSelection, open_models

    (tmp_path / "x" / "photos").rename(tmp_path / "moved")
    (opened,) = open_models([run.folder], device="cpu")
    selection = ImageSelection(dataset=f"folder:{tmp_path / 'moved'}", count=100)
    tensors = torch.cat(list(selection.tensors(opened)))
    record = [line.split(",") for line in run.data.text.splitlines()]
    files = [tmp_path / "moved" / name for split, name, *_ in record if split == "test"]
    expected = torch.stack([evaluation_tensor(Image.open(file), opened.preprocessing) for file in files])
    assert torch.equal(tensors, expected)
    assert main(["analyze", "erf", str(run.folder), "--dataset", f"folder:{tmp_path / 'moved'}", "--count", "2"]) == 0
    assert main(["analyze", "erf", str(run.folder)]) == 2
    assert "photos does not exist" in capsys.readouterr().err


def test_a_run_with_a_validation_split_of_its_own_has_no_test_figure(tmp_path, capsys):
    paint(tmp_path / "data" / "Training", 20)
    paint(tmp_path / "data" / "Valid", 6, first=40)
    run = vicinal.train(config(tmp_path / "data", tmp_path / "run", epochs=1))
    assert run.results.keys() == {"val"}
    assert run.results["val"]["images"] == 12
    assert main(["eval", str(run.folder)]) == 2
    assert "has no test images; evaluate another split" in capsys.readouterr().err
    assert np.allclose(evaluated(capsys, run, "--split", "val")[0]["loss"], run.results["val"]["loss"])
