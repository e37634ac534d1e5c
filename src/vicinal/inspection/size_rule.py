"""How the grid of an attention changes with the size of the image: a rule, confirmed by a probe at another size."""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from vicinal.cells import Cells, Layout, PairLayout, TokenLines
from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.inspection.attention_observer import observe_attention
from vicinal.inspection.model_runner import ModelRunner, restored_attributes
from vicinal.inspection.shared_layout import has_layout
from vicinal.inspection.sites import AttentionSite, find_sites
from vicinal.pooled_tokens import PooledTokens

__all__ = ["KnownSize", "SizeRule", "finer_grid", "grid_at", "lines_at", "probe_other_size", "size_rule"]

Sides = tuple[TokenLines | PooledTokens, TokenLines | PooledTokens]
"""Queries and keys."""


class SizeRule(Enum):
    """How the grid of an attention changes with the size of the image."""

    FOLLOWS = "patches keep their size in pixels"
    FIXED = "the grid is the same for every image, as that of a window is"
    WHOLE_WINDOWS = "the grid is that of a window, and images must be cut into whole windows"
    UNTRIED = "the model took no image of another size when it was inspected"
    UNKNOWN = "tokens sit in other places at another size"


@dataclass(frozen=True)
class KnownSize:
    """The grid of an attention on images of one size."""

    image: tuple[int, int]
    """Height and width in pixels."""
    grid: Grid
    lattice: tuple[int, int]
    """Rows and columns of patches of the whole image; those of the grid, unless it is a window."""


def grid_at(rule: SizeRule, known: KnownSize, image: tuple[int, int], tokens: int) -> Grid | None:
    """Returns the grid of an attention on images of another size, or None if it is not known.

    Args:
        rule: how the grid changes.
        known: the grid on images of one size.
        image: height and width now.
        tokens: length of the sequence now, which the grid must have.
    """
    grid = known.grid
    if rule is SizeRule.UNKNOWN:
        return None
    if rule is SizeRule.FIXED:
        return grid if tokens == grid.tokens else None
    if rule is SizeRule.WHOLE_WINDOWS:
        rows = _counts(known.lattice[0], known.image[0], image[0])
        columns = _counts(known.lattice[1], known.image[1], image[1])
        whole = len(rows) == 1 == len(columns) and rows[0] % grid.height == 0 == columns[0] % grid.width
        return grid if whole and tokens == grid.tokens else None
    # A patch at the edge that is not whole is left out or padded. Numbers of rows and columns differ by rounding only.
    heights = _counts(grid.height, known.image[0], image[0])
    widths = _counts(grid.width, known.image[1], image[1])
    patches = tokens - grid.prefix
    fitting = [pair for pair in itertools.product(heights, widths) if pair[0] * pair[1] == patches]
    return Grid(*fitting[0], grid.prefix) if len(fitting) == 1 else None


def lines_at(
    rule: SizeRule, lines: Sides, before: tuple[int, int], image: tuple[int, int], tokens: tuple[int, int]
) -> Sides | None:
    """Returns the lines of queries and keys on images of another size, or None if they are not known.

    Args:
        rule: how they change.
        lines: those on images of the size `before`; their steps and first places in patches stay, and so does the
            pooling that one side is made by from the patches of the other.
        before: height and width.
        image: height and width now.
        tokens: numbers of queries and of keys now.
    """
    if rule not in (SizeRule.FOLLOWS, SizeRule.UNTRIED):
        return None
    found: list[TokenLines | PooledTokens] = list(lines)
    for number, side in enumerate(lines):
        if isinstance(side, TokenLines):
            grid = Grid(side.rows, side.columns, side.prefix + side.suffix)
            other = grid_at(SizeRule.FOLLOWS, KnownSize(before, grid, (side.rows, side.columns)), image, tokens[number])
            if other is None:
                return None
            found[number] = replace(side, rows=other.height, columns=other.width)
    for number, side in enumerate(lines):
        if isinstance(side, PooledTokens):
            patches = found[1 - number]
            found[number] = replace(side, rows=patches.rows, columns=patches.columns)
            if found[number].tokens != tokens[number]:
                return None
    return found[0], found[1]


def finer_grid(queries: TokenLines | PooledTokens, keys: TokenLines | PooledTokens) -> Grid:
    """Returns the grid that all offsets between queries and keys fit in: that of the finer side, or of a pooled map."""
    if isinstance(queries, PooledTokens) or isinstance(keys, PooledTokens):
        return Grid(queries.rows, queries.columns)
    extents = [max(max(abs(key), abs(query)) for key, query in _corners(queries, keys, axis)) for axis in (0, 1)]
    sizes = []
    for axis, extent in enumerate(extents):
        counts = [(side.rows, side.columns)[axis] for side in (queries, keys) if side.step[axis] == 1]
        sizes.append(max([math.ceil(extent) + 1, *counts]))
    return Grid(sizes[0], sizes[1])


def _corners(queries: TokenLines, keys: TokenLines, axis: int) -> list[tuple[float, float]]:
    """Returns the extreme offsets along an axis."""
    ends = []
    for side in (queries, keys):
        count = (side.rows, side.columns)[axis]
        ends.append((side.first[axis], side.first[axis] + side.step[axis] * (count - 1)))
    return [(ends[1][1] - ends[0][0], ends[1][0] - ends[0][1])]


