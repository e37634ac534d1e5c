"""Fits lattices of rows and columns through the centers of tokens."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CELL_LIMITS", "PROBE_LIMITS", "Lattice", "all_near", "full_lattice", "overlapping_lattice"]

MAX_CELL_RATIO = 20  # of a cell's sides; a thinner one is the noise of a single line
# In cells:
MAX_RESIDUAL = 0.22  # rms distance of tokens from the lines of their rows and columns
MAX_OVERLAP_RESIDUAL = 0.065  # the same where windows overlap, so that the number of tokens says nothing
CELL_LIMITS = (0.45, 0.65)  # distance of a token, and of a lone one, see `all_near`
PROBE_LIMITS = (0.7, 1.05)  # the same in a single probe; a neighbor's cell is 1 away
LONE_TOKENS = 0.005  # share of tokens that may be farther than the first limit
MAX_LINE_SHIFT = 0.3  # of a line from even spacing
MAX_GAP_ERROR = 0.35  # of the distance of two neighboring lines
MAX_EDGE_SHIFT = 0.6  # of the first and last line, half of whose cells may lie outside of the image
CLEAR_RESIDUAL = 0.12  # centers with less are not noisy
MIN_CUT = 0.25  # least space between the tokens of neighboring lines, where windows overlap


@dataclass(frozen=True, eq=False)
class Lattice:
    """Lines of rows and columns, and the cell of each point."""

    rows: int
    columns: int
    cells: Tensor
    centers: Tensor
    origin: tuple[float, float]
    pitch: tuple[float, float]
    residual: float


def full_lattice(points: Tensor, aspect: float) -> Lattice | None:
    """Returns the rectangle with exactly one of the points `(n, 2)` in each cell that fits best; None if none does."""
    count = len(points)
    ranks = points.argsort(0).argsort(0)
    best: Lattice | None = None
    for rows in (n for n in range(1, count + 1) if count % n == 0):
        columns = count // rows
        row, column = ranks[:, 0] // columns, ranks[:, 1] // rows
        if len((row * columns + column).unique()) == count:
            lattice = _fit(points, row, column, rows, columns, aspect)
            if lattice is not None and (best is None or lattice.residual < best.residual):
                best = lattice
    return best


def overlapping_lattice(points: Tensor, heard: Tensor, aspect: float) -> Lattice | None:
    """Returns the lattice of windows that overlap: lines between gaps; no window has two tokens in one cell."""
    if len(heard) == 1:
        return None
    lines = [_lines(points[:, axis]) for axis in (0, 1)]
    rows, columns = (int(each.max()) + 1 for each in lines)
    cells = lines[0] * columns + lines[1]
    window = heard.nonzero()[:, 0]
    once = len((window * rows * columns + cells).unique()) == len(cells)
    if not once or not len(cells.unique()) == rows * columns < len(cells):
        return None
    lattice = _fit(points, lines[0], lines[1], rows, columns, aspect)
    return lattice if lattice is not None and lattice.residual < MAX_OVERLAP_RESIDUAL else None


def _lines(x: Tensor) -> Tensor:
    """Returns the line of each coordinate `(n,)`, counted from 0: cuts at the widest gaps, into the clearest lines."""
    order = x.argsort()
    widths, cuts = x[order].diff().sort(descending=True)
    extent = float(x.max() - x.min())
    best, least = torch.zeros(len(x), dtype=torch.long), math.inf
    for count, width in enumerate(widths[: len(x) // 2].tolist(), start=2):
        if width < MIN_CUT * extent / (count - 1):
            continue
        number = torch.zeros_like(best)
        number[order[1:]] = torch.zeros_like(cuts).index_fill(0, cuts[: count - 1], 1).cumsum(0)
        lines = _line_centers(x, number, count)
        spacing = _even_spacing(lines)
        if spacing is not None:
            residual = float((x - lines[number]).square().mean().sqrt()) / spacing[1]
            best, least = (number, residual) if residual < least else (best, least)
    return best


def _line_centers(x: Tensor, number: Tensor, count: int) -> Tensor:
    """Returns the mean of the coordinates `x` on each line, `(count,)`."""
    return torch.zeros(count, dtype=x.dtype).index_add(0, number, x) / number.bincount(minlength=count)


def _even_spacing(lines: Tensor) -> tuple[float, float] | None:
    """Returns origin and pitch of two or more lines; None if they are not evenly spaced."""
    number = torch.arange(len(lines), dtype=lines.dtype)
    # From the second to the last but one where there are enough: the outermost cells may stick out of the image.
    middle = slice(1, -1) if len(lines) > 3 else slice(None)
    inner = lines[middle]
    pitch = float(inner[-1] - inner[0]) / (len(inner) - 1)
    if not pitch > 0:
        return None
    origin = float((lines - pitch * number)[middle].mean())
    shift = ((lines - origin) / pitch - number).abs()
    if float(shift.max()) > MAX_EDGE_SHIFT or (len(lines) > 3 and float(shift[middle].max()) > MAX_LINE_SHIFT):
        return None
    uneven = float((inner.diff() / pitch - 1).abs().max()) > MAX_GAP_ERROR
    return None if uneven or _lacks_a_line(lines) else (origin, pitch)


def _lacks_a_line(lines: Tensor) -> bool:
    """Returns whether lines lie on evenly spaced ones of which one is left out, rather than on all of them."""
    number = torch.arange(len(lines), dtype=lines.dtype)
    numbers = number + (number > number[:-1, None])  # one row for each gap
    fits = torch.corrcoef(torch.cat([lines[None], number[None], numbers]))[0, 1:]
    return len(lines) > 2 and bool((fits[1:] > fits[0]).any())


def _fit(points: Tensor, row: Tensor, column: Tensor, rows: int, columns: int, aspect: float) -> Lattice | None:
    """Returns the lattice of points whose rows and columns are known, if all lie close to evenly spaced lines."""
    lines = [_line_centers(points[:, axis], *each) for axis, each in enumerate(((row, rows), (column, columns)))]
    # A single line has no pitch; cells are taken to be square.
    spacings = [_even_spacing(each) if len(each) > 1 else (float(each[0]), math.nan) for each in lines]
    if spacings[0] is None or spacings[1] is None:
        return None
    origin, pitch = zip(*spacings, strict=True)
    pitch = (pitch[1] / aspect if rows == 1 else pitch[0], pitch[0] * aspect if columns == 1 else pitch[1])
    if not 1 / MAX_CELL_RATIO <= pitch[0] * aspect / pitch[1] <= MAX_CELL_RATIO:
        return None
    centers = torch.stack([lines[0][row], lines[1][column]], -1)
    distance = (points - centers).abs() / torch.tensor(pitch, dtype=points.dtype)
    residual = float(distance.square().mean(0).sqrt().max())
    lattice = Lattice(rows, columns, row * columns + column, centers, origin, pitch, residual)
    return lattice if residual <= MAX_RESIDUAL and all_near(distance.amax(1), lattice, CELL_LIMITS) else None


def all_near(distance: Tensor, lattice: Lattice, limits: tuple[float, float]) -> bool:
    """Returns whether all tokens are so near to their cells that none could belong to another.

    Args:
        distance: of each token from its cell, in cells.
        lattice: the cells.
        limits: the largest distance; and that of a few lone tokens, all of whose neighbors are in their cells, so that
            only its own is left.
    """
    far = (distance > limits[0]).nonzero()[:, 0]
    few = len(far) <= LONE_TOKENS * len(distance) and lattice.residual < CLEAR_RESIDUAL
    if len(far) == 0 or not few or float(distance.max()) > limits[1]:
        return len(far) == 0
    row, column = lattice.cells[far] // lattice.columns, lattice.cells[far] % lattice.columns
    apart = torch.maximum((row[:, None] - row).abs(), (column[:, None] - column).abs())
    return bool((apart + 3 * torch.eye(len(far)) > 2).all())
