"""What a person sees of a run while it goes: tables, TensorBoard, and a bar or, in a pipe, a line per epoch."""

import csv
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from tqdm import tqdm

from vicinal.training.prior_history import PriorLog

__all__ = ["COLUMNS", "Recorder", "Silence"]

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
Row = Mapping[str, float | None]


class Silence:
    """Records nothing: for all processes but the first."""

    def __enter__(self) -> "Silence":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, epoch: int, loss: float) -> None:
        """A step was done."""

    def epoch(self, row: Row) -> None:
        """An epoch was done."""

    def result(self, results: Mapping[str, Any]) -> None:
        """The run was done."""


class Recorder(Silence):
    """Records a run in its folder and on the screen.

    Args:
        folder: of the run.
        network: the one that is trained.
        epochs: how many there will be.
        steps: how many an epoch has.
        done: steps that were done before, if the run is resumed.
        history: rows of the epochs before.
    """

    def __init__(
        self, folder: Path, network: nn.Module, epochs: int, steps: int, done: int = 0, history: Sequence[Row] = ()
    ) -> None:
        self.folder, self.epochs, self.steps, self.done = folder, epochs, steps, done
        self.history = list(history)
        self.priors = PriorLog(folder, network)

    def __enter__(self) -> "Recorder":
        from torch.utils.tensorboard import SummaryWriter

        self._write_history()
        self.priors.start(len(self.history), self.done)
        self.writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self.done + 1)
        total = self.epochs * self.steps
        self.bar = tqdm(total=total, initial=self.done, unit="step", disable=None, file=sys.stderr, smoothing=0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        self.writer.close()

    def step(self, epoch: int, loss: float) -> None:
        """Move the bar."""
        self.done += 1
        if not self.bar.disable:
            top1 = self.history[-1]["val_top1"] if self.history else None
            seen = "" if top1 is None else f", val top-1 {100 * top1:.1f}%"
            self.bar.set_description(f"epoch {epoch + 1}/{self.epochs}", refresh=False)
            self.bar.set_postfix_str(f"loss {loss:.3f}{seen}", refresh=False)
            self.bar.update()

    def epoch(self, row: Row) -> None:
        """Write the row of an epoch."""
        self.history.append(row)
        self._write_history()
        self.priors.epoch(len(self.history))
        for name in COLUMNS[3:]:
            value = row[name]
            if value is not None:
                self.writer.add_scalar(name, value, row["step"])
        self.writer.flush()
        if self.bar.disable:
            print(describe_epoch(row, self.epochs), flush=True)

    def result(self, results: Mapping[str, Any]) -> None:
        """Write the last figures to TensorBoard."""
        for split, found in results.items():
            for name in ("loss", "top1", "top5", "calibration_error"):
                self.writer.add_scalar(f"final/{split}_{name}", found[name], self.done)

    def _write_history(self) -> None:
        file, beside = self.folder / "metrics.csv", self.folder / ".writing-metrics.csv"
        with open(beside, "w", newline="") as stream:
            table = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
            table.writeheader()
            table.writerows(self.history)
        os.replace(beside, file)


def describe_epoch(row: Row, epochs: int) -> str:
    """One line: what an epoch came to, and when the last one will be done."""
    left = (row["seconds"] or 0) / (row["epoch"] or 1) * (epochs - (row["epoch"] or 0))
    val = "" if row["val_top1"] is None else f"  val loss {row['val_loss']:.3f}  top-1 {100 * row['val_top1']:.1f}%"
    return (
        f"epoch {row['epoch']:.0f}/{epochs}  loss {row['train_loss']:.3f}{val}  "
        f"{row['images_per_second']:.0f} images/s  ETA {tqdm.format_interval(left)}"
    )
