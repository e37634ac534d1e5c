"""From the evidence of a probe to the cell of every token, or a refusal: pure functions that need no model.

There is no tolerance for misfits: every cell of a lattice holds exactly one token, and no token lies far from its cell.
Whatever does not fit is refused.
"""

import itertools
import math
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from vicinal.cells import Cells
from vicinal.inspection.head_layout import Factor, HeadLayout, split_heads
from vicinal.inspection.probe import Evidence
from vicinal.inspection.refusal import Refusal, RefusalKind

__all__ = ["Placement", "decide"]

MIN_RESPONSE = 1e-12  # of a token's squared length; less is rounding
MIN_RELATIVE_RESPONSE = 1e-4  # of the mean response; most tokens may be padding or have no place
MIN_CENTER_STD = 0.02  # parts of the image: tokens whose centers differ by less all follow the whole image
MAX_CELL_RATIO = 8  # of a cell's sides; a thinner one is the noise of a single line
# In cells:
MAX_RESIDUAL = 0.22  # rms distance of tokens from the lines of their rows and columns
MAX_OVERLAP_RESIDUAL = 0.065  # the same where windows overlap, so that the number of tokens says nothing
MAX_DISTANCE = 0.45  # of a single token
MAX_LONE_DISTANCE = 0.65  # of a token all of whose neighbors are in their cells, which leave only its own
LONE_TOKENS = 0.005  # share of tokens that may be farther than MAX_DISTANCE
MAX_LINE_SHIFT = 0.3  # of a line from even spacing
MAX_GAP_ERROR = 0.35  # of the distance of two neighboring lines
MAX_EDGE_SHIFT = 0.45  # of the first and last line, whose cells may stick out of the image
MAX_HEAD_SHIFT = 0.16  # rms distance of the mean centers of different heads
MAX_HEAD_DISTANCE = 0.3  # rms distance of a token's centers in different heads
MAX_PROBE_DISTANCE = 0.7  # of a token from its cell in a single probe; a neighbor's cell is 1 away
CLEAR_RESIDUAL = 0.12  # centers with less are not noisy
MIN_CUT = 0.25  # least space between the tokens of neighboring lines, where windows overlap


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
    centers: Tensor
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
    layout = _find_heads([side.sum(0) for side in sides], evidence, aspect)
    queries, keys = (
        _place(torch.stack([split_heads(layout, probe).sum(2) for probe in side]), aspect, what)
        for side, what in zip(sides, ("queries", "keys"), strict=True)
    )
    return Placement(layout, queries, keys)


def _centers(responses: Tensor) -> tuple[Tensor, Tensor]:
    """Returns centers `(..., 2)` as parts of the image, and which tokens respond `(...)`, from `(RAMPS, ...)`."""
    responses = responses.nan_to_num(0.0, 0.0, 0.0)
    strength = responses.sum(0)
    audible = strength[strength > MIN_RESPONSE]
    least = max(MIN_RESPONSE, MIN_RELATIVE_RESPONSE * float(audible.mean())) if len(audible) else math.inf
    down, up, right, left = responses.unbind(0)
    centers = torch.stack([down / (down + up), right / (right + left)], -1).nan_to_num(0.5)
    return centers, strength > least


def _find_heads(sides: list[Tensor], evidence: Evidence, aspect: float) -> HeadLayout:
    """Returns which axes count heads: as many as tokens keep their centers along, all of them taken together.

    Args:
        sides: responses of queries and keys, `(RAMPS, *leading, tokens)`.
        evidence: says which axis counts images.
        aspect: height / width of the image.
    """
    assert evidence.image_axis is not None
    image_axis, fastest = evidence.image_axis
    options: list[list[tuple[tuple[Factor, int], ...]]] = []
    for axis, size in enumerate(sides[0].shape[1:-1]):
        if axis == image_axis:
            images = ((Factor.IMAGES, evidence.images),)
            options.append([others + images if fastest else images + others for others in _splits(size)])
        else:
            options.append([((Factor.WINDOWS, size),), *([((Factor.HEADS, size),)] if size > 1 else [])])
    layouts = sorted(map(HeadLayout, itertools.product(*options)), key=lambda layout: -layout.logit_heads)
    # The last one has no heads, so its indices always agree.
    return next(each for each in layouts if all(_agree(split_heads(each, side), aspect) for side in sides))


