"""Pictures of receptive fields: one in detail, or several next to each other."""

import math
import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vicinal.analysis.receptive_field.measure import ReceptiveField
from vicinal.errors import VicinalError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

__all__ = ["draw_field", "draw_fields"]

COLOURS = "magma"
FAINTEST = 1e-4  # of the brightest pixel: darker ones are drawn alike where the scale is logarithmic
# Okabe and Ito's colours: outlines are on the dark of the map, lines on white.
PATCH, HALF, MOST = "#56B4E9", "#FFFFFF", "#F0E442"
LINES = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
STYLES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
ACROSS = 4  # fields in a row, at most
TALLEST = 1.6  # times its width, as which a higher image is counted: the rest makes it narrower
MOST_LINES = 32  # patches along a side up to which the grid is drawn


def draw_field(field: ReceptiveField) -> "Figure":
    """One field on a linear and on a logarithmic scale, with its patch and the squares of 50 and 99 % of the energy."""
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    energy = _relative(field)
    figure = Figure(figsize=(9.6, 1.8 + 3.7 * _height(energy)), layout="compressed")
    scales = {"linear": Normalize(0, float(energy.max())), "logarithmic": _logarithmic([energy])}
    for axes, (name, scale) in zip(figure.subplots(1, 2), scales.items(), strict=True):
        drawn = _show(axes, field, energy, scale)
        axes.set_title(f"{name} scale", fontsize=10)
        outlines = [_outline_patch(axes, field), _outline(axes, field, 0.5, HALF), _outline(axes, field, 0.99, MOST)]
        high = max(1, energy.shape[0] / energy.shape[1])
        _colour_bar(figure, drawn, axes.inset_axes((1 + 0.03 * high, 0, 0.05 * high, 1)), name == "logarithmic")
    figure.suptitle(_title(field), fontsize=11, parse_math=False)
    figure.legend(handles=outlines, loc="outside lower center", ncols=3, fontsize=9, facecolor="#444", labelcolor="w")
    return figure


def draw_fields(fields: Mapping[str, ReceptiveField]) -> "Figure":
    """Several fields on one logarithmic scale, and how much of each lies how far from its patch.

    Args:
        fields: by the name to write above each.
    """
    from matplotlib.figure import Figure

    if not fields:
        raise VicinalError("there are no receptive fields to draw; give at least one")
    down = math.ceil(len(fields) / ACROSS)
    across = math.ceil(len(fields) / down)
    energies = [_relative(field) for field in fields.values()]
    scale = _logarithmic(energies)
    rows = down * (0.6 + 2.5 * max(map(_height, energies)))
    figure = Figure(figsize=(1 + 2.7 * max(across, 3), 0.6 + rows + 3.2), layout="constrained")
    outlined = "the patch, and the square of 50 % of the energy (dashed)"
    figure.suptitle(f"Receptive fields (mean pixel = 1). Outlined: {outlined}", fontsize=11)
    parts: Any = figure.subfigures(2, 1, height_ratios=(rows, 3.2))
    upper, lower = parts
    grid = upper.subplots(down, across, squeeze=False)
    for axes in grid.flat[len(fields) :]:
        axes.set_axis_off()
    for axes, (name, field), energy in zip(grid.flat, fields.items(), energies, strict=False):
        drawn = _show(axes, field, energy, scale)
        _outline_patch(axes, field)
        _outline(axes, field, 0.5, HALF)
        rotary = ", rotary positions stay" if field.rotary_stay else ""
        axes.set_title(f"{textwrap.fill(name, 34)}\n{field.layer}{rotary}", fontsize=9, parse_math=False)
        if len({energy.shape for energy in energies}) == 1:
            axes.label_outer()
    _colour_bar(upper, drawn, grid, True)
    _draw_profiles(lower, fields)
    return figure


def _height(energy: NDArray[np.float64]) -> float:
    """What to count an image's height as, in widths."""
    height, width = energy.shape
    return min(TALLEST, float(height / width))


def _relative(field: ReceptiveField) -> NDArray[np.float64]:
    """Energy relative to that of the mean pixel, so that images of all sizes share a scale."""
    return field.field * field.field.size


def _logarithmic(energies: Iterable[NDArray[np.float64]]) -> "Normalize":
    """A scale from the brightest pixel down to the darkest, leaving out the few that are darker still."""
    from matplotlib.colors import LogNorm

    values = np.concatenate([energy[energy > 0] for energy in energies])
    top = float(values.max())
    return LogNorm(float(np.clip(np.quantile(values, 0.01), FAINTEST * top, top / 10)), top)


