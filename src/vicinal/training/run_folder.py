"""The run folder: what training writes, and the only thing that later stages read."""

import csv
import itertools
import json
import os
import platform
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from vicinal.data import DataRecord
from vicinal.data.data_record import DATA_FILE, SKIPPED_FILE
from vicinal.errors import VicinalError
from vicinal.files import write_json, write_text
from vicinal.training.config import ConfigError, TrainConfig
from vicinal.training.config_file import FORMAT
from vicinal.training.failure import FAILURE_FILE, read_failure
from vicinal.training.model_path import MODEL_CONFIG, load, no_such_run
from vicinal.training.prior_history import PRIORS_FILE, PriorHistory, read_history

__all__ = ["ATTENTION_KEY", "METRICS_FILE", "RESULTS_FILE", "Run", "with_absolute_paths"]

CONFIG_FILE, ENVIRONMENT_FILE = "config.yaml", "environment.json"
METRICS_FILE, RESULTS_FILE = "metrics.csv", "results.json"
ATTENTION_KEY = "attention"  # of results.json, beside the splits
CHANGED_RULES = (
    "the learning rate reaches lr after the warm-up, the last partial batch of an epoch is kept, the moving average "
    "has no warm-up, and all of a prior and of relative positions is undecayed"
)
FIRST_FILES = {
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    DATA_FILE,
    SKIPPED_FILE,
    PRIORS_FILE,
    MODEL_CONFIG,
    "checkpoints",
    FAILURE_FILE,
    "tensorboard",
}
"""Files that a run can have before its first checkpoint."""


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

    def __repr__(self) -> str:
        """Returns what the run is, and its figures if it is finished."""
        config = self.config
        what = f"{config.init_from or config.model_name}, prior {config.prior}, {config.dataset}, seed {config.seed}"
        figures = [f"{split} top-1 {100 * values['top1']:.2f}%" for split, values in (self.results or {}).items()]
        state = ", ".join(figures) if self.finished else "failed" if self.failure else "not finished"
        return f"Run({self.folder}: {what}; {state})"

    @classmethod
    def create(cls, config: TrainConfig, environment: Mapping[str, Any], data: DataRecord | None = None) -> "Run":
        """Creates the run folder with its configuration, environment and data record, atomically. Returns the run.

        Args:
            config: of the run. Its paths are stored as absolute ones. Without `out`, the folder gets a number if that
                of the default name exists. The folder of a run that died before its first checkpoint is replaced.
            environment: what `describe_environment` returned.
            data: the images of the run, for `check_data`.

        Raises:
            VicinalError: if `out` exists.
        """
        folder = config.folder
        if config.out is not None:
            cls.check_free(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder.with_name(f".starting-{uuid.uuid4().hex}")
        try:
            temporary.mkdir()
            write_text(temporary / CONFIG_FILE, with_absolute_paths(config).to_yaml())
            if data is not None:
                data.write(temporary)
            write_json(temporary / ENVIRONMENT_FILE, {**environment, "resumed": []})
            folder = _rename_to_free(temporary, folder, numbered=config.out is None)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return cls(folder)

    @staticmethod
    def check_free(folder: Path) -> None:
        """Raises VicinalError if the folder exists and is not that of a run that died before its first checkpoint."""
        if folder.exists() and not _is_abandoned(folder):
            is_run = (folder / CONFIG_FILE).is_file() and read_failure(folder) is None
            advice = f"`vicinal train --resume {folder}` continues it, or " if is_run else ""
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
    def data(self) -> DataRecord | None:
        """The images that the run was started with; None if it was started by version 0.1.0."""
        return DataRecord.read(self.folder)

    @property
    def metrics(self) -> list[dict[str, float | None]]:
        """One row of metrics.csv for each finished epoch; an empty cell is None."""
        if not (self.folder / METRICS_FILE).is_file():
            return []
        with _readable(self.folder / METRICS_FILE), open(self.folder / METRICS_FILE, newline="") as file:
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
        with _readable(self.folder / ENVIRONMENT_FILE):
            return dict(json.loads((self.folder / ENVIRONMENT_FILE).read_text()))

    @property
    def results(self) -> dict[str, Any] | None:
        """The final evaluation on `val` and `test`; None before the run is finished."""
        file = self.folder / RESULTS_FILE
        if not file.is_file():
            return None
        with _readable(file):
            results = dict(json.loads(file.read_text()))
            results.pop(ATTENTION_KEY, None)
            if not all(
                isinstance(split, dict) and isinstance(split.get("top1"), float | int) for split in results.values()
            ):
                raise ValueError("each split must have a number named top1")
        return results

    @property
    def finished(self) -> bool:
        """Whether the run has its results, which are written last."""
        return (self.folder / RESULTS_FILE).is_file()

    @property
    def failure(self) -> str | None:
        """Why the run ended before its last epoch and cannot be resumed; None for any other run."""
        return read_failure(self.folder)

    def model(self) -> nn.Module:
        """Returns the trained model in evaluation mode; that of the last checkpoint, with a warning, if not finished.

        Raises:
            VicinalError: if the run has neither a model nor a checkpoint.
        """
        return load(self.folder)

    def check_data(self, data: DataRecord, dataset: str) -> None:
        """Raises ConfigError that names the differences if data are not those that the run was started with.

        Args:
            data: the images to compare.
            dataset: where they are, for the message.
        """
        before = self.data
        difference = before.difference(data) if before is not None else None
        if difference is not None:
            raise ConfigError(
                "dataset",
                f"must be the data that {self.folder} was started with, got {dataset} with {difference}; restore these "
                "images, or start another run",
            )

    def note_resumed(self, environment: Mapping[str, Any], config: TrainConfig) -> None:
        """Appends an environment to the list `resumed` of environment.json, and stores where the data is now.

        Args:
            environment: what `describe_environment` returned.
            config: that the run is resumed with.
        """
        before, place = self.environment, with_absolute_paths(config)
        moved = self.config.changed(dataset=place.dataset, data_dir=place.data_dir)
        if moved != self.config:
            write_text(self.folder / CONFIG_FILE, moved.to_yaml())
        write_json(self.folder / ENVIRONMENT_FILE, {**before, "resumed": [*before["resumed"], environment]})


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Raises VicinalError with the name of the file if what is read inside of `with` is not as it was written."""
    try:
        yield
    except (OSError, ValueError, TypeError) as error:
        raise VicinalError(f"{file} cannot be read: {error}; restore it, or run again") from None


def _rename_to_free(temporary: Path, folder: Path, *, numbered: bool) -> Path:
    """Renames a folder to `folder`, or to `folder-2` and so on if that exists and `numbered`. Returns the new name."""
    for number in itertools.count(1):
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        if _is_abandoned(candidate):
            shutil.rmtree(candidate)
        if not candidate.exists():
            try:
                return temporary.rename(candidate)
            except OSError:
                if not candidate.exists():  # else another process created it after the check
                    raise
        if not numbered:
            Run.check_free(candidate)
    raise AssertionError


def _is_abandoned(folder: Path) -> bool:
    """Returns whether a folder is that of a run that ended before its first checkpoint, without other files in it."""
    if not (folder / CONFIG_FILE).is_file() or any(folder.glob("checkpoints/step-*")):
        return False
    if not {file.name for file in folder.iterdir()} <= FIRST_FILES:
        return False
    environment = Run(folder).environment
    last = [environment, *environment["resumed"]][-1]
    return last.get("host") == platform.node() and not _is_running(last.get("pid"))


def _is_running(pid: Any) -> bool:
    """Returns whether another process has a number; True if that is not known."""
    if pid == os.getpid():
        return False  # training in this process ended before
    if os.name != "posix" or not isinstance(pid, int):
        return True
    try:
        os.kill(pid, 0)  # sends no signal
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """Returns a configuration that means the same in every working folder; `out` stays as it is."""
    kind, separator, path = config.dataset.partition(":")
    changes: dict[str, Any] = {}
    if kind in ("folder", "parquet") and separator:
        changes["dataset"] = f"{kind}:{Path(path).expanduser().absolute()}"
    for name in ("data_dir", "cache_dir"):
        if (value := getattr(config, name)) is not None:
            changes[name] = value.expanduser().absolute()
    if config.init_from is not None and Path(config.init_from).exists():
        changes["init_from"] = str(Path(config.init_from).absolute())
    return config.changed(**changes)
