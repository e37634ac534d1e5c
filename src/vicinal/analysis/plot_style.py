"""The style of all plots: palette, resolution, color bars, wrapped titles, and scales on which white is 1."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vicinal.analysis.output_files import temporary_file

if TYPE_CHECKING:
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

__all__ = [
    "BLACK",
    "BLUE",
    "DIVERGING",
    "DPI",
    "GRAY",
    "GREEN",
    "LINE_STYLES",
    "ORANGE",
    "PALETTE",
    "PURPLE",
    "SEQUENTIAL",
    "SKY_BLUE",
    "VERMILION",
    "WHITE",
    "YELLOW",
    "add_color_bar",
    "distinct_colors",
    "factor_scale",
    "line_style",
    "save_figure",
    "wrap_title",
]

# Okabe and Ito's palette, which people with color vision deficiency can tell apart, in the order of use.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
VERMILION, SKY_BLUE, BLACK, YELLOW = "#D55E00", "#56B4E9", "#000000", "#F0E442"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY_BLUE, BLACK)  # yellow is too light on white
GRAY, WHITE = "#666666", "#FFFFFF"
LINE_STYLES = ("-", "-.", ":", "--")
SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"
DPI = 130
CHARACTERS_PER_INCH = 13  # of a title in 10 points


def save_figure(figure: "Figure", path: str | Path) -> None:
    """Writes a figure to a file, whole or not at all; the ending of `path` chooses the format."""
    with temporary_file(Path(path)) as temporary:
        figure.savefig(temporary, dpi=DPI)


def wrap_title(title: str, inches: float) -> str:
    """Returns a title in lines that fit into a figure of the given width."""
    return "\n".join(textwrap.wrap(title, round(CHARACTERS_PER_INCH * inches)))


def line_style(number: int) -> dict[str, Any]:
    """Returns color and line style of one of several lines, counted from 0; the first 28 differ."""
    return {"color": PALETTE[number % len(PALETTE)], "linestyle": LINE_STYLES[number % len(LINE_STYLES)]}


def distinct_colors(count: int) -> Sequence[str]:
    """Returns at least `count` different colors, none of them black: the palette, or else a colormap's."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    colors = [color for color in PALETTE if color != BLACK]
    if count <= len(colors):
        return colors
    return [to_hex(colormaps[SEQUENTIAL](place)) for place in np.linspace(0, 0.92, count)]


def factor_scale(low: float, high: float, *, logarithmic: bool = False) -> "tuple[Normalize, str]":
    """Returns the scale and the colormap of factors from `low` to `high`.

    If 1, the factor that changes nothing, is between them, it is white in the middle of a diverging colormap; else the
    colormap is sequential.

    Args:
        low: smallest factor; above 0 if the scale is logarithmic.
        high: largest factor.
        logarithmic: whether the scale is.
    """
    from matplotlib.colors import LogNorm, Normalize

    normalize = LogNorm if logarithmic else Normalize
    if not (low < 1 < high or low == high):
        return normalize(low, high), SEQUENTIAL
    if logarithmic:
        high = max(high, 1 / low, 2.0 if low == high else 1.0)
        return normalize(1 / high, high), DIVERGING
    reach = max(high - 1, 1 - low) or 1.0
    return normalize(1 - reach, 1 + reach), DIVERGING


def add_color_bar(figure: Any, drawn: Any, label: str = "", *, fontsize: int = 8, **placement: Any) -> Any:
    """Adds a color bar to a figure and returns it.

    Args:
        figure: a figure or subfigure.
        drawn: the image whose colors the bar explains.
        label: beside the bar.
        fontsize: of the numbers; the label is one point larger.
        placement: arguments of matplotlib's `Figure.colorbar`, such as `cax` or `ax`.
    """
    bar = figure.colorbar(drawn, **placement)
    bar.set_label(label, fontsize=fontsize + 1)
    bar.ax.tick_params(labelsize=fontsize)
    return bar
