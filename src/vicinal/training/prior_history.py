"""The history of a run's priors: their named parameters at the end of every epoch, in `priors.csv`.

    epoch,layer,option,kernel,head,value
    0,blocks.0.attn,sigma,1,1,0.5

Epoch 0 is before the first step. Kernels and heads count from 1; `kernel` is empty where a parameter has one value for
each head. The values are those of the trained model, also where its EMA is saved. `vicinal.priors.parameters` defines
which parameters are listed.
"""

import csv
import io
import itertools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from vicinal.attachment import get_priors
from vicinal.errors import VicinalError
from vicinal.files import csv_text, write_text
from vicinal.priors.parameters import get_parameters, parameter_rows

__all__ = ["PRIORS_FILE", "PriorHistory", "PriorLog", "read_history"]

PRIORS_FILE = "priors.csv"
COLUMNS = ("epoch", "layer", "option", "kernel", "head", "value")


class PriorLog:
    """Writes the named parameters of a model's priors to the run folder. Without any, it writes no file.

    Args:
        folder: run folder.
        model: the model that is trained.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self.file, self.model = folder / PRIORS_FILE, model

    def start(self, epochs: int, steps: int) -> None:
        """Creates the file, or drops rows of later epochs, which a resumed run does again.

        Args:
            epochs: number of epochs done.
            steps: number of steps done. At 0 the file begins with the initial values, as epoch 0.
        """
        rows = self._rows(0)
        if not rows:
            return
        new_text = csv_text([COLUMNS]) + ("" if steps else rows)
        write_text(self.file, _text_until(self.file, epochs) if self.file.is_file() else new_text)

    def log_epoch(self, epoch: int) -> None:
        """Appends the rows of a finished epoch, counted from 1."""
        rows = self._rows(epoch)
        if rows:
            with open(self.file, "a", newline="") as stream:
                stream.write(rows)
                stream.flush()
                os.fsync(stream.fileno())  # before the checkpoint: a run resumed from it does not repeat this epoch

    def _rows(self, epoch: int) -> str:
        priors = get_priors(self.model).items()
        return csv_text(
            (epoch, layer, *row) for layer, prior in priors for row in parameter_rows(get_parameters(prior))
        )


def _text_until(file: Path, epoch: float) -> str:
    """Returns the text of the file up to the end of an epoch, without a last line that a killed run left incomplete."""
    header, *lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    complete = (line for line in lines if line.endswith("\n"))
    return header + "".join(line for line in complete if int(line.partition(",")[0]) <= epoch)


@dataclass(frozen=True, eq=False)
class PriorHistory:
    """The named parameters of a run's priors over its epochs."""

    epochs: tuple[int, ...]
    """Begins with 0, before the first step."""
    layers: Mapping[str, Mapping[str, NDArray[Any]]]
    """By layer and parameter: `(epochs, heads)` or `(epochs, kernels, heads)`."""


def read_history(folder: Path) -> PriorHistory | None:
    """Returns what `PriorLog` wrote to a run folder; None if there is no row, as in a run without a prior.

    Args:
        folder: run folder.

    Raises:
        VicinalError: if the file is damaged.
    """
    file = folder / PRIORS_FILE
    if not file.is_file():
        return None
    by_epoch: dict[int, list[dict[str, str]]] = {}
    values: dict[tuple[str, str], list[float]] = {}
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    layers: dict[str, dict[str, NDArray[Any]]] = {}
    try:
        for row in csv.DictReader(io.StringIO(_text_until(file, math.inf))):
            by_epoch.setdefault(int(row["epoch"]), []).append(row)
        size = max(map(len, by_epoch.values()), default=0)
        complete = {epoch: rows for epoch, rows in by_epoch.items() if len(rows) == size}
        for row in itertools.chain.from_iterable(complete.values()):
            key = row["layer"], row["option"]
            values.setdefault(key, []).append(float(row["value"]))
            shapes[key] = *([int(row["kernel"])] if row["kernel"] else []), int(row["head"])  # the last row's remains
        for (layer, option), numbers in values.items():
            layers.setdefault(layer, {})[option] = np.array(numbers).reshape(len(complete), *shapes[layer, option])
    except (KeyError, TypeError, ValueError) as error:
        raise VicinalError(f"{file} is damaged ({error}); expected the columns {','.join(COLUMNS)}") from error
    return PriorHistory(tuple(complete), layers) if layers else None
