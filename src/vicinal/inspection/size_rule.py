"""How the grid of an attention changes with the size of the image: a rule, confirmed by a probe at another size."""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from vicinal.cells import Cells, Layout
from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.inspection.attention_observer import observe_attention
from vicinal.inspection.model_runner import ModelRunner, restored_attributes
from vicinal.inspection.shared_layout import has_layout
from vicinal.inspection.sites import AttentionSite, find_sites

__all__ = ["KnownSize", "SizeRule", "grid_at", "probe_other_size", "size_rule"]


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
