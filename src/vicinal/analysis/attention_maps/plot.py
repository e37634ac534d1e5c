"""Pictures of attention: maps over the image, rollouts, and how far and how widely the heads of each layer look."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vicinal.analysis.attention_maps.measure import AttentionMap
from vicinal.analysis.attention_maps.statistics import AttentionStatistics
from vicinal.errors import VicinalError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

__all__ = ["Panel", "draw_maps", "draw_panels", "draw_rollout", "draw_statistics"]

COLOURS = "viridis"
# Okabe and Ito's colours; vermilion stands out from those of the maps.
MARK = "#D55E00"
LINES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
MARKERS = "os^Dv<>P"  # one more than colours, so that 56 models differ in one or the other
STYLES = ("-", "-.", ":")
FAINTEST = 0.75  # what black is drawn as in a picture under a map
ACROSS = 6  # pictures in a row, where columns mean nothing
LONGEST = 26  # title of a picture, in characters
# In inches:
SIDE = 1.5  # width of a picture, at least
GAP = 0.08
TITLE = 0.26  # above each picture


@dataclass(frozen=True, eq=False)
class Panel:
    """A picture, alone or under attention."""

    title: str
    picture: NDArray[Any]
    """`(height, width, channels)`, 1 channel or 3, of values between 0 and 1."""
    attention: NDArray[Any] | None = None
    """`(rows, columns)`."""
    of: AttentionMap | None = None
    """Whose query is outlined, if it is a patch."""

    def __post_init__(self) -> None:
        pixels = self.picture
        if pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or pixels.min() < 0 or pixels.max() > 1:
            raise VicinalError(
                "a picture is (height, width, channels), 1 channel or 3, of values between 0 and 1; given "
                f"{pixels.dtype} {pixels.shape}, from {pixels.min():.3g} to {pixels.max():.3g}"
            )

    @property
    def relative(self) -> NDArray[Any] | None:
        """Attention relative to that of the mean patch, which gets 1."""
        return None if self.attention is None else self.attention / (self.attention.mean() or 1)


def draw_maps(maps: Sequence[AttentionMap], picture: NDArray[Any], *, image: int = 0) -> "Figure":
    """Maps over a picture, on one colour scale: a row for each layer and a column for each head.

    Maps of a single layer, and means over heads, follow each other. The query patch is outlined.

    Args:
        maps: of one model, as `attention_maps` gives them.
        picture: what the model saw, `(height, width, channels)`, 1 channel or 3, of values between 0 and 1.
        image: which of the images of the maps it is, from 0.
    """
    if not maps:
        raise VicinalError("there are no maps to draw; give at least one")
    if not 0 <= image < len(maps[0].values):
        raise VicinalError(f"image is one of {len(maps[0].values)} that there are maps of, from 0; given {image}")
    rows = []
    for each in maps:
        titles = [each.layer] if each.heads is None else [f"head {head + 1}" for head in each.heads]
        attention = each.values[image].numpy(force=True)
        panels = [Panel(title, picture, one, each) for title, one in zip(titles, attention, strict=True)]
        rows.append([Panel(each.layer, picture, of=each), *panels])
    if len(maps) == 1 or max(map(len, rows)) == 2:
        rows = _wrapped(
            [[Panel("picture", picture, of=maps[0])], *([panel] for panels in rows for panel in panels[1:])]
        )
    layers = maps[0].layer if len(maps) == 1 else f"{maps[0].layer} to {maps[-1].layer}"
    others = [each.whose for each in maps if isinstance(each.query, str)]
    whose = " or ".join(dict.fromkeys([maps[0].whose, *others]))
    heads = ", mean over heads" if maps[0].heads is None else ""
    title = f"{maps[0].model}, {layers}: attention of {whose}{heads}"
    return draw_panels(rows, title)


def draw_rollout(found: AttentionMap, pictures: NDArray[Any], names: Sequence[str] | None = None) -> "Figure":
    """A rollout over its pictures, each next to the picture itself, on one colour scale.

    Args:
        found: as `rollout` gives it.
        pictures: what the model saw, `(n, height, width, channels)`, 1 channel or 3, of values between 0 and 1.
        names: what to write above each.
    """
    from matplotlib.colors import Normalize

    names = [f"image {number + 1}" for number in range(len(pictures))] if names is None else names
    if not len(pictures) == len(names) == len(found.values):
        raise VicinalError(
            f"a rollout of {len(found.values)} images is drawn over as many pictures and names, given {len(pictures)} "
            f"and {len(names)}"
        )
    attention = found.map.numpy(force=True)
    pairs = [
        [Panel(name, picture, of=found), Panel("", picture, one, found)]
        for name, picture, one in zip(names, pictures, attention, strict=True)
    ]
    rows = _wrapped(pairs)
    scale = Normalize(float(_seen(rows).min()), _top(rows))  # from the least on: skips give every patch its share
    return draw_panels(rows, f"{found.model}: {found.layer}, seen by {found.whose}", scale)


def _seen(rows: Sequence[Sequence[Panel]]) -> NDArray[Any]:
    """All attention that is drawn."""
    return np.concatenate([panel.relative.ravel() for row in rows for panel in row if panel.relative is not None])


def _top(rows: Sequence[Sequence[Panel]]) -> float:
    """Where colours end: below the few patches that would leave little colour for all others."""
    return float(np.quantile(_seen(rows), 0.99))


def _wrapped(groups: Sequence[list[Panel]]) -> list[list[Panel]]:
    """Rows of about the same length; groups stay together."""
    down = math.ceil(len(groups) * len(groups[0]) / ACROSS)
    across = math.ceil(len(groups) / down)
    return [list(chain(*groups[start : start + across])) for start in range(0, len(groups), across)]


def draw_panels(rows: Sequence[Sequence[Panel]], title: str, scale: "Normalize | None" = None) -> "Figure":
    """Panels in rows, a bar of colours, and a title.

    Args:
        rows: pictures of one shape; at least one is under attention.
        title: above all.
        scale: of the colours; by default the root of attention, from 0 on.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    scale = scale or PowerNorm(0.5, 0, max(2.0, _top(rows)))
    # All has its place in inches: a layout engine takes seconds.
    down, across = len(rows), max(map(len, rows))
    shape = rows[0][0].picture.shape
    side = max(SIDE, 4.5 / across, 1.4 / down * shape[1] / shape[0])  # room for the title and the bar's label
    tall = side * shape[0] / shape[1]
    wide = across * (side + GAP) + 1.1
    lines = textwrap.wrap(title, int(13 * wide))
    high = down * (tall + TITLE) + 0.2 * len(lines) + 0.2
    figure = Figure(figsize=(wide, high))
    figure.suptitle("\n".join(lines), fontsize=10, y=1 - 0.08 / high, va="top", parse_math=False)
    drawn: Any = None
    for down_to, panels in enumerate(rows, start=1):
        for number, panel in enumerate(panels):
            left, bottom = GAP + number * (side + GAP), GAP + (down - down_to) * (tall + TITLE)
            axes = figure.add_axes((left / wide, bottom / high, side / wide, tall / high))
            drawn = _show(axes, panel, scale) or drawn
    length = down * (tall + TITLE) - TITLE
    beside = figure.add_axes((1 - 1 / wide, (GAP + max(length - 5, 0)) / high, 0.14 / wide, min(length, 5) / high))
    bar = figure.colorbar(drawn, cax=beside, extend="max")
    bar.set_label("attention\n(mean patch = 1" + ", root scale" * isinstance(scale, PowerNorm) + ")", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return figure


def _show(axes: "Axes", panel: Panel, scale: "Normalize") -> Any:
    """Draw a panel; returns what has colours, if it does."""
    from matplotlib.patches import Rectangle

    height, width = panel.picture.shape[:2]
    whole: dict[str, Any] = {"extent": (0, width, height, 0), "interpolation": "nearest"}
    gray: dict[str, Any] = {"cmap": "gray", "vmin": 0, "vmax": 1}
    drawn = None
    if panel.relative is None:
        axes.imshow(panel.picture.squeeze(), **gray, **whole)
    else:
        # Light and faint, so that what is dark or bright in the picture is not taken for colours of the map.
        axes.imshow(FAINTEST + (1 - FAINTEST) * panel.picture.mean(2), **gray, **whole)
        drawn = axes.imshow(panel.relative, cmap=COLOURS, norm=scale, alpha=0.7, **whole)
    if panel.of is not None and isinstance(panel.of.query, tuple):
        rows, columns = panel.of.query_grid or panel.of.values.shape[-2:]
        row, column = panel.of.query
        corner, size = (column * width / columns, row * height / rows), (width / columns, height / rows)
        axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor=MARK, linewidth=1.5))
    axes.set_axis_off()
    title = panel.title if len(panel.title) <= LONGEST else "..." + panel.title[3 - LONGEST :]
    axes.set_title(title, fontsize=8, y=1, pad=4, parse_math=False)
    return drawn


