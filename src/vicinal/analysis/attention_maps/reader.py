"""Reads attention layer by layer: the weights of each are reduced as soon as it has run, and dropped."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vicinal.analysis.attention_maps.layers import AttentionLayer, find_layers
from vicinal.analysis.inputs import in_batches, name_of
from vicinal.errors import VicinalError
from vicinal.inspection.attention_tap import tap
from vicinal.inspection.layer_selection import Layers
from vicinal.inspection.model_inspection import Inspection, inspect_runner
from vicinal.inspection.model_runner import eval_without_side_effects, make_runner, uncompiled
from vicinal.inspection.sites import AttentionSite

__all__ = ["AttentionReader", "Reduce", "attention_reader"]

Reduce = Callable[[AttentionLayer, Tensor], Tensor]
"""From a layer's weights `(n, windows, heads, queries, keys)` to what is kept of them, `(n, ...)`."""


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
                raise VicinalError(f"{site.name} saw {weights.shape[-1]} tokens, where {layer.keys} were expected")
            weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
            reduced = reduce(layer, weights if layer.windows > 1 else weights.unsqueeze(1))
            return reduced.to("cpu", copy=True)  # a row of the weights would keep them all

        reader = tap(runner.model, [layer.index for layer in self.layers], reduce=keep, inspection=self.inspection)
        kept: list[list[Tensor]] = []
        with eval_without_side_effects(runner.model), torch.no_grad():
            for batch in self.batches:
                if batch.shape[1:] != runner.shape:
                    raise VicinalError(
                        f"all images must have one shape, got {_sizes(runner.shape)} and {_sizes(batch.shape[1:])}"
                    )
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
) -> AttentionReader:
    """Returns the layers of a model that have a map, ready to be read; the model runs on noise to find them.

    Args:
        model: any vision transformer; it is left as it was.
        images: `(n, channels, height, width)` as the model takes them; or one image without the first axis; or batches,
            alone or, as loaders give them, with labels behind.
        layers: as for `find_layers`, or an index.
        check: as for `find_layers`.
        name: what to call the model; by default its architecture.
        batch_size: images at a time, which bounds the memory.

    Raises:
        VicinalError: if there are no images, or no layer to read.
    """
    if batch_size < 1:
        raise VicinalError(f"batch_size must be a number of images, at least 1, got {batch_size}")
    if isinstance(images, Tensor) and images.dim() == 3:
        images = images[None]
    batches = in_batches(images, batch_size)
    first = next(batches, None)
    if first is None:
        raise VicinalError("there are no images; give at least one")
    model = uncompiled(model)
    inspection = inspect_runner(make_runner(model, example=first))
    found, left_out = find_layers(inspection, [layers] if isinstance(layers, int) else layers, check)
    return AttentionReader(name or name_of(model), found, left_out, inspection, itertools.chain([first], batches))


def _sizes(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))