def _counts(count: int, before: int, pixels: int) -> list[int]:
    """Returns the numbers of patches that may fit in `pixels`, if `count` of them fit in `before`."""
    least = pixels * count // before
    return [n for n in ([least] if least * before == pixels * count else [least, least + 1]) if n >= 1]


def probe_other_size(
    runner: ModelRunner, sites: Sequence[AttentionSite]
) -> tuple[ModelRunner, list[AttentionSite]] | None:
    """Finds the attention of a model on images of another size; None if it takes none of those that are tried.

    Args:
        runner: the model, in evaluation mode, without priors and in full precision; and its images.
        sites: all that were found with these images.

    Returns:
        The model with the other images, and all sites there.
    """
    for size in _other_sizes(runner.image, [site for site in sites if site.layout is not None]):
        other = replace(runner, shape=(*runner.shape[:-2], *size))
        with contextlib.suppress(VicinalError), restored_attributes(runner.model):  # it takes no such images
            calls = observe_attention(other.model, functools.partial(other, other.noise(1)))
            return other, find_sites(other, len(calls), rounds=1) if calls else []
    return None


def size_rule(
    site: AttentionSite,
    image: tuple[int, int],
    other: AttentionSite | None,
    other_image: tuple[int, int],
    verified: bool,
) -> SizeRule:
    """Returns the rule that a site on images of two sizes confirms.

    Args:
        site: that takes a prior.
        image: height and width there.
        other: the same module on images of another size; None if it does not run there.
        other_image: height and width there.
        verified: whether a prior acts as it should in the other site, if that takes one.
    """
    one = site.layout
    if one is None or other is None or site.heads != other.heads:
        return SizeRule.UNKNOWN
    two = other.layout
    if isinstance(one, PairLayout) or isinstance(two, PairLayout):
        return _rule_of_pairs(one, two, image, other_image) if verified else SizeRule.UNKNOWN
    if two is not None and _same_layout(one, two):
        return SizeRule.FIXED if verified else SizeRule.WHOLE_WINDOWS
    if two is not None and one.is_raster and two.is_raster and one.suffix == two.suffix:
        # Windows that follow the image are interleaved, as those of MobileViT: their number stays.
        known = KnownSize(image, one.grid, (one.grid.height, one.grid.width))
        follows = two.grid == grid_at(SizeRule.FOLLOWS, known, other_image, two.grid.tokens)
        return SizeRule.FOLLOWS if follows and verified and site.windows == other.windows else SizeRule.UNKNOWN
    cells, keys = other.queries, other.keys
    if not isinstance(cells, Cells) or not isinstance(keys, Cells) or not cells.same_as(keys):
        return SizeRule.UNKNOWN
    # Tokens without a place could be padding, which is part of a larger image.
    if one.grid.prefix or not has_layout(cells, one, wrapped=True):
        return SizeRule.UNKNOWN
    return SizeRule.FIXED if has_layout(cells, one, wrapped=False) else SizeRule.WHOLE_WINDOWS


def _rule_of_pairs(one: Layout, two: Layout | None, image: tuple[int, int], other_image: tuple[int, int]) -> SizeRule:
    """Returns the rule of queries and keys with places of their own."""
    if not isinstance(one, PairLayout) or not isinstance(two, PairLayout):
        return SizeRule.UNKNOWN
    if one.lines is not None and two.lines is not None:
        tokens = two.lines[0].tokens, two.lines[1].tokens
        predicted = lines_at(SizeRule.FOLLOWS, one.lines, image, other_image, tokens)
        return SizeRule.FOLLOWS if predicted == two.lines else SizeRule.UNKNOWN
    same = one.offsets.shape == two.offsets.shape and torch.equal(one.offsets.nan_to_num(), two.offsets.nan_to_num())
    return SizeRule.FIXED if same else SizeRule.UNKNOWN


def _same_layout(one: Layout, two: Layout) -> bool:
    if one.grid != two.grid or one.suffix != two.suffix or (one.order is None) != (two.order is None):
        return False
    return one.order is None or two.order is None or torch.equal(one.order, two.order)


def _other_sizes(image: tuple[int, int], sites: Sequence[AttentionSite]) -> Iterator[tuple[int, int]]:
    """Yields sizes to try, of whole patches in the coarsest layer: smaller ones of another aspect first."""
    strides = [
        (math.ceil(image[0] / side.rows), math.ceil(image[1] / side.columns))
        for site in sites
        for side in (site.queries, site.keys)
        if isinstance(side, Cells)
    ]
    if not strides:
        return
    down, across = (max(each) for each in zip(*strides, strict=True))
    rows, columns = image[0] // down, image[1] // across
    fewer = math.ceil(0.6 * rows), math.ceil(0.4 * columns)
    while fewer == (rows, columns) or fewer[0] * down * image[1] == fewer[1] * across * image[0]:
        fewer = fewer[0] + 1, fewer[1]
    yield fewer[0] * down, fewer[1] * across
    yield image[0], 2 * image[1]  # whole windows again
    square = math.ceil(0.6 * rows)
    if image[0] == image[1]:
        side = down * (square if square != rows else rows + 1)
        yield side, side
