import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
import torch

import vicinal
from small_runs import config
from vicinal.training.accelerator import make_accelerator
from vicinal.training.config import recipe
from vicinal.training.header import nearest_recipe, run_header
from vicinal.training.logger import format_epoch
from vicinal.training.setup import prepare


def header(tmp_path, **changes):
    """Returns the header of a run as text by name."""
    settings = config(tmp_path / "run", device="cpu", cache_dir=tmp_path / "cache", **changes)
    state = prepare(settings, make_accelerator(settings))
    lines = run_header(settings, state, settings.folder, step=changes.get("seed", 0)).splitlines()
    assert all(len(line) <= 80 or str(tmp_path) in line for line in lines)
    rows, name = {}, ""
    for line in lines:
        name = line[:8].strip() or name
        rows[name] = f"{rows.get(name, '')} {line[8:]}".strip()  # a long path starts a line
    return rows, state


def test_the_header_says_what_is_trained_on_what(tmp_path):
    rows, state = header(tmp_path, prior="gmm:kernels=3", lr=0.01)
    assert list(rows) == ["data", "train", "val", "test", "model", "prior", "recipe", "steps", "device", "run"]
    assert rows["data"] == "digits, 10 classes, 8 x 8 px, grayscale"
    assert rows["train"] == "130 images of 1,797"
    assert rows["val"] == "60 images, held out of the training images"
    assert rows["test"] == "359 images, held out of the training images"
    parameters = sum(parameter.numel() for parameter in state.raw_model.parameters())
    assert rows["model"] == f"vit-micro, {parameters:,} parameters, 16 tokens (4 x 4), pooling avg"
    assert rows["prior"] == "gmm:kernels=3 in 4 layers, 96 parameters, learning rate x 30"  # 3 x 4 heads x 2 x 4 layers
    assert rows["recipe"] == "quick, with epochs 3, warmup 0.5, batch_size 32, lr 0.01"
    assert rows["steps"] == f"{3 * state.train.steps} of 32 images: 3 epochs of {state.train.steps}"
    assert rows["device"] == f"cpu, {torch.get_num_threads()} threads, fp32"
    assert rows["run"] == str(tmp_path / "run")


def test_a_resumed_run_and_one_without_prior_and_validation_say_so(tmp_path):
    rows, state = header(tmp_path, val_size=0, seed=7, pool="token")
    assert rows["model"].endswith("17 tokens (4 x 4 + 1), pooling token")
    assert rows["prior"] == "none"
    assert rows["val"] == "none"
    assert rows["steps"].endswith(f", from step 7 of {3 * state.train.steps}")


def test_splits_of_a_folder_are_its_own(tmp_path):
    from PIL import Image

    for split, count in (("train", 8), ("test", 3)):
        for name in "ab":
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for number in range(count):
                color = (number, 10 * len(split), ord(name))
                Image.new("RGB", (8, 8), color).save(tmp_path / "data" / split / name / f"{number}.png")
    settings = {"dataset": f"folder:{tmp_path / 'data'}", "train_size": None, "val_size": 4, "img_size": 8}
    rows, _ = header(tmp_path, batch_size=4, **{**settings, "model": "resnet18"})
    assert (rows["train"], rows["val"]) == ("12 images of 16", "4 images, held out of the training images")
    assert rows["test"] == "6 images, a split of the dataset's own"
    assert rows["data"].endswith("2 classes, 8 x 8 px, RGB")
    assert "tokens" not in rows["model"]


def test_the_nearest_recipe_is_found():
    assert nearest_recipe(vicinal.TrainConfig(model="vit", dataset="cifar10", seed=3)) == ("quick", {})
    assert nearest_recipe(recipe("paper", model="vit")) == ("paper", {})
    assert nearest_recipe(recipe("paper", mix="none", lr=0.1)) == ("paper", {"mix": "none", "lr": 0.1})


def test_a_line_of_an_epoch_fits_in_80_columns():
    row = {"epoch": 300, "train_loss": 12.345, "val_loss": 12.345, "val_top1": 1.0, "images_per_second": 12345}
    line = format_epoch({**row, "seconds": 1e5}, 300, eta=False)
    assert line == "epoch 300/300  loss 12.345  val loss 12.345  top-1 100.0%  12345 images/s"
    assert len(line) <= 80


def screen(output, columns):
    """Returns the lines of a terminal after some output: characters, returns, newlines and wrapped lines."""
    lines, row, column = [[]], 0, 0
    for character in re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", output):
        if character == "\r":
            column = 0
        elif character == "\n":
            row, column = row + 1, 0
        else:
            if column == columns:
                row, column = row + 1, 0
            while len(lines) <= row:
                lines.append([])
            line = lines[row]
            line.extend(" " * (column + 1 - len(line)))
            line[column] = character
            column += 1
    return ["".join(line).rstrip() for line in lines]


def run_in_terminal(columns, words):
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    environment.pop("COLUMNS", None)
    process = subprocess.Popen(words, stdout=terminal, stderr=terminal, stdin=terminal, env=environment)
    os.close(terminal)
    output = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        output += part
    os.close(main)
    assert process.wait() == 0, output.decode()
    return output.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.slow)])
def test_on_a_terminal_every_epoch_stays_above_the_bar(tmp_path, columns):
    flags = ["--epochs", "3", "--warmup", "0", "--train-size", "64", "--batch-size", "8", "--device", "cpu"]
    output = run_in_terminal(columns, [sys.executable, "-m", "vicinal", "train", *flags, "--out", str(tmp_path / "r")])
    lines = screen(output, columns)
    epochs = [line for line in lines if line.startswith("epoch ")]
    pattern = r"epoch {}/3  loss \d\.\d{{3}}  val loss \d\.\d{{3}}  top-1 \d+\.\d%  \d+ images/s"
    assert [bool(re.fullmatch(pattern.format(number), line)) for number, line in enumerate(epochs, 1)] == [True] * 3
    first = lines.index(epochs[0])
    assert lines[first : first + 3] == epochs  # nothing of the bar is between them
    assert any(line.startswith("data ") for line in lines[:first])
    assert lines[first + 3].startswith("val ")
    assert "steps/s" in output or "step/s" in output or "s/step" in output  # there was a bar
    bars = [line for line in re.split(r"[\r\n]", output) if "%|" in line]
    assert bars
    assert max(map(len, bars)) <= columns
