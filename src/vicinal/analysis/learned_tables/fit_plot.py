"""Plots of fits: tables beside their Gaussians, layer by layer, and R^2 of mixtures by number of kernels."""

from typing import TYPE_CHECKING, Any

import numpy as np

from vicinal.analysis.fit_note import NoteKind
from vicinal.analysis.gaussian_fit import MIN_R2, GaussianFit
from vicinal.analysis.learned_tables.fit_report import FitReport, FitRow
from vicinal.analysis.plot_style import BLUE, DIVERGING, GRAY, SEQUENTIAL, VERMILION, add_color_bar, wrap_title
from vicinal.errors import VicinalError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_fits", "draw_mixture_r2"]

MAX_HEADS = 6  # drawn of a layer
NUM_DETAILS = 4  # layers drawn with fit and residual
# Words and marker for each kind of note.
NOTE_MARKS = {
    NoteKind.TOO_SMALL: ("too small", "o"),
    NoteKind.NOT_FINITE: ("not finite", "o"),
    NoteKind.FLAT: ("flat", "o"),
    NoteKind.POOR: ("poor", "o"),
    NoteKind.PARABOLA: ("too wide", "s"),
    NoteKind.TOO_WIDE: ("too wide", "s"),
    NoteKind.PEAK_OUTSIDE: ("peak outside", "^"),
    NoteKind.LIKE_NOISE: ("like noise", "x"),
    NoteKind.NOT_CONVERGED: ("not converged", "+"),
}
TITLE_INCHES, MIXTURE_TITLE_INCHES = 7.7, 5.4
CENTER_ALIGNMENT: Any = {"ha": "center", "va": "center"}

Columns = dict[str, list[FitRow]]


