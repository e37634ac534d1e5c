"""Plots of mean attention distance and entropy of heads, layer by layer."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vicinal.analysis.attention_maps.statistics_result import AttentionStatistics
from vicinal.analysis.plot_style import GRAY, LINE_STYLES, PALETTE, wrap_title
from vicinal.errors import VicinalError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_statistics"]

MARKERS = "os^Dv<>P"  # one more than colors, so that 56 models differ in one or the other
TITLE_INCHES = 7.7


def draw_statistics(*statistics: AttentionStatistics) -> "Figure":
    """Returns a plot of distance and entropy by layer: a dot for each head, and a line through their means.

    Args:
        statistics: of one model, or of several to compare.

    Raises:
        VicinalError: if there are none.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    if not statistics:
        raise VicinalError("there are no statistics to draw; give at least one")
    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    far, wide = figure.subplots(1, 2)
    for number, each in enumerate(statistics):
        style = _style(number)
        layers = np.array([layer.layer for layer in each.layers])
        apart = min(0.16, 0.8 / len(statistics))  # models do not cover each other, and stay at their layer
        beside = layers + apart * (number - (len(statistics) - 1) / 2)
        _draw_heads(far, beside, [layer.distance_pixels for layer in each.layers], style)
        _draw_heads(wide, beside, [layer.relative_entropy for layer in each.layers], style)
        far.plot(layers, [layer.uniform_pixels for layer in each.layers], color=GRAY, linestyle="--", linewidth=1)
    wide.axhline(1, color=GRAY, linestyle="--", linewidth=1)
    far.set_ylabel("mean attention distance, pixels", fontsize=9)
    wide.set_ylabel("entropy of attention / log(number of keys)", fontsize=9)
    _second_axes(far, wide, statistics)
    first = statistics[0].layers[0]
    for axes, title in ((far, "attention distance"), (wide, "attention entropy")):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(f"attention layer ({first.layer} is {first.name})", fontsize=9, parse_math=False)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(labelsize=8)
        axes.spines["top"].set_visible(False)
    legend = [Line2D([], [], **_style(number), label=each.model) for number, each in enumerate(statistics)]
    legend.append(Line2D([], [], color=GRAY, linestyle="--", linewidth=1, label="uniform attention"))
    figure.legend(handles=legend, loc="outside lower center", ncols=min(4, len(legend)), fontsize=9)
    images = " and ".join(dict.fromkeys(f"{each.images:,}" for each in statistics))
    name = f"{statistics[0].model}: a" if len(statistics) == 1 else "A"
    title = f"{name}ttention on {images} image{'' if images == '1' else 's'}; a dot is a head, the line their mean"
    figure.suptitle(wrap_title(title, TITLE_INCHES), fontsize=11, parse_math=False)
    return figure


def _style(number: int) -> dict[str, Any]:
    """Returns color, marker and line style of one of several models, counted from 0."""
    style = LINE_STYLES[number // len(PALETTE) % len(LINE_STYLES)]
    return {"color": PALETTE[number % len(PALETTE)], "marker": MARKERS[number % len(MARKERS)], "linestyle": style}


def _draw_heads(axes: "Axes", layers: NDArray[Any], values: Sequence[Sequence[float]], style: dict[str, Any]) -> None:
    """Draws a dot for each head, and a line through the means of layers."""
    across = [layer for layer, heads in zip(layers, values, strict=True) for _ in heads]
    dots, line = {**style, "linestyle": ""}, {**style, "marker": ""}
    axes.plot(across, [value for heads in values for value in heads], **dots, markersize=4, alpha=0.5)
    axes.plot(layers, [sum(heads) / len(heads) for heads in values], **line, linewidth=1.5)


def _second_axes(far: "Axes", wide: "Axes", statistics: Sequence[AttentionStatistics]) -> None:
    """Adds axes in patches and nats on the right, if these units are the same for all layers."""
    layers = [layer for each in statistics for layer in each.layers]
    sides = {side for layer in layers for side in layer.patch}
    if len(sides) == 1:
        (side,) = sides
        _add_unit(far, 1 / side, f"patches of {side:g} pixels")
    keys = {layer.keys for layer in layers}
    if len(keys) == 1 and all(layer.windows == 1 for layer in layers):  # windows can mask some of their keys
        _add_unit(wide, math.log(next(iter(keys))), "nats")


def _add_unit(axes: "Axes", factor: float, label: str) -> None:
    """Adds a second axis on the right, in another unit."""
    conversions: Any = (lambda y: y * factor, lambda y: y / factor)
    second = axes.secondary_yaxis("right", functions=conversions)
    second.set_ylabel(label, fontsize=9)
    second.tick_params(labelsize=8)