def draw_statistics(*statistics: AttentionStatistics) -> "Figure":
    """Distance and entropy by layer: a dot for each head, and a line through their means.

    Args:
        statistics: of one model, or of several to compare.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    if not statistics:
        raise VicinalError("there are no statistics to draw; give at least one")
    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    far, wide = figure.subplots(1, 2)
    for number, each in enumerate(statistics):
        look = _look(number)
        layers = np.array([layer.layer for layer in each.layers])
        apart = min(0.16, 0.8 / len(statistics))  # so that models do not hide each other, nor come to another layer
        beside = layers + apart * (number - (len(statistics) - 1) / 2)
        _heads(far, beside, [layer.distance_pixels for layer in each.layers], look)
        _heads(wide, beside, [layer.relative_entropy for layer in each.layers], look)
        far.plot(layers, [layer.uniform_pixels for layer in each.layers], color="gray", linestyle="--", linewidth=1)
    wide.axhline(1, color="gray", linestyle="--", linewidth=1)
    far.set_ylabel("mean attention distance, pixels", fontsize=9)
    wide.set_ylabel("entropy of attention / log(number of keys)", fontsize=9)
    _second_axes(far, wide, statistics)
    first = statistics[0].layers[0]
    for axes, title in ((far, "how far heads look"), (wide, "how widely heads look")):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(f"attention layer ({first.layer} is {first.name})", fontsize=9, parse_math=False)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(labelsize=8)
        axes.spines["top"].set_visible(False)
    legend = [Line2D([], [], **_look(number), label=each.model) for number, each in enumerate(statistics)]
    legend.append(Line2D([], [], color="gray", linestyle="--", linewidth=1, label="if all keys were seen alike"))
    figure.legend(handles=legend, loc="outside lower center", ncols=min(4, len(legend)), fontsize=9)
    images = " and ".join(dict.fromkeys(f"{each.images:,}" for each in statistics))
    name = f"{statistics[0].model}: a" if len(statistics) == 1 else "A"
    title = f"{name}ttention on {images} image{'' if images == '1' else 's'}; a dot is a head, the line their mean"
    figure.suptitle(textwrap.fill(title, 100), fontsize=11, parse_math=False)
    return figure


def _look(number: int) -> dict[str, Any]:
    """Of one of several models."""
    style = STYLES[number // len(LINES) % len(STYLES)]
    return {"color": LINES[number % len(LINES)], "marker": MARKERS[number % len(MARKERS)], "linestyle": style}


def _heads(axes: "Axes", places: NDArray[Any], values: Sequence[Sequence[float]], look: dict[str, Any]) -> None:
    """Dots of all heads, and a line through the means of layers."""
    across = [place for place, heads in zip(places, values, strict=True) for _ in heads]
    dots, line = {**look, "linestyle": ""}, {**look, "marker": ""}
    axes.plot(across, [value for heads in values for value in heads], **dots, markersize=4, alpha=0.5)
    axes.plot(places, [sum(heads) / len(heads) for heads in values], **line, linewidth=1.5)


def _second_axes(far: "Axes", wide: "Axes", statistics: Sequence[AttentionStatistics]) -> None:
    """Patches and nats, to the right, where they are the same for all layers."""
    layers = [layer for each in statistics for layer in each.layers]
    sides = {side for layer in layers for side in layer.patch}
    if len(sides) == 1:
        (side,) = sides
        _beside(far, 1 / side, f"patches of {side:g} pixels")
    keys = {layer.keys for layer in layers}
    if len(keys) == 1 and all(layer.windows == 1 for layer in layers):  # windows hide some of their keys
        _beside(wide, math.log(next(iter(keys))), "nats")


def _beside(axes: "Axes", factor: float, label: str) -> None:
    """A second axis, on the right."""
    to_and_fro: Any = (lambda y: y * factor, lambda y: y / factor)
    second = axes.secondary_yaxis("right", functions=to_and_fro)
    second.set_ylabel(label, fontsize=9)
    second.tick_params(labelsize=8)