def _splits(size: int) -> list[tuple[tuple[Factor, int], ...]]:
    """Returns the factors that an axis may have which counts heads and windows together with images."""
    splits: list[tuple[tuple[Factor, int], ...]] = [((Factor.WINDOWS, size),), ((Factor.HEADS, size),)]
    if size == 1:
        return [()]
    for heads in (n for n in range(2, size) if size % n == 0):
        pair = (Factor.WINDOWS, size // heads), (Factor.HEADS, heads)
        splits += [pair, pair[::-1]]
    return splits


def _agree(responses: Tensor, aspect: float) -> bool:
    """Returns whether tokens have the same centers in all heads, from responses `(RAMPS, windows, heads, tokens)`.

    If the heads were windows instead, all tokens of one would be shifted from those of another, by at least a quarter
    of the distance of neighbors, rms.
    """
    if responses.shape[2] == 1:
        return True
    centers, heard = _centers(responses.movedim(2, 1))
    if not bool((heard == heard[:1]).all()):
        return False
    everywhere = heard.all(0)
    if not bool(everywhere.any()):
        return True
    centers = centers * centers.new_tensor([aspect, 1.0])  # the same unit along both axes
    mean = centers.mean(0)  # (windows, tokens, 2)
    windows = [(centers - mean)[:, window, mask] for window, mask in enumerate(everywhere) if bool(mask.any())]
    shift = torch.stack([apart.mean(1) for apart in windows]).square().mean((0, 1)).sqrt().max()
    distance = torch.cat(windows, 1).square().mean((0, 1)).sqrt().max()
    spacing = _spacing(mean[everywhere])
    # Where windows overlap, tokens are closer than neighbors in a window are.
    # The median, since a window that wraps around an edge is torn apart.
    own = statistics.median(
        _spacing(points[mask]) for points, mask in zip(mean, everywhere, strict=True) if bool(mask.any())
    )
    return bool(shift <= MAX_HEAD_SHIFT * spacing and distance <= MAX_HEAD_DISTANCE * max(own, spacing))


def _spacing(points: Tensor) -> float:
    """Returns the distance of neighbors, if points `(n, 2)` fill a rectangle evenly."""
    extent = points.std(0, correction=0) * math.sqrt(12)
    return max(float(extent.prod() / len(points)) ** 0.5, float(extent.max()) / len(points))


def _place(probes: Tensor, aspect: float, what: str) -> Cells | Refusal:
    """Returns the cells of one side, from responses `(probes, RAMPS, windows, tokens)`."""
    windows = probes.shape[2]
    centers, heard = _centers(probes.sum(0))
    if not bool(heard.any()):
        return Refusal(RefusalKind.SILENT, f"its {what} follow no place of the image")
    if windows > 1 and _agree(probes.sum(0)[:, None], aspect):  # every window has the same tokens
        probes = probes.sum(2, keepdim=True)
        centers, heard = _centers(probes.sum(0))
    points = centers[heard]
    if len(points) == 1 or float(points.std(0, correction=0).max()) < MIN_CENTER_STD:
        return Refusal(RefusalKind.SPREAD, f"each of its {what} follows the whole image")
    lattice = _full_lattice(points, aspect) or _overlapping_lattice(points, heard, aspect)
    if lattice is None:
        return Refusal(RefusalKind.IRREGULAR, f"its {len(points)} {what} that follow the image form no lattice over it")
    pitch = torch.tensor(lattice.pitch, dtype=points.dtype)
    apart = torch.stack([(_centers(one)[0][heard] - lattice.centers) / pitch for one in probes]).abs()
    if float(apart.max()) > MAX_PROBE_DISTANCE:
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


def _fit(points: Tensor, row: Tensor, column: Tensor, rows: int, columns: int, aspect: float) -> _Lattice | None:
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
    if not residual <= MAX_RESIDUAL or not _all_in_their_cells(distance.amax(1), row, column, residual):
        return None
    return _Lattice(rows, columns, row * columns + column, centers, origin, pitch, residual)


def _all_in_their_cells(distance: Tensor, row: Tensor, column: Tensor, residual: float) -> bool:
    """Returns whether no token could belong to another cell, from its distance to its own, in cells."""
    far = (distance > MAX_DISTANCE).nonzero()[:, 0]
    if len(far) == 0:
        return True
    if residual > CLEAR_RESIDUAL or len(far) > LONE_TOKENS * len(distance) or float(distance.max()) > MAX_LONE_DISTANCE:
        return False
    apart = torch.maximum((row[far, None] - row[far]).abs(), (column[far, None] - column[far]).abs())
    return bool((apart + 3 * torch.eye(len(far)) > 2).all())
