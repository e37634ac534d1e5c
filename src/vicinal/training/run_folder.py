"""A run folder: what training leaves behind, and the only thing that later stages read."""

import csv
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from vicinal.errors import VicinalError
from vicinal.models import load
from vicinal.training.config import TrainConfig
from vicinal.training.model_path import model_folder, no_such_run
from vicinal.training.prior_history import PriorHistory, read_history

__all__ = ["Run", "write_json"]

CONFIG, METRICS, ENVIRONMENT, RESULTS = "config.yaml", "metrics.csv", "environment.json", "results.json"


class Run:
    """A run, by its folder.

    >>> import tempfile, vicinal
    >>> folder = tempfile.mkdtemp()
    >>> run = vicinal.Run.create(vicinal.TrainConfig(out=folder + "/first"), environment={})
    >>> run.config.dataset, run.finished
    ('digits', False)

    Args:
        folder: one that training made.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise no_such_run(self.folder)
        if not (self.folder / CONFIG).is_file():
            raise VicinalError(f"{folder} is no run: it has no {CONFIG}")

    @classmethod
    def create(cls, config: TrainConfig, environment: Mapping[str, Any]) -> "Run":
        """Make the folder, with its configuration in it, at once; an error if there is one."""
        folder = config.folder
        cls.check_free(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = folder.with_name(f".starting-{uuid.uuid4().hex}")
        try:
            beside.mkdir()
            (beside / CONFIG).write_text(config.to_yaml())
            write_json(beside / ENVIRONMENT, {**environment, "resumed": []})
            beside.rename(folder)
        except OSError:
            shutil.rmtree(beside, ignore_errors=True)
            cls.check_free(folder)  # another run may have taken the name meanwhile
            raise
        return cls(folder)

    @staticmethod
    def check_free(folder: Path) -> None:
        """An error if a run's folder is taken."""
        if folder.exists():
            what = f"`vicinal train --resume {folder}` continues it, or " if (folder / CONFIG).is_file() else ""
            raise VicinalError(f"{folder} exists already; {what}give another name with --out")

    @property
    def config(self) -> TrainConfig:
        """What the run was asked to do."""
        return TrainConfig.from_yaml(self.folder / CONFIG)

    @property
    def metrics(self) -> list[dict[str, float | None]]:
        """Figures of each epoch so far."""
        if not (self.folder / METRICS).is_file():
            return []
        with open(self.folder / METRICS, newline="") as file:
            return [
                {key: float(value) if value else None for key, value in row.items()} for row in csv.DictReader(file)
            ]

    @property
    def priors(self) -> PriorHistory | None:
        """How the options of the priors moved, epoch by epoch; None if there are none."""
        return read_history(self.folder)

    @property
    def environment(self) -> dict[str, Any]:
        """Machine, versions and command; `resumed` has one more for each time the run was continued."""
        return dict(json.loads((self.folder / ENVIRONMENT).read_text()))

    @property
    def results(self) -> dict[str, Any] | None:
        """The evaluation on `val` and `test` at the end; None before."""
        file = self.folder / RESULTS
        return dict(json.loads(file.read_text())) if file.is_file() else None

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return (self.folder / RESULTS).is_file()

    def model(self) -> nn.Module:
        """The trained model, ready for inference."""
        return load(model_folder(str(self.folder)))

    def note_resumed(self, environment: Mapping[str, Any]) -> None:
        """Note that the run goes on, and on what machine."""
        before = self.environment
        write_json(self.folder / ENVIRONMENT, {**before, "resumed": [*before["resumed"], environment]})


def write_json(file: Path, content: Any) -> None:
    """Write a file as a whole."""
    beside = file.with_name(f".writing-{file.name}")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(beside, file)
