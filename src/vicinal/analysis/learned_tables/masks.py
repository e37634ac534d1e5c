"""Masks: what a model's priors do to its attention, layer by layer and head by head.

    logits -> scale(d) logits + bias(d),   d the offset from the query to the key, in patches

The equivalent convolution kernel is what is left of attention where all content is the same. Before the prior every
logit is then one number c, and the patch i in the centre of the grid looks at the patches j by

    K_h(j) = softmax over j of (c scale_h(i, j) + bias_h(i, j)),   sum_j K_h(j) = 1

as a convolution does, whatever is in the picture. Prefix tokens are left out, and so are biases that the model has of
its own. A bias makes the same kernel at every c. A scale makes a sharper one the larger c is, an even one at c = 0, and
one turned inside out below.

Where keys or queries are pooled over the whole image, patches are those of the finer side. The softmax is then over the
keys, seen from the query that is nearest to the central patch, and a key's weight is spread evenly over the patches
that are nearest to it. In windows, or tokens in another order, the kernel is that of the prior between all patches.

Where a model reads its answer off a class token, the patches of its last layer look at nothing that counts: a prior
stays there as it started.
"""

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vicinal.analysis.inputs import name_of
from vicinal.attachment import get_priors
from vicinal.cells import TokenLines
from vicinal.errors import VicinalError, unknown_name
from vicinal.grid import Grid
from vicinal.priors.base import EPSILON, Prior
from vicinal.priors.gaussian_mixture import GaussianMixture
from vicinal.priors.parameters import get_parameters, get_parts, parameter_rows

__all__ = ["LayerMask", "Masks", "Mixture", "masks_of"]


@dataclass(frozen=True, eq=False)
class Mixture:
    """The Gaussian mixture of a layer: `M(r) = constant + sum_k alpha_k exp(-r^2 / (2 (sigma_k^2 + 1e-5)))`."""

    constant: float
    alpha: NDArray[np.float64]
    """`(kernels, heads)`."""
    sigma: NDArray[np.float64]
    """In patches, `(kernels, heads)`. A width may be learned with either sign, which changes nothing."""

    def kernels_at(self, distance: NDArray[Any]) -> NDArray[np.float64]:
        """What each kernel adds at some distances in patches: `(n,)` gives `(kernels, heads, n)`."""
        spread = 2 * (self.sigma**2 + EPSILON)
        return self.alpha[..., None] * np.exp(-(distance**2) / spread[..., None])


@dataclass(frozen=True, eq=False)
class LayerMask:
    """What the prior of one layer does."""

    name: str
    """Of the attention module."""
    prior: str
    """As it is written, such as `gmm:kernels=3+gab`."""
    grid: Grid
    over: Literal["offsets", "patches"]
    """`offsets` between any two patches; or `patches` of the grid, as the one in the centre sees them: elm has a number
    for every pair."""
    scale: NDArray[np.float64] | None
    """What multiplies logits: `(heads, 2h-1, 2w-1)` over offsets, `(heads, h, w)` over patches; None for 1."""
    bias: NDArray[np.float64] | None
    """What is added to them; None for 0."""
    convolution: NDArray[np.float64]
    """The equivalent convolution kernel over patches: `(heads, h, w)`, of sum 1 for each head."""
    options: Mapping[str, NDArray[Any]]
    """What the prior learned, if it is not a free table: `(heads,)` or `(kernels, heads)`."""
    mixtures: Mapping[str, Mixture]
    """Of `gmm`: alone under the name `""`, in a composition under that of the part, such as `gmm` or `gmm-2`."""

    @property
    def heads(self) -> int:
        """How many the layer has."""
        return len(self.convolution)

    @property
    def centre(self) -> tuple[int, int]:
        """Row and column of the patch that `convolution` is seen from."""
        return self.grid.height // 2, self.grid.width // 2

    @property
    def tables(self) -> dict[str, NDArray[np.float64]]:
        """Scale and bias, as far as there are any."""
        given = {"scale": self.scale, "bias": self.bias}
        return {role: values for role, values in given.items() if values is not None}


