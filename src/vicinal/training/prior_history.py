"""How priors move in training: their readable options at the end of every epoch, in `priors.csv`.

    epoch,layer,option,kernel,head,value
    0,blocks.0.attn,sigma,1,1,0.5

Epoch 0 is the start. Kernels and heads count from 1; `kernel` is empty where an option has none. The values are those
of the network that is trained, also where its moving average is what is saved. A free table, as of elm and rpe, is no
option, and too much to write down every epoch.
"""

import csv
import inspect
import io
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from vicinal.attachment import get_priors
from vicinal.errors import VicinalError
from vicinal.priors.base import Prior
from vicinal.priors.composition import Composition
from vicinal.priors.convolution import Convolution
from vicinal.priors.registry import get_prior, list_priors

__all__ = ["PRIORS", "PriorHistory", "PriorLog", "option_rows", "parts_of", "read_history", "readable_options"]

PRIORS = "priors.csv"
COLUMNS = ("epoch", "layer", "option", "kernel", "head", "value")
MOST = 32  # numbers per head, up to which an option is written down


def parts_of(prior: Prior) -> dict[str, Prior]:
    """What a prior is composed of, by name: `gmm` and `gab` of `gmm+gab`; one that is not composed has no name."""
    if not isinstance(prior, Composition):
        return {"": prior}
    parts = [part for part in prior.parts if isinstance(part, Prior)]
    known = {get_prior(name): name for name in list_priors()}
    names = [known.get(type(part), type(part).__name__) for part in parts]
    return {
        name if names.count(name) == 1 else f"{name}-{number}": part
        for number, (name, part) in enumerate(zip(names, parts, strict=True), start=1)
    }


def readable_options(prior: Prior) -> dict[str, NDArray[Any]]:
    """The options of a prior that are numbers for each head: `(heads,)` or `(kernels, heads)`.

    >>> import vicinal
    >>> from vicinal.training.prior_history import readable_options
    >>> prior = vicinal.build_prior("gmm:kernels=3+gab", heads=6, grid=vicinal.Grid(8, 8))
    >>> {name: values.shape for name, values in readable_options(prior).items()}
    {'gmm.sigma': (3, 6), 'gmm.alpha': (3, 6), 'gab.sigma': (6,), 'gab.amplitude': (6,)}

    Args:
        prior: of any class. What it shows as a property, or keeps under the name of an option, is readable. A centre,
            `mu` of conv, is two options, `mu_row` and `mu_column`.
    """
    return {
        f"{part}.{option}" if part else option: values.numpy(force=True)
        for part, its_prior in parts_of(prior).items()
        for option, values in _tensors(its_prior)
        if values.dim() in (1, 2) and values.shape[-1] == prior.heads and values.numel() <= MOST * prior.heads
    }


def _tensors(prior: Prior) -> Iterator[tuple[str, Tensor]]:
    classes = [base for base in type(prior).__mro__ if issubclass(base, Prior) and base is not Prior]
    shown = [name for base in classes for name, value in vars(base).items() if isinstance(value, property)]
    arguments = inspect.signature(type(prior).__init__).parameters.values()
    taken = [argument.name for argument in arguments if argument.kind is argument.KEYWORD_ONLY]
    for name in dict.fromkeys(shown + taken):
        value = getattr(prior, name, None)
        if isinstance(prior, Convolution) and name == "mu":
            yield from zip(("mu_row", "mu_column"), prior.mu.unbind(1), strict=True)
        elif isinstance(value, Tensor):
            yield name, value


def option_rows(options: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, int | str, int, str]]:
    """Option, kernel, head and value, of every number that `readable_options` gave."""
    for option, values in options.items():
        for place, value in np.ndenumerate(values):
            *kernel, head = (index + 1 for index in place)
            yield option, kernel[0] if kernel else "", head, str(value)  # as few digits as tell it apart


class PriorLog:
    """Writes the options of a network's priors to a run's folder; nothing, if there are none.

    Args:
        folder: of the run.
        network: the one that is trained.
    """

    def __init__(self, folder: Path, network: nn.Module) -> None:
        self.file, self.network = folder / PRIORS, network

    def start(self, epochs: int, steps: int) -> None:
        """Make the file say what happened in so many epochs and no more: a run that is resumed does the rest again.

        Args:
            epochs: that are done.
            steps: that are done; before the first, the network is as it starts.
        """
        rows = self._rows(0)
        if not rows:
            return
        kept = _until(self.file, epochs) if self.file.is_file() else _as_csv([COLUMNS]) + ("" if steps else rows)
        beside = self.file.with_name(f".writing-{PRIORS}")
        beside.write_text(kept, newline="")
        os.replace(beside, self.file)

    def epoch(self, number: int) -> None:
        """Add the rows of an epoch that is done."""
        rows = self._rows(number)
        if rows:
            with open(self.file, "a", newline="") as stream:
                stream.write(rows)
                stream.flush()
                os.fsync(stream.fileno())  # a checkpoint follows, and from it this epoch is not done again

    def _rows(self, epoch: int) -> str:
        priors = get_priors(self.network).items()
        return _as_csv((epoch, layer, *row) for layer, prior in priors for row in option_rows(readable_options(prior)))


def _as_csv(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _until(file: Path, epoch: float) -> str:
    """The file's text up to the end of an epoch; a line that was cut short, by the death of a run, is none."""
    header, *lines = file.read_text().splitlines(keepends=True)
    whole = (line for line in lines if line.endswith("\n"))
    return header + "".join(line for line in whole if int(line.partition(",")[0]) <= epoch)


@dataclass(frozen=True, eq=False)
class PriorHistory:
    """How the options of a run's priors moved."""

    epochs: tuple[int, ...]
    """From 0, the start, on."""
    layers: Mapping[str, Mapping[str, NDArray[Any]]]
    """By layer and option: `(epochs, heads)` or `(epochs, kernels, heads)`."""


def read_history(folder: Path) -> PriorHistory | None:
    """What `PriorLog` wrote to a run's folder; None if there is nothing, as in a run without a prior."""
    file = folder / PRIORS
    if not file.is_file():
        return None
    by_epoch: dict[int, list[dict[str, str]]] = {}
    numbers: dict[tuple[str, str], list[float]] = {}
    last: dict[tuple[str, str], tuple[int, ...]] = {}
    layers: dict[str, dict[str, NDArray[Any]]] = {}
    try:
        for row in csv.DictReader(io.StringIO(_until(file, math.inf))):
            by_epoch.setdefault(int(row["epoch"]), []).append(row)
        size = max(map(len, by_epoch.values()), default=0)
        whole = {epoch: rows for epoch, rows in by_epoch.items() if len(rows) == size}
        for row in itertools.chain.from_iterable(whole.values()):
            place = row["layer"], row["option"]
            numbers.setdefault(place, []).append(float(row["value"]))
            last[place] = *([int(row["kernel"])] if row["kernel"] else []), int(row["head"])
        for (layer, option), values in numbers.items():
            layers.setdefault(layer, {})[option] = np.array(values).reshape(len(whole), *last[layer, option])
    except (KeyError, TypeError, ValueError) as error:
        raise VicinalError(f"{file} is damaged ({error}); expected the columns {','.join(COLUMNS)}") from error
    return PriorHistory(tuple(whole), layers) if layers else None
