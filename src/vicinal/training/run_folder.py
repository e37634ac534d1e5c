"""The run folder: what training writes, and the only thing that later stages read."""

import csv
import itertools
import json
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from vicinal.errors import VicinalError
from vicinal.files import write_json, write_text
from vicinal.models import load
from vicinal.training.config import FORMAT, TrainConfig
from vicinal.training.failure import read_failure
from vicinal.training.model_path import model_folder, no_such_run
from vicinal.training.prior_history import PriorHistory, read_history

__all__ = ["METRICS_FILE", "RESULTS_FILE", "Run"]

CONFIG_FILE, ENVIRONMENT_FILE = "config.yaml", "environment.json"
METRICS_FILE, RESULTS_FILE = "metrics.csv", "results.json"
CHANGED_RULES = (
    "the learning rate reaches lr after the warm-up, the last partial batch of an epoch is kept, the moving average "
    "has no warm-up, and all of a prior and of relative positions is undecayed"
)


class Run:
    """A run, finished or not, in its folder.

    >>> import tempfile, vicinal
    >>> folder = tempfile.mkdtemp()
    >>> run = vicinal.Run.create(vicinal.TrainConfig(out=folder + "/first"), environment={})
    >>> run.config.dataset, run.finished
    ('digits', False)

    Args:
        folder: an existing run folder.

    Raises:
        VicinalError: if there is no such folder, or it is not a run folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise no_such_run(self.folder)
        if not (self.folder / CONFIG_FILE).is_file():
            raise VicinalError(f"{folder} is not a run folder: it has no {CONFIG_FILE}")

    @classmethod
    def create(cls, config: TrainConfig, environment: Mapping[str, Any]) -> "Run":
        """Creates the run folder with config.yaml and environment.json in it, atomically. Returns the run.

        Args:
            config: of the run; its `folder` is created.
            environment: what `describe_environment` returned.

        Raises:
            VicinalError: if the folder exists.
        """
        folder = config.folder
        cls.check_free(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder.with_name(f".starting-{uuid.uuid4().hex}")
        try:
            temporary.mkdir()
            write_text(temporary / CONFIG_FILE, config.to_yaml())
            write_json(temporary / ENVIRONMENT_FILE, {**environment, "resumed": []})
            temporary.rename(folder)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            cls.check_free(folder)  # another process can have created it after the first check
            raise
        return cls(folder)

    @staticmethod
    def check_free(folder: Path) -> None:
        """Raises VicinalError if the folder exists."""
        if folder.exists():
            can_resume = (folder / CONFIG_FILE).is_file() and read_failure(folder) is None
            advice = f"`vicinal train --resume {folder}` continues it, or " if can_resume else ""
            raise VicinalError(f"{folder} exists already; {advice}give another name with --out")

    @property
    def config(self) -> TrainConfig:
        """The configuration that the run was started with."""
        return TrainConfig.from_yaml(self.folder / CONFIG_FILE, stored=True)

    @property
    def format(self) -> int:
        """Version of the rules that the run is trained by: 2, or 1 for runs before there was a version."""
        return int(yaml.safe_load((self.folder / CONFIG_FILE).read_text(encoding="utf-8")).get("format", 1))

    def check_resumable(self) -> None:
        """Raises VicinalError if the run failed, or was started under other rules of training."""
        if self.failure is not None:
            raise VicinalError(f"{self.folder} cannot be resumed: {self.failure}")
        if self.format != FORMAT:
            number = next(n for n in itertools.count(2) if not Path(f"{self.folder}-{n}").exists())
            raise VicinalError(
                f"{self.folder} cannot be resumed: it was started by an earlier version, and these rules changed: "
                f"{CHANGED_RULES}. Start it anew with `vicinal train --config {self.folder / CONFIG_FILE} --out "
                f"{self.folder}-{number}`"
            )

    @property
    def metrics(self) -> list[dict[str, float | None]]:
        """One row of metrics.csv for each finished epoch; an empty cell is None."""
        if not (self.folder / METRICS_FILE).is_file():
            return []
        with open(self.folder / METRICS_FILE, newline="") as file:
            return [
                {key: float(value) if value else None for key, value in row.items()} for row in csv.DictReader(file)
            ]

    @property
    def priors(self) -> PriorHistory | None:
        """The named parameters of the priors for each epoch; None if there are none."""
        return read_history(self.folder)

    @property
    def environment(self) -> dict[str, Any]:
        """Machine, versions and command; `resumed` lists the same for each time that the run was resumed."""
        return dict(json.loads((self.folder / ENVIRONMENT_FILE).read_text()))

    @property
    def results(self) -> dict[str, Any] | None:
        """The final evaluation on `val` and `test`; None before the run is finished."""
        file = self.folder / RESULTS_FILE
        return dict(json.loads(file.read_text())) if file.is_file() else None

    @property
    def finished(self) -> bool:
        """Whether the run has its results, which are written last."""
        return (self.folder / RESULTS_FILE).is_file()

    @property
    def failure(self) -> str | None:
        """Why the run ended before its last epoch and cannot be resumed; None for any other run."""
        return read_failure(self.folder)

    def model(self) -> nn.Module:
        """Returns the trained model in evaluation mode.

        Raises:
            VicinalError: if the run is not finished.
        """
        return load(model_folder(str(self.folder)))

    def note_resumed(self, environment: Mapping[str, Any]) -> None:
        """Appends an environment to the list `resumed` of environment.json.

        Args:
            environment: what `describe_environment` returned.
        """
        before = self.environment
        write_json(self.folder / ENVIRONMENT_FILE, {**before, "resumed": [*before["resumed"], environment]})
