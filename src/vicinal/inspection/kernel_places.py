"""Where the kernels of a convolution or pooling stand, by its stride, padding and dilation; and even parts of maps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["KernelPlaces", "Resampling", "kernel_places", "spread_evenly"]

MIN_PLACES_PER_PART = 1.5  # of a map that is spread evenly
CONVOLUTIONS = {torch.conv2d, F.conv2d}
POOLINGS = {
    torch.max_pool2d: ("kernel_size", "stride", "padding", "dilation"),
    F.max_pool2d: ("kernel_size", "stride", "padding", "dilation"),
    F.avg_pool2d: ("kernel_size", "stride", "padding"),
}


@dataclass(frozen=True)
class KernelPlaces:
    """The first center of a kernel and the distance of neighbors, along rows and columns, in places of the input."""

    first: tuple[float, float]
    stride: tuple[int, int]

    def carry(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """Returns the mean of maps `(..., rows, columns)` over a stride around each center: `(..., *size)`.

        Beyond the edge, maps go on as a straight line does.
        """
        down, across = (
            _weights(x.shape[axis - 2], size[axis], self.first[axis], self.stride[axis]).to(x) for axis in (0, 1)
        )
        return down @ x @ across.T


@dataclass(frozen=True)
class Resampling:
    """A map that `F.interpolate` makes larger or smaller."""

    mode: str
    align_corners: bool | None

    def carry(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """Returns maps `(images, maps, rows, columns)` resampled to `size`."""
        return F.interpolate(x, size, mode=self.mode, align_corners=self.align_corners)


def kernel_places(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> KernelPlaces | Resampling | None:
    """Returns where the kernels of a convolution, pooling or interpolation stand; None for other operations."""
    if func is F.interpolate:
        given = {**dict(zip(("input", "size", "scale_factor", "mode", "align_corners"), args, strict=False)), **kwargs}
        return Resampling(given.get("mode", "nearest"), given.get("align_corners"))
    if func in CONVOLUTIONS:
        names = ("input", "weight", "bias", "stride", "padding", "dilation")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        kernel = _pair(given["weight"].shape[2:])
    elif func in POOLINGS:
        given = {**dict(zip(("input", *POOLINGS[func]), args, strict=False)), **kwargs}
        kernel = _pair(given["kernel_size"])
    else:
        return None
    dilation, padding = _pair(given.get("dilation", 1)), given.get("padding", 0)
    stride = _pair(given.get("stride") or (1 if func in CONVOLUTIONS else kernel))
    reach = [width * (size - 1) for width, size in zip(dilation, kernel, strict=True)]
    if isinstance(padding, str):
        padding = tuple(each // 2 for each in reach) if padding == "same" else 0
    padding = _pair(padding)
    return KernelPlaces((reach[0] / 2 - padding[0], reach[1] / 2 - padding[1]), stride)


def spread_evenly(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Returns the means of maps `(..., rows, columns)` over equal parts of their area, `(..., *size)`.

    Parts may hold fractions of places, unlike the windows of `F.adaptive_avg_pool2d`: their centers are evenly spaced.
    Along an axis with nearly as many parts as places, one at the edge could be all padding; windows, which overlap, are
    taken there.
    """
    down, across = (_parts(x.shape[axis - 2], size[axis]).to(x) for axis in (0, 1))
    return down @ x @ across.T


def _parts(count: int, outputs: int) -> Tensor:
    """Returns how much of each input place is in each of `outputs` equal parts, or windows, `(outputs, count)`."""
    if count < MIN_PLACES_PER_PART * outputs:
        return F.adaptive_avg_pool1d(torch.eye(count, dtype=torch.float64)[None], outputs)[0].T
    edges = torch.arange(outputs + 1, dtype=torch.float64)[:, None] * (count / outputs)
    place = torch.arange(count, dtype=torch.float64)
    overlap = torch.minimum(edges[1:], place + 1) - torch.maximum(edges[:-1], place)
    return overlap.clamp(min=0) * (outputs / count)


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    numbers = [int(each) for each in value]
    return (numbers[0], numbers[-1])


def _weights(count: int, outputs: int, first: float, stride: int) -> Tensor:
    """Returns how much of each input place is in each output, `(outputs, count)`."""
    center = first + stride * torch.arange(outputs, dtype=torch.float64)
    inside = torch.arange(stride, dtype=torch.float64) - (stride - 1) / 2
    places = center[:, None] + inside  # (outputs, stride)
    left = places.floor().clamp(0, max(0, count - 2)).long()
    part = places - left if count > 1 else torch.zeros_like(places)
    weights = torch.zeros(outputs, count + 1, dtype=torch.float64)
    weights.scatter_add_(1, left, (1 - part) / stride)
    weights.scatter_add_(1, left + 1, part / stride)
    return weights[:, :count]
