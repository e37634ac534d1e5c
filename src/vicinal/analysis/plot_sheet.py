"""Small pictures side by side on one scale: a row for each layer, a column for each head."""

import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

__all__ = ["Sheet", "draw_sheets", "same_heads"]

ACROSS = 6  # pictures in a row, at most, where there is one for each layer
# All lengths are in inches, so that the page can be laid out without drawing it: to have it measured takes seconds.
TILE, GAP = 0.85, 0.07  # of a picture, and between two
MARKED, NAMED = 0.16, 0.2  # below a row for marks and above one for names
LEFT, RIGHT, TOP, BOTTOM = 0.6, 1.1, 0.15, 0.32
LETTER, LINE = 0.068, 0.2  # of the names beside and above pictures; of the title
NARROWEST, LOWEST = 6.0, 1.9  # of a page, and of the pictures on it: the words beside them need as much

Row = list[tuple[str, NDArray[np.float64]]]
"""Pictures of one shape, `(rows, columns)`, with what is written above each."""


@dataclass(frozen=True, eq=False)
class Sheet:
    """Pictures around a query, all on one scale."""

    title: str
    pictures: Mapping[str, NDArray[np.float64]]
    """By layer: `(heads, rows, columns)`, with the query at `(rows // 2, columns // 2)`."""
    scale: "Normalize"
    colours: str
    unit: str
    """What the colour bar says."""
    ticks: Sequence[float] | None = None
    """Of the colour bar."""

    @cached_property
    def once(self) -> bool:
        """Whether there is one picture for each layer, because all its heads are the same."""
        return all(map(same_heads, self.pictures.values()))

    @cached_property
    def rows(self) -> list[tuple[str, Row]]:
        """The pictures as they are laid out, with what is written beside each row."""
        if self.once:
            tiles = [(name, values[0]) for name, values in self.pictures.items()]
            of_a_shape = (list(group) for _, group in itertools.groupby(tiles, key=lambda tile: tile[1].shape))
            return [("", row) for group in of_a_shape for row in _cut(group)]
        found, named = [], 0
        for layer, values in self.pictures.items():
            titles = (f"head {head + 1}" if head >= named else "" for head in range(len(values)))
            found.append((layer, list(zip(titles, values, strict=True))))
            named = max(named, len(values))
        return found

    @cached_property
    def tile(self) -> float:
        """Width of a picture: where names of layers are above, these have to fit."""
        return max(1.3, LETTER * max(map(len, self.pictures))) if self.once else TILE

    @cached_property
    def left(self) -> float:
        """What is to the left of the pictures."""
        return LEFT + LETTER * max(len(beside) for beside, _ in self.rows)

    @cached_property
    def width(self) -> float:
        """Of all pictures in a row."""
        return max(len(row) for _, row in self.rows) * (self.tile + GAP) - GAP

    @cached_property
    def marked(self) -> list[bool]:
        """Whether there are marks below a row; if not, those of the last one serve it too."""
        one_shape = len({values.shape[1:] for values in self.pictures.values()}) == 1
        return [self.once or not one_shape] * (len(self.rows) - 1) + [True]

    def heights(self) -> list[tuple[float, float, float]]:
        """Of each row: what is above, the pictures, what is below."""
        return [
            (NAMED if row[-1][0] else 0.0, self.tile * row[0][1].shape[0] / row[0][1].shape[1], GAP + MARKED * marked)
            for (_, row), marked in zip(self.rows, self.marked, strict=True)
        ]


def same_heads(values: NDArray[Any]) -> bool:
    """Whether all along the first axis is the same."""
    return bool((values == values[:1]).all())


def draw_sheets(sheets: Sequence[Sheet]) -> "Figure":
    """Draw sheets below each other."""
    from matplotlib.figure import Figure

    width = max(NARROWEST, *(sheet.left + sheet.width + RIGHT for sheet in sheets))
    titles = [textwrap.wrap(sheet.title, round(13 * width)) for sheet in sheets]
    heights = [
        TOP + LINE * len(title) + max(LOWEST, sum(map(sum, sheet.heights()))) + BOTTOM
        for title, sheet in zip(titles, sheets, strict=True)
    ]
    figure = Figure(figsize=(width, sum(heights)))
    top = 0.0
    for sheet, title, height in zip(sheets, titles, heights, strict=True):
        _write(figure, (0.1, top + TOP), "\n".join(title), fontsize=10, va="top", parse_math=False)
        _draw(figure, sheet, top + TOP + LINE * len(title), top + height - BOTTOM)
        top += height
    return figure


