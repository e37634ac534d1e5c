"""Measures attention maps of a patch, the class token or the mean patch, in any layer and head."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from vicinal.analysis.attention_maps.layers import AttentionLayer
from vicinal.analysis.attention_maps.query import Query, check_query, patch_in, query_in
from vicinal.analysis.attention_maps.reader import attention_reader
from vicinal.analysis.attention_maps.result import AttentionMap
from vicinal.errors import VicinalError, unknown_name
from vicinal.inspection.layer_selection import Layers
from vicinal.inspection.model_inspection import Inspection

__all__ = ["attention_maps"]


def attention_maps(
    model: nn.Module,
    images: Tensor,
    *,
    layers: Layers | int | None = None,
    heads: Sequence[int] | int | Literal["mean"] | None = None,
    query: Query | None = None,
    name: str | None = None,
    batch_size: int = 32,
    inspection: Inspection | None = None,
) -> list[AttentionMap]:
    """Returns attention maps of a query, one for each layer, with an axis for the heads.

    >>> import torch, vicinal
    >>> from vicinal.analysis.attention_maps import attention_maps
    >>> model = vicinal.create_model("vit-micro", img_size=(32, 48), depth=2)
    >>> (last,) = attention_maps(model, torch.randn(3, 32, 48), layers="last", query=(2, 5))
    >>> last.layer, last.values.shape  # images, heads, rows, columns
    ('blocks.1.attn', torch.Size([1, 4, 8, 12]))

    The model runs once, in evaluation mode; one layer's weights are in memory at a time. Talking heads (CaiT) are read
    before they are mixed. With windows, a patch attends to its own window only; the mean is over all of them.

    Args:
        model: any vision transformer; its mode, buffers and random state are restored.
        images: `(n, channels, height, width)` as the model takes them, or one image without the first axis.
        layers: indices or names of attention layers, `last 4`, or a function; by default all that have such a query.
        heads: index or indices, from 0; `mean` averages over all; by default each of them.
        query: `class`, `mean`, or row and column of a patch, from 0, on the grid of the first layer; on coarser grids
            it is the patch that contains that one. By default the one that the model classifies by.
        name: display name of the model; by default its architecture.
        batch_size: number of images in a batch, which bounds the memory.
        inspection: as `inspect_images` returns it for the model, so that it is not inspected again.

    Raises:
        VicinalError: if there is no such layer, head or query.
    """
    check_query(query)
    chosen = _head_indices(heads)
    reader = attention_reader(
        model,
        images,
        layers=layers,
        check=lambda layer: query_in(model, layer, query),
        name=name,
        batch_size=batch_size,
        inspection=inspection,
    )
    queries = {layer.name: patch_in(layer, query_in(model, layer, query), reader.layers[0]) for layer in reader.layers}
    _check_heads(reader.layers, chosen)

    def keep(layer: AttentionLayer, weights: Tensor) -> Tensor:
        attended = _attention_of_query(layer, weights, queries[layer.name])
        return attended.mean(1, keepdim=True) if heads == "mean" else attended[:, _heads_of(layer, chosen)]

    maps = []
    for layer, values in zip(reader.layers, reader.reduce(keep), strict=True):
        shown = None if heads == "mean" else tuple(_heads_of(layer, chosen))
        maps.append(AttentionMap(reader.model, layer.name, queries[layer.name], shown, values, layer.query_size))
    return maps


def _heads_of(layer: AttentionLayer, heads: Sequence[int] | None) -> list[int]:
    """Returns indices of heads, counted from 0; all of the layer's if None is given."""
    return list(range(layer.heads)) if heads is None else [head % layer.heads for head in heads]


def _head_indices(heads: Sequence[int] | int | str | None) -> list[int] | None:
    """Returns indices of heads; None for all, or for their mean."""
    if isinstance(heads, str):
        if heads != "mean":
            raise unknown_name("heads", heads, ["mean"])
        return None
    chosen = [heads] if isinstance(heads, int) else None if heads is None else list(heads)
    if chosen == []:
        raise VicinalError("heads must be one or more indices, or 'mean', got none")
    return chosen


def _check_heads(layers: Sequence[AttentionLayer], heads: Sequence[int] | None) -> None:
    """Raises VicinalError if a layer does not have one of the heads."""
    for layer in layers:
        wrong = [head for head in heads or () if not -layer.heads <= head < layer.heads]
        if wrong:
            raise VicinalError(f"unknown head {wrong[0]}: {layer.name} has {layer.heads}, 0 to {layer.heads - 1}")


def _attention_of_query(layer: AttentionLayer, weights: Tensor, query: Query) -> Tensor:
    """Returns how much a query attends to each cell, `(n, heads, rows, columns)`.

    Args:
        layer: where the weights come from.
        weights: `(n, windows, heads, queries, keys)`.
        query: one that the layer has. Where every window has a class token, `class` is the mean over them.
    """
    share = torch.zeros(weights.shape[1], weights.shape[3], dtype=weights.dtype)  # of each query token in the result
    if query == "class":
        share[:, 0] = 1
    elif query == "mean":
        share[layer.placed_queries] = 1
    else:
        row, column = query
        share[layer.query_cells.index == row * layer.query_size[1] + column] = 1
    tokens = share.any(0).nonzero()[:, 0]  # no other rows are computed with
    share = (share / share.sum())[:, tokens].to(weights)
    attended = torch.einsum("nwhqk,wq->nhwk", weights[..., tokens.to(weights.device), :], share)
    return layer.cells.to_map(attended)
