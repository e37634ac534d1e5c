"""Logging of a run: metrics.csv, priors.csv, TensorBoard, and a progress bar, or one line per epoch in a pipe."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from tqdm import tqdm

from vicinal.files import write_csv
from vicinal.training.prior_history import PriorLog
from vicinal.training.run_folder import METRICS_FILE

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
SCALARS = COLUMNS[3:]  # for TensorBoard
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
        epochs: number of epochs of the run.
        steps: number of steps in an epoch.
        done: number of steps done before, if the run is resumed.
        history: rows of the epochs done before.
    """

    def __init__(
        self, folder: Path, model: nn.Module, epochs: int, steps: int, done: int = 0, history: Sequence[Row] = ()
    ) -> None:
        self.folder, self.epochs, self.steps, self.done = folder, epochs, steps, done
        self.history = list(history)
        self.priors = PriorLog(folder, model)

    def __enter__(self) -> "RunLogger":
        from torch.utils.tensorboard import SummaryWriter

        self._write_metrics()
        self.priors.start(len(self.history), self.done)
        self.writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self.done + 1)
        total = self.epochs * self.steps
        self.bar = tqdm(total=total, initial=self.done, unit="step", disable=None, file=sys.stderr, smoothing=0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        self.writer.close()

    def log_step(self, epoch: int, loss: float) -> None:
        """Advances the progress bar by one step of an epoch, which counts from 0."""
        self.done += 1
        if not self.bar.disable:
            top1 = self.history[-1]["val_top1"] if self.history else None
            val = "" if top1 is None else f", val top-1 {100 * top1:.1f}%"
            self.bar.set_description(f"epoch {epoch + 1}/{self.epochs}", refresh=False)
            self.bar.set_postfix_str(f"loss {loss:.3f}{val}", refresh=False)
            self.bar.update()

    def log_epoch(self, row: Row) -> None:
        """Writes the metrics of an epoch to metrics.csv and TensorBoard, and its priors to priors.csv."""
        self.history.append(row)
        self._write_metrics()
        self.priors.log_epoch(len(self.history))
        for name in SCALARS:
            value = row[name]
            if value is not None:
                self.writer.add_scalar(name, value, row["step"])
        self.writer.flush()
        if self.bar.disable:
            print(format_epoch(row, self.epochs), flush=True)

    def log_results(self, results: Mapping[str, Any]) -> None:
        """Writes the final evaluation to TensorBoard."""
        for split, metrics in results.items():
            for name in ("loss", "top1", "top5", "balanced_accuracy", "f1", "calibration_error"):
                self.writer.add_scalar(f"final/{split}_{name}", metrics[name], self.done)

    def _write_metrics(self) -> None:
        rows = ([row.get(name) for name in COLUMNS] for row in self.history)
        write_csv(self.folder / METRICS_FILE, COLUMNS, rows)


def format_epoch(row: Row, epochs: int) -> str:
    """Returns one line with the metrics of an epoch and the remaining time of the run."""
    remaining = (row["seconds"] or 0) / (row["epoch"] or 1) * (epochs - (row["epoch"] or 0))
    val = "" if row["val_top1"] is None else f"  val loss {row['val_loss']:.3f}  top-1 {100 * row['val_top1']:.1f}%"
    return (
        f"epoch {row['epoch']:.0f}/{epochs}  loss {row['train_loss']:.3f}{val}  "
        f"{row['images_per_second']:.0f} images/s  ETA {tqdm.format_interval(remaining)}"
    )
