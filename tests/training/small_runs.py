"""Runs on the embedded digits, small enough to be trained in a second or two."""

import safetensors.torch
import torch

import vicinal
from vicinal.training import train as loop

SMALL = {"epochs": 3, "warmup": 0.5, "train_size": 130, "val_size": 60, "batch_size": 32}
# everything that draws at random or keeps a state
ALL = {
    "prior": "gmm",
    "mix": "transmix",
    "mix_prob": 0.7,
    "mix_per_example": True,
    "mixup_share": 0.5,
    "auto_augment": True,
    "erasing": 0.5,
    "drop_path": 0.3,
    "ema": 0.9,
}


def config(folder, **changes):
    return vicinal.TrainConfig(**{**SMALL, "out": folder, **changes})


def die_at(monkeypatch, steps):
    """Lets training die at each of the given steps, once; returns those that are left."""
    real, left = loop.train_step, list(steps)

    def dying(state, settings, step, images, labels):
        if left and step == left[0]:
            left.pop(0)
            raise MemoryError
        return real(state, settings, step, images, labels)

    monkeypatch.setattr(loop, "train_step", dying)
    return left


def weights(run):
    return safetensors.torch.load_file(run.folder / "model" / "model.safetensors")


def assert_same_run(one, other):
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert one.results == other.results
    timeless = [
        [{key: value for key, value in row.items() if "second" not in key} for row in run.metrics]
        for run in (one, other)
    ]
    assert timeless[0] == timeless[1]
    logs = [run.folder / "priors.csv" for run in (one, other)]
    assert logs[0].exists() == logs[1].exists()
    assert not logs[0].exists() or logs[0].read_bytes() == logs[1].read_bytes()