def _title(field: ReceptiveField) -> str:
    about = f"{field.model}, {field.layer}: receptive field of the patch at row {field.at[0]}, column {field.at[1]}"
    how = "absolute gradient" if field.mode == "abs" else "positive gradient"
    positions = "" if field.positions == "trained" else f", positions {field.positions}"
    positions += " but for rotary ones" if field.rotary_stay else ""
    images = "one image" if field.images == 1 else f"mean of {field.images:,} images"
    return f"{textwrap.fill(about, 100)}\n{how}, {images}{positions}; mean pixel = 1"


def _show(axes: "Axes", field: ReceptiveField, energy: NDArray[np.float64], scale: "Normalize") -> Any:
    """The field over pixels, with fine lines between patches."""
    (height, width), (high, wide) = energy.shape, field.patch
    drawn = axes.imshow(
        np.maximum(energy, scale.vmin or 0),
        cmap=COLOURS,
        norm=scale,
        extent=(0, width, height, 0),
        interpolation="nearest",
    )
    if max(field.grid) <= MOST_LINES:
        lines: dict[str, Any] = {"color": "white", "linewidth": 0.4, "alpha": 0.25}
        axes.vlines(np.arange(1, field.grid[1]) * wide, 0, height, **lines)
        axes.hlines(np.arange(1, field.grid[0]) * high, 0, width, **lines)
    axes.set_xlabel("pixels", fontsize=9)
    axes.set_ylabel("pixels", fontsize=9)
    axes.tick_params(labelsize=8)
    return drawn


def _outline_patch(axes: "Axes", field: ReceptiveField) -> Any:
    high, wide = field.patch
    return _rectangle(axes, field, high, wide, PATCH, "-", f"the patch, {high:.3g} x {wide:.3g} pixels")


def _outline(axes: "Axes", field: ReceptiveField, share: float, colour: str) -> Any:
    side = field.square(share)
    label = f"{share:.0%} of the energy, {side:.3g} pixels ({side / math.sqrt(math.prod(field.patch)):.1f} patches)"
    return _rectangle(axes, field, side, side, colour, "--" if share == 0.5 else "-.", label)


def _rectangle(
    axes: "Axes", field: ReceptiveField, high: float, wide: float, colour: str, style: str, label: str
) -> Any:
    """A rectangle around the patch's centre, as far as it is in the image."""
    from matplotlib.patches import Rectangle

    (down, right), (height, width) = field.centre, field.field.shape
    top, bottom = np.clip((down - high / 2, down + high / 2), 0, height)
    left, end = np.clip((right - wide / 2, right + wide / 2), 0, width)
    look: dict[str, Any] = {
        "fill": False,
        "edgecolor": colour,
        "linestyle": style,
        "linewidth": 1.4,
        "clip_on": False,
        "zorder": 3,
    }
    return axes.add_patch(Rectangle((left, top), end - left, bottom - top, label=label, **look))


def _colour_bar(figure: Any, drawn: Any, beside: Any, logarithmic: bool) -> None:
    place = {"ax": beside, "shrink": 0.9, "aspect": 30} if isinstance(beside, np.ndarray) else {"cax": beside}
    bar = figure.colorbar(drawn, **place, extend="min" if logarithmic else "neither")
    bar.set_label("energy", fontsize=9)
    bar.ax.tick_params(labelsize=8)


def _draw_profiles(figure: Any, fields: Mapping[str, ReceptiveField]) -> None:
    """Energy by column of the stem's cells, and in squares of every size."""
    across, inside = figure.subplots(1, 2)
    widths = np.linspace(3.6, 1.2, len(fields))  # each line is seen below those that coincide with it
    for number, ((name, field), width) in enumerate(zip(fields.items(), widths, strict=True)):
        look = {"color": LINES[number % len(LINES)], "linestyle": STYLES[number % len(STYLES)], "linewidth": width}
        across.plot(*field.across, **look, marker="o", markersize=2, label=textwrap.shorten(name, 40))
        inside.plot(*(np.concatenate([[0], each]) for each in field.within), **look)
    across.set_ylim(bottom=0)
    across.set_xlabel("distance of a column from the patch, pixels", fontsize=9)
    across.set_ylabel("energy (mean column = 1)", fontsize=9)
    across.set_title("from left to right", fontsize=10)
    for share in (0.5, 0.99):
        inside.axhline(share, color="gray", linewidth=0.7, linestyle=":")
    inside.set_ylim(0, 1.02)
    inside.set_xlim(left=0)
    inside.set_xlabel("side of a square around the patch, pixels", fontsize=9)
    inside.set_ylabel("share of the energy inside", fontsize=9)
    inside.set_title("from the patch outwards (lines at 50 and 99 %)", fontsize=10)
    for axes in (across, inside):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=min(3, len(fields)), fontsize=9)
