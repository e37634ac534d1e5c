"""How the grid of an attention changes with the size of the image: a rule, confirmed by a probe at another size."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum

import torch

from vicinal.cells import Cells, Layout
from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.inspection.attention_observer import observe_attention
from vicinal.inspection.model_runner import ModelRunner
from vicinal.inspection.shared_layout import has_layout
from vicinal.inspection.sites import AttentionSite, find_sites

__all__ = ["SizeRule", "find_size_rules", "grid_at"]


class SizeRule(Enum):
    """How the grid of an attention changes with the size of the image."""

    FOLLOWS = "patches keep their size in pixels"
    FIXED = "the grid is the same for every image, as that of a window is"
    UNTRIED = "the model took no image of another size when it was inspected"
    UNKNOWN = "tokens sit in other places at another size"


def grid_at(rule: SizeRule, grid: Grid, before: tuple[int, int], image: tuple[int, int], tokens: int) -> Grid | None:
    """Returns the grid of an attention on images of another size, or None if it is not known.

    Args:
        rule: how the grid changes.
        grid: that on images of the size `before`.
        before: height and width.
        image: height and width now.
        tokens: length of the sequence now, which the grid must have.
    """
    if rule is SizeRule.FIXED:
        return grid if tokens == grid.tokens else None
    if rule is SizeRule.UNKNOWN:
        return None
    # A patch at the edge that is not whole is left out or padded. Numbers of rows and columns differ by rounding only.
    heights = _counts(grid.height, before[0], image[0])
    widths = _counts(grid.width, before[1], image[1])
    patches = tokens - grid.prefix
    fitting = [pair for pair in itertools.product(heights, widths) if pair[0] * pair[1] == patches]
    return Grid(*fitting[0], grid.prefix) if len(fitting) == 1 else None


def _counts(count: int, before: int, pixels: int) -> list[int]:
    """Returns the numbers of patches that may fit in `pixels`, if `count` of them fit in `before`."""
    least, rest = divmod(pixels * count, before)
    return [n for n in ([least, least + 1] if rest else [least]) if n >= 1]


def find_size_rules(runner: ModelRunner, sites: Sequence[AttentionSite]) -> dict[str, SizeRule]:
    """Probes a model at another size, if it takes any, and returns the rule of each site that takes a prior, by name.

    Args:
        runner: the model, in evaluation mode, without priors and in full precision; and its images.
        sites: all that were found with these images.
    """
    served = [site for site in sites if site.layout is not None]
    for size in _other_sizes(runner.image, served):
        other = replace(runner, shape=(*runner.shape[:-2], *size))
        try:
            calls = observe_attention(other.model, lambda other=other: other(other.noise(1)))  # type: ignore[misc]
            found = {site.name: site for site in find_sites(other, len(calls), rounds=1)} if calls else {}
        except VicinalError:
            continue  # the model takes no such images
        return {site.name: _rule(site, found.get(site.name), runner.image, size) for site in served}
    return dict.fromkeys((site.name for site in served), SizeRule.UNTRIED)


def _rule(site: AttentionSite, other: AttentionSite | None, before: tuple[int, int], image: tuple[int, int]) -> SizeRule:
    """Returns the rule that a site on images of two sizes confirms."""
    one = site.layout
    if one is None or other is None or site.heads != other.heads:
        return SizeRule.UNKNOWN
    two = other.layout
    if two is not None and _same_layout(one, two):
        return SizeRule.FIXED
    if two is not None and one.is_raster and two.is_raster and one.suffix == two.suffix and other.windows == 1:
        follows = two.grid == grid_at(SizeRule.FOLLOWS, one.grid, before, image, two.grid.tokens)
        return SizeRule.FOLLOWS if follows and site.windows == 1 else SizeRule.UNKNOWN
    cells = other.queries
    fixed = isinstance(cells, Cells) and isinstance(other.keys, Cells) and cells.same_as(other.keys)
    return SizeRule.FIXED if fixed and has_layout(cells, one) else SizeRule.UNKNOWN  # type: ignore[arg-type]


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
