"""Studies on the embedded digits whose runs take a second."""

from pathlib import Path

import vicinal
from vicinal.studies.spec_reader import read_spec
from vicinal.training.train import train

ARMS = {"none": {"prior": "none"}, "gmm": {"prior": "gmm"}}
BASE = {"train_size": 96, "val_size": 30, "batch_size": 32, "checkpoint_minutes": 0}


def definition(**changes):
    """A study of two arms and two seeds, each run of 4 steps."""
    return {"base": BASE, "arms": ARMS, "budget": {"steps": 4}, "seeds": 2, **changes}


def train_in_process(values, folder, names=None):
    """Trains runs of a study in this process, which is faster than a process for each."""
    for run in read_spec(values).runs(Path(folder), Path.cwd()):
        if names is None or run.name in names:
            train(run.config)


def finished_study(values, folder, monkeypatch):
    """The result of a study whose runs were trained in this process."""
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    train_in_process(values, folder)
    return vicinal.study(values, out=folder)


def tables(folder):
    """The content of a study's tables."""
    names = ("table.txt", "table.md", "results.csv", "results.json", "pairs.csv")
    return {name: (Path(folder) / name).read_bytes() for name in names}
