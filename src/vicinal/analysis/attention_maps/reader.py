"""Reads attention layer by layer: the weights of each are reduced as soon as it has run, and released."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vicinal.analysis.attention_maps.layers import AttentionLayer, find_layers
from vicinal.analysis.inputs import check_batch_size, check_same_shape, iterate_batches, model_name
from vicinal.errors import VicinalError
from vicinal.inspection.attention_tap import find_attention, tap
from vicinal.inspection.layer_selection import Layers
from vicinal.inspection.model_inspection import Inspection
from vicinal.inspection.model_runner import eval_without_side_effects
from vicinal.inspection.sites import AttentionSite

__all__ = ["AttentionReader", "Reduce", "attention_reader", "inspect_images"]

Reduce = Callable[[AttentionLayer, Tensor], Tensor]
"""Function of a layer and its weights `(n, windows, heads, queries, keys)` that returns a reduction, `(n, ...)`."""


@dataclass(frozen=True, eq=False)
class AttentionReader:
    """Layers of a model, and the images to read their attention on; made by `attention_reader`."""

    model: str
    """Display name of the model."""
    layers: list[AttentionLayer]
    """Those that are read, in the order in which they run."""
    left_out: dict[str, str]
    """Why other layers cannot be read, by name."""
    inspection: Inspection
    batches: Iterator[Tensor]
    """All images; they are consumed by `reduce`."""

    def reduce(self, reduce: Reduce) -> list[Tensor]:
        """Runs the model in evaluation mode on all images, and reduces the attention of its layers as they run.

        Returns:
            What the weights of each layer were reduced to, for all images, on the CPU.
        """
        runner, by_name = self.inspection.runner, {layer.name: layer for layer in self.layers}

        def keep(site: AttentionSite, weights: Tensor) -> Tensor:
            layer = by_name[site.name]
            if weights.shape[-1] != layer.keys:
                raise VicinalError(f"{site.name} must have {layer.keys} keys, got {weights.shape[-1]}")
            weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
            reduced = reduce(layer, weights if layer.windows > 1 else weights.unsqueeze(1))
            return reduced.to("cpu", copy=True)  # a view would keep all weights in memory

        reader = tap(runner.model, [layer.index for layer in self.layers], reduce=keep, inspection=self.inspection)
        kept: list[list[Tensor]] = []
        with eval_without_side_effects(runner.model), torch.no_grad():
            for batch in self.batches:
                check_same_shape(batch, runner.shape)
                with reader:
                    runner(runner.like_model(batch))
                kept.append(list(reader.weights.values()))
        return [torch.cat(parts) for parts in zip(*kept, strict=True)]


def attention_reader(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    layers: Layers | int | None = None,
    check: Callable[[AttentionLayer], object] = lambda layer: None,
    name: str | None = None,
    batch_size: int = 32,
    inspection: Inspection | None = None,
) -> AttentionReader:
    """Returns a reader of the layers of a model that have a map; the model runs on noise to find them.

    Args:
        model: any vision transformer; its mode, buffers and random state are restored.
        images: `(n, channels, height, width)` as the model takes them; or one image without the first axis; or batches,
            alone or first in a tuple, as DataLoaders give them.
        layers: as for `find_layers`, or an index.
        check: as for `find_layers`.
        name: display name of the model; by default its architecture.
        batch_size: number of images in a batch, which bounds the memory.
        inspection: as `inspect_images` returns it for the model, so that it is not inspected again.

    Raises:
        VicinalError: if there are no images, or no layer to read, or the inspection is of another model or
            for other images.
    """
    check_batch_size(batch_size)
    if isinstance(images, Tensor) and images.dim() == 3:
        images = images[None]
    batches = iterate_batches(images, batch_size)
    first = next(batches, None)
    if first is None:
        raise VicinalError("there are no images; give at least one")
    inspection = find_attention(model, None, first, inspection)
    check_same_shape(first, inspection.runner.shape)
    found, left_out = find_layers(inspection, [layers] if isinstance(layers, int) else layers, check)
    return AttentionReader(
        name or model_name(inspection.runner.model), found, left_out, inspection, itertools.chain([first], batches)
    )


def inspect_images(model: nn.Module, images: Tensor) -> Inspection:
    """Returns the attention sites of a model for images of one shape; pass it on to measure several things.

    >>> import torch, vicinal
    >>> from vicinal.analysis.attention_maps import attention_maps, inspect_images, rollout
    >>> model, images = vicinal.create_model("vit-micro", depth=2), torch.randn(2, 3, 32, 32)
    >>> inspection = inspect_images(model, images)
    >>> maps, rolled = (measure(model, images, inspection=inspection) for measure in (attention_maps, rollout))

    Args:
        model: any vision transformer; it runs on noise.
        images: `(n, channels, height, width)`, of which only the shape is used.

    Raises:
        VicinalError: if the model has no attention.
    """
    return find_attention(model, None, images, None)
