"""Several processes on one machine, started as a user would start them."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import vicinal
from vicinal.training.evaluating import evaluate_split

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# which starts one process where there are no GPUs
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
ACCELERATE += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
TRAIN = ["train", "--epochs", "3", "--warmup", "1", "--train-size", "200", "--val-size", "51", "--batch-size", "40"]


def run(*words, threads=1, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, **options)


def test_two_processes_take_the_steps_of_one(tmp_path):
    script = str(Path(__file__).with_name("steps_of_a_process.py"))
    for launcher in ([sys.executable], TORCHRUN):
        done = run(*launcher, script, str(tmp_path))
        assert done.returncode == 0, done.stderr
    one, two = (load_file(tmp_path / f"{number}.safetensors") for number in (1, 2))
    assert one.keys() == two.keys()
    assert len(one["losses"]) == 26
    torch.testing.assert_close(two.pop("losses"), one.pop("losses"), rtol=0, atol=1e-8)
    for name, gradient in one.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(two[name], gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("launcher", "processes"), [(TORCHRUN, 2), (ACCELERATE, 1)], ids=["torchrun", "accelerate"])
def test_launchers_write_one_run_with_exact_figures(tmp_path, launcher, processes):
    """The splits have odd numbers of images: a sampler that pads would count some twice."""
    done = run(*launcher, "-m", "vicinal", *TRAIN, "--prior", "gmm", "--mix", "both", "--out", str(tmp_path / "run"))
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


def test_an_error_is_said_once(tmp_path):
    done = run(*TORCHRUN, "-m", "vicinal", "train", "--dataset", "cifar1")
    assert done.returncode != 0
    assert done.stderr.count("vicinal: unknown") == 1


@pytest.mark.slow
def test_runs_killed_at_random_moments_end_as_the_undisturbed_one(tmp_path):
    train = [sys.executable, "-m", "vicinal", *TRAIN[:1], "--epochs", "30", *TRAIN[3:], "--checkpoint-minutes", "0.005"]
    train += ["--prior", "gmm", "--mix", "both", "--auto-augment", "--erasing", "0.3", "--ema", "0.99", "--out"]
    began = time.monotonic()
    done = run(*train, str(tmp_path / "whole"))
    assert done.returncode == 0, done.stderr
    took = time.monotonic() - began
    words, killed, generator = [*train, str(tmp_path / "killed")], 0, random.Random(0)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    while killed < 10:
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            process.communicate(timeout=generator.uniform(0.1, 0.8) * took)
            break  # it came to its end
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            killed += 1
        if (tmp_path / "killed").exists():
            words = [sys.executable, "-m", "vicinal", "train", "--resume", str(tmp_path / "killed")]
    done = run(sys.executable, "-m", "vicinal", "train", "--resume", str(tmp_path / "killed"))
    assert done.returncode == 0, done.stderr
    whole, resumed = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "killed"))
    assert whole == resumed
    assert killed >= 3
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "killed")]
    assert results[0] == results[1]


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
