"""From the evidence of a probe to the cell of every token, or a refusal: pure functions that need no model.

There is no tolerance for misfits: every cell of a lattice holds exactly one token, and no token lies far from its cell.
Whatever does not fit is refused.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vicinal.cells import Cells
from vicinal.inspection.head_layout import Factor, HeadLayout, merge_heads
from vicinal.inspection.probe import Evidence
from vicinal.inspection.refusal import Refusal, RefusalKind

__all__ = ["Placement", "decide"]

MIN_RESPONSE = 1e-12  # of a token's squared length; less is rounding
MIN_RELATIVE_RESPONSE = 1e-4  # of the median response
MIN_CENTER_STD = 0.02  # parts of the image: tokens whose centers differ by less all follow the whole image
MIN_LATTICE_STD = 0.1  # parts of the image: no lattice over an image has less along both axes
# In cells:
MAX_RESIDUAL = 0.22  # rms distance of tokens from the lines of their rows and columns
MAX_DISTANCE = 0.45  # of a single token
MAX_LONE_DISTANCE = 0.65  # of a token all of whose neighbors are in their cells, which leave only its own
LONE_TOKENS = 0.005  # share of tokens that may be farther than MAX_DISTANCE
MAX_LINE_SHIFT = 0.3  # of a line from even spacing
MAX_EDGE_SHIFT = 0.6  # of the first and last line, half of whose cells may lie outside of the image
MAX_HEAD_SHIFT = 0.12  # rms distance of the mean centers of different heads
MAX_HEAD_DISTANCE = 0.3  # rms distance of a token's centers in different heads
MAX_MOVE = 0.75  # of a token from one probe to another
MAX_MOVED = 0.02  # share of tokens that may move farther, where centers are noisy
CLEAR_RESIDUAL = 0.12  # centers with less are not noisy


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the heads of an attention are in its logits, and where its queries and keys sit."""

    layout: HeadLayout
    queries: Cells | Refusal
    keys: Cells | Refusal


@dataclass(frozen=True, eq=False)
class _Lattice:
    """Lines of rows and columns, and the cell of each point."""

    rows: int
    columns: int
    cells: Tensor
    origin: tuple[float, float]
    pitch: tuple[float, float]
    residual: float


def decide(evidence: Evidence, aspect: float) -> Placement:
    """Decides where tokens sit.

    Args:
        evidence: responses of one attention.
        aspect: height / width of the image.

    Returns:
        The layout of the heads, and the cells of queries and keys, each or why there are none.
    """
    if evidence.image_axis is None:
        shape = " x ".join(map(str, evidence.call.logits))
        refusal = Refusal(
            RefusalKind.UNREAD, f"no axis of its logits {shape} counts images, so tokens cannot be traced to the image"
        )
        return Placement(HeadLayout(()), refusal, refusal)
    sides = [torch.stack(each) for each in (evidence.queries, evidence.keys)]
    layout = _find_heads([side.sum(0) for side in sides], evidence)
    queries, keys = (
        _place(torch.stack([merge_heads(layout, probe) for probe in side]), aspect, what)
        for side, what in zip(sides, ("queries", "keys"), strict=True)
    )
    return Placement(layout, queries, keys)


def _centers(responses: Tensor) -> tuple[Tensor, Tensor]:
    """Returns centers `(..., 2)` as parts of the image, and which tokens respond `(...)`, from `(RAMPS, ...)`."""
    responses = responses.nan_to_num(0.0, 0.0, 0.0)
    strength = responses.sum(0)
    audible = strength[strength > MIN_RESPONSE]
    least = max(MIN_RESPONSE, MIN_RELATIVE_RESPONSE * float(audible.median())) if len(audible) else math.inf
    down, up, right, left = responses.unbind(0)
    centers = torch.stack([down / (down + up), right / (right + left)], -1).nan_to_num(0.5)
    return centers, strength > least


