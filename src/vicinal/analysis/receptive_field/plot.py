"""Plots of receptive fields: one in detail, or several side by side."""

import math
import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vicinal.analysis.plot_style import SKY_BLUE, WHITE, YELLOW, add_color_bar, line_style, wrap_title
from vicinal.analysis.receptive_field.result import ReceptiveField
from vicinal.errors import VicinalError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

__all__ = ["COLORMAP", "draw_field", "draw_fields", "energy_scale", "relative_energy"]

COLORMAP = "magma"  # its dark end makes outlines visible
MIN_RELATIVE_ENERGY = 1e-4  # of the brightest pixel: lower end of a logarithmic scale
PATCH_COLOR, HALF_COLOR, MOST_COLOR = SKY_BLUE, WHITE, YELLOW
MAX_COLUMNS = 4  # fields in a row
MAX_ASPECT = 1.6  # height over width for which there is space; higher images are drawn narrower
TITLE_INCHES = 7.7
MAX_GRID_LINES = 32  # patches along a side up to which the grid is drawn


def draw_field(field: ReceptiveField) -> "Figure":
    """Returns a plot of one field on a linear and a logarithmic scale.

    Outlined are its patch and the squares with 50 and 99 % of the energy.
    """
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    energy = relative_energy(field)
    figure = Figure(figsize=(9.6, 1.8 + 3.7 * _height(energy)), layout="compressed")
    scales = {"linear": Normalize(0, float(energy.max())), "logarithmic": energy_scale([energy])}
    for axes, (name, scale) in zip(figure.subplots(1, 2), scales.items(), strict=True):
        drawn = _show(axes, field, energy, scale)
        axes.set_title(f"{name} scale", fontsize=10)
        outlines = [
            _outline_patch(axes, field),
            _outline(axes, field, 0.5, HALF_COLOR),
            _outline(axes, field, 0.99, MOST_COLOR),
        ]
        high = max(1, energy.shape[0] / energy.shape[1])
        beside = axes.inset_axes((1 + 0.03 * high, 0, 0.05 * high, 1))
        add_color_bar(figure, drawn, "energy", cax=beside, extend="min" if name == "logarithmic" else "neither")
    figure.suptitle(_title(field), fontsize=11, parse_math=False)
    figure.legend(handles=outlines, loc="outside lower center", ncols=3, fontsize=9, facecolor="#444", labelcolor="w")
    return figure


def draw_fields(fields: Mapping[str, ReceptiveField]) -> "Figure":
    """Returns a plot of several fields on one logarithmic scale, with profiles of their energy over the distance.

    Args:
        fields: by the title of each.

    Raises:
        VicinalError: if there are none.
    """
    from matplotlib.figure import Figure

    if not fields:
        raise VicinalError("there are no receptive fields to draw; give at least one")
    down = math.ceil(len(fields) / MAX_COLUMNS)
    across = math.ceil(len(fields) / down)
    energies = [relative_energy(field) for field in fields.values()]
    scale = energy_scale(energies)
    rows = down * (0.6 + 2.5 * max(map(_height, energies)))
    figure = Figure(figsize=(1 + 2.7 * max(across, 3), 0.6 + rows + 3.2), layout="constrained")
    outlined = "the patch, and the square with 50 % of the energy (dashed)"
    figure.suptitle(f"Receptive fields (mean pixel = 1). Outlined: {outlined}", fontsize=11)
    parts: Any = figure.subfigures(2, 1, height_ratios=(rows, 3.2))
    upper, lower = parts
    grid = upper.subplots(down, across, squeeze=False)
    for axes in grid.flat[len(fields) :]:
        axes.set_axis_off()
    for axes, (name, field), energy in zip(grid.flat, fields.items(), energies, strict=False):
        drawn = _show(axes, field, energy, scale)
        _outline_patch(axes, field)
        _outline(axes, field, 0.5, HALF_COLOR)
        rotary = ", rotary positions kept" if field.rotary_stay else ""
        axes.set_title(f"{textwrap.fill(name, 34)}\n{field.layer}{rotary}", fontsize=9, parse_math=False)
        if len({energy.shape for energy in energies}) == 1:
            axes.label_outer()
    add_color_bar(upper, drawn, "energy", ax=grid, shrink=0.9, aspect=30, extend="min")
    _draw_profiles(lower, fields)
    return figure


def _height(energy: NDArray[np.float64]) -> float:
    """Returns the height of an image's space, in widths."""
    height, width = energy.shape
    return min(MAX_ASPECT, float(height / width))


def relative_energy(field: ReceptiveField) -> NDArray[np.float64]:
    """Returns the energy relative to the mean pixel, `(height, width)`, so that images of all sizes share a scale."""
    return field.field * field.field.size


