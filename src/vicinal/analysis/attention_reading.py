"""Attention, read layer by layer: the weights of each are reduced as soon as it has run, and dropped."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vicinal.analysis.attention_layers import AttentionLayer, find_layers
from vicinal.analysis.giving import in_batches, name_of
from vicinal.attachment.choosing import Layers
from vicinal.attachment.placing import LeftAlone, Site
from vicinal.attachment.running import quietly, runner_for
from vicinal.attachment.tapping import tap
from vicinal.errors import VicinalError

__all__ = ["Readings", "Reduce", "read_attention"]


@dataclass(frozen=True, eq=False)
class Readings:
    """What `read_attention` found."""

    model: str
    images: int
    layers: list[AttentionLayer]
    """Those that were read, in the order in which they run."""
    values: list[Tensor]
    """What each layer's weights were reduced to, of all images, on the CPU."""
    left_out: dict[str, str]
    """Why other layers could not be read, by name."""


Reduce = Callable[[AttentionLayer, Tensor], Tensor]
"""From a layer's weights `(n, windows, heads, queries, keys)` to what is kept of them, `(n, ...)`."""


def read_attention(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    prepare: Callable[[list[AttentionLayer]], Reduce],
    *,
    layers: Layers | int | None = None,
    check: Callable[[AttentionLayer], object] = lambda layer: None,
    name: str | None = None,
    batch_size: int = 32,
) -> Readings:
    """Run a model on images, in evaluation mode, and reduce the attention of its layers as they run.

    Args:
        model: any vision transformer; it is left as it was.
        images: `(n, channels, height, width)` as the model takes them; or one image without the first axis; or batches,
            alone or, as loaders give them, with labels behind.
        prepare: given the layers that will be read, says how to reduce the weights of each.
        layers: as for `find_layers`, or an index.
        check: as for `find_layers`.
        name: what to call the model; by default its architecture.
        batch_size: images at a time, which bounds the memory.
    """
    if batch_size < 1:
        raise VicinalError(f"batch_size is a number of images, at least 1; given {batch_size}")
    if isinstance(images, Tensor) and images.dim() == 3:
        images = images[None]
    batches = in_batches(images, batch_size)
    first = next(batches, None)
    if first is None:
        raise VicinalError("there are no images; give at least one")
    model = getattr(model, "_orig_mod", model)  # as it was before torch.compile
    run = runner_for(model, example=first)
    with quietly(model), torch.no_grad():
        found, left_out = find_layers(run, [layers] if isinstance(layers, int) else layers, check)
        reduce, by_name = prepare(found), {layer.name: layer for layer in found}

        def keep(site: Site | LeftAlone, weights: Tensor) -> Tensor:
            layer = by_name[site.name]
            if weights.shape[-1] != layer.keys:
                raise VicinalError(f"{site.name} saw {weights.shape[-1]} tokens, where {layer.keys} were expected")
            weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
            reduced = reduce(layer, weights if layer.windows > 1 else weights.unsqueeze(1))
            return reduced.to("cpu", copy=True)  # a row of the weights would keep them all

        reader = tap(model, [layer.index for layer in found], reduce=keep, example=first)
        kept: list[list[Tensor]] = []
        like = next(model.parameters(), first)
        for batch in itertools.chain([first], batches):
            if batch.shape[1:] != first.shape[1:]:
                raise VicinalError(
                    f"all images have one shape; given {_sizes(first.shape[1:])} and {_sizes(batch.shape[1:])}"
                )
            with reader:
                run(batch.to(like.device, like.dtype))
            kept.append(list(reader.weights.values()))
    values = [torch.cat(parts) for parts in zip(*kept, strict=True)]
    return Readings(name or name_of(model), len(values[0]), found, values, left_out)


def _sizes(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))
