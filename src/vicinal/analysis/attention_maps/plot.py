"""Plots of attention maps and rollouts over the image."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vicinal.analysis.attention_maps.result import AttentionMap
from vicinal.analysis.plot_style import SEQUENTIAL, VERMILION, add_color_bar, wrap_title
from vicinal.errors import VicinalError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

__all__ = ["Panel", "draw_maps", "draw_panels", "draw_rollout"]

QUERY_COLOR = VERMILION  # stands out from the colormap
BLACK_LEVEL = 0.75  # gray level of black in an image under a map
MAX_COLUMNS = 6  # panels in a row, if columns have no meaning
MAX_TITLE_LENGTH = 26  # characters, of a panel
# In inches:
MIN_WIDTH = 1.5  # of a panel
GAP = 0.08
TITLE_HEIGHT = 0.26  # above each panel
LINE_HEIGHT = 0.2  # of the title above all
MAX_BAR_LENGTH = 5.0


@dataclass(frozen=True, eq=False)
class Panel:
    """An image, alone or under its attention map."""

    title: str
    picture: NDArray[Any]
    """`(height, width, channels)`, 1 channel or 3, of values in [0, 1]."""
    attention: NDArray[Any] | None = None
    """Attention to each patch, `(rows, columns)`."""
    of: AttentionMap | None = None
    """The map whose query is outlined, if it is a patch."""

    def __post_init__(self) -> None:
        pixels = self.picture
        if pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or pixels.min() < 0 or pixels.max() > 1:
            raise VicinalError(
                "picture must be (height, width, channels), 1 channel or 3, of values in [0, 1], got "
                f"{pixels.dtype} {pixels.shape}, from {pixels.min():.3g} to {pixels.max():.3g}"
            )

    @property
    def relative(self) -> NDArray[Any] | None:
        """Attention relative to that of the mean patch."""
        return None if self.attention is None else self.attention / (self.attention.mean() or 1)


def draw_maps(maps: Sequence[AttentionMap], picture: NDArray[Any], *, image: int = 0) -> "Figure":
    """Returns a plot of maps over an image, on one color scale: a row for each layer, a column for each head.

    Maps of a single layer, and means over heads, are wrapped into rows. The query patch is outlined.

    Args:
        maps: of one model, as `attention_maps` returns them.
        picture: the image, `(height, width, channels)`, 1 channel or 3, of values in [0, 1].
        image: its index among the images of the maps, from 0.

    Raises:
        VicinalError: if there are no maps, or no such image.
    """
    if not maps:
        raise VicinalError("there are no maps to draw; give at least one")
    if not 0 <= image < len(maps[0].values):
        raise VicinalError(f"image must be an index from 0 to {len(maps[0].values) - 1}, got {image}")
    rows = []
    for each in maps:
        titles = [each.layer] if each.heads is None else [f"head {head + 1}" for head in each.heads]
        attention = each.values[image].numpy(force=True)
        panels = [Panel(title, picture, one, each) for title, one in zip(titles, attention, strict=True)]
        rows.append([Panel(each.layer, picture, of=each), *panels])
    if len(maps) == 1 or max(map(len, rows)) == 2:
        rows = _wrapped([[Panel("image", picture, of=maps[0])], *([panel] for panels in rows for panel in panels[1:])])
    layers = maps[0].layer if len(maps) == 1 else f"{maps[0].layer} to {maps[-1].layer}"
    others = [each.query_text for each in maps if isinstance(each.query, str)]
    queries = " or ".join(dict.fromkeys([maps[0].query_text, *others]))
    heads = ", mean over heads" if maps[0].heads is None else ""
    title = f"{maps[0].model}, {layers}: attention of {queries}{heads}"
    return draw_panels(rows, title)


def draw_rollout(found: AttentionMap, pictures: NDArray[Any], names: Sequence[str] | None = None) -> "Figure":
    """Returns a plot of a rollout over its images, each beside the image alone, on one color scale.

    Args:
        found: as `rollout` returns it.
        pictures: the images, `(n, height, width, channels)`, 1 channel or 3, of values in [0, 1].
        names: title of each; by default its number.

    Raises:
        VicinalError: if there are not as many images and names as in the rollout.
    """
    from matplotlib.colors import Normalize

    names = [f"image {number + 1}" for number in range(len(pictures))] if names is None else names
    if not len(pictures) == len(names) == len(found.values):
        raise VicinalError(
            f"pictures and names must be {len(found.values)}, one for each image of the rollout, got {len(pictures)} "
            f"and {len(names)}"
        )
    attention = found.map.numpy(force=True)
    pairs = [
        [Panel(name, picture, of=found), Panel("", picture, one, found)]
        for name, picture, one in zip(names, pictures, attention, strict=True)
    ]
    rows = _wrapped(pairs)
    scale = Normalize(
        float(_relative_values(rows).min()), _top(rows)
    )  # not from 0: residual connections give every patch a share
    return draw_panels(rows, f"{found.model}: {found.layer}, query: {found.query_text}", scale)


def _relative_values(rows: Sequence[Sequence[Panel]]) -> NDArray[Any]:
    """Returns all attention values that are drawn, relative to the mean patch, `(values,)`."""
    return np.concatenate([panel.relative.ravel() for row in rows for panel in row if panel.relative is not None])


def _top(rows: Sequence[Sequence[Panel]]) -> float:
    """Returns the upper end of the color scale, the 99 % quantile: outliers would use up most colors."""
    return float(np.quantile(_relative_values(rows), 0.99))


def _wrapped(groups: Sequence[list[Panel]]) -> list[list[Panel]]:
    """Returns rows of about the same length; groups stay together."""
    down = math.ceil(len(groups) * len(groups[0]) / MAX_COLUMNS)
    across = math.ceil(len(groups) / down)
    return [list(chain(*groups[start : start + across])) for start in range(0, len(groups), across)]


def draw_panels(rows: Sequence[Sequence[Panel]], title: str, scale: "Normalize | None" = None) -> "Figure":
    """Returns a plot of panels in rows, with a color bar and a title.

    Args:
        rows: panels of images of one shape; at least one has an attention map.
        title: above all.
        scale: of the colors; by default the square root of attention, from 0.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    scale = scale or PowerNorm(0.5, 0, max(2.0, _top(rows)))
    # Positions are computed in inches: a layout engine takes seconds.
    down, across = len(rows), max(map(len, rows))
    shape = rows[0][0].picture.shape
    side = max(MIN_WIDTH, 4.5 / across, 1.4 / down * shape[1] / shape[0])  # room for the title and the bar's label
    tall = side * shape[0] / shape[1]
    wide = across * (side + GAP) + 1.1
    wrapped = wrap_title(title, wide)
    high = down * (tall + TITLE_HEIGHT) + LINE_HEIGHT * (wrapped.count("\n") + 2)
    figure = Figure(figsize=(wide, high))
    figure.suptitle(wrapped, fontsize=10, y=1 - 0.08 / high, va="top", parse_math=False)
    drawn: Any = None
    for down_to, panels in enumerate(rows, start=1):
        for number, panel in enumerate(panels):
            left, bottom = GAP + number * (side + GAP), GAP + (down - down_to) * (tall + TITLE_HEIGHT)
            axes = figure.add_axes((left / wide, bottom / high, side / wide, tall / high))
            drawn = _show(axes, panel, scale) or drawn
    total = down * (tall + TITLE_HEIGHT) - TITLE_HEIGHT
    length = min(total, MAX_BAR_LENGTH)
    beside = figure.add_axes((1 - 1 / wide, (GAP + total - length) / high, 0.14 / wide, length / high))
    label = "attention\n(mean patch = 1" + ", root scale" * isinstance(scale, PowerNorm) + ")"
    add_color_bar(figure, drawn, label, fontsize=7, cax=beside, extend="max")
    return figure


