"""Do tokens sit where the grid says? Asked by disturbing the image.

Cells of the image are disturbed by chance, in another pattern for each copy of it. A token changes with the pattern of
the cell that it came from, however much attention has mixed the others in; so the map of changes, laid out as the grid
says, is compared with the patterns, at every shift. Tokens in their places give a peak; tokens out of order give none,
because cells next to each other have nothing in common.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vicinal.attachment.finding import Call
from vicinal.attachment.placing import Site, patch_queries
from vicinal.attachment.tiling import LAYOUTS, Cut, Map, Places, enlarged, map_of

__all__ = ["check_order", "find_places"]

PATTERNS = 4  # images disturbed in one run; every cell in half of them
RUNS = 16  # at most; one is enough for most models
SURE = 2.5  # standard deviations that a peak has to lie above the highest that chance gives
VARYING = 0.5  # of the squared mean: what places may differ by where all of them fit
FREEDOM = PATTERNS / (PATTERNS - 1)  # a cell's pattern has its last number from the others

OUT_OF_ORDER = "its tokens are not those of the image, row by row"
CANNOT_TELL = "where its tokens sit in the image cannot be told"


@dataclass
class _Match:
    """What was seen of one site, summed over runs."""

    site: Site
    map: Map
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Changes `(images, windows, patches)` and patterns `(images, rows, columns)`, run by run."""
    hopeless: bool = False
    """Whether more runs would hardly tell more."""
    cut: tuple[Cut, tuple[int, int]] = (Cut(LAYOUTS[0]), (0, 0))
    """How the windows were cut, and rows and columns that the map was rolled by before; as far as was seen."""

    @property
    def places(self) -> Places:
        """Where the patches are, as far as was seen."""
        if self.site.windows == 1:  # nobody rolls a map to look at all of it; convolutions may seem to, see `_near`
            return Places.of_cut(self.site, self.map, Cut(LAYOUTS[0]), (0, 0))
        return Places.of_cut(self.site, self.map, *self.cut)

    def add(self, call: Call, patterns: Tensor) -> None:
        """Take another run in."""
        self.seen.append((_changes(call, self.site, len(patterns)), patterns - patterns.mean((1, 2), keepdim=True)))

    def verdict(self) -> str | None:
        """`""` if tokens sit where they should, else what is wrong; None if there is too little to tell."""
        moments, chance = self._moments()
        cut = max(moments, key=lambda each: float(moments[each].max()))
        best = moments[cut]
        row, column = divmod(int(best.argmax()), best.shape[1])
        self.cut = cut, (row, column)
        ways = sum(each.numel() for each in moments.values())
        sure = (math.sqrt(2 * math.log(ways)) + SURE) * chance
        if float(best.max()) <= sure:
            self.hopeless = len(self.seen) >= 5 and float(best.max()) * (RUNS / len(self.seen)) ** 0.5 <= sure
            return None
        if self.site.windows == 1 and not self._near(best, row, column):
            return "its tokens are not in the places of the grid, but shifted"
        changes, patterns = self._all_seen()
        own = Places.of_cut(self.site, self.map, *self.cut).taken(patterns)
        fitting = _all_fit(changes, own, last=len(self.seen) == RUNS)
        if not fitting:
            return None if fitting is None else OUT_OF_ORDER
        shift = self._snapped(best, row, column)
        self.cut = (
            (Cut(cut.layout), shift) if shift == (0, 0) else (cut, shift)
        )  # no roll: the same, padded when it may
        return "its tokens run down the columns of the image, not along its rows" if cut.layout == "columns" else ""

    def is_cut_like(self, others: Sequence["_Match"]) -> bool:
        """Whether it is cut as one of the others, of the same map; there are few ways then, so less will do to tell."""
        cuts = {other.cut for other in others if other.map == self.map and other.site.windows == self.site.windows}
        if not cuts:
            return False
        moments, chance = self._moments()
        strength = {each: float(moments[each[0]][each[1]]) for each in cuts}
        *_, self.cut = sorted(cuts, key=lambda each: strength[each])
        second = max([0.0, *(strength[each] for each in cuts - {self.cut})])
        return strength[self.cut] - second > SURE * chance

    def _all_seen(self) -> tuple[Tensor, Tensor]:
        changes, patterns = (torch.cat(each) for each in zip(*self.seen, strict=True))
        return changes, patterns

    def _moments(self) -> tuple[dict[Cut, Tensor], float]:
        """Sum of the products of changes and patterns for every cut and shift, and what chance would give."""
        changes, patterns = self._all_seen()
        moments = {}
        for layout in LAYOUTS:
            if layout == "dilated" and self.site.windows == 1:
                continue
            for padded_first in (False, True)[: 1 + self.map.padded]:
                cut = Cut(layout, padded_first)
                laid = Places(self.map.size, cut.index(self.site, self.map.size)).laid(changes)
                area = self.map.size if padded_first else self.map.cells
                moments[cut] = _correlate(laid[:, : area[0], : area[1]], patterns)
        chance = float(changes.square().sum() * patterns.square().mean() * FREEDOM) ** 0.5
        return moments, chance

    def _near(self, moments: Tensor, row: int, column: int) -> bool:
        """Whether a shift is none, or what convolutions before attention do: they spread a cell over those around it,
        and the most of it may be a cell away. Behind prefix tokens that could also be a prefix miscounted, but then a
        token's own cell would have no say.
        """
        if row == column == 0:
            return True
        around = moments.roll((1 - row, 1 - column), (0, 1))[:3, :3].flatten().sort().values
        spread = float(around[-2]) > 0.25 * float(around[-1])
        close = all(_apart(place, 0, n) <= 1 for place, n in zip((row, column), moments.shape, strict=True))
        return spread and close and (self.site.grid.prefix == 0 or float(moments[0, 0]) > 0.3 * float(around[-1]))

    def _snapped(self, moments: Tensor, row: int, column: int) -> tuple[int, int]:
        """The shift by no or by half a window, as models have them, if it is next to what was seen; see `_near`."""
        (rows, columns), grid = moments.shape, self.site.grid
        usual = [(y, x) for y in (0, -(grid.height // 2) % rows) for x in (0, -(grid.width // 2) % columns)]
        for y, x in sorted(usual, key=lambda each: -float(moments[each])):
            close = _apart(row, y, rows) <= 1 and _apart(column, x, columns) <= 1
            if close and float(moments[y, x]) > 0.25 * float(moments[row, column]):
                return y, x
        return row, column


def _apart(one: int, other: int, count: int) -> int:
    """Steps between two places on a circle."""
    return min((one - other) % count, (other - one) % count)


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
    seen = chance > 0  # all but what is padding in every window
    fits = (changes * expected).sum((0, 1))[seen] / chance[seen].sqrt()
    mean = float(fits.mean()) ** 2
    varying = float(fits.var()) - 1
    error = 0.0 if last else 2 * (2 / fits.numel()) ** 0.5
    against = int((fits < 0).sum())
    if varying + error < VARYING * mean and against <= fits.numel() // (8 if last else 32):
        return True
    return False if last or varying - error > VARYING * mean else None


def _correlate(laid: Tensor, patterns: Tensor) -> Tensor:
    """Sum of their products over images and cells, for every shift of the patterns: `(rows, columns)`."""
    size = laid.shape[1:]  # which may be larger than the patterns: padding, where nothing is disturbed
    product = torch.fft.rfft2(laid) * torch.fft.rfft2(patterns, s=size).conj()
    moments: Tensor = torch.fft.irfft2(product, s=size)
    return moments.sum(0)


Disturbed = Callable[[Tensor, int], list[Call]]
"""Given masks of pixels `(images, height, width)` and a seed, runs a model on an image, and on copies of it in which
pixels of 1 are disturbed, and returns the calls."""


def check_order(sites: Sequence[Site], image: tuple[int, int], disturbed: Disturbed) -> dict[str, str]:
    """Which modules do not hold their tokens row by row, and why; by name.

    Args:
        sites: modules to ask, in the order in which they run.
        image: height and width.
        disturbed: runs the model.
    """
    matches, wrong = _matches(sites, image)
    trusted: set[type[nn.Module]] = set()
    for match, verdict in _ask(matches, image, disturbed, trusted, cuts=False):
        if verdict is None and type(match.site.module) not in trusted:
            verdict = OUT_OF_ORDER
        if verdict:
            wrong[match.site.name] = verdict
    return wrong


def find_places(
    sites: Sequence[Site], image: tuple[int, int], disturbed: Disturbed
) -> tuple[dict[str, Places], dict[str, str]]:
    """Where the patches of modules are in the image, and why that of others cannot be told; by name.

    A class that holds its tokens in order in one layer is trusted to do so in others, which may have mixed the image
    too much to be told; then windows need only be cut as they are elsewhere. Arguments as for `check_order`.
    """
    matches, wrong = _matches(sites, image)
    trusted: set[type[nn.Module]] = set()
    asked = list(_ask(matches, image, disturbed, trusted, cuts=True))
    known = [match for match, verdict in asked if verdict == ""]
    places = {}
    for match, verdict in asked:
        if verdict is None or (verdict == OUT_OF_ORDER and type(match.site.module) in trusted):
            alike = type(match.site.module) in trusted and (match.site.windows == 1 or match.is_cut_like(known))
            verdict = "" if alike else CANNOT_TELL
        if verdict:
            wrong[match.site.name] = verdict
        else:
            places[match.site.name] = match.places
    return places, wrong


def _matches(sites: Sequence[Site], image: tuple[int, int]) -> tuple[list[_Match], dict[str, str]]:
    matches, wrong = [], {}
    for site in sites:
        map = map_of(site, image)
        if map is None:
            wrong[site.name] = f"its {site.windows} windows of {site.grid} patches tile no map of the image"
        else:
            matches.append(_Match(site, map))
    return matches, wrong


def _ask(
    matches: list[_Match], image: tuple[int, int], disturbed: Disturbed, trusted: set[type[nn.Module]], *, cuts: bool
) -> Iterator[tuple[_Match, str | None]]:
    """Disturb the image until all that can be told is told; yields what is wrong with each match, as its verdict.

    A class that was seen to hold its tokens in order does so in later layers, which mix more: it becomes trusted. With
    `cuts`, how its windows are cut is asked nevertheless.
    """

    def enough(match: _Match, known: list[_Match]) -> bool:
        told = not cuts or match.site.windows == 1 or match.is_cut_like(known)
        return type(match.site.module) in trusted and told

    by_cells: dict[tuple[tuple[int, int], int | None], list[_Match]] = {}
    for match in matches:
        by_cells.setdefault((match.map.cells, match.map.side), []).append(match)
    for (cells, side), alike in by_cells.items():
        verdicts: dict[str, str | None] = {}
        undecided = alike
        for run in range(RUNS):
            if not undecided:
                break
            patterns = _patterns(cells, seed=run)
            seen = disturbed(enlarged(patterns, image, side), run)
            calls = {call.module: call for call in seen if call.queries is not None}
            for match in undecided:
                match.add(calls[match.site.module], patterns)
                verdicts[match.site.name] = match.verdict()
            known = [match for match in alike if verdicts[match.site.name] == ""]
            trusted |= {type(match.site.module) for match in known}
            undecided = [
                match
                for match in undecided
                if verdicts[match.site.name] is None and not match.hopeless and not (run and enough(match, known))
            ]
        for match in alike:
            yield match, verdicts[match.site.name]


def _patterns(cells: tuple[int, int], seed: int) -> Tensor:
    """`(PATTERNS, *cells)` of 0 and 1, half of each for every cell."""
    chance = torch.rand(PATTERNS, *cells, generator=torch.Generator().manual_seed(seed))
    return (chance.argsort(0).argsort(0) < PATTERNS // 2).float()


def _changes(call: Call, site: Site, patterns: int) -> Tensor:
    """How much each patch of each window changes, image by image: `(patterns, windows, patches)`.

    Relative to its own mean over images, and to that of all patches in its image: what all share tells nothing. Padding
    does not change.
    """
    queries = patch_queries(site, call, patterns + 1).float()
    change = (queries[1:] - queries[:1]).square().sum((2, 4)).cpu()
    mean = change.mean(0)
    real = mean > 1e-9 * mean.max()
    change = (change / mean - 1).where(real, 0).nan_to_num()
    return (change - change.sum((1, 2), keepdim=True) / real.sum().clamp(min=1)).where(real, 0)
