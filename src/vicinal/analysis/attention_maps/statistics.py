"""Measures mean attention distance and entropy of each head, layer by layer.

    distance(h) = mean over images and patches q of  sum_k A_h[q, k] |q - k| / sum_k A_h[q, k],      k over patches
    entropy(h)  = mean over images and queries q of  - sum_k A_h[q, k] log A_h[q, k],                k over all keys

Distance as in Dosovitskiy et al., "An Image is Worth 16x16 Words", arXiv:2010.11929, Figure 7. Tokens without a place,
such as the class token, are at no distance, so attention is normalized over patches first. Queries are the patches.
Where a single query reads the image, as in CaiT's class layers, it has an entropy and no distance.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vicinal.analysis.attention_maps.layers import AttentionLayer
from vicinal.analysis.attention_maps.reader import attention_reader
from vicinal.analysis.attention_maps.statistics_result import AttentionStatistics, LayerStatistics
from vicinal.errors import VicinalError
from vicinal.inspection.model_inspection import Inspection

__all__ = ["attention_statistics"]

MAX_MASKED_WEIGHT = 1e-6  # models mask a key by adding -100 or less to its logit, which leaves less weight


def attention_statistics(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    name: str | None = None,
    batch_size: int = 32,
    inspection: Inspection | None = None,
) -> AttentionStatistics:
    """Returns mean attention distance and entropy of every head of every layer.

    >>> import torch, vicinal
    >>> from vicinal.analysis.attention_maps import attention_statistics
    >>> model = vicinal.create_model("vit-micro", img_size=(32, 48), depth=2)
    >>> found = attention_statistics(model, torch.randn(4, 3, 32, 48))
    >>> [(layer.name, layer.grid, len(layer.distance_pixels)) for layer in found.layers]
    [('blocks.0.attn', (8, 12), 4), ('blocks.1.attn', (8, 12), 4)]

    The model runs in evaluation mode, with its fused attention; one layer's weights are in memory at a time. Windows
    are put back at their place, so distances are those in the image, and padding does not count. With a prior attached,
    it is the attention under the prior. Talking heads, as in CaiT, are read before they are mixed.

    Args:
        model: any vision transformer; its mode, buffers and random state are restored.
        images: `(n, channels, height, width)` as the model takes them; or batches, alone or first in a tuple, as
            DataLoaders give them.
        name: display name of the model; by default its architecture.
        batch_size: number of images in a batch, which bounds the memory.
        inspection: as for `attention_maps`.

    Raises:
        VicinalError: if there are no images, or no layer can be measured.
    """
    reader = attention_reader(
        model, images, check=_check_distances, name=name, batch_size=batch_size, inspection=inspection
    )
    measured = reader.reduce(_measure)
    layers = []
    for layer, values in zip(reader.layers, measured, strict=True):
        if not values[..., 4].isfinite().all():
            raise VicinalError(f"the attention of {layer.name} is not finite; check the images and the weights")
        figures = values.double().nanmean(0)  # over images
        patches, pixels, uniform_patches, uniform_pixels, entropy, relative = figures.T.tolist()
        layers.append(
            LayerStatistics(
                layer=layer.index + 1,
                name=layer.name,
                grid=layer.grid,
                patch=layer.patch,
                windows=layer.windows,
                keys=layer.keys,
                distance_patches=tuple(patches),
                distance_pixels=tuple(pixels),
                uniform_patches=uniform_patches[0],
                uniform_pixels=uniform_pixels[0],
                entropy=tuple(entropy),
                relative_entropy=tuple(relative),
            )
        )
    return AttentionStatistics(reader.model, len(measured[0]), tuple(layers), reader.left_out)


def _check_distances(layer: AttentionLayer) -> None:
    """Raises VicinalError if the distances between queries and keys are not known."""
    if not layer.single:
        _ = layer.offsets


def _measure(layer: AttentionLayer, weights: Tensor) -> Tensor:
    """Returns six figures of each image and head, `(n, heads, 6)`.

    They are the distance in patches and in pixels, both again for uniform attention, entropy and relative entropy.
    """
    entropy = torch.special.entr(weights).sum(-1, keepdim=True)  # (n, windows, heads, queries, 1)
    if layer.single:
        entropy = entropy.mean((1, 3))
        no_distance = entropy.new_full((1,), math.nan).expand(*entropy.shape[:2], 4)
        return torch.cat([no_distance, entropy, entropy / math.log(layer.keys)], -1)
    lengths, visible = _lengths(layer).to(weights), _visible(layer, weights)
    attended = torch.einsum("nwhqk,wqkm->nwhqm", weights, lengths)
    uniform = torch.einsum("wqk,wqkm->wqm", visible.to(weights), lengths)[:, None].expand_as(attended)
    distances = [each[..., :2] / each[..., 2:] for each in (attended, uniform)]
    highest = visible.sum(-1).to(weights).log()[:, None, :, None]
    by_query = torch.cat([*distances, entropy, entropy / highest], -1)
    # NaN: queries without a place, and 0 / 0 of a query that attends to no patch or can attend to one key only.
    placed = layer.placed_queries.to(weights.device)[:, None, :, None]
    return by_query.masked_fill(~placed, math.nan).nanmean((1, 3))


def _visible(layer: AttentionLayer, weights: Tensor) -> Tensor:
    """Returns which keys each query can attend to, bool `(windows, queries, keys)`.

    Models mask pairs of tokens that came into a window across the image's edge, and some mask padding. Such a pair
    counts if it gets any attention. A key without a place in any window counts if any query of the window attends to
    it.
    """
    highest = weights.amax((0, 2))
    nowhere = ~(layer.placed.any(0) | (highest.amax(1) > MAX_MASKED_WEIGHT).cpu())
    hidden = layer.wrapped | layer.padding[:, None]
    return ~nowhere.to(weights.device)[:, None] & (~hidden.to(weights.device) | (highest > MAX_MASKED_WEIGHT))


def _lengths(layer: AttentionLayer) -> Tensor:
    """Returns distance in patches, distance in pixels, and 1 for each pair of patches, `(windows, queries, keys, 3)`.

    All three are 0 where one of the tokens has no place.
    """
    offsets = layer.offsets
    pixels = offsets * torch.tensor(layer.patch, dtype=torch.float64)
    pairs = (layer.placed_queries[:, :, None] & layer.placed[:, None]).double()
    return torch.stack([offsets.norm(dim=-1) * pairs, pixels.norm(dim=-1) * pairs, pairs], -1)
