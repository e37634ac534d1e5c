"""Do tokens sit where the grid says? Asked by disturbing the image.

Cells of the image are disturbed by chance, in another pattern for each copy of it. A token changes with the pattern of
the cell that it came from, however much attention has mixed the others in; so the map of changes, laid out as the grid
says, is compared with the patterns, at every shift. Tokens in their places give a peak; tokens out of order give none,
because cells next to each other have nothing in common.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vicinal.attachment.finding import Call, heads_third
from vicinal.attachment.placing import Site
from vicinal.errors import VicinalError
from vicinal.grid import Grid

__all__ = ["check_order", "enlarged", "folding"]

PATTERNS = 4  # images disturbed in one run; every cell in half of them
RUNS = 16  # at most; one is enough for most models
SURE = 2.5  # standard deviations that a peak has to lie above the highest that chance gives
VARYING = 0.5  # of the squared mean: what places may differ by where all of them fit
FREEDOM = PATTERNS / (PATTERNS - 1)  # a cell's pattern has its last number from the others

OUT_OF_ORDER = "its tokens are not those of the image, row by row"
LAYOUTS = ("blocks", "dilated", "columns")


@dataclass
class _Match:
    """What was seen of one site, summed over runs."""

    site: Site
    size: tuple[int, int]
    """Of the map that the site's windows tile."""
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Changes `(images, windows, patches)` and patterns `(images, rows, columns)`, run by run."""
    hopeless: bool = False
    """Whether more runs would hardly tell more."""
    layout: str = LAYOUTS[0]
    """How the windows tile the map, as far as was seen."""
    shift: tuple[int, int] = (0, 0)
    """Rows and columns that the map was rolled by before it was cut into windows."""

    def add(self, call: Call, patterns: Tensor) -> None:
        """Take another run in."""
        self.seen.append((_changes(call, self.site, len(patterns)), patterns - patterns.mean((1, 2), keepdim=True)))

    def verdict(self) -> str | None:
        """`""` if tokens sit where they should, else what is wrong; None if there is too little to tell."""
        changes, patterns = (torch.cat(each) for each in zip(*self.seen, strict=True))
        moments = {
            layout: _correlate(_map_of(changes, self.site.grid, self.size, layout), patterns)
            for layout in LAYOUTS
            if self.site.windows > 1 or layout != "dilated"
        }
        self.layout = layout = max(moments, key=lambda name: float(moments[name].max()))
        best = moments[layout]
        row, column = self.shift = divmod(int(best.argmax()), best.shape[1])
        chance = float(changes.square().sum() * patterns.square().mean() * FREEDOM) ** 0.5
        sure = (math.sqrt(2 * math.log(len(moments) * best.numel())) + SURE) * chance
        if float(best.max()) <= sure:
            self.hopeless = len(self.seen) >= 5 and float(best.max()) * (RUNS / len(self.seen)) ** 0.5 <= sure
            return None
        if self.site.windows == 1 and not self._near(best, row, column):
            return "its tokens are not in the places of the grid, but shifted"
        own = _windows_of(patterns.roll((row, column), (1, 2)), self.site.grid, self.size, layout)
        fitting = _all_fit(changes, own, last=len(self.seen) == RUNS)
        if not fitting:
            return None if fitting is None else OUT_OF_ORDER
        return "its tokens run down the columns of the image, not along its rows" if layout == "columns" else ""

    def _near(self, moments: Tensor, row: int, column: int) -> bool:
        """Whether a shift is none, or what convolutions before attention do: they spread a cell over those around it,
        and the most of it may be a cell away. Behind prefix tokens that could also be a prefix miscounted, but then a
        token's own cell would have no say.
        """
        if row == column == 0:
            return True
        around = moments.roll((1 - row, 1 - column), (0, 1))[:3, :3].flatten().sort().values
        spread = float(around[-2]) > 0.25 * float(around[-1])
        close = all(min(place, n - place) <= 1 for place, n in zip((row, column), moments.shape, strict=True))
        return spread and close and (self.site.grid.prefix == 0 or float(moments[0, 0]) > 0.3 * float(around[-1]))


def _all_fit(changes: Tensor, expected: Tensor, last: bool) -> bool | None:
    """Whether the tokens of all places change as expected, or those of some only; None if that is too close to call.

    Tokens half of which sit right, as in an order of 2 x 2 blocks, give a peak too. But then places differ: where a
    share f of them fits, correlations vary by (1 - f) / f of their squared mean, on top of what chance does; and half
    of those that do not fit change the other way, however long one looks.

    Args:
        changes: `(images, windows, patches)`.
        expected: of the same shape.
        last: call it anyway.
    """
    chance = changes.square().sum((0, 1)) * expected.square().mean() * FREEDOM
    fits = (changes * expected).sum((0, 1)) / chance.clamp(min=1e-30).sqrt()
    mean = float(fits.mean()) ** 2
    varying = float(fits.var()) - 1
    error = 0.0 if last else 2 * (2 / fits.numel()) ** 0.5
    against = int((fits < 0).sum())
    if varying + error < VARYING * mean and against <= fits.numel() // (8 if last else 32):
        return True
    return False if last or varying - error > VARYING * mean else None


def _correlate(laid: Tensor, patterns: Tensor) -> Tensor:
    """Sum of their products over images and cells, for every shift of the patterns: `(rows, columns)`."""
    laid = laid[:, : patterns.shape[1], : patterns.shape[2]]
    product = torch.fft.rfft2(laid) * torch.fft.rfft2(patterns).conj()
    moments: Tensor = torch.fft.irfft2(product, s=patterns.shape[1:])
    return moments.sum(0)


def check_order(
    sites: Sequence[Site], image: tuple[int, int], disturbed: Callable[[Tensor, int], list[Call]]
) -> dict[str, str]:
    """Which modules do not hold their tokens row by row, and why; by name.

    Args:
        sites: modules to ask, in the order in which they run.
        image: height and width.
        disturbed: given masks of pixels `(images, height, width)` and a seed, runs the model on an image, and on copies
            of it whose pixels of 1 are disturbed, and returns the calls.
    """
    wrong: dict[str, str] = {}
    by_cells: dict[tuple[tuple[int, int], int | None], list[_Match]] = {}
    for site in sites:
        tiled = _tiled(site, image)
        if tiled is None:
            wrong[site.name] = f"its {site.windows} windows of {site.grid} patches tile no map of the image"
        else:
            by_cells.setdefault(tiled[1:], []).append(_Match(site, tiled[0]))
    trusted: set[type[nn.Module]] = set()
    for (cells, side), matches in by_cells.items():
        for match, verdict in _ask(matches, image, cells, side, disturbed, trusted):
            if verdict:
                wrong[match.site.name] = verdict
    return wrong


def _ask(
    matches: list[_Match],
    image: tuple[int, int],
    cells: tuple[int, int],
    side: int | None,
    disturbed: Callable[[Tensor, int], list[Call]],
    trusted: set[type[nn.Module]],
) -> Iterator[tuple[_Match, str]]:
    """Disturb the image until all that can be told is told; yields what is wrong with each match, `""` for nothing.

    A class that was seen to hold its tokens in order does so in later layers, which mix more: it becomes trusted.
    """
    verdicts: dict[str, str | None] = {}
    undecided = matches
    for run in range(RUNS):
        if not undecided:
            break
        patterns = _patterns(cells, seed=run)
        seen = disturbed(enlarged(patterns, image, side), run)
        calls = {call.module: call for call in seen if call.queries is not None}
        for match in undecided:
            match.add(calls[match.site.module], patterns)
            verdicts[match.site.name] = match.verdict()
        trusted |= {type(match.site.module) for match in undecided if verdicts[match.site.name] == ""}
        undecided = [
            match
            for match in undecided
            if verdicts[match.site.name] is None
            and not match.hopeless
            and (run < 1 or type(match.site.module) not in trusted)
        ]
    for match in matches:
        verdict = verdicts[match.site.name]
        yield match, OUT_OF_ORDER if verdict is None and type(match.site.module) not in trusted else verdict or ""


def folding(
    site: Site, image: tuple[int, int], disturbed: Callable[[Tensor, int], list[Call]]
) -> Callable[[Tensor], Tensor]:
    """How to get from windows back to the map that they were cut from: a function of `(images, windows, patches)`.

    What windows hold of padding is left out. Arguments as for `check_order`.
    """
    tiled = _tiled(site, image)
    problem = f"they tile no map of the image's {image[0]} x {image[1]}"
    if tiled is not None:
        size, cells, side = tiled
        match = _Match(site, size)
        ((_, problem),) = _ask([match], image, cells, side, disturbed, set())
    if tiled is None or problem:
        raise VicinalError(f"where the {site.windows} windows of {site.name} sit cannot be told: {problem}")
    back = [-place if place <= n // 2 else n - place for place, n in zip(match.shift, cells, strict=True)]

    def fold(values: Tensor, padded_first: bool) -> Tensor:
        laid = _map_of(values, site.grid, size, match.layout)
        if padded_first:
            return laid.roll(back, (1, 2))[:, : cells[0], : cells[1]]
        return laid[:, : cells[0], : cells[1]].roll(back, (1, 2))

    # Some models pad before they roll, some after.
    changes, patterns = (torch.cat(each) for each in zip(*match.seen, strict=True))
    likeness = [float((fold(changes, padded_first) * patterns).sum()) for padded_first in (False, True)]
    return functools.partial(fold, padded_first=likeness[1] > likeness[0])


def _patterns(cells: tuple[int, int], seed: int) -> Tensor:
    """`(PATTERNS, *cells)` of 0 and 1, half of each for every cell."""
    chance = torch.rand(PATTERNS, *cells, generator=torch.Generator().manual_seed(seed))
    return (chance.argsort(0).argsort(0) < PATTERNS // 2).float()


def enlarged(patterns: Tensor, image: tuple[int, int], side: int | None = None) -> Tensor:
    """Patterns `(images, rows, columns)` over the pixels of an image.

    With a `side`, cells are so many pixels wide and high, and the last ones may stick out; else they divide the image.
    """
    for axis, pixels in enumerate(image, start=1):
        places = torch.arange(pixels)
        cells = places * patterns.shape[axis] // pixels if side is None else places // side
        patterns = patterns.index_select(axis, cells)
    return patterns


def _changes(call: Call, site: Site, patterns: int) -> Tensor:
    """How much each patch of each window changes, image by image: `(patterns, windows, patches)`.

    Relative to its own mean over images, and to that of all patches in its image: what all share tells nothing.
    """
    assert call.queries is not None
    queries = heads_third(call.queries, site.heads, site.heads_axis).float()
    queries = queries.reshape(patterns + 1, site.windows, -1, site.grid.tokens, queries.shape[-1])
    change = (queries[1:] - queries[:1]).square().sum((2, 4))[:, :, site.grid.prefix :].cpu()
    mean = change.mean(0)
    change = (change / mean.clamp(min=1e-9 * float(mean.max()) + 1e-30) - 1).nan_to_num()
    return change - change.mean((1, 2), keepdim=True)


def _map_of(changes: Tensor, grid: Grid, size: tuple[int, int], layout: str) -> Tensor:
    """From windows to the map that they tile: `(images, windows, patches)` to `(images, *size)`."""
    down, right = size[0] // grid.height, size[1] // grid.width
    if layout == "columns":
        return changes.view(-1, down, right, grid.width, grid.height).permute(0, 1, 4, 2, 3).reshape(-1, *size)
    tiles = changes.view(-1, down, right, grid.height, grid.width)
    if layout == "dilated":  # a window takes every down-th row and every right-th column
        return tiles.permute(0, 3, 1, 4, 2).reshape(-1, *size)
    return tiles.permute(0, 1, 3, 2, 4).reshape(-1, *size)


def _windows_of(maps: Tensor, grid: Grid, size: tuple[int, int], layout: str) -> Tensor:
    """The way back, from a map that may lack the padding: `(images, rows, columns)` to `(images, windows, patches)`."""
    maps = F.pad(maps, (0, size[1] - maps.shape[2], 0, size[0] - maps.shape[1]))
    down, right = size[0] // grid.height, size[1] // grid.width
    if layout == "dilated":
        tiles = maps.view(-1, grid.height, down, grid.width, right).permute(0, 2, 4, 1, 3)
    else:
        tiles = maps.view(-1, down, grid.height, right, grid.width).permute(0, 1, 3, 2, 4)
        tiles = tiles.mT if layout == "columns" else tiles
    return tiles.reshape(len(maps), down * right, grid.patches)


def _tiled(site: Site, image: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int], int | None] | None:
    """Size of the map that the windows tile; of its part that is the image, since models pad what does not divide; and
    pixels a cell, if the last cells stick out of the image.
    """
    if site.windows == 1:
        return (site.grid.height, site.grid.width), (site.grid.height, site.grid.width), None
    sizes = [(tiles[0] * site.grid.height, tiles[1] * site.grid.width) for tiles in _rectangles(site.windows)]
    for size in sizes:
        cells = [
            next((n for n in range(full, full - window, -1) if pixels % n == 0), None)
            for full, window, pixels in zip(size, (site.grid.height, site.grid.width), image, strict=True)
        ]
        if cells[0] and cells[1] and cells[0] * image[1] == cells[1] * image[0]:
            return size, (cells[0], cells[1]), None
    # Cells that stick out: a map of an odd number of them was padded before it was halved.
    for size in sizes:
        for side in (2**power for power in range(1, 8)):
            high, wide = -(-image[0] // side), -(-image[1] // side)
            if 0 <= size[0] - high < site.grid.height and 0 <= size[1] - wide < site.grid.width:
                return size, (high, wide), side
    # No whole number of pixels a cell: such a map comes from convolutions that round.
    for size in sizes:
        if round(size[1] * image[0] / image[1]) == size[0]:
            return size, size, None
    return None


def _rectangles(count: int) -> Iterator[tuple[int, int]]:
    """Rows and columns of `count` tiles, squarest first."""
    rows = [n for n in range(1, count + 1) if count % n == 0]
    for n in sorted(rows, key=lambda n: abs(n - count / n)):
        yield n, count // n
