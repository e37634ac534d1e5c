"""Reads masks: the tables of a model's priors, layer by layer and head by head.

    logits -> scale(d) logits + bias(d),   d the offset from the query to the key, in patches

The equivalent convolution kernel is the attention for uniform content. Every logit is then one number c before the
prior, and the central patch i of the grid attends to the patches j by

    K_h(j) = softmax over j of (c scale_h(i, j) + bias_h(i, j)),   sum_j K_h(j) = 1

as a convolution does, whatever the image. Prefix tokens are left out, and so are biases of the model itself. A bias
makes the same kernel at every c. A scale makes a sharper kernel for larger c, a uniform one at c = 0, and an inverted
one below.

Where keys or queries are pooled over the whole image, patches are those of the finer side. The softmax is then over the
keys, for the query that is nearest to the central patch, and a key's weight is spread evenly over the patches that are
nearest to it. In windows, or with tokens in another order, the kernel is that of the prior between all patches.

With class-token pooling, patch-to-patch attention in the last layer does not reach the output, so that layer's prior
gets no gradient and keeps its initial values.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vicinal.analysis.inputs import model_name
from vicinal.analysis.learned_tables.center_view import center_view
from vicinal.analysis.learned_tables.mask_result import LayerMask, Masks, Mixture
from vicinal.attachment import get_priors
from vicinal.cells import TokenLines
from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.priors.base import Prior
from vicinal.priors.gaussian_mixture import GaussianMixture
from vicinal.priors.parameters import get_parameters, get_parts

__all__ = ["masks_of"]


def masks_of(model: nn.Module, *, name: str | None = None, logit: float = 1.0) -> Masks:
    """Returns the masks of a model's priors.

    >>> import vicinal
    >>> from vicinal.analysis.learned_tables import masks_of
    >>> masks = masks_of(vicinal.create_model("vit-micro", prior="gmm:kernels=3", img_size=(32, 48)))
    >>> layer = masks.layers[0]
    >>> layer.name, layer.scale.shape, layer.convolution.shape, layer.mixtures[""].sigma.shape
    ('blocks.0.attn', (4, 15, 23), (4, 8, 12), (3, 4))

    Args:
        model: one with a prior.
        name: display name of the model; by default its architecture.
        logit: c, the logit of uniform content, for the equivalent convolution kernel.

    Raises:
        VicinalError: if the model has no prior, or a prior or its product with `logit` is not finite.
    """
    if not math.isfinite(logit):
        raise VicinalError(f"logit must be a finite number, got {logit}")
    priors = {layer: prior for layer, prior in get_priors(model).items() if prior.spec != "none"}
    if not priors:
        raise VicinalError(
            f"{type(model).__name__} has no prior, so it has no masks; `vicinal train --prior gmm` trains one. "
            "`vicinal analyze fit` reads other position biases, `vicinal analyze attention` the attention itself"
        )
    sites: dict[str, Any] = {layer: model.get_submodule(layer).prior_site for layer in priors}
    with torch.no_grad():
        layers = tuple(_layer(layer, prior, logit, sites[layer].lines) for layer, prior in priors.items())
    return Masks(name or model_name(model), float(logit), layers)


def _layer(name: str, prior: Prior, logit: float, lines: tuple[TokenLines, TokenLines] | None) -> LayerMask:
    """Returns the mask of one layer; `lines` are those of queries and keys, if they are in different cells."""
    height, width = prior.grid.height, prior.grid.width
    values = [None if each is None else each.double().cpu() for each in prior.values()]
    if any(each is not None and not bool(each.isfinite().all()) for each in values):
        raise VicinalError(f"the prior of {name} is not finite; train again with a lower --prior-lr")
    central = [
        None if each is None else center_view(each, height, width, per_offset=prior.per_offset) for each in values
    ]
    scale, bias = central if lines is None else _over_keys(prior, *lines)
    key_grid = (height, width) if lines is None else (lines[1].rows, lines[1].columns)
    logits = logit * (torch.ones(prior.heads, *key_grid, dtype=torch.float64) if scale is None else scale)
    logits = logits if bias is None else logits + bias
    if not bool(logits.isfinite().all()):
        raise VicinalError(f"logit must be smaller, got {logit:g}: its product with the prior of {name} is not finite")
    convolution = logits.flatten(1).softmax(1).view_as(logits)
    if lines is not None:
        convolution = _over_patches(convolution, prior.grid, *lines)
    shown = values if prior.per_offset else central
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


def _over_keys(prior: Prior, queries: TokenLines, keys: TokenLines) -> list[Tensor | None]:
    """Returns scale and bias from the query nearest to the central patch to all keys: `(heads, rows, columns)` each."""
    center = _patches(prior.grid, queries, keys)[prior.grid.height // 2 * prior.grid.width + prior.grid.width // 2]
    places = _placed(queries)
    query = places[(places - center).norm(dim=-1).argmin()]
    pair = prior.at(_placed(keys) - query)
    return [None if each is None else each.double().cpu().unflatten(1, (keys.rows, keys.columns)) for each in pair]


def _over_patches(kernel: Tensor, grid: Grid, queries: TokenLines, keys: TokenLines) -> Tensor:
    """Returns weights of keys `(heads, rows, columns)` spread over patches: `(heads, h, w)`, of the same sum."""
    nearest = torch.cdist(_patches(grid, queries, keys), _placed(keys)).argmin(1)
    share = 1 / nearest.bincount(minlength=keys.rows * keys.columns)
    return (kernel.flatten(1) * share)[:, nearest].view(-1, grid.height, grid.width)


def _patches(grid: Grid, queries: TokenLines, keys: TokenLines) -> Tensor:
    """Returns row and column of each patch of the finer side, `(patches, 2)`, in the units of the lines."""
    first = [keys.first[axis] if keys.step[axis] == 1 else queries.first[axis] for axis in (0, 1)]
    return _placed(TokenLines(grid.height, grid.width, (first[0], first[1]), (1, 1)))


def _placed(lines: TokenLines) -> Tensor:
    """Returns row and column of each token that has a place, `(rows * columns, 2)`."""
    return lines.places[lines.prefix : lines.prefix + lines.rows * lines.columns]


def _double(values: Tensor) -> NDArray[np.float64]:
    found: NDArray[np.float64] = values.double().numpy(force=True)
    return found