def _find_heads(sides: list[Tensor], evidence: Evidence) -> HeadLayout:
    """Returns which axes count heads: those along which tokens keep their centers.

    Args:
        sides: responses of queries and keys, `(RAMPS, *leading, tokens)`.
        evidence: says which axis counts images.
    """
    assert evidence.image_axis is not None
    image_axis, fastest = evidence.image_axis
    sizes = sides[0].shape[1:-1]
    alike = [
        axis != image_axis and size > 1 and all(_agree(side.movedim(axis + 1, 1)) for side in sides)
        for axis, size in enumerate(sizes)
    ]
    axes: list[tuple[tuple[Factor, int], ...]] = []
    for axis, size in enumerate(sizes):
        others: tuple[tuple[Factor, int], ...] = ()
        if axis != image_axis:
            others = ((Factor.HEADS if alike[axis] else Factor.WINDOWS, size),)
        elif size > 1:
            # Where heads have an axis of their own, what is alike beside images are windows, such as frames of a video.
            others = ((Factor.WINDOWS, size),) if any(alike) else _folded(sides, axis)
        images = ((Factor.IMAGES, evidence.images),) if axis == image_axis else ()
        axes.append(others + images if fastest else images + others)
    return HeadLayout(tuple(axes))


def _folded(sides: list[Tensor], axis: int) -> tuple[tuple[Factor, int], ...]:
    """Returns the factors of an axis that counts heads and windows together; as many heads as agree."""
    size = sides[0].shape[axis + 1]
    for heads in sorted((n for n in range(2, size + 1) if size % n == 0), reverse=True):
        windows = size // heads
        for parts, at in (((windows, heads), 1), ((heads, windows), 0)):
            if all(_agree(side.unflatten(axis + 1, parts).movedim(axis + 1 + at, 1)) for side in sides):
                factors = [(Factor.WINDOWS, windows), (Factor.HEADS, heads)]
                factors = factors if at else factors[::-1]
                return tuple(factor for factor in factors if factor[1] > 1)
    return ((Factor.WINDOWS, size),)


def _agree(responses: Tensor) -> bool:
    """Returns whether tokens have the same centers for all indices of axis 1 of `(RAMPS, indices, ..., tokens)`.

    If the indices were windows instead, all tokens of one would be shifted from those of another, by at least a quarter
    of the distance of neighbors, rms.
    """
    centers, heard = _centers(responses)
    if not bool((heard == heard[:1]).all()):
        return False
    everywhere = heard.all(0)
    if not bool(everywhere.any()):
        return True
    mean = centers.mean(0)  # (..., tokens, 2)
    apart = (centers - mean)[:, everywhere] / _spacing(mean[everywhere])  # (indices, tokens, 2)
    shift = apart.mean(1).square().mean(0).sqrt().max()
    distance = apart.square().mean((0, 1)).sqrt().max()
    return bool(shift <= MAX_HEAD_SHIFT and distance <= MAX_HEAD_DISTANCE)


def _spacing(points: Tensor) -> float:
    """Returns the distance of neighbors, if points `(n, 2)` fill a rectangle evenly."""
    extent = points.std(0, correction=0) * math.sqrt(12)
    return max(math.sqrt(float(extent.prod()) / len(points)), float(extent.max()) / len(points))


def _place(probes: Tensor, aspect: float, what: str) -> Cells | Refusal:
    """Returns the cells of one side, from responses `(probes, RAMPS, windows, tokens)`."""
    windows = probes.shape[2]
    centers, heard = _centers(probes.sum(0))
    if not bool(heard.any()):
        return Refusal(RefusalKind.SILENT, f"its {what} follow no place of the image")
    if windows > 1 and _agree(probes.sum(0)):  # every window has the same tokens
        probes = probes.sum(2, keepdim=True)
        centers, heard = _centers(probes.sum(0))
    points = centers[heard]
    if len(points) == 1 or float(points.std(0, correction=0).max()) < MIN_CENTER_STD:
        return Refusal(RefusalKind.SPREAD, f"each of its {what} follows the whole image")
    lattice = _full_lattice(points, aspect) or _overlapping_lattice(points, heard, aspect)
    if lattice is None and float(points.std(0, correction=0).max()) < MIN_LATTICE_STD:
        return Refusal(RefusalKind.SPREAD, f"each of its {what} follows the whole image")
    if lattice is None:
        return Refusal(RefusalKind.IRREGULAR, f"its {len(points)} {what} that follow the image form no lattice over it")
    pitch = torch.tensor(lattice.pitch, dtype=points.dtype)
    moves = torch.stack([(_centers(one)[0][heard] - points) / pitch for one in probes]).abs().amax((0, 2))
    moved = float((moves > MAX_MOVE).double().mean())
    if moved > (0 if lattice.residual < CLEAR_RESIDUAL else MAX_MOVED):
        return Refusal(RefusalKind.CONTENT, f"the places of its {what} depend on the content of the image")
    index = torch.full(heard.shape, -1)
    index[heard] = lattice.cells
    return Cells(lattice.rows, lattice.columns, index.expand(windows, -1), lattice.origin, lattice.pitch)


