"""From cells of queries and of keys to the offsets between them, where they are not the same: pooled keys, halos."""

import math

import torch
from torch import Tensor

from vicinal.cells import Cells, PairLayout, TokenLines
from vicinal.grid import Grid
from vicinal.inspection.refusal import Refusal, RefusalKind

__all__ = ["pair_layout"]

MAX_STEP_ERROR = 0.03  # of the distance of neighbors, from a whole number of patches
MAX_SHIFT_ERROR = 0.1  # patches, from a multiple of half a patch


def pair_layout(queries: Cells, keys: Cells) -> PairLayout | Refusal:
    """Returns the offsets between queries and keys, or why they are not known.

    The patch is that of the finer side. Centers of pooled tokens lie on multiples of half a patch, which measured ones
    are rounded to.

    Args:
        queries: with the measured centers of their lines.
        keys: as queries.
    """
    lines = [_lines(queries, keys, axis) for axis in (0, 1)]
    if lines[0] is None or lines[1] is None:
        return Refusal(
            RefusalKind.POOLED,
            f"its {queries.tokens} queries ({queries}) and {keys.tokens} keys ({keys}) have no clear distance",
        )
    steps, firsts = zip(*((step, first) for step, first in lines), strict=True)  # type: ignore[misc]
    sides = []
    for number, cells in enumerate((queries, keys)):
        step = torch.tensor([axis[number] for axis in steps], dtype=torch.float64)
        first = torch.tensor([axis[number] for axis in firsts], dtype=torch.float64)
        sides.append((first + step * cells.coordinates).masked_fill(cells.index[..., None] < 0, torch.nan))
    offsets = _shared_offsets(*sides)
    if offsets is None:
        return Refusal(RefusalKind.WINDOWS, "its windows do not hold their queries and keys in the same places")
    found = _token_lines(queries, keys, steps, firsts)
    text = f"{queries}, keys {keys}" if queries.windows == 1 else f"{queries.tokens} queries, {keys.tokens} keys"
    return PairLayout(_grid(offsets, found), offsets=offsets, lines=found, text=text)


def _grid(offsets: Tensor, lines: tuple[TokenLines, TokenLines] | None) -> Grid:
    """Returns the grid of a prior: that of the finer side, or one that is as large as the largest offset."""
    height, width = (offsets.nan_to_num(0.0).abs().amax((0, 1)).ceil().long() + 1).tolist()
    for side in lines or ():
        height = max(height, side.rows if side.step[0] == 1 else 1)
        width = max(width, side.columns if side.step[1] == 1 else 1)
    return Grid(height, width)


def _lines(queries: Cells, keys: Cells, axis: int) -> tuple[tuple[int, int], tuple[float, float]] | None:
    """Returns the steps of queries and keys along an axis in patches, and the places of their first lines."""
    counts = [(cells.rows, cells.columns)[axis] for cells in (queries, keys)]
    origins = [(cells.origin or (0.5 / cells.rows, 0.5 / cells.columns))[axis] for cells in (queries, keys)]
    pitches = [(cells.pitch or (1 / cells.rows, 1 / cells.columns))[axis] for cells in (queries, keys)]
    # A single line has no pitch of its own.
    known = [pitch for pitch, count in zip(pitches, counts, strict=True) if count > 1]
    patch = min(known) if known else min(pitches)
    steps = [max(1, round(pitch / patch)) if count > 1 else 1 for pitch, count in zip(pitches, counts, strict=True)]
    for pitch, step, count in zip(pitches, steps, counts, strict=True):
        if count > 1 and abs(pitch / patch - step) > MAX_STEP_ERROR * step:
            return None
    shift = (origins[1] - origins[0]) / patch
    rounded = round(2 * shift) / 2
    if not math.isfinite(shift) or abs(shift - rounded) > MAX_SHIFT_ERROR:
        return None
    return (steps[0], steps[1]), (0.0, rounded)


def _shared_offsets(queries: Tensor, keys: Tensor) -> Tensor | None:
    """Returns offsets `(queries, keys, 2)` that hold in all windows, from places `(windows, tokens, 2)`; or None.

    NaN where a pair has a place in no window.
    """
    offsets = keys[:, None] - queries[:, :, None]  # (windows, queries, keys, 2)
    least, most = offsets.nan_to_num(math.inf).amin(0), offsets.nan_to_num(-math.inf).amax(0)
    placed = least <= most
    if bool((placed & (most - least > 1e-6)).any()):
        return None
    return least.masked_fill(~placed, torch.nan)


def _token_lines(
    queries: Cells, keys: Cells, steps: tuple[tuple[int, int], ...], firsts: tuple[tuple[float, float], ...]
) -> tuple[TokenLines, TokenLines] | None:
    """Returns queries and keys as lines, if both stand row by row over the whole image."""
    found = []
    for number, cells in enumerate((queries, keys)):
        index, count = cells.index[0], cells.rows * cells.columns
        placed = (index >= 0).nonzero()[:, 0]
        prefix = int(placed[0])
        suffix = cells.tokens - prefix - count
        if cells.windows > 1 and not bool((cells.index == index).all()):
            return None
        if suffix < 0 or not torch.equal(index[prefix : prefix + count], torch.arange(count)):
            return None
        first, step = (firsts[0][number], firsts[1][number]), (steps[0][number], steps[1][number])
        found.append(TokenLines(cells.rows, cells.columns, first, step, prefix, suffix))
    return found[0], found[1]