def energy_scale(energies: Iterable[NDArray[np.float64]]) -> "Normalize":
    """Returns a scale from the 1 % quantile, at least a tenth and at most 1e-4 of the maximum, to the maximum."""
    from matplotlib.colors import LogNorm

    values = np.concatenate([energy[energy > 0] for energy in energies])
    top = float(values.max())
    return LogNorm(float(np.clip(np.quantile(values, 0.01), MIN_RELATIVE_ENERGY * top, top / 10)), top)


def _title(field: ReceptiveField) -> str:
    about = f"{field.model}, {field.layer}: receptive field of the patch at row {field.at[0]}, column {field.at[1]}"
    how = "absolute gradient" if field.mode == "abs" else "positive gradient"
    positions = "" if field.positions == "trained" else f", positions {field.positions}"
    positions += " except rotary ones" if field.rotary_stay else ""
    images = "one image" if field.images == 1 else f"mean of {field.images:,} images"
    return f"{wrap_title(about, TITLE_INCHES)}\n{how}, {images}{positions}; mean pixel = 1"


def _show(axes: "Axes", field: ReceptiveField, energy: NDArray[np.float64], scale: "Normalize") -> Any:
    """Draws the field over pixels, with thin lines between patches, and returns the drawn image."""
    (height, width), (high, wide) = energy.shape, field.patch
    drawn = axes.imshow(
        np.maximum(energy, scale.vmin or 0),
        cmap=COLORMAP,
        norm=scale,
        extent=(0, width, height, 0),
        interpolation="nearest",
    )
    if max(field.grid) <= MAX_GRID_LINES:
        lines: dict[str, Any] = {"color": "white", "linewidth": 0.4, "alpha": 0.25}
        axes.vlines(np.arange(1, field.grid[1]) * wide, 0, height, **lines)
        axes.hlines(np.arange(1, field.grid[0]) * high, 0, width, **lines)
    axes.set_xlabel("pixels", fontsize=9)
    axes.set_ylabel("pixels", fontsize=9)
    axes.tick_params(labelsize=8)
    return drawn


def _outline_patch(axes: "Axes", field: ReceptiveField) -> Any:
    high, wide = field.patch
    return _rectangle(axes, field, high, wide, PATCH_COLOR, "-", f"the patch, {high:.3g} x {wide:.3g} pixels")


def _outline(axes: "Axes", field: ReceptiveField, share: float, color: str) -> Any:
    side = field.square(share)
    label = f"{share:.0%} of the energy, {side:.3g} pixels ({side / math.sqrt(math.prod(field.patch)):.1f} patches)"
    return _rectangle(axes, field, side, side, color, "--" if share == 0.5 else "-.", label)


def _rectangle(
    axes: "Axes", field: ReceptiveField, high: float, wide: float, color: str, style: str, label: str
) -> Any:
    """Adds a rectangle around the center of the patch, clipped to the image, and returns it."""
    from matplotlib.patches import Rectangle

    (down, right), (height, width) = field.center, field.field.shape
    top, bottom = np.clip((down - high / 2, down + high / 2), 0, height)
    left, end = np.clip((right - wide / 2, right + wide / 2), 0, width)
    look: dict[str, Any] = {
        "fill": False,
        "edgecolor": color,
        "linestyle": style,
        "linewidth": 1.4,
        "clip_on": False,
        "zorder": 3,
    }
    return axes.add_patch(Rectangle((left, top), end - left, bottom - top, label=label, **look))


def _draw_profiles(figure: Any, fields: Mapping[str, ReceptiveField]) -> None:
    """Draws the energy by column of the stem's grid, and in squares of every size."""
    across, inside = figure.subplots(1, 2)
    widths = np.linspace(3.6, 1.2, len(fields))  # lines that coincide stay visible
    for number, ((name, field), width) in enumerate(zip(fields.items(), widths, strict=True)):
        look = {**line_style(number), "linewidth": width}
        across.plot(*field.across, **look, marker="o", markersize=2, label=textwrap.shorten(name, 40))
        inside.plot(*(np.concatenate([[0], each]) for each in field.within), **look)
    across.set_ylim(bottom=0)
    across.set_xlabel("distance of a column from the patch, pixels", fontsize=9)
    across.set_ylabel("energy (mean column = 1)", fontsize=9)
    across.set_title("by column, left to right", fontsize=10)
    for share in (0.5, 0.99):
        inside.axhline(share, color="gray", linewidth=0.7, linestyle=":")
    inside.set_ylim(0, 1.02)
    inside.set_xlim(left=0)
    inside.set_xlabel("side of a square around the patch, pixels", fontsize=9)
    inside.set_ylabel("share of the energy inside", fontsize=9)
    inside.set_title("in squares around the patch (lines at 50 and 99 %)", fontsize=10)
    for axes in (across, inside):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=min(3, len(fields)), fontsize=9)
