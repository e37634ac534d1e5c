"""Attention from patch to patch of several models in few bytes: 8 bits for each pair, within a budget."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vicinal.analysis.attention_maps.layers import AttentionLayer
from vicinal.analysis.attention_maps.reader import attention_reader, inspect_images
from vicinal.errors import VicinalError
from vicinal.inspection.model_inspection import Inspection
from vicinal.report.shown_model import ShownModel

__all__ = ["Budget", "LayerAttention", "ReadableModel", "choose_budget", "find_readable", "quantize", "read_attention"]

MIN_IMAGES = 2


@dataclass(frozen=True, eq=False)
class ReadableModel:
    """A model with its layers that have attention from patch to patch."""

    shown: ShownModel
    inspection: Inspection
    layers: tuple[AttentionLayer, ...]
    left_out: dict[str, str]
    """Why other layers cannot be shown, by name."""


@dataclass(frozen=True)
class Budget:
    """What is stored: how many images, each head or only their mean, and how many of the last layers."""

    images: int
    heads: bool
    layers: int


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """The attention of a layer, in few bytes."""

    name: str
    query_grid: tuple[int, int]
    """Rows and columns of the patches that attend."""
    grid: tuple[int, int]
    """Rows and columns of the patches that are attended to."""
    heads: int
    """Number of heads of the layer."""
    levels: NDArray[np.uint8]
    """255 for the largest weight of a query, `(images, maps, queries, keys)`; a map for each head, or their mean."""
    maxima: NDArray[np.uint16]
    """The largest weight of each query, 65535 for 1: `(images, maps, queries)`."""

    @property
    def weights(self) -> NDArray[np.float64]:
        """The attention weights, as the script computes them from `levels` and `maxima`."""
        return self.levels / 255 * (self.maxima / 65535)[..., None]

    def as_dict(self) -> dict[str, Any]:
        """Returns everything for the script, arrays as base64 text, with the low byte of each maximum first."""
        return {
            "name": self.name,
            "queryGrid": list(self.query_grid),
            "grid": list(self.grid),
            "maps": self.levels.shape[1],
            "levels": base64.b64encode(self.levels.tobytes()).decode(),
            "maxima": base64.b64encode(self.maxima.astype("<u2").tobytes()).decode(),
        }


def find_readable(shown: ShownModel) -> ReadableModel:
    """Returns the layers of a model in which patches attend to patches.

    Raises:
        VicinalError: if there are none.
    """
    inspection = inspect_images(shown.opened.model, shown.images)
    reader = attention_reader(shown.opened.model, shown.images, check=_check_patches, inspection=inspection)
    return ReadableModel(shown, inspection, tuple(reader.layers), reader.left_out)


def _check_patches(layer: AttentionLayer) -> None:
    if layer.single:
        raise VicinalError(f"in {layer.name} one query reads the image, and no patch does")


def choose_budget(models: Sequence[ReadableModel], images: int, max_bytes: int) -> Budget | None:
    """Returns the most that fits: first images are left out, then single heads, then layers; None if nothing fits.

    Args:
        models: all that are shown.
        images: number of images at hand.
        max_bytes: of the base64 text.
    """
    depth = max(len(model.layers) for model in models)
    least = min(MIN_IMAGES, images)
    choices = [Budget(count, heads, depth) for heads in (True, False) for count in range(images, least - 1, -1)]
    choices += [Budget(least, False, layers) for layers in range(depth - 1, 0, -1)]
    return next((choice for choice in choices if _size(models, choice) <= max_bytes), None)


def _size(models: Sequence[ReadableModel], budget: Budget) -> float:
    """Returns the number of bytes of the base64 text."""
    pairs = 0
    for model in models:
        for layer in model.layers[-budget.layers :]:
            queries, keys = (rows * columns for rows, columns in (layer.query_size, layer.size))
            pairs += (layer.heads if budget.heads else 1) * queries * (keys + 2)
    return 4 / 3 * budget.images * pairs


def read_attention(model: ReadableModel, budget: Budget) -> Iterator[LayerAttention]:
    """Yields the attention of the layers that are stored, in the order in which they run.

    Raises:
        VicinalError: if attention is not finite.
    """
    chosen = model.layers[-budget.layers :]

    def keep(layer: AttentionLayer, weights: Tensor) -> Tensor:
        pairs = _patch_pairs(layer, weights)
        return pairs if budget.heads else pairs.mean(1, keepdim=True)

    reader = attention_reader(
        model.shown.opened.model,
        model.shown.images[: budget.images],
        layers=[layer.index for layer in chosen],
        batch_size=1,  # bounds the memory: a layer's weights of one image
        inspection=model.inspection,
    )
    for layer, weights in zip(reader.layers, reader.reduce(keep), strict=True):
        if not bool(weights.isfinite().all()):
            raise VicinalError(f"the attention of {layer.name} is not finite; check the images and the weights")
        levels, maxima = quantize(weights.double().numpy())
        yield LayerAttention(layer.name, layer.query_size, layer.size, layer.heads, levels, maxima)


def _patch_pairs(layer: AttentionLayer, weights: Tensor) -> Tensor:
    """Returns how much each patch attends to each, `(n, heads, queries, keys)`, row by row; 0 beyond its window.

    Args:
        layer: where the weights come from.
        weights: `(n, windows, heads, queries, keys)`. A patch that is in several windows gets their mean.
    """
    queries, keys = (rows * columns for rows, columns in (layer.query_size, layer.size))
    of_query = torch.where(layer.query_cells.index < 0, queries, layer.query_cells.index)
    of_key = torch.where(layer.cells.index < 0, keys, layer.cells.index)
    pairs = (of_query[:, :, None] * (keys + 1) + of_key[:, None]).flatten()
    total = weights.new_zeros(len(weights), weights.shape[2], (queries + 1) * (keys + 1))
    total.index_add_(-1, pairs, weights.transpose(1, 2).flatten(2))
    times = of_query.flatten().bincount(minlength=queries + 1)[:queries].clamp(min=1)
    whole: Tensor = total.view(*total.shape[:2], queries + 1, keys + 1)[..., :queries, :keys]
    return whole / times[:, None].to(whole.device)


def quantize(weights: NDArray[np.float64]) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
    """Returns weights `(..., keys)` as parts of the largest of each query, 255 for all of it, and the largest ones.

    The error of a weight is at most half of a 255th of the largest, and half of a 65535th.
    """
    top = weights.max(-1)
    parts = weights / np.where(top > 0, top, 1)[..., None]
    return np.round(255 * parts).astype(np.uint8), np.round(65535 * np.clip(top, 0, 1)).astype(np.uint16)
