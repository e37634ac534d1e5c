import re
import subprocess
import sys
from pathlib import Path

import pytest

import vicinal
from vicinal.cli import main as command_line
from vicinal.cli import reference
from vicinal.cli import train as train_command
from vicinal.models import BACKBONES
from vicinal.models.backbones import ALIASES
from vicinal.priors import build_prior
from vicinal.training.config import recipe

ROOT = Path(__file__).parents[2]


def settings(*flags):
    """Returns the flags of `vicinal train` with their values; a flag without a value has an empty one."""
    words = reference.train_args(reference.parse(flags))
    given = {}
    for word in words:
        if word.startswith("--"):
            given[word] = ""
        else:
            given[list(given)[-1]] = word
    return given


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
        "--auto-augment": "",
        "--mix": "both",
        "--mix-prob": "0.5",
        "--mixup-alpha": "1.0",
        "--cutmix-alpha": "1.0",
        "--erasing": "0.25",
        "--erasing-area": "0.4",
        "--erasing-aspect": "0.3",
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
        field = flag.removeprefix("--").replace("-", "_")
        expected = getattr(config, "warmup_epochs" if field == "warmup" else field)
        if expected is True:
            assert value == ""
        else:
            assert (value if isinstance(expected, str) else float(value)) == expected, flag


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        ("--ls", {"--smoothing": "0.0"}),
        ("--cm", {"--mix": "mixup"}),
        ("--mu", {"--mix": "cutmix"}),
        ("--cm --mu", {"--mix": "none"}),
        ("--alpha 0.2", {"--mixup-alpha": "0.2"}),
        ("--beta 0.2", {"--cutmix-alpha": "0.2"}),
        ("--re_sh 0.2", {"--erasing-area": "0.2"}),
        ("--re_r1 0.2", {"--erasing-aspect": "0.2"}),
        ("--workers 3", {"--workers": "3"}),
        ("-j 3", {"--workers": "3"}),
        ("--gpu 0", {}),
        ("--gpu 2", {"--device": "cuda:2"}),
        ("--gpu 2 --no_cuda", {"--device": "cpu"}),
        ("--print-freq 10 --disable-cos --channel 96 --heads 3 --depth 9 --enable_aug", {}),
    ],
)
def test_a_flag_of_the_reference_changes_what_it_changes_there(flags, changed):
    assert settings(*flags.split()) == {**settings(), **changed}


def test_no_auto_augment_is_a_flag_of_train():
    assert set(settings("--aa")) == (set(settings()) - {"--auto-augment"}) | {"--no-auto-augment"}


def test_train_takes_what_it_is_given(monkeypatch):
    configs = []
    monkeypatch.setattr(train_command, "_train", lambda config, resume: configs.append(config))
    flags = "--aa --mu --ls --alpha 0.4 --beta 0.6 --re_sh 0.3 --re_r1 0.5 -j 2 --no_cuda --is_GMM"
    assert reference.run(flags.split()) == 0
    assert configs == [
        recipe(
            "paper",
            model="vit",
            prior="gmm:kernels=5,init=paper",
            dataset="cifar10",
            auto_augment=False,
            mix="cutmix",
            smoothing=0,
            mixup_alpha=0.4,
            cutmix_alpha=0.6,
            erasing_area=0.3,
            erasing_aspect=0.5,
            workers=2,
            device="cpu",
            out="runs/vit-gmm-cifar10-0",
            warmup=30,
        )
    ]


def test_every_flag_reaches_train():
    flags = (
        "--model swin --dataset T-IMNET --data_path copies/tiny --epochs 20 --warmup 2 --ra 2 -b 64 --lr 5e-4 "
        "--weight-decay 0.1 --sd 0.2 --smoothing 0 --mix_prob 0.8 --re 0.1 --seed 7 --no_cuda --tag again --is_SLM "
        "--aa --mu --alpha 0.4 --beta 0.6 --re_sh 0.3 --re_r1 0.5 -j 2"
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
        "--no-auto-augment": "",
        "--mix": "cutmix",
        "--mix-prob": "0.8",
        "--mixup-alpha": "0.4",
        "--cutmix-alpha": "0.6",
        "--erasing": "0.1",
        "--erasing-area": "0.3",
        "--erasing-aspect": "0.5",
        "--workers": "2",
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
    page = " ".join((ROOT / "docs" / "training.md").read_text().split())
    for line in reference.DIFFERENCES.splitlines():
        if name := re.match(r"  (\S+) ", line):
            assert f"| {name[1]} |" in page, f"docs/training.md does not list the difference in {name[1]}"
