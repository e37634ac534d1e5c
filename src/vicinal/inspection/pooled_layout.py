"""Offsets between patches and tokens that pool them in windows which are not evenly spaced.

The pooling says exactly where its results sit, in cells of its input. That it is this pooling which made the tokens of
an attention is measured: its input must sit in the cells of the other side, and each token at the mean of its window.
"""

import torch
from torch import Tensor

from vicinal.cells import Cells, PairLayout, TokenLines
from vicinal.grid import Grid
from vicinal.inspection.head_layout import split_heads
from vicinal.inspection.place_tokens import Placement, measured_centers, place_side
from vicinal.inspection.pool_calls import PoolCall
from vicinal.inspection.probe import Evidence
from vicinal.inspection.refusal import Refusal
from vicinal.pooled_tokens import PooledTokens, TokenPooling

__all__ = ["pooled_layout"]

MAX_CENTER_ERROR = 0.2  # patches, of a measured center from the mean of a window


def pooled_layout(placement: Placement, evidence: Evidence, aspect: float) -> PairLayout | None:
    """Returns the offsets between queries and keys if one side pools the patches of the other; None if that is not so.

    Args:
        placement: from exact centers.
        evidence: that it was decided on, with the poolings before the attention.
        aspect: height / width of the image.
    """
    sides = (placement.queries, evidence.queries[0]), (placement.keys, evidence.keys[0])
    for number, ((cells, _), (_, pooled)) in enumerate((sides, sides[::-1])):
        lines = None if isinstance(cells, Refusal) else raster_lines(cells)
        if lines is None:
            continue
        assert isinstance(cells, Cells)
        # (RAMPS, windows, heads, tokens)
        centers, heard = measured_centers(split_heads(placement.layout, pooled).sum(2))
        if not bool(heard.all()):
            continue
        first = cells.centers[0, lines.prefix]
        in_patches = (centers - first) / cells.distance
        poolings = {
            call.pooling
            for call in evidence.pools
            if _pools(call, lines, aspect) and _explains(call.pooling, lines, in_patches)
        }
        if len(poolings) == 1:
            return _pair_layout(
                lines, PooledTokens(poolings.pop(), lines.rows, lines.columns), pooled_first=number == 1
            )
    return None


def raster_lines(cells: Cells) -> TokenLines | None:
    """Returns the lines of patches that stand row by row over the whole image, the same in all windows; else None."""
    index, count = cells.index[0], cells.rows * cells.columns
    prefix = int((index >= 0).nonzero()[0, 0])
    suffix = cells.tokens - prefix - count
    same = suffix >= 0 and bool((cells.index == index).all())
    if not same or not torch.equal(index[prefix : prefix + count], torch.arange(count)):
        return None
    if int((index >= 0).sum()) != count:
        return None
    return TokenLines(cells.rows, cells.columns, (0.0, 0.0), (1, 1), prefix, suffix)


def _pools(call: PoolCall, lines: TokenLines, aspect: float) -> bool:
    """Returns whether the input of a pooling is a map of the same patches."""
    if call.map not in (None, (lines.rows, lines.columns)) or call.responses.shape[1] != lines.rows * lines.columns:
        return False
    cells = place_side(call.responses[None, :, None], aspect, "tokens")
    return isinstance(cells, Cells) and raster_lines(cells) == TokenLines(
        lines.rows, lines.columns, lines.first, lines.step
    )


def _explains(pooling: TokenPooling, lines: TokenLines, centers: Tensor) -> bool:
    """Returns whether all centers `(windows, tokens, 2)`, in patches, are where a pooling puts its results."""
    places = pooling.places(lines.rows, lines.columns)
    return places.shape == centers.shape[1:] and float((centers - places).abs().max()) < MAX_CENTER_ERROR


def _pair_layout(lines: TokenLines, pooled: PooledTokens, pooled_first: bool) -> PairLayout:
    queries, keys = (pooled, lines) if pooled_first else (lines, pooled)
    offsets = keys.places[None] - queries.places[:, None]
    texts = f"{lines.rows} x {lines.columns}", f"{pooled}"
    text = "{1}, keys {0}" if pooled_first else "{0}, keys {1}"
    return PairLayout(Grid(lines.rows, lines.columns), offsets=offsets, lines=(queries, keys), text=text.format(*texts))
