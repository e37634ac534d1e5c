"""A run is resumed on the data that it was started with."""

import shutil

import pytest
from PIL import Image

import vicinal
from photo_folders import config, interrupted, paint
from small_runs import assert_same_run
from vicinal.cli.main import main
from vicinal.errors import VicinalError


@pytest.fixture
def photos(tmp_path):
    return paint(tmp_path / "photos")


def refusal(folder, *arguments):
    with pytest.raises(VicinalError) as raised:
        vicinal.resume(folder, *arguments)
    return str(raised.value)


def test_removed_added_and_changed_images_are_named_and_the_run_is_not_resumed(photos, tmp_path, monkeypatch):
    run = interrupted(monkeypatch, config(photos, tmp_path / "run"))
    (photos / "cat" / "007.png").rename(tmp_path / "007.png")
    message = refusal(run)
    assert "1 removed (cat/007.png)" in message
    assert "\n" not in message
    (tmp_path / "007.png").rename(photos / "cat" / "007.png")
    paint(photos, 5, first=30)
    assert "10 added (" in refusal(run)
    assert "cat/030.png" in refusal(run)
    for name in ("cat", "dog"):
        for number in range(30, 35):
            (photos / name / f"{number:03}.png").unlink()
    Image.new("RGB", (8, 8)).save(photos / "dog" / "003.png")
    assert "1 of another size in bytes (dog/003.png)" in refusal(run)
    paint(photos)
    (photos / "dog" / "004.png").rename(photos / "cat" / "104.png")
    assert "1 added (cat/104.png)" in refusal(run)
    assert "1 removed (dog/004.png)" in refusal(run)
    (photos / "cat" / "104.png").rename(photos / "dog" / "004.png")
    assert vicinal.resume(run).finished


def test_a_folder_that_moved_is_the_same_data(photos, tmp_path, monkeypatch):
    whole = vicinal.train(config(photos, tmp_path / "whole"))
    run = interrupted(monkeypatch, config(photos, tmp_path / "run"))
    moved = tmp_path / "elsewhere" / "pictures"
    shutil.copytree(photos, moved, copy_function=shutil.copyfile)  # with new times
    shutil.rmtree(photos)
    assert "photos does not exist" in refusal(run)
    resumed = vicinal.resume(run, vicinal.Run(run).config.changed(dataset=f"folder:{moved}"))
    assert_same_run(whole, resumed)
    assert resumed.config.dataset == f"folder:{moved}"


def test_other_data_cannot_take_the_place_of_a_runs_own(photos, tmp_path, monkeypatch):
    run = interrupted(monkeypatch, config(photos, tmp_path / "run"))
    other = paint(tmp_path / "other", classes=("cat", "wolf"))
    message = refusal(run, vicinal.Run(run).config.changed(dataset=f"folder:{other}"))
    assert "30 removed (dog/000.png, dog/001.png, dog/002.png, ...)" in message
    assert vicinal.Run(run).config.dataset == f"folder:{photos}"


def test_the_command_line_takes_the_new_place_and_names_the_flag(photos, tmp_path, monkeypatch, capsys):
    run = interrupted(monkeypatch, config(photos, tmp_path / "run"))
    photos.rename(tmp_path / "moved")
    (tmp_path / "moved" / "cat" / "000.png").rename(tmp_path / "000.png")
    monkeypatch.chdir(tmp_path)
    words = ["train", "--resume", str(run), "--dataset", "folder:moved"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"vicinal: --dataset must be the data that {run} was started with, got folder:")
    assert "1 removed (cat/000.png)" in said
    (tmp_path / "000.png").rename(tmp_path / "moved" / "cat" / "000.png")
    assert main(words) == 0
    assert vicinal.Run(run).config.dataset == f"folder:{tmp_path / 'moved'}"
