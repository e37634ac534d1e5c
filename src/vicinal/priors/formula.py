"""A prior's values at offsets that its own grid does not have: other grids, fractional offsets.

A prior that has `scale_at` or `bias_at` computes them by its formula. For one that overrides `scale()` or `bias()`,
these are called on a copy whose grid has the wanted offsets; where they are free numbers, the table is interpolated.
"""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vicinal.errors import VicinalError
from vicinal.grid import Grid

if TYPE_CHECKING:
    from vicinal.priors.base import Prior

__all__ = ["formula_at", "formula_on", "interpolate_table", "table_stretch"]


def formula_at(prior: "Prior", rows: Tensor, columns: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Returns a prior's scale and bias at offsets `(n, 1)`, each `(heads or 1, n, 1)` or None."""
    if not prior.per_offset:
        raise VicinalError(
            f"{type(prior).__name__} has a free number for every pair of patches, not one for every offset: it serves "
            "queries and keys of one grid only; use another prior"
        )
    scale = _value_at(prior, "scale", rows, columns)
    return scale, _value_at(prior, "bias", rows, columns)


def formula_on(prior: "Prior", grid: Grid) -> tuple[Tensor | None, Tensor | None]:
    """Returns a prior's scale and bias over the offsets of another grid, each `(heads or 1, 2h-1, 2w-1)` or None."""
    scale = _value_on(prior, "scale", grid)
    return scale, _value_on(prior, "bias", grid)


def _value_at(prior: "Prior", which: str, rows: Tensor, columns: Tensor) -> Tensor | None:
    formula: Any = getattr(prior, f"{which}_at")
    if which not in prior.without_formula:
        return formula(rows, columns)  # type: ignore[no-any-return]
    count = len(rows)
    # One more offset than needed if the result would have the shape of the prior's own table.
    if (count, 1) == prior.grid.table_shape:
        rows, columns = torch.cat([rows, rows[:1]]), torch.cat([columns, columns[:1]])
    values = _on_copy(prior, which, _OffsetGrid(prior.grid.height, prior.grid.width, 0, rows, columns))
    if values is None:
        return None
    if values.shape[1:] == (len(rows), 1):
        return values[:, :count]
    if values.shape[1:] == prior.grid.table_shape:
        return interpolate_table(values, rows[:count], columns[:count])
    raise _unfit(prior, which, f"returns shape {tuple(values.shape)} for {len(rows)} offsets")


def _value_on(prior: "Prior", which: str, grid: Grid) -> Tensor | None:
    formula: Any = getattr(prior, f"{which}_at")
    if which not in prior.without_formula:
        rows, columns = grid.offsets(prior.device, prior.dtype)
        down, across = table_stretch(prior, grid)
        return formula(rows * down, columns * across)  # type: ignore[no-any-return]
    values = _on_copy(prior, which, grid)
    wanted = grid.table_shape if prior.per_offset else (grid.patches, grid.patches)
    if values is None or values.shape[1:] == wanted:
        return values
    raise _unfit(prior, which, f"returns shape {tuple(values.shape)} on a grid of {grid}")


def _on_copy(prior: "Prior", which: str, grid: Grid) -> Tensor | None:
    """Returns `scale()` or `bias()` of a copy that shares the parameters and has another grid."""
    from vicinal.priors.base import Prior

    if type(prior)._carry is not Prior._carry and not isinstance(grid, _OffsetGrid):
        raise _unfit(prior, which, "fits its parameters to a new grid")
    other = copy.copy(prior)
    other.grid = grid
    try:
        values: Tensor | None = getattr(other, which)()
    except (RuntimeError, VicinalError) as error:
        if isinstance(grid, _OffsetGrid) and prior.per_offset:  # a table of parameters, which has no other offsets
            return getattr(prior, which)()  # type: ignore[no-any-return]
        raise _unfit(prior, which, f"fails on a grid of {grid} ({error})") from error
    return values


def _unfit(prior: "Prior", which: str, why: str) -> VicinalError:
    name = type(prior).__name__
    return VicinalError(
        f"{name}.{which}() {why}, so {name} serves its own grid of {prior.grid} only; define "
        f"{which}_at(rows, columns) for other offsets, or use prior.resize(grid)"
    )


@dataclass(frozen=True, eq=False)
class _OffsetGrid(Grid):
    """A grid whose offsets are given, `(n, 1)` each, in place of those of its rows and columns."""

    rows: Tensor = None  # type: ignore[assignment]
    columns: Tensor = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        pass

    @property
    def table_shape(self) -> tuple[int, int]:
        """Shape of a table over the offsets."""
        return len(self.rows), 1

    def offsets(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Returns the given rows and columns."""
        return self.rows.to(device, dtype or torch.float32), self.columns.to(device, dtype or torch.float32)

    def coordinates(self, device: torch.device | None = None) -> Tensor:
        """Raises VicinalError: offsets have no patches."""
        raise VicinalError("a grid of given offsets has no coordinates of patches")


def table_stretch(prior: "Prior", grid: Grid) -> tuple[float, float]:
    """Returns by how much offsets of a grid shrink, along rows and columns, to those of a prior's free table.

    The outermost offsets of both grids meet. 1 for a prior without a free table: widths stay in patches.
    """
    if not prior.free_table:
        return 1.0, 1.0
    own = prior.grid
    return (own.height - 1) / max(1, grid.height - 1), (own.width - 1) / max(1, grid.width - 1)


def interpolate_table(table: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Returns a table over offsets, `(heads, 2h-1, 2w-1)`, between its entries: `(heads, *shape)`, bilinear.

    Args:
        table: with offset (0, 0) in its center.
        rows: offsets, which broadcast with `columns` to `shape`; clamped to those of the table.
        columns: as rows.
    """
    last_row, last_column = table.shape[1] - 1, table.shape[2] - 1
    rows = (rows + last_row // 2).clamp(0, last_row)
    columns = (columns + last_column // 2).clamp(0, last_column)
    top, left = rows.floor().long(), columns.floor().long()
    bottom, right = (top + 1).clamp(max=last_row), (left + 1).clamp(max=last_column)
    down, across = rows - top, columns - left
    upper = table[:, top, left] * (1 - across) + table[:, top, right] * across
    lower = table[:, bottom, left] * (1 - across) + table[:, bottom, right] * across
    return upper * (1 - down) + lower * down
