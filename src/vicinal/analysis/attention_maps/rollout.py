"""Measures attention rollout: attention of a query multiplied through all layers and their residual connections.

    R = A'_L ... A'_2 A'_1,    A'_l = normalized over keys (1/2 mean over heads of A_l + 1/2 identity)

Abnar and Zuidema, "Quantifying Attention Flow in Transformers", arXiv:2005.00928. The product is taken as the layers
run, so one layer's attention is in memory at a time.
"""

import torch
from torch import Tensor, nn

from vicinal.analysis.attention_maps.layers import AttentionLayer
from vicinal.analysis.attention_maps.query import Query, check_query, patch_in, query_in
from vicinal.analysis.attention_maps.reader import attention_reader
from vicinal.analysis.attention_maps.result import AttentionMap
from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.inspection.layer_selection import Layers
from vicinal.inspection.model_inspection import Inspection

__all__ = ["rollout"]


def rollout(
    model: nn.Module,
    images: Tensor,
    *,
    layers: Layers | int | None = None,
    query: Query | None = None,
    name: str | None = None,
    batch_size: int = 32,
    inspection: Inspection | None = None,
) -> AttentionMap:
    """Returns the map of attention multiplied through a model's layers.

    >>> import torch, vicinal
    >>> from vicinal.analysis.attention_maps import rollout
    >>> model = vicinal.create_model("vit-micro", img_size=(32, 48), depth=2)
    >>> found = rollout(model, torch.randn(4, 3, 32, 48))
    >>> found.layer, found.map.shape
    ('rollout of 2 layers, blocks.0.attn to blocks.1.attn', torch.Size([4, 8, 12]))

    The model runs in evaluation mode, with its fused attention. Windows are put back at their place. Layers in which a
    single query reads the image, as CaiT's class layers, continue with that query: its residual path leads to a token
    that is not a patch, so that share is not on the map.

    Args:
        model: any vision transformer whose layers are on one grid; its mode, buffers and random state are restored.
        images: `(n, channels, height, width)` as the model takes them, or one image without the first axis.
        layers: as for `attention_maps`; all by default. In a model of several grids, choose layers on one of them.
        query: as for `attention_maps`.
        name: display name of the model; by default its architecture.
        batch_size: number of images in a batch, which bounds the memory.
        inspection: as for `attention_maps`.

    Raises:
        VicinalError: if the layers cannot be multiplied, or there is no such query.
    """
    check_query(query)
    asked = _every_layer if layers is None else layers
    reader = attention_reader(model, images, layers=asked, name=name, batch_size=batch_size, inspection=inspection)
    product = _Product(model, reader.layers, query)
    names = [layer.name for layer in reader.layers]
    which = f"{len(names)} layers, {names[0]} to {names[-1]}" if len(names) > 1 else names[0]
    values = reader.reduce(product.multiply)[-1].unflatten(1, product.first.size)[:, None]
    return AttentionMap(reader.model, f"rollout of {which}", product.query, None, values)


class _Product:
    """The product so far, for a batch of images; the first layer starts a new batch.

    Args:
        model: the model of the layers.
        layers: those to multiply.
        query: the row of the product to return; None for the one that the model classifies by.

    Raises:
        VicinalError: if the layers cannot be multiplied, or there is no such query.
    """

    tokens: Tensor
    """How much each token attends to those before the first layer, `(n, tokens, tokens)`, in the order of the map."""
    reader: Tensor
    """How much the single query that reads the image attends to them, `(n, tokens)`."""

    def __init__(self, model: nn.Module, layers: list[AttentionLayer], query: Query | None) -> None:
        self.first = layers[0]
        if self.first.single:
            raise VicinalError("rollout needs layers in which patches attend to patches; choose others with layers=")
        for layer in layers:
            if layer.pooled:
                raise VicinalError(
                    f"rollout cannot follow {layer.name}: its keys are not its queries, {layer.cells} and "
                    f"{layer.query_cells}; choose others with layers="
                )
            if layer.windows > 1 and (layer.single or layer.prefix):
                raise VicinalError(f"rollout cannot follow {layer.name}: its windows have tokens of their own")
            if not _fits(self.first, layer):
                raise VicinalError(
                    f"rollout needs layers on one grid: {_grid(self.first)}, {_grid(layer)}; choose layers that are, "
                    f"such as {', '.join(str(each.index) for each in _last(layers))}"
                )
        asked = query_in(model, layers[-1], query) if query is None else query
        self.by_reader = asked == "class" and layers[-1].single
        if not self.by_reader:
            asked = patch_in(self.first, query_in(model, self.first, asked), self.first)
        self.query: Query = asked

    def multiply(self, layer: AttentionLayer, weights: Tensor) -> Tensor:
        """Multiplies by a layer's weights, and returns how much the query attends to each cell so far, `(n, cells)`."""
        weights = weights.mean(2)
        if layer.single:
            attended = weights[:, 0, 0, layer.order.to(weights.device)]
            own = max(layer.keys - self.tokens.shape[1], 0)
            itself, others = attended[:, :own].sum(1, keepdim=True), attended[:, own:]
            mixed = torch.einsum("nk,nkt->nt", others, self.tokens[:, -others.shape[1] :]) + itself * self.reader
            self.reader = (mixed + self.reader) / 2
        else:
            step = layer.over_all_tokens(weights)
            step.diagonal(dim1=-2, dim2=-1).add_(1)
            step /= step.sum(-1, keepdim=True)
            self.tokens = step if layer is self.first else step @ self.tokens
            if layer is self.first:
                self.reader = torch.zeros_like(step[:, 0])
        prefix = self.first.prefix
        if self.by_reader:
            return self.reader[:, prefix:]
        if self.query == "class":
            return self.tokens[:, 0, prefix:]
        if self.query == "mean":
            return self.tokens[:, prefix:, prefix:].mean(1)
        row, column = self.query
        return self.tokens[:, prefix + row * self.first.size[1] + column, prefix:]


def _every_layer(index: int, name: str) -> bool:
    """Selects all layers: with a selection, a layer that cannot be read raises, and is not left out."""
    return True


def _fits(first: AttentionLayer, layer: AttentionLayer) -> bool:
    """Returns whether a layer can be rolled out after the first one."""
    more = layer.prefix - first.prefix
    # A query that reads the image can attend to itself, and can leave out tokens that are not patches.
    return layer.size == first.size and (more == 0 or (layer.single and more <= 1))


def _last(layers: list[AttentionLayer]) -> list[AttentionLayer]:
    """Returns the last layers that can be rolled out together."""
    found: list[AttentionLayer] = []
    for layer in layers:
        if layer.pooled:
            continue
        if found and _fits(found[0], layer):
            found.append(layer)
        elif not layer.single:
            found = [layer]
    return found


def _grid(layer: AttentionLayer) -> str:
    return f"{layer.name} has {Grid(*layer.size, layer.prefix)}"
