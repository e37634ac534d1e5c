"""Pictures of masks: every layer and head at once, the mixture of a layer, convolution kernels, and how they moved."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vicinal.analysis.learned_tables.masks import Masks
from vicinal.analysis.plot_sheet import Sheet, draw_sheets, same_heads
from vicinal.errors import VicinalError, unknown_name
from vicinal.training.prior_history import PriorHistory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_history", "draw_kernels", "draw_masks", "draw_mixture"]

LINES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")  # Okabe and Ito's
FAINTEST = 0.01  # of the largest factor of attention: smaller ones are drawn alike
MARKS = [digit * 10.0**power for power in range(-3, 9) for digit in (1, 2, 5)]  # on a scale of factors
ACROSS = 6  # layers in a row, at most, where each has curves
UNITS = {"sigma": "patches", "mu_row": "patches", "mu_column": "patches", "gamma": "per patch"}


def draw_masks(masks: Masks) -> "Figure":
    """What priors do in each layer and head, all on one scale; if they multiply and add, on one scale each.

    Logits are multiplied by the scale, and attention, in effect, by the exponential of the bias. Where colours go from
    blue to red, white changes nothing. If the heads of every layer are the same, there is one picture for each layer.
    """
    sheets = []
    where = "offset" if all(layer.over == "offsets" for layer in masks.layers) else "patch around the one in the centre"
    scales = {layer.name: layer.scale for layer in masks.layers if layer.scale is not None}
    if scales:
        sheets.append(_linear(_title(masks, f"what multiplies logits, by {where}"), scales))
    biases = {layer.name: layer.bias for layer in masks.layers if layer.bias is not None}
    if biases:
        sheets.append(_logarithmic(_title(masks, f"what multiplies attention, exp(bias), by {where}"), biases))
    return draw_sheets(sheets)


def _linear(title: str, scales: Mapping[str, NDArray[np.float64]]) -> Sheet:
    """A sheet of factors of logits, which may be below zero."""
    from matplotlib.colors import Normalize

    low, high = min(float(each.min()) for each in scales.values()), max(float(each.max()) for each in scales.values())
    reach = max(high - 1, 1 - low) or 1.0
    if low < 1 < high or low == high:
        return Sheet(title, scales, Normalize(1 - reach, 1 + reach), "RdBu_r", "logits times")
    return Sheet(title, scales, Normalize(low, high), "viridis", "logits times")


def _logarithmic(title: str, biases: Mapping[str, NDArray[np.float64]]) -> Sheet:
    """A sheet of factors of attention, which are above zero."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    factors = {name: np.exp(bias) for name, bias in biases.items()}
    high = max(float(each.max()) for each in factors.values())
    low = max(FAINTEST * high, min(float(each.min()) for each in factors.values()))
    colours = "viridis"
    if low < 1 < high or low == high:
        high = max(high, 1 / low, 2.0 if low == high else 1.0)
        low, colours = 1 / high, "RdBu_r"
    marks = [mark for mark in MARKS if low <= mark <= high]
    if len(marks) < 3:  # less than a factor of about four in all
        marks = [float(mark) for mark in MaxNLocator(5).tick_values(low, high) if low <= mark <= high]
    return Sheet(title, factors, LogNorm(low, high), colours, "attention times", marks)


def draw_kernels(masks: Masks) -> "Figure":
    """The equivalent convolution kernels of each layer and head: see `vicinal.analysis.learned_tables.masks`."""
    from matplotlib.colors import PowerNorm

    pictures = {layer.name: layer.convolution * layer.grid.patches for layer in masks.layers}
    # By the square root: beside a head that looks at one patch, one that looks at all is still to be told from nothing.
    scale = PowerNorm(0.5, 0, max(float(values.max()) for values in pictures.values()))
    what = f"the centre patch's attention where every logit is {masks.logit:g} before the prior"
    title = _title(masks, f"equivalent convolution kernels, {what}")
    return draw_sheets([Sheet(title, pictures, scale, "viridis", "attention (mean patch = 1)")])