def _draw(figure: "Figure", sheet: Sheet, top: float, bottom: float) -> None:
    """The pictures of a sheet and their colour bar, from `top` to `bottom`."""
    down = (top + bottom - sum(map(sum, sheet.heights()))) / 2
    for (beside, row), (above, height, below), marked in zip(sheet.rows, sheet.heights(), sheet.marked, strict=True):
        axes = figure.add_axes(_place(figure, sheet.left, down + above, sheet.width, height))
        drawn = _draw_row(axes, sheet, row, height)
        axes.tick_params(labelsize=6, length=2, pad=1, labelbottom=marked)
        _write(figure, (sheet.left - 0.22, down + above + height / 2), beside, ha="right", va="center", fontsize=8)
        down += above + height + below
    middle = {"ha": "center", "va": "center", "fontsize": 8}
    _write(figure, (sheet.left + sheet.width / 2, down + 0.1), "columns from the query, patches", **middle)
    _write(figure, (0.12, (top + bottom) / 2), "rows from the query, patches", rotation=90, **middle)
    length = min(6.0, bottom - top - 0.3)
    beside_all = figure.add_axes(
        _place(figure, sheet.left + sheet.width + 0.15, (top + bottom - length) / 2, 0.15, length)
    )
    lowest: Any = sheet.scale.vmin
    too_low = any(bool((values < lowest).any()) for values in sheet.pictures.values())
    bar = figure.colorbar(drawn, cax=beside_all, extend="min" if too_low else "neither")
    if sheet.ticks is not None:
        bar.set_ticks(list(sheet.ticks), labels=[f"{tick:g}" for tick in sheet.ticks])
        bar.minorticks_off()
    bar.set_label(sheet.unit, fontsize=9)
    bar.ax.tick_params(labelsize=8)


def _draw_row(axes: "Axes", sheet: Sheet, row: Row, height: float) -> Any:
    """All pictures of a row in one set of axes, whose unit is an inch."""
    from matplotlib.patches import Rectangle

    rows, columns = row[0][1].shape
    places: dict[float, str] = {}
    for number, (title, picture) in enumerate(row):
        left = number * (sheet.tile + GAP)
        right = left + sheet.tile
        extent = (left, right, height, 0)
        drawn = axes.imshow(picture, norm=sheet.scale, cmap=sheet.colours, extent=extent, interpolation="nearest")
        axes.add_patch(Rectangle((left, 0), sheet.tile, height, fill=False, linewidth=0.6, clip_on=False))
        axes.text((left + right) / 2, -0.04, title, ha="center", va="bottom", fontsize=8, parse_math=False)
        places |= {left + sheet.tile * place: mark for place, mark in _marks(columns)}
    axes.set_xlim(0, sheet.width)
    axes.set_ylim(height, 0)
    axes.set_xticks(list(places), labels=list(places.values()))
    axes.set_yticks([height * place for place, _ in _marks(rows)], labels=[mark for _, mark in _marks(rows)])
    axes.spines[:].set_visible(False)
    return drawn


def _marks(count: int) -> Iterator[tuple[float, str]]:
    """Where the query is among so many patches, along a length of 1, and a round number of patches to each side."""
    query = count // 2
    far = count - 1 - query
    near = [steps for steps in (1, 2, 5, 10, 20, 50, 100, 200) if steps <= max(0.85 * far, min(far, 5))]
    for offset in [-near[-1], 0, near[-1]] if near else [0]:
        yield (query + offset + 0.5) / count, str(offset)


def _place(figure: "Figure", left: float, top: float, width: float, height: float) -> tuple[float, float, float, float]:
    """A rectangle, in inches from the upper left corner, as matplotlib takes it."""
    across, down = figure.get_size_inches()
    return left / across, 1 - (top + height) / down, width / across, height / down


def _write(figure: "Figure", place: tuple[float, float], text: str, **look: Any) -> None:
    """A text, in inches from the upper left corner."""
    across, down = figure.get_size_inches()
    figure.text(place[0] / across, 1 - place[1] / down, text, **look)


def _cut(tiles: Row) -> Iterator[Row]:
    """Rows of at most `ACROSS`, and about the same length."""
    length = -(-len(tiles) // -(-len(tiles) // ACROSS))
    for start in range(0, len(tiles), length):
        yield tiles[start : start + length]
