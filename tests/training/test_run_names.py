"""Names of run folders, and what a user's own folder is trained with if no flag says else."""

import os
import subprocess
import sys

import pytest
import torch

import vicinal
from photo_folders import interrupted, paint
from small_runs import SMALL
from vicinal.errors import VicinalError
from vicinal.files import write_json
from vicinal.training.accelerator import make_accelerator
from vicinal.training.setup import prepare


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VICINAL_CACHE", str(tmp_path / "cache"))


def test_a_second_run_gets_a_new_name():
    names = [vicinal.train(vicinal.TrainConfig(**{**SMALL, "epochs": 1, "warmup": 0})).folder.name for _ in range(3)]
    assert names == ["vit-micro-digits-s0", "vit-micro-digits-s0-2", "vit-micro-digits-s0-3"]
    assert sorted(os.listdir("runs")) == names
    assert vicinal.Run("runs/vit-micro-digits-s0-2").config.out is None  # config.yaml can be used again


@pytest.mark.parametrize("out", [None, "runs/mine"])
def test_a_run_that_died_before_its_first_checkpoint_does_not_block_its_name(monkeypatch, out):
    settings = vicinal.TrainConfig(**{**SMALL, "epochs": 1, "warmup": 0}, out=out)
    interrupted(monkeypatch, settings, step=0)
    (folder,) = os.listdir("runs")
    before = vicinal.Run(f"runs/{folder}").environment
    assert vicinal.train(settings).folder.name == folder
    assert os.listdir("runs") == [folder]
    assert vicinal.Run(f"runs/{folder}").environment["pid"] == before["pid"] == os.getpid()


def test_a_run_that_can_go_on_or_is_running_keeps_its_name(monkeypatch, tmp_path):
    settings = vicinal.TrainConfig(**SMALL, out="runs/mine")
    interrupted(monkeypatch, settings, step=5)  # in the second epoch
    with pytest.raises(VicinalError, match=r"runs/mine exists already; `vicinal train --resume runs/mine`"):
        vicinal.train(settings)

    other = vicinal.TrainConfig(**SMALL, out="runs/other")
    run = interrupted(monkeypatch, other, step=0)
    alive = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    environment = vicinal.Run(run).environment
    for change in ({"pid": alive.pid}, {"host": "elsewhere"}, {"pid": None}):
        write_json(run / "environment.json", {**environment, **change})
        with pytest.raises(VicinalError, match="exists already"):
            vicinal.Run.check_free(run)
    write_json(run / "environment.json", {**environment, "pid": alive.pid})
    alive.communicate()
    vicinal.Run.check_free(run)
    (run / "notes.txt").write_text("of the user")
    with pytest.raises(VicinalError, match="exists already"):
        vicinal.Run.check_free(run)


def test_a_folder_that_cannot_be_written_is_an_error(monkeypatch):
    def refuse(self, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.rename", refuse)
    with pytest.raises(PermissionError):
        vicinal.Run.create(vicinal.TrainConfig(), environment={})
    assert os.listdir("runs") == []


@pytest.mark.parametrize(
    ("model", "name", "size"),
    [
        (None, "vicinal_vit_mini", 64),
        ("vit-micro", "vicinal_vit_micro", 64),
        ("vit_tiny_patch16_224", "vit_tiny_patch16_224", 224),
    ],
)
def test_an_own_folder_gets_a_small_model_at_64_pixels(tmp_path, model, name, size):
    config = vicinal.TrainConfig(dataset=f"folder:{paint(tmp_path / 'photos')}", model=model, batch_size=8)
    state = prepare(config, make_accelerator(config))
    assert state.raw_model.pretrained_cfg["architecture"] == name
    assert (state.preprocessing.height, state.preprocessing.width) == (size, size)
    images, _ = next(state.train.batches(0))
    assert images.shape == torch.Size([8, 3, size, size])


def test_paths_are_stored_as_absolute_ones(tmp_path):
    paint(tmp_path / "photos")
    run = vicinal.Run.create(vicinal.TrainConfig(dataset="folder:photos", cache_dir="c", out="runs/x"), environment={})
    assert run.config.dataset == f"folder:{tmp_path / 'photos'}"
    assert run.config.cache_dir == tmp_path / "c"
    assert vicinal.TrainConfig(dataset="folder:photos").folder == run.config.changed(out=None).folder