def draw_mixture(masks: Masks, layer: int | str, part: str | None = None) -> "Figure":
    """The Gaussian mixture of a layer and its kernels over the distance, head by head; and every kernel in one place.

    Args:
        masks: of a model with `gmm`.
        layer: name or index, from 0.
        part: which one of a layer that has several, such as `gmm-2` of `gmm+gmm`; the first by default.
    """
    from matplotlib.figure import Figure

    number = masks.index(layer)
    chosen = masks.layers[number]
    if not chosen.mixtures:
        raise VicinalError(
            f"{chosen.name} carries {chosen.prior}, which is no mixture of Gaussians; draw_masks shows it, and "
            "`vicinal analyze fit --kernels 5` fits mixtures to it"
        )
    part = next(iter(chosen.mixtures)) if part is None else part
    if part not in chosen.mixtures:
        raise unknown_name("part", part, chosen.mixtures)
    mixture = chosen.mixtures[part]
    kernels, heads = mixture.alpha.shape
    if same_heads(np.concatenate([mixture.alpha, mixture.sigma]).T):
        heads = 1
    across = min(4, heads)
    size = 2.2 * across + 4.2, max(3.6, 1.75 * math.ceil(heads / across) + 1.2)
    figure = Figure(figsize=size, layout="constrained")
    what = "mixture" if len(chosen.mixtures) == 1 else f"mixture {part}"
    title = f"{masks.model}, {chosen.prior}: {what} of layer {number + 1}, {chosen.name}"
    figure.suptitle(_wrapped(title, size[0]), fontsize=10, parse_math=False)
    parts: Any = figure.subfigures(1, 2, width_ratios=(2.2 * across + 0.4, 3.8))
    distance = np.linspace(0, math.hypot(chosen.grid.height - 1, chosen.grid.width - 1), 200)
    curves, colours = mixture.kernels_at(distance), _colours(kernels)
    for head, axes in enumerate(_panels(parts[0], heads, across)):
        for kernel in range(kernels):
            axes.plot(distance, curves[kernel, head], color=colours[kernel], linewidth=1.2)
        axes.plot(distance, mixture.constant + curves[:, head].sum(0), color="black", linewidth=1.8)
        axes.axhline(mixture.constant, color="gray", linewidth=0.8, linestyle=":")
        axes.set_title(f"head {head + 1}" if heads > 1 else "all heads", fontsize=9)
    parts[0].supxlabel("distance, patches", fontsize=9)
    parts[0].supylabel("logits times", fontsize=9)
    (axes,) = _panels(parts[1], 1, 1)
    for kernel in range(kernels):
        widths = np.abs(mixture.sigma[kernel, :heads])  # the sign changes nothing
        axes.scatter(widths, mixture.alpha[kernel, :heads], color=colours[kernel], s=18, label=f"kernel {kernel + 1}")
    axes.plot([], [], color="black", linewidth=1.8, label="the mixture")
    axes.plot([], [], color="gray", linewidth=0.8, linestyle=":", label=f"constant, {mixture.constant:g}")
    axes.axhline(0, color="gray", linewidth=0.7)
    axes.set_xlim(left=0)
    axes.set_xlabel("sigma, patches", fontsize=9)
    axes.set_ylabel("alpha", fontsize=9)
    axes.set_title("each kernel of each head" if heads > 1 else "each kernel", fontsize=9)
    figure.legend(loc="outside lower center", ncols=min(kernels + 2, int(size[0] / 1.4)), fontsize=8)
    return figure


def draw_history(history: PriorHistory, *, model: str = "") -> "Figure":
    """How the options of priors moved over epochs, layer by layer: heads in faint lines, their mean in a strong one.

    Args:
        history: `Run.priors` of a run.
        model: what to call the model in the title.
    """
    from matplotlib.figure import Figure

    options: dict[str, dict[str, NDArray[Any]]] = {}
    for layer, each in history.layers.items():
        for option, values in each.items():
            # One kernel where there are none. The sign of a width changes nothing.
            by_kernel = values if values.ndim == 3 else values[:, None]
            options.setdefault(option, {})[layer] = np.abs(by_kernel) if option.endswith("sigma") else by_kernel
    kernels = max(values.shape[1] for layers in options.values() for values in layers.values())
    colours = _colours(kernels)
    across = min(ACROSS, max(map(len, options.values())))
    heights = [0.75 + 1.5 * math.ceil(len(layers) / across) for layers in options.values()]
    size = max(5.0, 1.0 + 1.9 * across), sum(heights) + 0.8
    figure = Figure(figsize=size, layout="constrained")
    title = f"{model}: " * bool(model) + "options of priors over epochs; faint: each head, strong: their mean"
    figure.suptitle(_wrapped(title, size[0]), fontsize=10, parse_math=False)
    parts = np.ravel(np.array(figure.subfigures(len(options), 1, height_ratios=heights)))
    for part, (option, layers) in zip(parts, options.items(), strict=True):
        for axes, (layer, values) in zip(_panels(part, len(layers), across), layers.items(), strict=True):
            for kernel in range(values.shape[1]):
                axes.plot(history.epochs, values[:, kernel], color=colours[kernel], linewidth=0.6, alpha=0.4)
                axes.plot(history.epochs, values[:, kernel].mean(1), color=colours[kernel], linewidth=1.8)
            axes.set_title(layer, fontsize=8, parse_math=False)
        unit = UNITS.get(option.rpartition(".")[2])
        part.supylabel(f"{option}, {unit}" if unit else option, fontsize=9)
    part.supxlabel("epoch", fontsize=9)
    for kernel in range(kernels if kernels > 1 else 0):
        axes.plot([], [], color=colours[kernel], linewidth=1.8, label=f"kernel {kernel + 1}")
    if kernels > 1:
        figure.legend(loc="outside lower center", ncols=min(kernels, int(size[0] / 1.4)), fontsize=8)
    return figure


def _panels(part: Any, count: int, across: int) -> list["Axes"]:
    """Axes for so many pictures of curves that share both axes, with numbers at the left and where nothing is below."""
    from matplotlib.ticker import MaxNLocator

    grid = part.subplots(math.ceil(count / across), across, squeeze=False, sharex=True, sharey=True)
    for number, axes in enumerate(grid.flat):
        axes.set_visible(number < count)
        axes.tick_params(labelsize=7, labelbottom=number + across >= count, labelleft=number % across == 0)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))
        axes.spines[["top", "right"]].set_visible(False)
    return list(grid.flat[:count])


def _title(masks: Masks, what: str) -> str:
    return f"{masks.model}, {', '.join(dict.fromkeys(layer.prior for layer in masks.layers))}: {what}"


def _wrapped(title: str, width: float) -> str:
    """A title in lines that a figure of so many inches has room for."""
    return textwrap.fill(title, round(13 * width))


def _colours(kernels: int) -> Sequence[str]:
    """One for each kernel, all different: more than there are `LINES` for go from dark to light."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if kernels <= len(LINES):
        return LINES
    return [to_hex(colormaps["viridis"](place)) for place in np.linspace(0, 0.92, kernels)]