def _full_lattice(points: Tensor, aspect: float) -> _Lattice | None:
    """Returns the rectangle with exactly one of the points `(n, 2)` in each cell that fits best; None if none does."""
    count = len(points)
    ranks = points.argsort(0).argsort(0)
    best: _Lattice | None = None
    for rows in (n for n in range(1, count + 1) if count % n == 0):
        columns = count // rows
        row, column = ranks[:, 0] // columns, ranks[:, 1] // rows
        if len((row * columns + column).unique()) == count:
            lattice = _fit(points, row, column, rows, columns, aspect)
            if lattice is not None and (best is None or lattice.residual < best.residual):
                best = lattice
    return best


def _overlapping_lattice(points: Tensor, heard: Tensor, aspect: float) -> _Lattice | None:
    """Returns the lattice of windows that overlap: lines between gaps; no window has two tokens in one cell."""
    lines = []
    for x, share in ((points[:, 0], aspect), (points[:, 1], 1 / aspect)):
        order = x.argsort()
        gaps = x[order].diff() > 0.3 / (len(points) * share) ** 0.5
        lines.append(torch.cat([gaps.new_zeros(1), gaps]).cumsum(0)[order.argsort()])
    rows, columns = (int(each.max()) + 1 for each in lines)
    cells = lines[0] * columns + lines[1]
    window = heard.nonzero()[:, 0]
    once = len((window * rows * columns + cells).unique()) == len(cells)
    if not once or not len(cells.unique()) == rows * columns < len(cells):
        return None
    return _fit(points, lines[0], lines[1], rows, columns, aspect)


def _fit(points: Tensor, row: Tensor, column: Tensor, rows: int, columns: int, aspect: float) -> _Lattice | None:
    """Returns the lattice of points in known rows and columns, if all lie close to evenly spaced lines."""
    lines, spread, pitch = [], [], []
    for axis, (number, count) in enumerate(((row, rows), (column, columns))):
        total = torch.zeros(count, dtype=points.dtype).index_add(0, number, points[:, axis])
        lines.append(total / number.bincount(minlength=count))
        spread.append((points[:, axis] - lines[axis][number]).abs())
        # From the second to the last but one where there are enough: the outermost cells may stick out of the image.
        inner = lines[axis][1:-1] if count > 3 else lines[axis]
        pitch.append(float(inner[-1] - inner[0]) / (len(inner) - 1) if count > 1 else math.nan)
    # A single line has no pitch; cells are taken to be square.
    pitch = [pitch[1] / aspect if rows == 1 else pitch[0], pitch[0] * aspect if columns == 1 else pitch[1]]
    if not all(each > 0 for each in pitch):
        return None
    residual, origin = 0.0, []
    for axis, count in enumerate((rows, columns)):
        number = torch.arange(count, dtype=points.dtype)
        middle = slice(1, -1) if count > 3 else slice(None)
        origin.append(float((lines[axis] - pitch[axis] * number)[middle].mean()))
        shift = (lines[axis] - origin[axis] - pitch[axis] * number).abs() / pitch[axis]
        if float(shift.max()) > MAX_EDGE_SHIFT or (count > 3 and float(shift[middle].max()) > MAX_LINE_SHIFT):
            return None
        residual = max(residual, float(spread[axis].square().mean().sqrt()) / pitch[axis])
    distance = torch.maximum(spread[0] / pitch[0], spread[1] / pitch[1])
    if residual > MAX_RESIDUAL or not _all_in_their_cells(distance, row, column, residual):
        return None
    cells = row * columns + column
    return _Lattice(rows, columns, cells, (origin[0], origin[1]), (pitch[0], pitch[1]), residual)


def _all_in_their_cells(distance: Tensor, row: Tensor, column: Tensor, residual: float) -> bool:
    """Returns whether no token could belong to another cell, from its distance to its own, in cells."""
    far = (distance > MAX_DISTANCE).nonzero()[:, 0]
    if len(far) == 0:
        return True
    if residual > CLEAR_RESIDUAL or len(far) > LONE_TOKENS * len(distance) or float(distance.max()) > MAX_LONE_DISTANCE:
        return False
    apart = torch.maximum((row[far, None] - row[far]).abs(), (column[far, None] - column[far]).abs())
    return bool((apart + 3 * torch.eye(len(far)) > 2).all())
