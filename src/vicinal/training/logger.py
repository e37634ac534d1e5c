"""Logging of a run: metrics.csv, priors.csv, a tracker, one line per epoch, and on a terminal a progress bar."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from tqdm import tqdm

from vicinal.files import write_csv
from vicinal.training.prior_history import PriorLog
from vicinal.training.run_folder import METRICS_FILE
from vicinal.training.run_length import RunLength

__all__ = ["COLUMNS", "NullLogger", "RunLogger"]

COLUMNS = (
    "epoch",
    "step",
    "images_seen",
    "lr",
    "train_loss",
    "val_loss",
    "val_top1",
    "val_top5",
    "images_per_second",
    "seconds",
)
SCALARS = COLUMNS[3:]  # for the tracker
Row = Mapping[str, float | None]


class NullLogger:
    """Logs nothing: for all processes but the main one."""

    def __enter__(self) -> "NullLogger":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def log_step(self, epoch: int, loss: float) -> None:
        """Logs a step of an epoch, which counts from 0."""

    def log_epoch(self, row: Row) -> None:
        """Logs the metrics of an epoch."""

    def log_results(self, results: Mapping[str, Any]) -> None:
        """Logs the final evaluation by split."""


class RunLogger(NullLogger):
    """Logs to the run folder and to the terminal. Files and progress bar are open inside of `with`.

    Args:
        folder: run folder.
        model: the model that is trained; its priors are logged.
        length: of the run.
        done: number of steps done before, if the run is resumed.
        history: rows of the epochs done before.
        tracker: from `start_tracker`; it is finished at the end of `with`.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        length: RunLength,
        done: int = 0,
        history: Sequence[Row] = (),
        tracker: Any = None,
    ) -> None:
        self.folder, self.length, self.done, self.tracker = folder, length, done, tracker
        self.history = list(history)
        self.priors = PriorLog(folder, model)

    def __enter__(self) -> "RunLogger":
        self._write_metrics()
        self.priors.start(len(self.history), self.done)
        self.bar = tqdm(
            total=self.length.steps,
            initial=self.done,
            unit="step",
            disable=None,  # if stderr is not a terminal
            file=sys.stderr,
            smoothing=0.05,
            dynamic_ncols=True,
            leave=False,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        if self.tracker is not None:
            self.tracker.finish()

    def log_step(self, epoch: int, loss: float) -> None:
        """Advances the progress bar by one step of an epoch, which counts from 0."""
        self.done += 1
        if not self.bar.disable:
            self.bar.set_description(f"epoch {epoch + 1}/{self.length.epochs}", refresh=False)
            self.bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            self.bar.update()

    def log_epoch(self, row: Row) -> None:
        """Writes the metrics of an epoch to metrics.csv and the tracker, and its priors to priors.csv."""
        self.history.append(row)
        self._write_metrics()
        self.priors.log_epoch(len(self.history))
        self._track({name: row[name] for name in SCALARS})
        tqdm.write(format_epoch(row, self.length.epochs, eta=bool(self.bar.disable)), file=sys.stdout)  # above the bar
        sys.stdout.flush()

    def log_results(self, results: Mapping[str, Any]) -> None:
        """Writes the final evaluation to the tracker."""
        names = ("loss", "top1", "top5", "balanced_accuracy", "f1", "calibration_error")
        self._track({f"final/{split}_{name}": metrics[name] for split, metrics in results.items() for name in names})

    def _track(self, values: Mapping[str, float | None]) -> None:
        if self.tracker is not None:
            self.tracker.log({name: value for name, value in values.items() if value is not None}, step=self.done)

    def _write_metrics(self) -> None:
        rows = ([row.get(name) for name in COLUMNS] for row in self.history)
        write_csv(self.folder / METRICS_FILE, COLUMNS, rows)


def format_epoch(row: Row, epochs: int, *, eta: bool = True) -> str:
    """Returns one line with the metrics of an epoch.

    Args:
        row: of metrics.csv.
        epochs: number of epochs of the run.
        eta: add the remaining time of the run, which a progress bar shows anyway.
    """
    remaining = (row["seconds"] or 0) / (row["epoch"] or 1) * (epochs - (row["epoch"] or 0))
    val = "" if row["val_top1"] is None else f"  val loss {row['val_loss']:.3f}  top-1 {100 * row['val_top1']:.1f}%"
    return (
        f"epoch {row['epoch']:.0f}/{epochs}  loss {row['train_loss']:.3f}{val}  "
        f"{row['images_per_second']:.0f} images/s" + (f"  ETA {tqdm.format_interval(remaining)}" if eta else "")
    )
