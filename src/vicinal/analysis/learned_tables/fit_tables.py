"""Fits the tables of a model with Gaussians, layer by layer, as in Table 1 of Kim et al., arXiv:2305.04722."""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
from torch import nn

from vicinal.analysis.gaussian_fit import fit_gaussian
from vicinal.analysis.inputs import model_name
from vicinal.analysis.learned_tables.fit_report import FitReport, FitRow, View
from vicinal.analysis.learned_tables.tables import LayerTable, tables_of
from vicinal.analysis.mixture_fit import fit_mixtures
from vicinal.deprecation import warn_renamed
from vicinal.errors import VicinalError, unknown_name
from vicinal.inspection.layer_selection import layer_index
from vicinal.inspection.model_runner import ImageSize

__all__ = ["fit_model"]


def fit_model(
    model: nn.Module,
    *,
    name: str | None = None,
    kernels: int | None = None,
    per_head: bool = True,
    view: View = "center",
    layers: Sequence[int | str] | None = None,
    img_size: ImageSize | None = None,
) -> FitReport:
    """Returns Gaussians fitted to every table of a model, and mixtures if asked for.

    >>> import vicinal
    >>> from vicinal.analysis.learned_tables import fit_model
    >>> model = vicinal.create_model("vit-micro", prior="gab:sigma=2", depth=2)
    >>> print(fit_model(model, name="vit-micro").table())
    vit-micro, gab:sigma=2 (bias): tables around the central patch, fitted by a 2-D Gaussian; lengths in patches
    l  layer          role  head    R^2  sigma_X  sigma_Y  amplitude  constant      x      y
    1  blocks.0.attn  bias   all  1.000    2.000    2.000          1         0  0.000  0.000
    2  blocks.1.attn  bias   all  1.000    2.000    2.000          1         0  0.000  0.000

    Args:
        model: one with priors, or relative position biases of its own; see `tables_of`.
        name: display name of the model; by default its architecture.
        kernels: also fit mixtures of 1, 2, ... up to this many Gaussians of the distance.
        per_head: fit every head; else their mean, as in the paper.
        view: `center` fits the table around the central patch, as in the paper: at each of its offsets at least a
            quarter of the patches have a neighbor. `offsets` fits all, up to those from corner to corner, which are
            rare in training.
        layers: names or indices, from 0, of the layers to fit; all by default.
        img_size: as for `tables_of`.

    Raises:
        VicinalError: if the model has no table, or an argument is wrong.
    """
    if view == "centre":  # type: ignore[comparison-overlap]
        warn_renamed("view='centre'", "view='center'")
        view = "center"
    if view not in get_args(View):
        raise unknown_name("view", str(view), get_args(View))
    if kernels is not None and (not isinstance(kernels, int) or kernels < 1):
        raise VicinalError(f"kernels must be a whole number >= 1, got {kernels!r}")
    tables = tables_of(model, img_size=img_size)
    names = list(dict.fromkeys(table.name for table in tables))
    selected = _select(names, layers)
    rows = []
    for table in tables:
        if table.name in selected:
            table = table.around_center() if view == "center" else table
            number = names.index(table.name) + 1
            rows += [_fit(number, each, head, kernels) for head, each in _split_heads(table, per_head)]
    return FitReport(name or model_name(model), view, tuple(rows))


def _select(names: list[str], layers: Sequence[int | str] | None) -> set[str]:
    """Returns the names of the layers to fit."""
    if layers is None:
        return set(names)
    if isinstance(layers, str) or not layers:
        raise VicinalError(f"layers must be a list of names or indices, got {layers!r}")
    return {names[layer_index(names, layer)] for layer in layers}


def _split_heads(table: LayerTable, per_head: bool) -> list[tuple[int | None, LayerTable]]:
    """Returns a table for each head, with its number from 1; one without a number for the mean, or for equal heads."""
    values = table.values
    if not per_head or np.array_equal(values, np.broadcast_to(values[:1], values.shape)):
        return [(None, replace(table, values=values.mean(0, keepdims=True)))]
    return [(head + 1, replace(table, values=values[head : head + 1])) for head in range(len(values))]


def _fit(layer: int, table: LayerTable, head: int | None, kernels: int | None) -> FitRow:
    values = table.values[0]
    mixtures = tuple(fit_mixtures(values, kernels, table.center)) if kernels else ()
    return FitRow(layer, table, head, fit_gaussian(values, table.center), mixtures)
