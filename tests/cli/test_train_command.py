import json
import math
import subprocess
import sys

import numpy as np
import pytest
import yaml
from PIL import Image

import vicinal
from vicinal.cli.main import main
from vicinal.files import write_json

SMALL = ["--epochs", "1", "--warmup", "0", "--train-size", "128", "--val-size", "50"]


def said(capsys, *words):
    """What a command that must fail says; it may leave no run behind."""
    assert main(list(words)) == 2
    text = capsys.readouterr().err
    assert text.startswith("vicinal: ")
    assert text.count("\n") == 1
    return text


@pytest.fixture
def photos(tmp_path):
    """A folder of two classes, of pictures of several sizes and modes."""
    generator = np.random.default_rng(0)
    for number in range(40):
        name, mode = ("cat", "RGB") if number % 2 else ("dog", "L")
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True, exist_ok=True)
        size = tuple(generator.integers(20, 60, 2))
        pixels = generator.integers(0, 120, (*size, 3) if mode == "RGB" else size) + (100 if name == "cat" else 0)
        Image.fromarray(pixels.astype(np.uint8), mode).save(folder / f"{number}.png")
    return tmp_path / "photos"


def test_train_eval_and_resume(tmp_path, capsys):
    out = str(tmp_path / "run")
    assert main(["train", *SMALL, "--prior", "gmm", "--out", out]) == 0
    text = capsys.readouterr().out
    assert "test  top-1 " in text
    assert "top-5 " in text
    assert "balanced " in text
    assert text.endswith(f"run folder: {out}\n")
    assert main(["eval", out, "--split", "val", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["images"] == 50
    assert found["top1"] == vicinal.Run(out).results["val"]["top1"]
    assert main(["eval", out]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "test: 359 images"
    assert len(lines) == 15
    assert main(["train", "--resume", out]) == 0
    assert capsys.readouterr().out.startswith(f"{out} is finished already\n")
    assert "--lr was 0.001" in said(capsys, "train", "--resume", out, "--lr", "0.1")
    assert "--config and --recipe" in said(capsys, "train", "--resume", out, "--recipe", "paper")
    assert "exists already" in said(capsys, "train", *SMALL, "--out", out)


def test_flags_win_over_a_file_and_a_file_over_a_recipe(tmp_path, capsys):
    file = tmp_path / "settings.yaml"
    file.write_text("recipe: paper\nepochs: 2\nwarmup: 0\nmix: none\ntrain_size: 128\nlr: 5e-4\n")
    out = tmp_path / "run"
    assert main(["train", "--config", str(file), "--epochs", "1", "--out", str(out)]) == 0
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert (config["epochs"], config["mix"], config["lr"], config["erasing"]) == (1, "none", 5e-4, 0.25)


def test_a_folder_of_photos_becomes_a_model_that_knows_their_names(photos, tmp_path, capsys):
    out = str(tmp_path / "run")
    words = [
        "--dataset",
        f"folder:{photos}",
        "--img-size",
        "16",
        "--batch-size",
        "8",
        "--cache-dir",
        str(tmp_path / "c"),
    ]
    assert main(["train", *words, "--epochs", "8", "--warmup", "1", "--out", out]) == 0
    assert vicinal.Run(out).results["test"]["top1"] > 0.8
    assert main(["eval", out]) == 0
    text = capsys.readouterr().out
    assert "top-5" not in text  # of two classes
    assert "macro F1" in text
    assert main(["predict", out, str(photos / "cat" / "1.png"), "--top", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["predictions"][0]["name"] == "cat"


def test_bad_words_are_short_messages_and_leave_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "did you mean 'cifar10'" in said(capsys, "train", "--dataset", "cifar1")
    assert "did you mean 'vit'" in said(capsys, "train", "--model", "vitt")
    assert "unknown prior 'gm'" in said(capsys, "train", "--prior", "gm")
    assert "patches of 4 x 4" in said(capsys, "train", "--model", "vit", "--img-size", "2")
    assert "train_size must be from 1 to 1294" in said(capsys, "train", "--train-size", "5000")
    assert "got 5000" in said(capsys, "train", "--val-size", "5000")
    assert "--epochs must be a whole number, at least 1, got 0" in said(capsys, "train", "--epochs", "0")
    assert "--lr must be a number above 0, got -1" in said(capsys, "train", "--lr", "-1")
    assert "unknown recipe 'papre'" in said(capsys, "train", "--recipe", "papre")
    assert "--precision fp16" in said(capsys, "train", "--precision", "fp16", "--device", "cpu")
    blind = said(capsys, "train", "--model", "resnet18", "--img-size", "32", "--mix", "transmix")
    assert "no attention to read. Modes none, mixup, cutmix and both work with any model" in blind
    assert "there is no run runs/x" in said(capsys, "train", "--resume", "runs/x")
    assert "there is no run runs/x" in said(capsys, "train", "--init-from", "runs/x")
    assert "there is no run runs/x" in said(capsys, "eval", "runs/x")
    assert "cannot read missing.yaml" in said(capsys, "train", "--config", "missing.yaml")
    assert "vit has no pretrained weights" in said(capsys, "train", "--model", "vit", "--pretrained")
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    assert "photos" in said(capsys, "train", "--dataset", "folder:photos")
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "cat" / "a.png")
    assert "class" in said(capsys, "train", "--dataset", "folder:photos")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("words", [["--recipe"], ["--config", "--lr", "1"], ["--resume"], ["--lr"], ["--unknown", "1"]])
def test_flags_without_a_value_and_unknown_flags_exit_with_2(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train", *words])
    assert stopped.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_a_loss_that_is_not_finite_is_printed(tmp_path, capsys):
    run = vicinal.Run.create(vicinal.TrainConfig(out=tmp_path / "run"), environment={})
    metrics = {
        "top1": 0.1,
        "top5": 0.5,
        "loss": math.nan,
        "calibration_error": 0.2,
        "images": 359,
        "per_class": [0.1] * 10,
    }
    write_json(run.folder / "results.json", {"test": metrics})
    assert main(["train", "--resume", str(run.folder)]) == 0
    assert "loss nan" in capsys.readouterr().out


def test_a_run_without_a_checkpoint_cannot_be_evaluated(tmp_path, capsys):
    run = vicinal.Run.create(vicinal.TrainConfig(out=tmp_path / "run"), environment={})
    assert f"`vicinal train --resume {run.folder}` continues it" in said(capsys, "eval", str(run.folder))


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from vicinal.cli.main import main\n"
        "for words in (['--help'], ['train', '--help'], ['eval', '--help']):\n"
        "    try: main(words)\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'timm', 'datasets', 'accelerate', 'sklearn', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "300 and 30" in " ".join(done.stdout.split())
