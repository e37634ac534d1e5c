"""How far each head looks, and how widely: mean attention distance and entropy, layer by layer.

    distance(h) = mean over images and patches q of  sum_k A_h[q, k] |q - k| / sum_k A_h[q, k],      k over patches
    entropy(h)  = mean over images and queries q of  - sum_k A_h[q, k] log A_h[q, k],                k over all keys

Distance as in Dosovitskiy et al., "An Image is Worth 16x16 Words", arXiv:2010.11929, Figure 7. Tokens without a place,
such as the class token, are at no distance, so attention is normalized over patches first. Queries are the patches.
Where a single query reads the image, as in CaiT's class layers, it has an entropy and no distance.
"""

import csv
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vicinal.analysis.attention_maps.layers import AttentionLayer
from vicinal.analysis.attention_maps.reader import attention_reader
from vicinal.errors import VicinalError

__all__ = ["AttentionStatistics", "LayerStatistics", "attention_statistics"]

HIDDEN = 1e-6  # models hide a key by adding -100 or less to its logit, which leaves less of it than this


@dataclass(frozen=True)
class LayerStatistics:
    """What one layer does, head by head; NaN where there is nothing to measure."""

    layer: int
    """Among the model's attention layers, from 1."""
    name: str
    """Of the module."""
    grid: tuple[int, int]
    """Rows and columns of patches; where keys or queries are pooled, of the others."""
    patch: tuple[float, float]
    """Height and width of a patch, in pixels."""
    windows: int
    """Into how many the grid is cut; 1 where attention is global."""
    keys: int
    """Tokens that a query may look at, those without a place included."""
    distance_patches: tuple[float, ...]
    """Mean attention distance of each head, in patches."""
    distance_pixels: tuple[float, ...]
    """The same in pixels."""
    uniform_patches: float
    """What the distance would be if a head saw all patches (of its window) alike."""
    uniform_pixels: float
    """The same in pixels."""
    entropy: tuple[float, ...]
    """Of each head, in nats."""
    relative_entropy: tuple[float, ...]
    """Of each head, over the most there can be, log(number of keys): 0 for one key, 1 for all alike."""


@dataclass(frozen=True)
class AttentionStatistics:
    """What `attention_statistics` found."""

    model: str
    images: int
    """How many it is the mean of."""
    layers: tuple[LayerStatistics, ...]
    left_out: dict[str, str]
    """Layers that have no map of the image, by name, with the reason."""

    def _rows(self) -> list[dict[str, Any]]:
        """A row for each head of each layer, heads from 1; None where there is nothing to measure."""
        found = []
        for layer in self.layers:
            for head, entropy in enumerate(layer.entropy):
                row = {
                    "layer": layer.layer,
                    "name": layer.name,
                    "head": head + 1,
                    "distance_patches": layer.distance_patches[head],
                    "distance_pixels": layer.distance_pixels[head],
                    "uniform_patches": layer.uniform_patches,
                    "uniform_pixels": layer.uniform_pixels,
                    "entropy": entropy,
                    "relative_entropy": layer.relative_entropy[head],
                    "keys": layer.keys,
                    "rows": layer.grid[0],
                    "columns": layer.grid[1],
                    "windows": layer.windows,
                }
                found.append({key: None if value != value else value for key, value in row.items()})
        return found

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {"model": self.model, "images": self.images, "heads": self._rows(), "left_out": self.left_out}

    def write_json(self, path: str | Path) -> None:
        """Write `as_dict` to a file."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n")

    def write_csv(self, path: str | Path) -> None:
        """Write a line for each head of each layer."""
        lines = [{"model": self.model, "images": self.images, **row} for row in self._rows()]
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(lines[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)

    def table(self) -> str:
        """The figures as text, a line for each layer: the mean over heads, and the least and the most of a head."""
        head = ["layer", "name", "heads", "distance (patches)", "(pixels)", "uniform", "entropy (nats)", "relative"]
        rows = [head]
        for layer in self.layers:
            figures = (layer.distance_patches, layer.distance_pixels, layer.entropy, layer.relative_entropy)
            patches, pixels, entropy, relative = (_span(each) for each in figures)
            uniform = "-" if math.isnan(layer.uniform_pixels) else f"{layer.uniform_pixels:.2f}"
            rows.append([str(layer.layer), layer.name, str(len(layer.entropy)), patches, pixels, uniform])
            rows[-1] += [entropy, relative]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = [f"{self.model}: mean over heads (least-most of a head), {_counted(self.images, 'image')}"]
        for row in rows:
            cells = [
                cell.ljust(n) if i == 1 else cell.rjust(n) for i, (cell, n) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells))
        if self.left_out:
            lines.append(f"left out: {_counted(len(self.left_out), 'layer')}. {next(iter(self.left_out.values()))}")
        return "\n".join(lines)


def attention_statistics(
    model: nn.Module, images: Tensor | Iterable[Any], *, name: str | None = None, batch_size: int = 32
) -> AttentionStatistics:
    """Measure how far and how widely every head of every layer looks.

    >>> import torch, vicinal
    >>> from vicinal.analysis.attention_maps.statistics import attention_statistics
    >>> model = vicinal.create_model("vit-micro", img_size=(32, 48), depth=2)
    >>> found = attention_statistics(model, torch.randn(4, 3, 32, 48))
    >>> [(layer.name, layer.grid, len(layer.distance_pixels)) for layer in found.layers]
    [('blocks.0.attn', (8, 12), 4), ('blocks.1.attn', (8, 12), 4)]

    The model runs as in evaluation, with its fused attention; one layer's weights are in memory at a time. Windows are
    put back where they were cut from, so distances are those in the image, and padding does not count. With a prior
    attached, it is the attention under the prior. Heads that talk behind the softmax, as in CaiT, are taken before.

    Args:
        model: any vision transformer; it is left as it was.
        images: `(n, channels, height, width)` as the model takes them; or batches of them, alone or, as loaders give
            them, with labels behind.
        name: what to call the model; by default its architecture.
        batch_size: images at a time, which bounds the memory.
    """
    reader = attention_reader(model, images, check=_check_distances, name=name, batch_size=batch_size)
    measured = reader.reduce(_measure)
    layers = []
    for layer, values in zip(reader.layers, measured, strict=True):
        if not values[..., 4].isfinite().all():
            raise VicinalError(f"the attention of {layer.name} is not finite; are the images and the weights?")
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
    nowhere = ~(layer.placed.any(0) | (highest.amax(1) > HIDDEN).cpu())
    hidden = layer.wrapped | layer.padding[:, None]
    return ~nowhere.to(weights.device)[:, None] & (~hidden.to(weights.device) | (highest > HIDDEN))


def _lengths(layer: AttentionLayer) -> Tensor:
    """Returns distance in patches, distance in pixels, and 1 for each pair of patches, `(windows, queries, keys, 3)`.

    All three are 0 where one of the tokens has no place.
    """
    offsets = layer.offsets
    pixels = offsets * torch.tensor(layer.patch, dtype=torch.float64)
    pairs = (layer.placed_queries[:, :, None] & layer.placed[:, None]).double()
    return torch.stack([offsets.norm(dim=-1) * pairs, pixels.norm(dim=-1) * pairs, pairs], -1)


def _span(values: tuple[float, ...]) -> str:
    known = [value for value in values if not math.isnan(value)]
    return f"{sum(known) / len(known):.2f} ({min(known):.2f}-{max(known):.2f})" if known else "-"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
