import subprocess
import sys
from pathlib import Path

import pytest

import vicinal
from vicinal.cli import main as command_line
from vicinal.cli import reference
from vicinal.models import BACKBONES
from vicinal.models.backbones import ALIASES
from vicinal.priors import build_prior
from vicinal.training.config import recipe

ROOT = Path(__file__).parents[2]


def settings(*flags):
    words = reference.train_args(reference.parse(flags))
    assert all(flag.startswith("--") for flag in words[::2])
    return dict(zip(words[::2], words[1::2], strict=True))


def test_without_flags_it_is_the_papers_recipe_with_epochs_counted_as_walks_over_the_data():
    assert settings() == {
        "--recipe": "paper",
        "--model": "vit",
        "--prior": "none",
        "--dataset": "cifar10",
        "--val-size": "0.1",
        "--epochs": "300",
        "--warmup": "30",
        "--batch-size": "128",
        "--lr": "0.001",
        "--weight-decay": "0.05",
        "--drop-path": "0.1",
        "--smoothing": "0.1",
        "--mix": "both",
        "--mix-prob": "0.5",
        "--erasing": "0.25",
        "--device": "auto",
        "--seed": "0",
        "--out": "runs/vit-cifar10-0",
    }


def test_train_has_these_flags_and_its_recipe_these_values():
    config = recipe("paper")
    given = settings()
    assert given.pop("--recipe") == "paper"
    for flag in ("--model", "--dataset", "--out"):
        del given[flag]
    for flag, value in given.items():
        expected = getattr(config, flag.removeprefix("--").replace("-", "_"))
        assert (value if isinstance(expected, str) else float(value)) == expected, flag


def test_every_flag_reaches_train():
    flags = (
        "--model swin --dataset T-IMNET --data_path copies/tiny --epochs 20 --warmup 2 --ra 2 -b 64 --lr 5e-4 "
        "--weight-decay 0.1 --sd 0.2 --smoothing 0 --mix_prob 0.8 --re 0.1 --seed 7 --no_cuda --tag again --is_SLM"
    )
    assert settings(*flags.split()) == {
        "--recipe": "paper",
        "--model": "swin",
        "--prior": "elm",
        "--dataset": "tiny-imagenet",
        "--data-dir": "copies/tiny",
        "--val-size": "0.1",
        "--epochs": "40",
        "--warmup": "4",
        "--batch-size": "64",
        "--lr": "0.0005",
        "--weight-decay": "0.1",
        "--drop-path": "0.2",
        "--smoothing": "0.0",
        "--mix": "both",
        "--mix-prob": "0.8",
        "--erasing": "0.1",
        "--device": "cpu",
        "--seed": "7",
        "--out": "runs/swin-elm-tiny-imagenet-7-again",
    }
    assert reference.train_args(reference.parse(["--resume", "runs/x", "--epochs", "7"])) == ["--resume", "runs/x"]


def test_the_mask_is_the_papers_and_changes_nothing_else():
    plain, masked = settings("--seed", "3"), settings("--seed", "3", "--is_GMM", "--num_kernals", "2")
    assert {flag for flag in plain if plain[flag] != masked[flag]} == {"--prior", "--out"}
    assert "--pool" not in masked
    assert masked["--out"] == "runs/vit-gmm-cifar10-3"
    prior = build_prior(masked["--prior"], heads=3, grid=vicinal.Grid(4, 4))
    assert prior.sigma.shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "width"),
    [("vit", 192), ("cait", 192), ("cait-tiny", 108), ("vit_d30", 72), ("vit_d30*", 108), ("vit_d30**", 192)],
)
def test_names_of_models_mean_the_references_shapes(name, width):
    ours = settings("--model", name)["--model"]
    assert BACKBONES[ALIASES.get(ours, ours)].shape["embed_dim"] == width


def test_every_name_it_knows_is_a_model_here():
    for name in (*reference.MODELS, "vit", "swin", "cait-tiny", "pit", "t2t", "vit-base", "vit-heat"):
        ours = settings("--model", name)["--model"]
        assert ALIASES.get(ours, ours) in BACKBONES


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--is_GMM", "--is_SLM"], "main.py: --is_GMM and --is_SLM "),
        (["--dataset", "CIFAR"], "main.py: unknown dataset 'CIFAR'; did you mean 'CIFAR10'? Known: CIFAR10, CIFAR100"),
        (["--ra", "0"], "main.py: --ra must be at least 1, got 0"),
    ],
)
def test_bad_input_is_a_short_message_and_exit_code_2(flags, message, capsys):
    assert reference.run(flags) == 2
    out, err = capsys.readouterr()
    assert err.startswith(message)
    assert err.count("\n") == 1
    assert out == ""


def test_it_prints_the_command_and_runs_it(capsys, monkeypatch):
    given = []
    monkeypatch.setattr(command_line, "main", lambda words: given.extend(words) or 2)
    assert reference.run(["--is_GMM", "--data_path", "my data"]) == 2
    out = capsys.readouterr().out
    assert out.startswith("vicinal train --recipe paper --model vit --prior gmm:kernels=5,init=paper ")
    assert "--data-dir 'my data'" in out
    assert given == ["train", *reference.train_args(reference.parse(["--is_GMM", "--data_path", "my data"]))]


def test_the_help_of_main_py_explains_what_differs():
    ran = subprocess.run([sys.executable, ROOT / "main.py", "--help"], capture_output=True, text=True, check=True)
    for word in ("--is_GMM", "300 and 30", "class token", "the last weights are tested, once", "10%", "cait-192"):
        assert word in ran.stdout