def _show(axes: "Axes", panel: Panel, scale: "Normalize") -> Any:
    """Draws a panel, and returns the drawn attention map, if it has one."""
    from matplotlib.patches import Rectangle

    height, width = panel.picture.shape[:2]
    whole: dict[str, Any] = {"extent": (0, width, height, 0), "interpolation": "nearest"}
    gray: dict[str, Any] = {"cmap": "gray", "vmin": 0, "vmax": 1}
    drawn = None
    if panel.relative is None:
        axes.imshow(panel.picture.squeeze(), **gray, **whole)
    else:
        # Light gray: dark and bright parts of the image would look like colors of the map.
        axes.imshow(BLACK_LEVEL + (1 - BLACK_LEVEL) * panel.picture.mean(2), **gray, **whole)
        drawn = axes.imshow(panel.relative, cmap=SEQUENTIAL, norm=scale, alpha=0.7, **whole)
    if panel.of is not None and isinstance(panel.of.query, tuple):
        rows, columns = panel.of.query_grid or panel.of.values.shape[-2:]
        row, column = panel.of.query
        corner, size = (column * width / columns, row * height / rows), (width / columns, height / rows)
        axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor=QUERY_COLOR, linewidth=1.5))
    axes.set_axis_off()
    title = panel.title if len(panel.title) <= MAX_TITLE_LENGTH else "..." + panel.title[3 - MAX_TITLE_LENGTH :]
    axes.set_title(title, fontsize=8, y=1, pad=4, parse_math=False)
    return drawn
