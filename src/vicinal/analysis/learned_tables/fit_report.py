"""The tables of a model fitted by Gaussians, layer by layer, as in Table 1 of Kim et al., arXiv:2305.04722."""

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from vicinal.analysis.gaussian_fit import ENOUGH, GaussianFit, fit_gaussian
from vicinal.analysis.inputs import name_of
from vicinal.analysis.learned_tables.tables import LayerTable, tables_of
from vicinal.analysis.mixture_fit import MixtureFit, fit_mixtures
from vicinal.errors import VicinalError, unknown_name
from vicinal.inspection.model_runner import ImageSize

__all__ = ["FitReport", "FitRow", "fit_model"]

PLACE = ("l", "layer", "role", "head")


@dataclass(frozen=True, eq=False)
class FitRow:
    """One table and what was fitted to it."""

    layer: int
    """Of those that have a table, from 1."""
    table: LayerTable
    """With one head: the one that was fitted, or the mean."""
    head: int | None
    """From 1; None for the mean over heads, and where all are the same."""
    gaussian: GaussianFit
    mixtures: tuple[MixtureFit, ...] = ()
    """Of 1, 2, ... kernels, if asked for."""


@dataclass(frozen=True, eq=False)
class FitReport:
    """What `fit_model` found."""

    model: str
    view: Literal["centre", "offsets"]
    rows: tuple[FitRow, ...]

    @property
    def kernels(self) -> int:
        """The most kernels that were fitted; 0 if no mixtures were asked for."""
        return len(self.rows[0].mixtures)

    @property
    def title(self) -> str:
        """Model and kind of table."""
        roles: dict[str, dict[str, None]] = {}
        for row in self.rows:
            roles.setdefault(row.table.kind, {})[row.table.role] = None
        return ", ".join([self.model, *(f"{kind} ({' and '.join(its)})" for kind, its in roles.items())])

    def as_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON; None where there was nothing to fit."""
        rows = [
            {**_place(row), **_numbers(row.gaussian), "mixtures": [_numbers(mixture) for mixture in row.mixtures]}
            for row in self.rows
        ]
        return {"model": self.model, "view": self.view, "fits_from_r2": ENOUGH, "fits": rows}

    def write_json(self, path: str | Path) -> None:
        """Write `as_dict` to a file."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n")

    def write_csv(self, path: str | Path) -> None:
        """Write a line per fit; of mixtures R^2 by number of kernels, and the most that is possible."""
        lines = []
        for row in self.rows:
            line = {"model": self.model, **_place(row), **_numbers(row.gaussian)}
            line |= {f"r2_of_{mixture.kernels}_kernels": _number(mixture.r2) for mixture in row.mixtures}
            lines.append(line | ({"r2_by_distance": _number(row.mixtures[0].ceiling)} if row.mixtures else {}))
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(lines[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)

    def table(self) -> str:
        """The fits as text, a line each; and R^2 of mixtures below, if asked for."""
        seen = "around the centre patch" if self.view == "centre" else "over all offsets"
        lines = [f"{self.title}: tables {seen}, fitted by a 2-D Gaussian; lengths in patches"]
        head = [*PLACE, "R^2", "sigma_X", "sigma_Y", "amplitude", "constant", "x", "y", ""]
        lines += _aligned([head, *([*_labels(row), *_cells(row.gaussian)] for row in self.rows)])
        if self.kernels:
            lines += ["", "R^2 of mixtures of K Gaussians of the distance, and of the best function of it (any)"]
            head = [*PLACE, *(f"K={number + 1}" for number in range(self.kernels)), "any", ""]
            lines += _aligned([head, *([*_labels(row), *_curve(row)] for row in self.rows)])
        return "\n".join(lines)


def fit_model(
    model: nn.Module,
    *,
    name: str | None = None,
    kernels: int | None = None,
    per_head: bool = True,
    view: Literal["centre", "offsets"] = "centre",
    layers: Sequence[int | str] | None = None,
    img_size: ImageSize | None = None,
) -> FitReport:
    """Fit every table of a model by a 2-D Gaussian, and by mixtures if asked for.

    >>> import vicinal
    >>> from vicinal.analysis.learned_tables.fit_report import fit_model
    >>> model = vicinal.create_model("vit-micro", prior="gab:sigma=2", depth=2)
    >>> print(fit_model(model, name="vit-micro").table())
    vit-micro, gab:sigma=2 (bias): tables around the centre patch, fitted by a 2-D Gaussian; lengths in patches
    l  layer          role  head    R^2  sigma_X  sigma_Y  amplitude  constant      x      y
    1  blocks.0.attn  bias   all  1.000    2.000    2.000          1         0  0.000  0.000
    2  blocks.1.attn  bias   all  1.000    2.000    2.000          1         0  0.000  0.000

    Args:
        model: one with priors, or relative position biases of its own; see `tables_of`.
        name: what to call it; by default its architecture.
        kernels: also fit mixtures of 1, 2, ... up to so many Gaussians of the distance.
        per_head: fit every head; else their mean, as in the paper.
        view: `centre` fits what the patch in the centre sees, as in the paper: all of it are offsets that at least a
            quarter of the patches have a neighbour at. `offsets` fits all, up to those from corner to corner, which
            training rarely meets.
        layers: names or indices, from 0, of the layers to fit; all by default.
        img_size: as for `tables_of`.
    """
    if view not in ("centre", "offsets"):
        raise unknown_name("view", str(view), ("centre", "offsets"))
    if kernels is not None and (not isinstance(kernels, int) or kernels < 1):
        raise VicinalError(f"kernels is a whole number >= 1, given {kernels!r}")
    tables = tables_of(model, img_size=img_size)
    names = list(dict.fromkeys(table.name for table in tables))
    chosen = _chosen(names, layers)
    rows = []
    for table in tables:
        if table.name in chosen:
            table = table.around_centre() if view == "centre" else table
            rows += [_fit(names.index(table.name) + 1, each, head, kernels) for head, each in _heads(table, per_head)]
    return FitReport(name or name_of(model), view, tuple(rows))


def _chosen(names: list[str], layers: Sequence[int | str] | None) -> set[str]:
    """Names of the layers asked for."""
    if layers is None:
        return set(names)
    if isinstance(layers, str) or not layers:
        raise VicinalError(f"layers is a list of names or indices, given {layers!r}")
    chosen = set()
    for layer in layers:
        if isinstance(layer, str):
            if layer not in names:
                raise unknown_name("layer", layer, names)
            chosen.add(layer)
        elif -len(names) <= layer < len(names):
            chosen.add(names[layer])
        else:
            raise VicinalError(f"unknown layer {layer}: {len(names)} layers have a table, 0 to {len(names) - 1}")
    return chosen


def _heads(table: LayerTable, per_head: bool) -> list[tuple[int | None, LayerTable]]:
    """Tables of one head, with its number from 1; a single one without number for the mean, or if all are the same."""
    values = table.values
    if not per_head or np.array_equal(values, np.broadcast_to(values[:1], values.shape)):
        return [(None, replace(table, values=values.mean(0, keepdims=True)))]
    return [(head + 1, replace(table, values=values[head : head + 1])) for head in range(len(values))]


def _fit(layer: int, table: LayerTable, head: int | None, kernels: int | None) -> FitRow:
    values = table.values[0]
    mixtures = tuple(fit_mixtures(values, kernels, table.centre)) if kernels else ()
    return FitRow(layer, table, head, fit_gaussian(values, table.centre), mixtures)


def _place(row: FitRow) -> dict[str, Any]:
    table = row.table
    return {"layer": row.layer, "name": table.name, "kind": table.kind, "role": table.role, "head": row.head}


def _numbers(fit: GaussianFit | MixtureFit) -> dict[str, Any]:
    return {field.name: _number(getattr(fit, field.name)) for field in fields(fit)}


def _number(value: Any) -> Any:
    """What JSON can say of a number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _labels(row: FitRow) -> list[str]:
    return [str(row.layer), row.table.name, row.table.role, str(row.head or "all")]


def _cells(fit: GaussianFit) -> list[str]:
    lengths = (fit.r2, fit.sigma_x, fit.sigma_y, fit.amplitude, fit.offset, fit.centre_x, fit.centre_y)
    cells = [_text(number) for number in lengths]
    # These have the table's scale, which may be of any size.
    cells[3:5] = [f"{fit.amplitude:.4g}", f"{0 if abs(fit.offset) < 1e-6 * abs(fit.amplitude) else fit.offset:.4g}"]
    return [*cells, fit.note or ""]


def _curve(row: FitRow) -> list[str]:
    return [*(_text(mixture.r2) for mixture in row.mixtures), _text(row.mixtures[0].ceiling), ""]


def _text(number: float) -> str:
    return f"{number:z.3f}" if math.isfinite(number) else "-"


def _aligned(rows: list[list[str]]) -> list[str]:
    """Words to the left, numbers to the right."""
    words = {rows[0].index(name) for name in ("layer", "role", "")}
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
