"""Several processes on one machine, started as a user would start them."""

import csv
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import steps_of_a_process
import vicinal
from vicinal.cli.main import main
from vicinal.training.evaluate import evaluate_split

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# which starts one process where there are no GPUs
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
ACCELERATE += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
TRAIN = ["train", "--epochs", "3", "--warmup", "1", "--train-size", "201", "--val-size", "51", "--batch-size", "40"]


def run(*words, threads=1, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, **options)


def test_two_processes_take_the_steps_of_one(tmp_path):
    """Four steps of 24 images and one of 1, of which a process has none, or of 5, in slices of 3 and 2, in pieces."""
    done = run(*TORCHRUN, steps_of_a_process.__file__, str(tmp_path), "97:1", "101:3")
    assert done.returncode == 0, done.stderr
    for images in (97, 101):
        steps_of_a_process.main(tmp_path, images, accumulate=1)
        one, two = (load_file(tmp_path / f"{images}-{number}.safetensors") for number in (1, 2))
        assert one.keys() == two.keys()
        assert len(one["losses"]) == 10
        torch.testing.assert_close(two.pop("losses"), one.pop("losses"), rtol=0, atol=1e-8)
        for name, gradient in one.items():
            assert gradient.abs().max() > 0, name
            torch.testing.assert_close(two[name], gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("launcher", "processes"),
    [
        pytest.param(TORCHRUN, 2, id="torchrun", marks=pytest.mark.slow),
        pytest.param(ACCELERATE, 1, id="accelerate", marks=pytest.mark.slow),
    ],
)
def test_launchers_write_one_run_with_exact_figures(tmp_path, launcher, processes):
    """The splits have odd numbers of images: a sampler that pads would count some twice."""
    done = run(
        *launcher, "-m", "vicinal", *TRAIN, "--prior", "gmm", "--mix", "transmix", "--out", str(tmp_path / "run")
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 3/3") == done.stdout.count("run folder:") == 1
    found = vicinal.Run(tmp_path / "run")
    assert found.environment["processes"] == processes
    assert len(found.metrics) == 3
    for split, images in (("val", 51), ("test", 359)):
        again = evaluate_split(found, split)[0]
        assert again.images == found.results[split]["images"] == images
        assert again.confusion == found.results[split]["confusion"]
        assert again.loss == pytest.approx(found.results[split]["loss"], rel=1e-5)
        with open(found.folder / "predictions.csv", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["split"] == split]
        assert [int(row["prediction"]) for row in rows] == again.predicted
        assert [float(row["confidence"]) for row in rows] == pytest.approx(again.confidence, abs=1e-4)


@pytest.mark.parametrize(("rank", "times"), [("0", 1), ("1", 0)])
def test_only_the_first_process_says_an_error(monkeypatch, capsys, rank, times):
    monkeypatch.setenv("RANK", rank)
    assert main(["train", "--dataset", "cifar1"]) == 2
    assert capsys.readouterr().err.count("vicinal: unknown") == times


@pytest.mark.slow
def test_an_error_is_said_once(tmp_path):
    done = run(*TORCHRUN, "-m", "vicinal", "train", "--dataset", "cifar1")
    assert done.returncode != 0
    assert done.stderr.count("vicinal: unknown") == 1


@pytest.mark.slow
def test_a_run_killed_at_ten_random_moments_ends_as_the_undisturbed_one(tmp_path):
    train = [sys.executable, "-m", "vicinal", "train", "--epochs", "150", "--checkpoint-minutes", "0.005", *TRAIN[5:]]
    train += [
        "--prior",
        "gmm",
        "--mix",
        "both",
        "--auto-augment",
        "--erasing",
        "0.3",
        "--drop-path",
        "0.1",
        "--ema",
        "0.99",
    ]
    done = run(*train, "--out", str(tmp_path / "whole"))
    assert done.returncode == 0, done.stderr
    killed, generator = tmp_path / "killed", random.Random(0)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    again = [sys.executable, "-m", "vicinal", "train", "--resume", str(killed)]
    for number in range(10):
        words = again if killed.exists() else [*train, "--out", str(killed)]
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if number % 3:  # while it trains; else while it starts
            while not process.stdout.readline().startswith("epoch "):
                assert process.poll() is None
        time.sleep(generator.uniform(0, 1 if number % 3 else 6))
        assert process.poll() is None
        process.kill()
        process.communicate()
    assert not vicinal.Run(killed).finished
    done = run(*again)
    assert done.returncode == 0, done.stderr
    for file in ("model/model.safetensors", "results.json"):
        assert (tmp_path / "whole" / file).read_bytes() == (killed / file).read_bytes()


def test_two_processes_stop_together_and_go_on(tmp_path):
    words = [*TORCHRUN, "-m", "vicinal", *TRAIN[:1], "--epochs", "200", *TRAIN[3:], "--out", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "epoch 1/" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode != 0
    assert said.count("continues exactly there") == 1
    assert not vicinal.Run(tmp_path / "run").finished
    assert len(vicinal.Run(tmp_path / "run").metrics) >= 1
    assert list((tmp_path / "run" / "checkpoints").iterdir())
