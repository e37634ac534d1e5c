"""From cells to the layout that a prior is built for: one grid, and one order of tokens, for all windows."""

import torch
from torch import Tensor

from vicinal.cells import Cells, Layout
from vicinal.grid import Grid
from vicinal.inspection.refusal import Refusal, RefusalKind

__all__ = ["has_layout", "shared_layout"]


def shared_layout(cells: Cells) -> Layout | Refusal:
    """Returns the grid and the token order that all windows of a lattice share, or why there is none.

    A window is a rectangle of cells, next to each other or every n-th one. Where a shift wraps a window around the
    image's edge, its tokens keep their place in the window, and verification makes sure that tokens from both sides do
    not attend to each other. A token that is padding in some windows keeps the place that it has in the others.
    """
    if cells.windows == 1 or bool((cells.index == cells.index[:1]).all()):
        return _order(cells.coordinates[0], cells.rows, cells.columns)
    coordinates, placed = cells.coordinates, cells.index >= 0
    best: tuple[tuple[int, int, int], Tensor, Tensor] | None = None
    for window in range(cells.windows):
        down, right = (_step(coordinates[window, placed[window], axis]) for axis in (0, 1))
        if down is None or right is None:
            continue
        (row_step, rows), (column_step, columns) = down, right
        count = int(placed[window].sum())
        if rows * columns != count:
            continue
        quality = (-count, row_step, column_step)
        if best is None or quality < best[0]:
            step = torch.tensor([row_step, column_step])
            first = coordinates[window][placed[window]].amin(0)
            local = ((coordinates[window] - first) // step).masked_fill(~placed[window, :, None], -1)
            best = quality, local, step
    if best is None:
        return Refusal(RefusalKind.WINDOWS, "its windows are no rectangles of cells")
    _, local, step = best
    if bool((placed.any(0) & (local[:, 0] < 0)).any()):  # padding in the window with the most cells
        local = _extended(local)
    if not _holds_everywhere(cells, local, step):
        return Refusal(RefusalKind.WINDOWS, "its windows do not hold their tokens in the same order")
    return _order(local, int(local[:, 0].max()) + 1, int(local[:, 1].max()) + 1)


def has_layout(cells: Cells, layout: Layout, wrapped: bool) -> bool:
    """Returns whether all windows of a lattice hold their tokens as a layout says, some of them cut by padding.

    Args:
        cells: of the tokens.
        layout: of every window.
        wrapped: whether windows may wrap around the image's edge, as shifted ones do.
    """
    if cells.tokens != layout.grid.tokens:
        return False
    place = torch.arange(cells.tokens) if layout.position is None else layout.position
    place = place - layout.grid.prefix
    local = torch.stack([place.div(layout.grid.width, rounding_mode="floor"), place % layout.grid.width], -1)
    local = local.masked_fill(place[:, None] < 0, -1)
    return _holds_everywhere(cells, local, torch.tensor([1, 1]), wrapped)


def _step(numbers: Tensor) -> tuple[int, int] | None:
    """Returns step and count of the rows, or columns, of a window; None if they are not evenly spaced."""
    lines = numbers.unique()
    if len(lines) == 0:
        return None
    steps = lines.diff().unique()
    return None if len(steps) > 1 else (int(steps[0]) if len(steps) else 1, len(lines))


def _extended(local: Tensor) -> Tensor:
    """Returns places for all tokens behind the prefix, if those that have one stand row by row: `(tokens, 2)`."""
    tokens = (local[:, 0] >= 0).nonzero()[:, 0]
    prefix = int(tokens[0])
    below = (local[:, 0] == 1).nonzero()[:, 0]
    if len(below) == 0:
        return local
    width = int(below[0]) - prefix
    place = torch.arange(len(local)) - prefix
    row_by_row = torch.stack([place.div(width, rounding_mode="floor"), place % width], -1)
    if (len(local) - prefix) % width or not torch.equal(row_by_row[tokens], local[tokens]):
        return local
    return row_by_row.masked_fill(place[:, None] < 0, -1)


def _holds_everywhere(cells: Cells, local: Tensor, step: Tensor, wrapped: bool = True) -> bool:
    """Returns whether tokens keep their places in every window, if `wrapped` up to one wrap around each edge."""
    placed = cells.index >= 0
    if bool((placed & (local[:, 0] < 0)).any()):
        return False
    corner = cells.coordinates - local * step  # (windows, tokens, 2): the same in a window, but for a wrap
    for window, mask in zip(corner, placed, strict=True):
        for axis, size in enumerate((cells.rows, cells.columns)):
            corners = window[mask, axis].unique()
            # A wrap moves tokens by the size of the map, or more if it was padded before it was rolled.
            if len(corners) > 1 + wrapped or (len(corners) == 2 and int(corners[1] - corners[0]) < size):
                return False
    return True


def _order(local: Tensor, rows: int, columns: int) -> Layout | Refusal:
    """Returns the layout of tokens in places `(tokens, 2)`, one in each cell of `rows x columns`."""
    cell = torch.where(local[:, 0] < 0, -1, local[:, 0] * columns + local[:, 1])
    outside, inside = (cell < 0).nonzero()[:, 0], (cell >= 0).nonzero()[:, 0]
    if not torch.equal(cell[inside].sort().values, torch.arange(rows * columns)):
        return Refusal(RefusalKind.WINDOWS, f"its tokens do not fill windows of {rows} x {columns}")
    if len(inside) < 2:
        return Refusal(RefusalKind.WINDOWS, "its windows are single patches, which have no neighbors")
    order = torch.cat([outside, inside[cell[inside].argsort()]])
    suffix = int((outside > int(inside.max())).sum())
    in_order = torch.equal(order, torch.arange(len(order)))
    return Layout(Grid(rows, columns, len(outside)), None if in_order else order, suffix)