@dataclass(frozen=True, eq=False)
class Masks:
    """The masks of a model, in the order of its layers."""

    model: str
    logit: float
    """c, which the equivalent convolution kernels are for."""
    layers: tuple[LayerMask, ...]
    """Those that have a prior."""

    def index(self, layer: int | str) -> int:
        """Where a layer is in `layers`, by its name or its own number, from 0, or below 0 from the end."""
        names = [each.name for each in self.layers]
        if isinstance(layer, str):
            if layer not in names:
                raise unknown_name("layer", layer, names)
            return names.index(layer)
        if not -len(names) <= layer < len(names):
            raise VicinalError(f"unknown layer {layer}: {len(names)} layers have a prior, 0 to {len(names) - 1}")
        return layer % len(names)

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {"model": self.model, "logit": self.logit, "layers": [_as_dict(layer) for layer in self.layers]}

    def write_json(self, path: str | Path) -> None:
        """Write `as_dict` to a file."""
        Path(path).write_text(json.dumps(self.as_dict(), allow_nan=False) + "\n")

    def write_csv(self, path: str | Path) -> None:
        """Write a line per number of scale, bias and convolution, with its offset in patches; heads count from 1."""
        with open(path, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("layer", "prior", "quantity", "head", "row", "column", "value"))
            for layer in self.layers:
                for quantity, values in {**layer.tables, "convolution": layer.convolution}.items():
                    down, right = values.shape[1] // 2, values.shape[2] // 2
                    for (head, row, column), value in np.ndenumerate(values):
                        writer.writerow(
                            (layer.name, layer.prior, quantity, head + 1, row - down, column - right, float(value))
                        )

    def write_options_csv(self, path: str | Path) -> None:
        """Write a line per learned number, in the columns of a run's `priors.csv` without the epoch."""
        with open(path, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("layer", "option", "kernel", "head", "value"))
            writer.writerows((layer.name, *row) for layer in self.layers for row in parameter_rows(layer.options))


def masks_of(model: nn.Module, *, name: str | None = None, logit: float = 1.0) -> Masks:
    """Read the masks of a model's priors.

    >>> import vicinal
    >>> from vicinal.analysis.learned_tables.masks import masks_of
    >>> masks = masks_of(vicinal.create_model("vit-micro", prior="gmm:kernels=3", img_size=(32, 48)))
    >>> layer = masks.layers[0]
    >>> layer.name, layer.scale.shape, layer.convolution.shape, layer.mixtures[""].sigma.shape
    ('blocks.0.attn', (4, 15, 23), (4, 8, 12), (3, 4))

    Args:
        model: one with a prior.
        name: what to call it; by default its architecture.
        logit: c, the logit of equal content, which the equivalent convolution kernel is for.
    """
    if not math.isfinite(logit):
        raise VicinalError(f"logit is a number, such as 1, given {logit}")
    priors = {layer: prior for layer, prior in get_priors(model).items() if prior.spec != "none"}
    if not priors:
        raise VicinalError(
            f"{type(model).__name__} carries no prior, so it has no masks; `vicinal train --prior gmm` makes one that "
            "has. `vicinal analyze fit` reads a model's own position biases, `vicinal analyze attention` where it looks"
        )
    sites: dict[str, Any] = {layer: model.get_submodule(layer).prior_site for layer in priors}
    with torch.no_grad():
        layers = tuple(_layer(layer, prior, logit, sites[layer].lines) for layer, prior in priors.items())
    return Masks(name or name_of(model), float(logit), layers)


