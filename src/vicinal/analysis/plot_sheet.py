"""Sheets of small pictures on one scale: a row for each layer, a column for each head."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vicinal.analysis.plot_style import add_color_bar, wrap_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

__all__ = ["Sheet", "draw_sheets", "same_heads"]

MAX_COLUMNS = 6  # pictures in a row, if there is one for each layer
# In inches: positions are computed here, because a layout engine takes seconds.
TILE_WIDTH, GAP = 0.85, 0.07  # of a picture, and between two
TICKS_HEIGHT, NAMES_HEIGHT = 0.16, 0.2  # below a row for tick labels, above one for names
LEFT, RIGHT, TOP, BOTTOM = 0.6, 1.1, 0.15, 0.32  # margins
LETTER_WIDTH, LINE_HEIGHT = 0.068, 0.2  # of names beside and above pictures; of the title
MIN_WIDTH, MIN_HEIGHT = 6.0, 1.9  # of a page, and of the pictures on it, for the labels beside them
MAX_BAR_LENGTH = 6.0

Row = list[tuple[str, NDArray[np.float64]]]
"""Pictures of one shape, `(rows, columns)`, with the title of each."""


@dataclass(frozen=True, eq=False)
class Sheet:
    """Pictures around a query, all on one scale."""

    title: str
    pictures: Mapping[str, NDArray[np.float64]]
    """By layer: `(heads, rows, columns)`, with the query at `(rows // 2, columns // 2)`."""
    scale: "Normalize"
    colors: str
    """Name of the colormap."""
    unit: str
    """Label of the color bar."""
    ticks: Sequence[float] | None = None
    """Ticks of the color bar."""

    @cached_property
    def heads_are_equal(self) -> bool:
        """Whether there is one picture for each layer, because all its heads are the same."""
        return all(map(same_heads, self.pictures.values()))

    @cached_property
    def rows(self) -> list[tuple[str, Row]]:
        """The pictures row by row, with the label of each row."""
        if self.heads_are_equal:
            tiles = [(name, values[0]) for name, values in self.pictures.items()]
            of_a_shape = (list(group) for _, group in itertools.groupby(tiles, key=lambda tile: tile[1].shape))
            return [("", row) for group in of_a_shape for row in _wrap(group)]
        found, named = [], 0
        for layer, values in self.pictures.items():
            titles = (f"head {head + 1}" if head >= named else "" for head in range(len(values)))
            found.append((layer, list(zip(titles, values, strict=True))))
            named = max(named, len(values))
        return found

    @cached_property
    def tile(self) -> float:
        """Width of a picture; names of layers above it have to fit."""
        return max(1.3, LETTER_WIDTH * max(map(len, self.pictures))) if self.heads_are_equal else TILE_WIDTH

    @cached_property
    def left(self) -> float:
        """Width of the space to the left of the pictures."""
        return LEFT + LETTER_WIDTH * max(len(beside) for beside, _ in self.rows)

    @cached_property
    def width(self) -> float:
        """Width of the longest row of pictures."""
        return max(len(row) for _, row in self.rows) * (self.tile + GAP) - GAP

    @cached_property
    def has_tick_labels(self) -> list[bool]:
        """Whether there are tick labels below each row; those of the last row serve rows of the same shape."""
        one_shape = len({values.shape[1:] for values in self.pictures.values()}) == 1
        return [self.heads_are_equal or not one_shape] * (len(self.rows) - 1) + [True]

    def heights(self) -> list[tuple[float, float, float]]:
        """Returns, for each row, the height of the space above, of the pictures, and of the space below."""
        return [
            (
                NAMES_HEIGHT if row[-1][0] else 0.0,
                self.tile * row[0][1].shape[0] / row[0][1].shape[1],
                GAP + TICKS_HEIGHT * labels,
            )
            for (_, row), labels in zip(self.rows, self.has_tick_labels, strict=True)
        ]


def same_heads(values: NDArray[Any]) -> bool:
    """Returns whether all slices along the first axis are the same."""
    return bool((values == values[:1]).all())


def draw_sheets(sheets: Sequence[Sheet]) -> "Figure":
    """Returns a figure of sheets below each other."""
    from matplotlib.figure import Figure

    width = max(MIN_WIDTH, *(sheet.left + sheet.width + RIGHT for sheet in sheets))
    titles = [wrap_title(sheet.title, width) for sheet in sheets]
    title_heights = [LINE_HEIGHT * (title.count("\n") + 1) for title in titles]
    heights = [
        TOP + above + max(MIN_HEIGHT, sum(map(sum, sheet.heights()))) + BOTTOM
        for above, sheet in zip(title_heights, sheets, strict=True)
    ]
    figure = Figure(figsize=(width, sum(heights)))
    top = 0.0
    for sheet, title, above, height in zip(sheets, titles, title_heights, heights, strict=True):
        _write(figure, (0.1, top + TOP), title, fontsize=10, va="top", parse_math=False)
        _draw(figure, sheet, top + TOP + above, top + height - BOTTOM)
        top += height
    return figure


def _draw(figure: "Figure", sheet: Sheet, top: float, bottom: float) -> None:
    """Draws the pictures of a sheet and their color bar, from `top` to `bottom`."""
    down = (top + bottom - sum(map(sum, sheet.heights()))) / 2
    rows = zip(sheet.rows, sheet.heights(), sheet.has_tick_labels, strict=True)
    for (beside, row), (above, height, below), labels in rows:
        axes = figure.add_axes(_place(figure, sheet.left, down + above, sheet.width, height))
        drawn = _draw_row(axes, sheet, row, height)
        axes.tick_params(labelsize=6, length=2, pad=1, labelbottom=labels)
        _write(figure, (sheet.left - 0.22, down + above + height / 2), beside, ha="right", va="center", fontsize=8)
        down += above + height + below
    centered = {"ha": "center", "va": "center", "fontsize": 8}
    _write(figure, (sheet.left + sheet.width / 2, down + 0.1), "columns from the query, patches", **centered)
    _write(figure, (0.12, (top + bottom) / 2), "rows from the query, patches", rotation=90, **centered)
    length = min(MAX_BAR_LENGTH, bottom - top - 0.3)
    beside_all = figure.add_axes(
        _place(figure, sheet.left + sheet.width + 0.15, (top + bottom - length) / 2, 0.15, length)
    )
    lowest: Any = sheet.scale.vmin
    too_low = any(bool((values < lowest).any()) for values in sheet.pictures.values())
    bar = add_color_bar(figure, drawn, sheet.unit, cax=beside_all, extend="min" if too_low else "neither")
    if sheet.ticks is not None:
        bar.set_ticks(list(sheet.ticks), labels=[f"{tick:g}" for tick in sheet.ticks])
        bar.minorticks_off()


def _draw_row(axes: "Axes", sheet: Sheet, row: Row, height: float) -> Any:
    """Draws all pictures of a row in one set of axes, whose unit is an inch, and returns the last image."""
    from matplotlib.patches import Rectangle

    rows, columns = row[0][1].shape
    places: dict[float, str] = {}
    for number, (title, picture) in enumerate(row):
        left = number * (sheet.tile + GAP)
        right = left + sheet.tile
        extent = (left, right, height, 0)
        drawn = axes.imshow(picture, norm=sheet.scale, cmap=sheet.colors, extent=extent, interpolation="nearest")
        axes.add_patch(Rectangle((left, 0), sheet.tile, height, fill=False, linewidth=0.6, clip_on=False))
        axes.text((left + right) / 2, -0.04, title, ha="center", va="bottom", fontsize=8, parse_math=False)
        places |= {left + sheet.tile * place: label for place, label in _ticks(columns)}
    axes.set_xlim(0, sheet.width)
    axes.set_ylim(height, 0)
    axes.set_xticks(list(places), labels=list(places.values()))
    axes.set_yticks([height * place for place, _ in _ticks(rows)], labels=[label for _, label in _ticks(rows)])
    axes.spines[:].set_visible(False)
    return drawn


def _ticks(count: int) -> Iterator[tuple[float, str]]:
    """Yields position, along a length of 1, and label of the query among `count` patches and of round offsets."""
    query = count // 2
    far = count - 1 - query
    near = [steps for steps in (1, 2, 5, 10, 20, 50, 100, 200) if steps <= max(0.85 * far, min(far, 5))]
    for offset in [-near[-1], 0, near[-1]] if near else [0]:
        yield (query + offset + 0.5) / count, str(offset)


def _place(figure: "Figure", left: float, top: float, width: float, height: float) -> tuple[float, float, float, float]:
    """Returns a rectangle, given in inches from the upper left corner, as matplotlib takes it."""
    across, down = figure.get_size_inches()
    return left / across, 1 - (top + height) / down, width / across, height / down


def _write(figure: "Figure", place: tuple[float, float], text: str, **look: Any) -> None:
    """Writes a text at a place in inches from the upper left corner."""
    across, down = figure.get_size_inches()
    figure.text(place[0] / across, 1 - place[1] / down, text, **look)


def _wrap(tiles: Row) -> Iterator[Row]:
    """Yields rows of at most `MAX_COLUMNS` pictures, of about the same length."""
    length = -(-len(tiles) // -(-len(tiles) // MAX_COLUMNS))
    for start in range(0, len(tiles), length):
        yield tiles[start : start + length]
