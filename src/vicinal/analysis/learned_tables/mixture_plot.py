"""Plots of Gaussian mixtures: the kernels of a layer, and the parameters of priors over epochs."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vicinal.analysis.learned_tables.mask_result import Masks, Mixture
from vicinal.analysis.plot_sheet import same_heads
from vicinal.analysis.plot_style import BLACK, GRAY, distinct_colors, wrap_title
from vicinal.errors import VicinalError, unknown_name
from vicinal.training.prior_history import PriorHistory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_history", "draw_mixture"]

MAX_HEAD_COLUMNS = 4
MAX_LAYER_COLUMNS = 6
NUM_DISTANCES = 200  # of a curve
LEGEND_INCHES = 1.4  # width of one entry
UNITS = {"sigma": "patches", "mu_row": "patches", "mu_column": "patches", "gamma": "per patch"}


def draw_mixture(masks: Masks, layer: int | str, part: str | None = None) -> "Figure":
    """Returns a plot of the Gaussian mixture of a layer and its kernels over the distance, and of their parameters.

    Args:
        masks: of a model with `gmm`.
        layer: name or index, from 0.
        part: name of the mixture in a layer that has several, such as `gmm-2` of `gmm+gmm`; the first by default.

    Raises:
        VicinalError: if there is no such layer or part, or the layer's prior is not a mixture.
    """
    from matplotlib.figure import Figure

    number = masks.index(layer)
    chosen = masks.layers[number]
    if not chosen.mixtures:
        raise VicinalError(
            f"{chosen.name} has the prior {chosen.prior}, which is not a mixture of Gaussians; draw_masks draws it, "
            "and `vicinal analyze fit --kernels 5` fits mixtures to it"
        )
    part = next(iter(chosen.mixtures)) if part is None else part
    if part not in chosen.mixtures:
        raise unknown_name("part", part, chosen.mixtures)
    mixture = chosen.mixtures[part]
    kernels, heads = mixture.alpha.shape
    if same_heads(np.concatenate([mixture.alpha, mixture.sigma]).T):
        heads = 1
    columns = min(MAX_HEAD_COLUMNS, heads)
    size = 2.2 * columns + 4.2, max(3.6, 1.75 * math.ceil(heads / columns) + 1.2)
    figure = Figure(figsize=size, layout="constrained")
    which = "mixture" if len(chosen.mixtures) == 1 else f"mixture {part}"
    title = f"{masks.model}, {chosen.prior}: {which} of layer {number + 1}, {chosen.name}"
    figure.suptitle(wrap_title(title, size[0]), fontsize=10, parse_math=False)
    parts: Any = figure.subfigures(1, 2, width_ratios=(2.2 * columns + 0.4, 3.8))
    distance = np.linspace(0, math.hypot(chosen.grid.height - 1, chosen.grid.width - 1), NUM_DISTANCES)
    _draw_curves(parts[0], mixture, distance, heads, columns)
    _draw_parameters(parts[1], mixture, heads)
    figure.legend(loc="outside lower center", ncols=min(kernels + 2, int(size[0] / LEGEND_INCHES)), fontsize=8)
    return figure


def _draw_curves(part: Any, mixture: Mixture, distance: NDArray[np.float64], heads: int, columns: int) -> None:
    """Draws the mixture and its kernels over the distance, head by head."""
    curves, colors = mixture.kernels_at(distance), distinct_colors(len(mixture.alpha))
    for head, axes in enumerate(_panels(part, heads, columns)):
        for kernel, curve in enumerate(curves[:, head]):
            axes.plot(distance, curve, color=colors[kernel], linewidth=1.2)
        axes.plot(distance, mixture.constant + curves[:, head].sum(0), color=BLACK, linewidth=1.8)
        axes.axhline(mixture.constant, color=GRAY, linewidth=0.8, linestyle=":")
        axes.set_title(f"head {head + 1}" if heads > 1 else "all heads", fontsize=9)
    part.supxlabel("distance, patches", fontsize=9)
    part.supylabel("logits times", fontsize=9)


def _draw_parameters(part: Any, mixture: Mixture, heads: int) -> None:
    """Draws alpha over sigma: a dot for each kernel of each head."""
    (axes,) = _panels(part, 1, 1)
    colors = distinct_colors(len(mixture.alpha))
    for kernel, (sigma, alpha) in enumerate(zip(mixture.sigma, mixture.alpha, strict=True)):
        widths = np.abs(sigma[:heads])  # the sign has no effect
        axes.scatter(widths, alpha[:heads], color=colors[kernel], s=18, label=f"kernel {kernel + 1}")
    axes.plot([], [], color=BLACK, linewidth=1.8, label="the mixture")
    axes.plot([], [], color=GRAY, linewidth=0.8, linestyle=":", label=f"constant, {mixture.constant:g}")
    axes.axhline(0, color=GRAY, linewidth=0.7)
    axes.set_xlim(left=0)
    axes.set_xlabel("sigma, patches", fontsize=9)
    axes.set_ylabel("alpha", fontsize=9)
    axes.set_title("each kernel of each head" if heads > 1 else "each kernel", fontsize=9)


def draw_history(history: PriorHistory, *, model: str = "") -> "Figure":
    """Returns a plot of the parameters of priors over epochs, layer by layer: each head thin, their mean thick.

    Args:
        history: `Run.priors` of a run.
        model: display name of the model, for the title.
    """
    from matplotlib.figure import Figure

    options = _by_option(history)
    kernels = max(values.shape[1] for layers in options.values() for values in layers.values())
    colors = distinct_colors(kernels)
    columns = min(MAX_LAYER_COLUMNS, max(map(len, options.values())))
    heights = [0.75 + 1.5 * math.ceil(len(layers) / columns) for layers in options.values()]
    size = max(5.0, 1.0 + 1.9 * columns), sum(heights) + 0.8
    figure = Figure(figsize=size, layout="constrained")
    title = f"{model}: " * bool(model) + "parameters of priors over epochs; thin: each head, thick: their mean"
    figure.suptitle(wrap_title(title, size[0]), fontsize=10, parse_math=False)
    parts = np.ravel(np.array(figure.subfigures(len(options), 1, height_ratios=heights)))
    for part, (option, layers) in zip(parts, options.items(), strict=True):
        for axes, (layer, values) in zip(_panels(part, len(layers), columns), layers.items(), strict=True):
            for kernel in range(values.shape[1]):
                axes.plot(history.epochs, values[:, kernel], color=colors[kernel], linewidth=0.6, alpha=0.4)
                axes.plot(history.epochs, values[:, kernel].mean(1), color=colors[kernel], linewidth=1.8)
            axes.set_title(layer, fontsize=8, parse_math=False)
        unit = UNITS.get(option.rpartition(".")[2])
        part.supylabel(f"{option}, {unit}" if unit else option, fontsize=9)
    part.supxlabel("epoch", fontsize=9)
    for kernel in range(kernels if kernels > 1 else 0):
        axes.plot([], [], color=colors[kernel], linewidth=1.8, label=f"kernel {kernel + 1}")
    if kernels > 1:
        figure.legend(loc="outside lower center", ncols=min(kernels, int(size[0] / LEGEND_INCHES)), fontsize=8)
    return figure


def _by_option(history: PriorHistory) -> dict[str, dict[str, NDArray[Any]]]:
    """Returns values by option and layer, `(epochs, kernels, heads)`; absolute values of sigma."""
    options: dict[str, dict[str, NDArray[Any]]] = {}
    for layer, each in history.layers.items():
        for option, values in each.items():
            by_kernel = values if values.ndim == 3 else values[:, None]
            # The sign of sigma has no effect.
            options.setdefault(option, {})[layer] = np.abs(by_kernel) if option.endswith("sigma") else by_kernel
    return options


def _panels(part: Any, count: int, columns: int) -> list["Axes"]:
    """Returns `count` axes in a grid that share ticks; their labels are at the left, and below each column."""
    from matplotlib.ticker import MaxNLocator

    grid = part.subplots(math.ceil(count / columns), columns, squeeze=False, sharex=True, sharey=True)
    for number, axes in enumerate(grid.flat):
        axes.set_visible(number < count)
        axes.tick_params(labelsize=7, labelbottom=number + columns >= count, labelleft=number % columns == 0)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))
        axes.spines[["top", "right"]].set_visible(False)
    return list(grid.flat[:count])