def draw_fits(report: FitReport) -> "Figure":
    """Returns a plot of R^2 and widths over layers, of every table with its Gaussian, and of some fits in detail."""
    from matplotlib.figure import Figure

    columns = _columns(report)
    heads = min(MAX_HEADS, max(len(rows) for rows in columns.values()))
    details = _details(columns)
    width = max(10.0, 1.4 + 0.85 * len(columns))
    heights = [2.7, 0.9 + 1.1 * heads, 0.4 + 2.1 * -(-len(details) // 2)]
    figure = Figure(figsize=(width, sum(heights) + 0.4), layout="constrained")
    figure.suptitle(_title(report, "a 2-D Gaussian", TITLE_INCHES), fontsize=11, parse_math=False)
    parts: Any = figure.subfigures(3, 1, height_ratios=heights)
    upper, middle, lower = parts
    _draw_numbers(upper, columns)
    _draw_tables(middle, columns, heads)
    if details:
        _draw_details(lower, details)
    return figure


def draw_mixture_r2(report: FitReport) -> "Figure":
    """Returns a plot of R^2 of mixtures by number of kernels: a line for each layer, the mean over its heads.

    Raises:
        VicinalError: if no mixtures were fitted.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    if not report.kernels:
        raise VicinalError("no mixtures were fitted; call fit_model with kernels=5, for example")
    columns = _columns(report)
    figure = Figure(figsize=(8.2, 4.6), layout="constrained")
    axes = figure.subplots()
    numbers = np.arange(1, report.kernels + 1)
    layers = list(dict.fromkeys(rows[0].layer for rows in columns.values()))
    for label, rows in columns.items():
        place = layers.index(rows[0].layer)
        style: Any = {
            "color": colormaps[SEQUENTIAL](0.9 * place / max(1, len(layers) - 1)),
            "marker": "osD^vP"[place % 6],
            "linestyle": "--" if rows[0].table.role == "bias" and len(layers) < len(columns) else "-",
        }
        curves = np.array([[mixture.r2 for mixture in row.mixtures] for row in rows])
        if not np.isfinite(curves).any():
            axes.plot([], [], label=f"{label}: {rows[0].gaussian.note}", **style)
            continue
        axes.plot(numbers, np.nanmean(curves, 0), markersize=5, label=label, **style)
        ceiling = np.nanmean([row.mixtures[0].ceiling for row in rows])
        axes.plot(report.kernels + 1, ceiling, markersize=6, fillstyle="none", **style)
    axes.axvline(report.kernels + 0.5, color=GRAY, linewidth=0.8, linestyle=":")
    axes.set_xticks([*numbers, report.kernels + 1], [*map(str, numbers), "any function\nof the distance"])
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("Gaussian kernels K")
    axes.set_ylabel("$R^2$" + (", mean over heads" if _by_head(columns) else ""))
    axes.grid(alpha=0.3)
    axes.set_title(
        _title(report, "mixtures of Gaussians of the distance", MIXTURE_TITLE_INCHES), fontsize=11, parse_math=False
    )
    figure.legend(loc="outside right upper", title="layer", fontsize=8)
    return figure


def _title(report: FitReport, by: str, inches: float) -> str:
    return wrap_title(f"{report.title}: tables fitted by {by}", inches)


def _columns(report: FitReport) -> Columns:
    """Returns rows by the label of their table: number of the layer, with role or kind if a layer has several."""
    tables = dict.fromkeys((row.layer, row.table.role, row.table.kind) for row in report.rows)
    layers, roles = ({key[:length] for key in tables} for length in (1, 2))
    columns: Columns = {}
    for row in report.rows:
        detail = "" if len(layers) == len(tables) else row.table.role if len(roles) == len(tables) else _short_kind(row)
        columns.setdefault(f"{row.layer} {detail}".strip(), []).append(row)
    return columns


def _short_kind(row: FitRow) -> str:
    return row.table.kind.rpartition(".")[2].partition(":")[0]


def _by_head(columns: Columns) -> bool:
    return any(len(rows) > 1 for rows in columns.values())


def _details(columns: Columns) -> list[FitRow]:
    """Returns the head that fits best, for some layers from the first to the last."""
    fitted = [[row for row in rows if np.isfinite(row.gaussian.r2)] for rows in columns.values()]
    fitted = [rows for rows in fitted if rows]
    chosen = dict.fromkeys(np.linspace(0, len(fitted) - 1, NUM_DETAILS).round().astype(int).tolist() if fitted else [])
    return [max(fitted[place], key=lambda row: (row.gaussian.fits, row.gaussian.r2)) for place in chosen]


def _draw_numbers(figure: Any, columns: Columns) -> None:
    """Draws R^2 and widths over layers."""
    left, right = figure.subplots(1, 2)
    fits = [[row.gaussian for row in rows if np.isfinite(row.gaussian.r2)] for rows in columns.values()]
    for place, of_layer in enumerate(fits, 1):
        for fit in of_layer:
            face = BLUE if fit.fits else "none"
            left.plot(place, fit.r2, _mark(fit)[1], color=BLUE, markerfacecolor=face, markersize=5, alpha=0.8)
            if fit.fits:
                right.plot(place - 0.12, fit.sigma_x, ">", color=BLUE, markersize=5, alpha=0.8)
                right.plot(place + 0.12, fit.sigma_y, "^", color=VERMILION, markersize=5, alpha=0.8)
    left.axhline(MIN_R2, color=GRAY, linewidth=0.8, linestyle="--")
    left.set_ylim(0, 1.05)
    left.set_ylabel("$R^2$")
    left.plot([], [], "o", color=BLUE, label="fits")
    for words, marker in sorted({_mark(fit) for of_layer in fits for fit in of_layer if not fit.fits}):
        left.plot([], [], marker, color=BLUE, markerfacecolor="none", label=words)
    right.plot([], [], ">", color=BLUE, label=r"$\sigma_X$")
    right.plot([], [], "^", color=VERMILION, label=r"$\sigma_Y$")
    if any(fit.fits for of_layer in fits for fit in of_layer):
        right.set_ylim(0)
    else:
        right.set_ylim(0, 1)
        right.text(0.5, 0.5, "none fits", transform=right.transAxes, color=GRAY, **CENTER_ALIGNMENT)
    right.set_ylabel("width (patches)")
    left.set_title("quality of the fit" + (", by head" if _by_head(columns) else ""), fontsize=9, loc="left")
    right.set_title("widths of fits", fontsize=9, loc="left")
    for axes in (left, right):
        _finish_numbers(axes, columns)


def _finish_numbers(axes: "Axes", columns: Columns) -> None:
    """Adds ticks for layers, a grid, and a legend above the axes."""
    axes.set_xticks(range(1, len(columns) + 1), list(columns), fontsize=8)
    axes.set_xlim(0.5, len(columns) + 0.5)
    axes.set_xlabel("layer")
    axes.grid(alpha=0.3)
    look: Any = {"frameon": False, "columnspacing": 0.8, "handletextpad": 0, "ncols": 6}
    axes.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1.02, 0.98), **look)


def _mark(fit: GaussianFit) -> tuple[str, str]:
    """Returns why a Gaussian does not fit, in a word or two, and its marker; no words if it fits."""
    return ("", "o") if fit.fits else NOTE_MARKS[fit.kinds[0]]


def _draw_tables(figure: Any, columns: Columns, heads: int) -> None:
    """Draws every table on a scale of its own, with the widths of the Gaussian around its peak."""
    most = max(len(rows) for rows in columns.values())
    some = f"; {heads} of up to {most} heads" if most > heads else ""
    figure.suptitle(
        f"tables, each on its own scale{some}; below: $R^2$, and why it does not fit; "
        "ellipses: peak and widths of Gaussians that fit",
        fontsize=9,
    )
    grid = figure.subplots(heads, len(columns), squeeze=False)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[], frame_on=False)
    for column, (label, rows) in enumerate(columns.items()):
        grid[0, column].set_title(f"layer {label}", fontsize=8)
        for axes, row in zip(grid[:, column], rows, strict=False):
            axes.imshow(row.table.values[0], SEQUENTIAL, extent=_extent(row), **_limits(row.table.values[0]))
            if np.isfinite(row.gaussian.r2):
                axes.set_xlabel(f"{row.gaussian.r2:.2f} {_mark(row.gaussian)[0]}".strip(), fontsize=7, labelpad=2)
            if row.gaussian.fits:
                _outline(axes, row)
            if row.gaussian.notes and not np.isfinite(row.gaussian.r2):
                axes.text(0.5, 0.5, _mark(row.gaussian)[0], transform=axes.transAxes, fontsize=8, **CENTER_ALIGNMENT)
    for head, axes in enumerate(grid[:, 0], 1):
        axes.set_ylabel(f"head {head}" if _by_head(columns) else "all heads", fontsize=8)


def _outline(axes: "Axes", row: FitRow) -> None:
    """Draws the peak of the Gaussian, and an ellipse of its widths around it."""
    from matplotlib.patches import Ellipse
    from matplotlib.patheffects import withStroke

    fit, edge = row.gaussian, [withStroke(linewidth=2.6, foreground="k")]  # visible on light and dark
    peak = (fit.center_x, fit.center_y)
    ellipse = Ellipse(peak, 2 * fit.sigma_x, 2 * fit.sigma_y, fill=False, color="w", linewidth=1.2, path_effects=edge)
    axes.add_patch(ellipse)
    axes.plot(*peak, "+", color="w", markersize=5, path_effects=edge)
    left, right, bottom, top = _extent(row)
    axes.set(xlim=(left, right), ylim=(bottom, top))


def _draw_details(figure: Any, rows: list[FitRow]) -> None:
    """Draws table, fit and residual of some rows."""
    figure.suptitle(
        "some layers in detail" + (": the head that fits best" if any(row.head for row in rows) else ""), fontsize=9
    )
    blocks = figure.subfigures(-(-len(rows) // 2), min(2, len(rows)), squeeze=False)
    for block, row in zip(blocks.flat, rows, strict=False):
        table, fit = row.table.values[0], row.gaussian
        fitted = fit.values(table.shape, row.table.center)
        limits = _limits(table)
        reach = (limits["vmax"] - limits["vmin"]) / 2
        head = f", head {row.head}" if row.head else ""
        note = f" ({fit.note})" if fit.note else ""
        block.suptitle(f"layer {row.layer}, {row.table.name}{head}: $R^2$ = {fit.r2:.3f}{note}", fontsize=8)
        axes = block.subplots(1, 3)
        for each, title, picture in zip(axes, ("table", "fit"), (table, fitted), strict=False):
            drawn = each.imshow(picture, SEQUENTIAL, extent=_extent(row), **limits)
            each.set_title(title, fontsize=8)
        left = axes[2].imshow(table - fitted, DIVERGING, vmin=-reach, vmax=reach, extent=_extent(row))
        axes[2].set_title("residual", fontsize=8)
        for each, image in ((axes[1], drawn), (axes[2], left)):
            add_color_bar(block, image, fontsize=7, cax=each.inset_axes((1.05, 0, 0.07, 1)))
        for each in axes:
            each.tick_params(labelsize=7)
            each.locator_params(nbins=4, integer=True)
            each.set_xlabel("patches", fontsize=7, labelpad=1)
        for each in axes[1:]:
            each.set_yticklabels([])


def _limits(picture: Any) -> dict[str, float]:
    """Returns the range of the colors, as arguments of `imshow`; of length 1 if all values are the same."""
    finite = picture[np.isfinite(picture)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    return {"vmin": low, "vmax": high} if high > low else {"vmin": low - 0.5, "vmax": high + 0.5}


def _extent(row: FitRow) -> tuple[float, float, float, float]:
    """Returns left, right, bottom and top, in patches from offset 0."""
    (rows, columns), (row_0, column_0) = row.table.values.shape[1:], row.table.center
    return -column_0 - 0.5, columns - column_0 - 0.5, rows - row_0 - 0.5, -row_0 - 0.5