def _layer(name: str, prior: Prior, logit: float, lines: tuple[TokenLines, TokenLines] | None) -> LayerMask:
    """Returns what the prior of one layer does; `lines` are those of queries and keys in cells of their own."""
    height, width = prior.grid.height, prior.grid.width
    values = [None if each is None else each.double().cpu() for each in prior.values()]
    if any(each is not None and not bool(each.isfinite().all()) for each in values):
        raise VicinalError(f"the prior of {name} is not finite; train again with a lower --prior-lr")
    seen = [None if each is None else _from_centre(each, prior) for each in values]
    scale, bias = seen if lines is None else _over_keys(prior, *lines)
    seen_from = (height, width) if lines is None else (lines[1].rows, lines[1].columns)
    logits = logit * (torch.ones(prior.heads, *seen_from, dtype=torch.float64) if scale is None else scale)
    logits = logits if bias is None else logits + bias
    if not bool(logits.isfinite().all()):
        raise VicinalError(f"logit is so large, {logit:g}, that the prior of {name} times it is no number; give less")
    convolution = logits.flatten(1).softmax(1).view_as(logits)
    if lines is not None:
        convolution = _over_patches(convolution, prior.grid, *lines)
    shown = values if prior.per_offset else seen
    return LayerMask(
        name=name,
        prior=prior.spec or type(prior).__name__,
        grid=prior.grid,
        over="offsets" if prior.per_offset else "patches",
        scale=None if shown[0] is None else _double(shown[0]),
        bias=None if shown[1] is None else _double(shown[1]),
        convolution=_double(convolution),
        options=get_parameters(prior),
        mixtures={
            part: Mixture(float(its.constant), _double(its.alpha), _double(its.sigma))
            for part, its in get_parts(prior).items()
            if isinstance(its, GaussianMixture)
        },
    )


def _from_centre(values: Tensor, prior: Prior) -> Tensor:
    """What the patch in the centre sees of a prior's values: `(heads, h, w)`."""
    height, width = prior.grid.height, prior.grid.width
    row, column = height // 2, width // 2
    if prior.per_offset:  # offset 0 is in the table's centre, and the first row of the grid is `row` above it
        return values[:, height - 1 - row :, width - 1 - column :][:, :height, :width]
    return values[:, row * width + column].view(-1, height, width)


def _over_keys(prior: Prior, queries: TokenLines, keys: TokenLines) -> list[Tensor | None]:
    """Returns scale and bias from the query nearest to the central patch to all keys: `(heads, rows, columns)` each."""
    centre = _patches(prior.grid, queries, keys)[prior.grid.height // 2 * prior.grid.width + prior.grid.width // 2]
    places = _placed(queries)
    query = places[(places - centre).norm(dim=-1).argmin()]
    pair = prior.at(_placed(keys) - query)
    return [None if each is None else each.double().cpu().unflatten(1, (keys.rows, keys.columns)) for each in pair]


def _over_patches(kernel: Tensor, grid: Grid, queries: TokenLines, keys: TokenLines) -> Tensor:
    """Returns weights of keys `(heads, rows, columns)` spread over patches: `(heads, h, w)`, of the same sum."""
    nearest = torch.cdist(_patches(grid, queries, keys), _placed(keys)).argmin(1)
    share = 1 / nearest.bincount(minlength=keys.rows * keys.columns)
    return (kernel.flatten(1) * share)[:, nearest].view(-1, grid.height, grid.width)


def _patches(grid: Grid, queries: TokenLines, keys: TokenLines) -> Tensor:
    """Returns row and column of each patch of the finer side, `(patches, 2)`, counted as those of the lines."""
    first = [keys.first[axis] if keys.step[axis] == 1 else queries.first[axis] for axis in (0, 1)]
    return _placed(TokenLines(grid.height, grid.width, (first[0], first[1]), (1, 1)))


def _placed(lines: TokenLines) -> Tensor:
    """Returns row and column of each token that has a place, `(rows * columns, 2)`."""
    return lines.places[lines.prefix : lines.prefix + lines.rows * lines.columns]


def _as_dict(layer: LayerMask) -> dict[str, Any]:
    return {
        "name": layer.name,
        "prior": layer.prior,
        "grid": [layer.grid.height, layer.grid.width],
        "over": layer.over,
        "scale": None if layer.scale is None else layer.scale.tolist(),
        "bias": None if layer.bias is None else layer.bias.tolist(),
        "centre": list(layer.centre),
        "convolution": layer.convolution.tolist(),
        "constants": {
            f"{part}.constant" if part else "constant": mixture.constant for part, mixture in layer.mixtures.items()
        },
        "options": {option: values.tolist() for option, values in layer.options.items()},
    }


def _double(values: Tensor) -> NDArray[np.float64]:
    found: NDArray[np.float64] = values.double().numpy(force=True)
    return found
