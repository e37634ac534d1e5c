"""What a patch, the class token or the mean patch looks at: maps of any layer and head, laid on the image's grid."""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from vicinal.analysis.attention_maps.layers import AttentionLayer
from vicinal.analysis.attention_maps.query import Query, check_query, patch_in, query_in
from vicinal.analysis.attention_maps.reader import attention_reader
from vicinal.errors import VicinalError, unknown_name
from vicinal.inspection.layer_selection import Layers

__all__ = ["AttentionMap", "attention_maps", "write_maps"]


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Where one layer looks, or several in a rollout."""

    model: str
    layer: str
    """Name of the module, or what was rolled out."""
    query: Query
    heads: tuple[int, ...] | None
    """Which heads, from 0; None for their mean."""
    values: Tensor
    """Attention to each patch, `(n, heads, rows, columns)`; the mean over heads has that axis too, of length 1. What
    goes to tokens without a place is left out, so the sum over patches may be below 1. Pooled keys are patches here."""
    query_grid: tuple[int, int] | None = None
    """Rows and columns of the patches that `query` counts; None for those of the map, unless its keys are pooled."""

    @property
    def map(self) -> Tensor:
        """Averaged over the heads that are in it: `(n, rows, columns)`."""
        return self.values.mean(1)

    @property
    def whose(self) -> str:
        """Whose attention it is, in words."""
        if isinstance(self.query, tuple):
            return f"the patch at row {self.query[0]}, column {self.query[1]}"
        return "the class token" if self.query == "class" else "all patches (mean)"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; heads from 1."""
        heads = None if self.heads is None else [head + 1 for head in self.heads]
        about = {"model": self.model, "layer": self.layer, "query": self.query, "heads": heads}
        return {**about, "attention": self.values.tolist()}


def write_maps(maps: Sequence[AttentionMap], path: str | Path, names: Sequence[str] | None = None) -> None:
    """Write maps to a file. Heads count from 1.

    Args:
        maps: of the same images.
        path: as JSON, or as CSV with a line for each patch, as its ending says.
        names: of the images; by default they count from 0.
    """
    path, counts = Path(path), {len(each.values) for each in maps}
    if names is not None and counts - {len(names)}:
        raise VicinalError(f"names is one for each image, given {len(names)} for {max(counts)}")
    if path.suffix == ".json":
        images = {} if names is None else {"images": list(names)}
        path.write_text(json.dumps([{**each.as_dict(), **images} for each in maps], allow_nan=False) + "\n")
        return
    if path.suffix != ".csv":
        raise VicinalError(f"maps are written as .json or .csv, given {path.name}")
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", "layer", "query", "image", "head", "row", "column", "attention"])
        for each in maps:
            query = each.query if isinstance(each.query, str) else f"{each.query[0]} {each.query[1]}"
            labels = ["mean"] if each.heads is None else [head + 1 for head in each.heads]
            for place, value in zip(np.ndindex(*each.values.shape), each.values.flatten().tolist(), strict=True):
                image, head, row, column = place
                shown = image if names is None else names[image]
                writer.writerow([each.model, each.layer, query, shown, labels[head], row, column, value])


def attention_maps(
    model: nn.Module,
    images: Tensor,
    *,
    layers: Layers | int | None = None,
    heads: Sequence[int] | int | Literal["mean"] | None = None,
    query: Query | None = None,
    name: str | None = None,
    batch_size: int = 32,
) -> list[AttentionMap]:
    """Maps of what a query looks at, one for each layer, with an axis for the heads.

    >>> import torch, vicinal
    >>> from vicinal.analysis.attention_maps.measure import attention_maps
    >>> model = vicinal.create_model("vit-micro", img_size=(32, 48), depth=2)
    >>> (last,) = attention_maps(model, torch.randn(3, 32, 48), layers="last", query=(2, 5))
    >>> last.layer, last.values.shape  # images, heads, rows, columns
    ('blocks.1.attn', torch.Size([1, 4, 8, 12]))

    The model runs as in evaluation, once, with its fused attention; one layer's weights are in memory at a time. With a
    prior attached, it is the attention under the prior. Heads that talk behind the softmax, as in CaiT, are taken
    before. In layers with windows, a patch looks at its own window only; the mean is over all of them.

    Args:
        model: any vision transformer; it is left as it was.
        images: `(n, channels, height, width)` as the model takes them, or one image without the first axis.
        layers: which attention layers: an index, several, `last 4`, `first 2`, or a function of index and module name;
            by default all that have such a query.
        heads: an index or several, from 0; `mean` averages over all; by default each.
        query: `class`, `mean`, or row and column of a patch, from 0, on the grid of the first of the layers; on coarser
            grids it is the patch that holds that one. By default that by which the model classifies: a query that reads
            the whole image, the class token, or the mean.
        name: what to call the model; by default its architecture.
        batch_size: images at a time, which bounds the memory.
    """
    check_query(query)
    chosen = _heads(heads)
    reader = attention_reader(
        model,
        images,
        layers=layers,
        check=lambda layer: query_in(model, layer, query),
        name=name,
        batch_size=batch_size,
    )
    first, queries = reader.layers[0], dict[str, Query]()
    for layer in reader.layers:
        queries[layer.name] = patch_in(layer, query_in(model, layer, query), first)
        wrong = [head for head in chosen or () if not -layer.heads <= head < layer.heads]
        if wrong:
            raise VicinalError(f"unknown head {wrong[0]}: {layer.name} has {layer.heads}, 0 to {layer.heads - 1}")

    def keep(layer: AttentionLayer, weights: Tensor) -> Tensor:
        attended = _attention_of_query(layer, weights, queries[layer.name])
        if heads == "mean":
            return attended.mean(1, keepdim=True)
        return attended if chosen is None else attended[:, chosen]

    maps = []
    for layer, values in zip(reader.layers, reader.reduce(keep), strict=True):
        shown = None if heads == "mean" else tuple(head % layer.heads for head in chosen or range(layer.heads))
        maps.append(AttentionMap(reader.model, layer.name, queries[layer.name], shown, values, layer.query_size))
    return maps


def _heads(heads: Sequence[int] | int | str | None) -> list[int] | None:
    """Indices, or None for all."""
    if isinstance(heads, str):
        if heads != "mean":
            raise unknown_name("heads", heads, ["mean"])
        return None
    chosen = [heads] if isinstance(heads, int) else None if heads is None else list(heads)
    if chosen == []:
        raise VicinalError("heads is an index, several, or 'mean'; given none")
    return chosen


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
