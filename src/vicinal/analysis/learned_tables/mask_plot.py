"""Plots of masks: every layer and head at once, and their equivalent convolution kernels."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vicinal.analysis.learned_tables.mask_result import Masks
from vicinal.analysis.plot_sheet import Sheet, draw_sheets
from vicinal.analysis.plot_style import SEQUENTIAL, factor_scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["bias_sheet", "draw_convolutions", "draw_masks", "scale_sheet"]

MIN_RELATIVE_FACTOR = 0.01  # of the largest factor of attention: lower end of the scale
TICKS = [digit * 10.0**power for power in range(-3, 9) for digit in (1, 2, 5)]  # of a logarithmic scale
MIN_TICKS = 3


def draw_masks(masks: Masks) -> "Figure":
    """Returns a plot of the masks of each layer and head, all on one scale; scales and biases on one each.

    Logits are multiplied by the scale, and attention, in effect, by the exponential of the bias. If colors go from blue
    to red, white is 1, no change. If the heads of every layer are the same, there is one picture for each layer.
    """
    sheets = []
    where = "offset" if all(layer.over == "offsets" for layer in masks.layers) else "patch around the central one"
    scales = {layer.name: layer.scale for layer in masks.layers if layer.scale is not None}
    if scales:
        sheets.append(scale_sheet(_title(masks, f"factor of logits, by {where}"), scales))
    biases = {layer.name: layer.bias for layer in masks.layers if layer.bias is not None}
    if biases:
        sheets.append(bias_sheet(_title(masks, f"factor of attention, exp(bias), by {where}"), biases))
    return draw_sheets(sheets)


def scale_sheet(title: str, scales: Mapping[str, NDArray[np.float64]]) -> Sheet:
    """Returns a sheet of factors of logits, which can be negative."""
    low, high = min(float(each.min()) for each in scales.values()), max(float(each.max()) for each in scales.values())
    scale, colors = factor_scale(low, high)
    return Sheet(title, scales, scale, colors, "logits times")


def bias_sheet(title: str, biases: Mapping[str, NDArray[np.float64]]) -> Sheet:
    """Returns a sheet of factors of attention, which are positive."""
    from matplotlib.ticker import MaxNLocator

    factors = {name: np.exp(bias) for name, bias in biases.items()}
    high = max(float(each.max()) for each in factors.values())
    low = max(MIN_RELATIVE_FACTOR * high, min(float(each.min()) for each in factors.values()))
    scale, colors = factor_scale(low, high, logarithmic=True)
    bottom, top = float(scale.vmin or low), float(scale.vmax or high)
    ticks = [tick for tick in TICKS if bottom <= tick <= top]
    if len(ticks) < MIN_TICKS:  # a range of less than a factor of about four
        ticks = [float(tick) for tick in MaxNLocator(5).tick_values(bottom, top) if bottom <= tick <= top]
    return Sheet(title, factors, scale, colors, "attention times", ticks)


def draw_convolutions(masks: Masks) -> "Figure":
    """Returns a plot of the equivalent convolution kernels of each layer and head, see `masks_of`."""
    from matplotlib.colors import PowerNorm

    pictures = {layer.name: layer.convolution * layer.grid.patches for layer in masks.layers}
    # Square root: uniform attention stays visible beside a head that attends to one patch.
    scale = PowerNorm(0.5, 0, max(float(values.max()) for values in pictures.values()))
    which = f"attention of the central patch if every logit is {masks.logit:g} before the prior"
    title = _title(masks, f"equivalent convolution kernels, {which}")
    return draw_sheets([Sheet(title, pictures, scale, SEQUENTIAL, "attention (mean patch = 1)")])


def _title(masks: Masks, content: str) -> str:
    return f"{masks.model}, {', '.join(dict.fromkeys(layer.prior for layer in masks.layers))}: {content}"
