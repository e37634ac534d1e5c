"""Pictures of fits: tables next to their Gaussians, layer by layer, and how far mixtures come with more kernels."""

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from vicinal.analysis.gaussian_fit import ENOUGH, GaussianFit
from vicinal.analysis.learned_tables.fit_report import FitReport, FitRow
from vicinal.errors import VicinalError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_fits", "draw_kernels"]

# Okabe and Ito's colours.
BLUE, ORANGE = "#0072B2", "#D55E00"
GREY = "#666666"
MOST_HEADS = 6  # drawn of a layer
DETAILS = 4  # layers drawn with fit and residual
# How a note begins, and how a picture says it.
REASONS = {
    "poor": ("poor", "o"),
    "a parabola": ("too wide", "s"),
    "too wide": ("too wide", "s"),
    "peak outside": ("peak outside", "^"),
    "no better": ("like noise", "x"),
    "did not converge": ("not converged", "+"),
}
MIDDLE: Any = {"ha": "center", "va": "center"}

Columns = dict[str, list[FitRow]]


def draw_fits(report: FitReport) -> "Figure":
    """R^2 and widths over layers, every table with its Gaussian, and some of them next to fit and residual."""
    from matplotlib.figure import Figure

    columns = _columns(report)
    heads = min(MOST_HEADS, max(len(rows) for rows in columns.values()))
    details = _details(columns)
    width = max(10.0, 1.4 + 0.85 * len(columns))
    heights = [2.7, 0.9 + 1.1 * heads, 0.4 + 2.1 * -(-len(details) // 2)]
    figure = Figure(figsize=(width, sum(heights) + 0.4), layout="constrained")
    figure.suptitle(_title(report, "a 2-D Gaussian", 100), fontsize=11, parse_math=False)
    parts: Any = figure.subfigures(3, 1, height_ratios=heights)
    upper, middle, lower = parts
    _draw_numbers(upper, columns)
    _draw_tables(middle, columns, heads)
    if details:
        _draw_details(lower, details)
    return figure


def draw_kernels(report: FitReport) -> "Figure":
    """R^2 of mixtures as kernels are added, a line per layer: the mean over its heads."""
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
            "color": colormaps["viridis"](0.9 * place / max(1, len(layers) - 1)),
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
    axes.axvline(report.kernels + 0.5, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_xticks([*numbers, report.kernels + 1], [*map(str, numbers), "any function\nof the distance"])
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("Gaussian kernels K")
    axes.set_ylabel("$R^2$" + (", mean over heads" if _by_head(columns) else ""))
    axes.grid(alpha=0.3)
    axes.set_title(_title(report, "mixtures of Gaussians of the distance", 70), fontsize=11, parse_math=False)
    figure.legend(loc="outside right upper", title="layer", fontsize=8)
    return figure


def _title(report: FitReport, by: str, width: int) -> str:
    return textwrap.fill(f"{report.title}: tables fitted by {by}", width)


def _columns(report: FitReport) -> Columns:
    """Rows by table: the number of its layer; with its role, or kind, where a layer has several."""
    tables = dict.fromkeys((row.layer, row.table.role, row.table.kind) for row in report.rows)
    layers, roles = ({key[:length] for key in tables} for length in (1, 2))
    columns: Columns = {}
    for row in report.rows:
        detail = "" if len(layers) == len(tables) else row.table.role if len(roles) == len(tables) else _short(row)
        columns.setdefault(f"{row.layer} {detail}".strip(), []).append(row)
    return columns


def _short(row: FitRow) -> str:
    return row.table.kind.rpartition(".")[2].partition(":")[0]


def _by_head(columns: Columns) -> bool:
    return any(len(rows) > 1 for rows in columns.values())


def _details(columns: Columns) -> list[FitRow]:
    """Of some layers, from the first to the last, the head that fits best."""
    fitted = [[row for row in rows if np.isfinite(row.gaussian.r2)] for rows in columns.values()]
    fitted = [rows for rows in fitted if rows]
    chosen = dict.fromkeys(np.linspace(0, len(fitted) - 1, DETAILS).round().astype(int).tolist() if fitted else [])
    return [max(fitted[place], key=lambda row: (row.gaussian.fits, row.gaussian.r2)) for place in chosen]


def _draw_numbers(figure: Any, columns: Columns) -> None:
    """R^2 and widths over layers."""
    left, right = figure.subplots(1, 2)
    for place, rows in enumerate(columns.values(), 1):
        for fit in (row.gaussian for row in rows if np.isfinite(row.gaussian.r2)):
            _, marker = _reason(fit)
            filled = BLUE if fit.fits else "none"
            left.plot(place, fit.r2, marker, color=BLUE, markerfacecolor=filled, markersize=5, alpha=0.8)
            if fit.fits:
                right.plot(place - 0.12, fit.sigma_x, ">", color=BLUE, markersize=5, alpha=0.8)
                right.plot(place + 0.12, fit.sigma_y, "^", color=ORANGE, markersize=5, alpha=0.8)
    left.axhline(ENOUGH, color=GREY, linewidth=0.8, linestyle="--")
    left.set_ylim(0, 1.05)
    left.set_ylabel("$R^2$")
    left.plot([], [], "o", color=BLUE, label="fits")
    unfit = [row.gaussian for rows in columns.values() for row in rows if not row.gaussian.fits]
    for words, marker in sorted({_reason(fit) for fit in unfit if np.isfinite(fit.r2)}):
        left.plot([], [], marker, color=BLUE, markerfacecolor="none", label=words)
    right.plot([], [], ">", color=BLUE, label=r"$\sigma_X$")
    right.plot([], [], "^", color=ORANGE, label=r"$\sigma_Y$")
    if any(row.gaussian.fits for rows in columns.values() for row in rows):
        right.set_ylim(0)
    else:
        right.set_ylim(0, 1)
        right.text(0.5, 0.5, "none fits", transform=right.transAxes, color=GREY, **MIDDLE)
    right.set_ylabel("width (patches)")
    left.set_title("how well it fits" + (", by head" if _by_head(columns) else ""), fontsize=9, loc="left")
    right.set_title("widths where it fits", fontsize=9, loc="left")
    for axes in (left, right):
        axes.set_xticks(range(1, len(columns) + 1), list(columns), fontsize=8)
        axes.set_xlim(0.5, len(columns) + 0.5)
        axes.set_xlabel("layer")
        axes.grid(alpha=0.3)
        axes.legend(
            fontsize=8,
            loc="lower right",
            bbox_to_anchor=(1.02, 0.98),
            ncols=6,
            frameon=False,
            columnspacing=0.8,
            handletextpad=0,
        )


def _reason(fit: GaussianFit) -> tuple[str, str]:
    """Why a fitted Gaussian does not fit, in a word or two, and its marker; no words if it fits."""
    note = fit.note or ""
    return ("", "o") if fit.fits else next(short for begin, short in REASONS.items() if note.startswith(begin))


def _draw_tables(figure: Any, columns: Columns, heads: int) -> None:
    """Every table on a scale of its own, with the Gaussian's widths around its peak."""
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
            axes.imshow(row.table.values[0], "viridis", extent=_extent(row), **_limits(row.table.values[0]))
            if np.isfinite(row.gaussian.r2):
                why, _ = _reason(row.gaussian)
                axes.set_xlabel(f"{row.gaussian.r2:.2f} {why}".strip(), fontsize=7, labelpad=2)
            if row.gaussian.fits:
                _outline(axes, row)
            if row.gaussian.note and not np.isfinite(row.gaussian.r2):
                axes.text(0.5, 0.5, row.gaussian.note.split(":")[0], transform=axes.transAxes, fontsize=8, **MIDDLE)
    for head, axes in enumerate(grid[:, 0], 1):
        axes.set_ylabel(f"head {head}" if _by_head(columns) else "all heads", fontsize=8)


def _outline(axes: "Axes", row: FitRow) -> None:
    """The Gaussian's peak, and its widths around."""
    from matplotlib.patches import Ellipse
    from matplotlib.patheffects import withStroke

    fit, edge = row.gaussian, [withStroke(linewidth=2.6, foreground="k")]  # to be seen on light and dark
    peak = (fit.centre_x, fit.centre_y)
    ellipse = Ellipse(peak, 2 * fit.sigma_x, 2 * fit.sigma_y, fill=False, color="w", linewidth=1.2, path_effects=edge)
    axes.add_patch(ellipse)
    axes.plot(*peak, "+", color="w", markersize=5, path_effects=edge)
    left, right, bottom, top = _extent(row)
    axes.set(xlim=(left, right), ylim=(bottom, top))


def _draw_details(figure: Any, rows: list[FitRow]) -> None:
    """Table, fit and residual."""
    figure.suptitle(
        "some layers in detail" + (": the head that fits best" if any(row.head for row in rows) else ""), fontsize=9
    )
    blocks = figure.subfigures(-(-len(rows) // 2), min(2, len(rows)), squeeze=False)
    for block, row in zip(blocks.flat, rows, strict=False):
        table, fit = row.table.values[0], row.gaussian
        fitted = fit.values(table.shape, row.table.centre)
        limits = _limits(table)
        reach = (limits["vmax"] - limits["vmin"]) / 2
        head = f", head {row.head}" if row.head else ""
        note = f" ({fit.note})" if fit.note else ""
        block.suptitle(f"layer {row.layer}, {row.table.name}{head}: $R^2$ = {fit.r2:.3f}{note}", fontsize=8)
        axes = block.subplots(1, 3)
        for each, title, picture in zip(axes, ("table", "fit"), (table, fitted), strict=False):
            drawn = each.imshow(picture, "viridis", extent=_extent(row), **limits)
            each.set_title(title, fontsize=8)
        left = axes[2].imshow(table - fitted, "RdBu_r", vmin=-reach, vmax=reach, extent=_extent(row))
        axes[2].set_title("residual", fontsize=8)
        for each, image in ((axes[1], drawn), (axes[2], left)):
            block.colorbar(image, cax=each.inset_axes((1.05, 0, 0.07, 1))).ax.tick_params(labelsize=7)
        for each in axes:
            each.tick_params(labelsize=7)
            each.locator_params(nbins=4, integer=True)
            each.set_xlabel("patches", fontsize=7, labelpad=1)
        for each in axes[1:]:
            each.set_yticklabels([])


def _limits(picture: Any) -> dict[str, float]:
    """The range of colours; a little apart if all is the same."""
    finite = picture[np.isfinite(picture)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    return {"vmin": low, "vmax": high} if high > low else {"vmin": low - 0.5, "vmax": high + 0.5}


def _extent(row: FitRow) -> tuple[float, float, float, float]:
    """Left, right, bottom and top, in patches from offset 0."""
    (rows, columns), (row_0, column_0) = row.table.values.shape[1:], row.table.centre
    return -column_0 - 0.5, columns - column_0 - 0.5, rows - row_0 - 0.5, -row_0 - 0.5
