"""Gaussians fitted to the tables of a model: the result, its text table and files."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from vicinal.analysis.gaussian_fit import MIN_R2, GaussianFit
from vicinal.analysis.learned_tables.tables import LayerTable
from vicinal.analysis.mixture_fit import MixtureFit
from vicinal.analysis.result import AnalysisResult, without_nan
from vicinal.text_table import text_table

__all__ = ["FitReport", "FitRow", "View"]

View = Literal["center", "offsets"]
LABEL_COLUMNS = ("l", "layer", "role", "head")
LEFT_COLUMNS = ("layer", "role", "")
MIN_OFFSET = 1e-6  # of the amplitude: a smaller constant is printed as 0


@dataclass(frozen=True, eq=False)
class FitRow:
    """One table and what was fitted to it."""

    layer: int
    """Number among the layers with a table, from 1."""
    table: LayerTable
    """A table of one head: the one that was fitted, or the mean."""
    head: int | None
    """From 1; None for the mean over heads, and if all are the same."""
    gaussian: GaussianFit
    mixtures: tuple[MixtureFit, ...] = ()
    """Mixtures of 1, 2, ... kernels, if they were asked for."""

    @property
    def label(self) -> dict[str, Any]:
        """Layer, module, kind and role of the table, and head."""
        table = self.table
        return {"layer": self.layer, "name": table.name, "kind": table.kind, "role": table.role, "head": self.head}


@dataclass(frozen=True, eq=False)
class FitReport(AnalysisResult):
    """Gaussians, and mixtures if asked for, fitted to the tables of a model."""

    model: str
    view: View
    rows: tuple[FitRow, ...]

    @property
    def kernels(self) -> int:
        """Maximum number of kernels that were fitted; 0 if no mixtures were asked for."""
        return len(self.rows[0].mixtures)

    @property
    def title(self) -> str:
        """Model, and kinds and roles of its tables."""
        roles: dict[str, dict[str, None]] = {}
        for row in self.rows:
            roles.setdefault(row.table.kind, {})[row.table.role] = None
        return ", ".join([self.model, *(f"{kind} ({' and '.join(its)})" for kind, its in roles.items())])

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures, ready for JSON; None if a table cannot be fitted."""
        rows = [
            {**row.label, **row.gaussian.as_dict(), "mixtures": [mixture.as_dict() for mixture in row.mixtures]}
            for row in self.rows
        ]
        return {"model": self.model, "view": self.view, "fits_from_r2": MIN_R2, "fits": rows}

    def csv_rows(self) -> list[dict[str, Any]]:
        """Returns a line for each fit; of mixtures R^2 by number of kernels, and its maximum."""
        lines = []
        for row in self.rows:
            fit = row.gaussian.as_dict()
            line = {"model": self.model, **row.label, **fit, "note_kinds": " ".join(fit["note_kinds"])}
            line |= {f"r2_of_{mixture.kernels}_kernels": without_nan(mixture.r2) for mixture in row.mixtures}
            lines.append(line | ({"r2_by_distance": without_nan(row.mixtures[0].ceiling)} if row.mixtures else {}))
        return lines

    def table(self) -> str:
        """Returns the fits as text, a line for each; and R^2 of mixtures below, if there are any."""
        view = "around the central patch" if self.view == "center" else "over all offsets"
        lines = [f"{self.title}: tables {view}, fitted by a 2-D Gaussian; lengths in patches"]
        header = [*LABEL_COLUMNS, "R^2", "sigma_X", "sigma_Y", "amplitude", "constant", "x", "y", ""]
        lines.append(_table([header, *([*_labels(row), *_cells(row.gaussian)] for row in self.rows)]))
        if self.kernels:
            lines += ["", "R^2 of mixtures of K Gaussians of the distance, and of the best function of it (any)"]
            header = [*LABEL_COLUMNS, *(f"K={number + 1}" for number in range(self.kernels)), "any"]
            lines.append(_table([header, *([*_labels(row), *_r2_cells(row)] for row in self.rows)]))
        return "\n".join(lines)


def _table(rows: list[list[str]]) -> str:
    return text_table(rows, right=[column for column, name in enumerate(rows[0]) if name not in LEFT_COLUMNS])


def _labels(row: FitRow) -> list[str]:
    return [str(row.layer), row.table.name, row.table.role, str(row.head or "all")]


def _cells(fit: GaussianFit) -> list[str]:
    # Amplitude and constant have the scale of the table, which can be of any size.
    constant = 0 if abs(fit.offset) < MIN_OFFSET * abs(fit.amplitude) else fit.offset
    widths = [_number(each) for each in (fit.r2, fit.sigma_x, fit.sigma_y)]
    peak = [_number(each) for each in (fit.center_x, fit.center_y)]
    return [*widths, f"{fit.amplitude:.4g}", f"{constant:.4g}", *peak, fit.note or ""]


def _r2_cells(row: FitRow) -> list[str]:
    return [*(_number(mixture.r2) for mixture in row.mixtures), _number(row.mixtures[0].ceiling)]


def _number(number: float) -> str:
    return f"{number:z.3f}" if math.isfinite(number) else "-"
