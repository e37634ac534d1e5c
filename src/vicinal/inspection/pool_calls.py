"""Calls of a pooling that is not evenly strided, and how the places of its input responded to ramps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.pooled_tokens import AdaptivePooling, SequencePooling, TokenPooling

__all__ = ["PoolCall", "find_pool_call", "token_pooling"]

ADAPTIVE = {F.adaptive_avg_pool2d, F.adaptive_max_pool2d}
SEQUENCE = {torch.avg_pool1d, F.avg_pool1d}


@dataclass(eq=False)
class PoolCall:
    """A pooling in a probe."""

    pooling: TokenPooling
    map: tuple[int, int] | None
    """Rows and columns of its input; None for a sequence."""
    outputs: int
    """Number of pooled tokens."""
    responses: Tensor
    """Squared responses of its input, `(RAMPS, places)`."""


def token_pooling(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TokenPooling | None:
    """Returns the pooling that a call computes; None for other operations, and for padded sequences."""
    if func in ADAPTIVE:
        given = {**dict(zip(("input", "output_size"), args, strict=False)), **kwargs}
        size = given["output_size"]
        rows, columns = (size, size) if isinstance(size, int) else (size[0], size[-1])
        # An axis of None keeps its size, which a pooling to a fixed one does not.
        return None if rows is None or columns is None or given["input"].dim() != 4 else AdaptivePooling(rows, columns)
    if func in SEQUENCE:
        names = ("input", "kernel_size", "stride", "padding", "ceil_mode")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        kernel = _single(given["kernel_size"])
        if given["input"].dim() != 3 or _single(given.get("padding", 0)) or given.get("ceil_mode", False):
            return None
        return SequencePooling(kernel, _single(given.get("stride") or kernel))
    return None


def find_pool_call(pooling: TokenPooling, x: Tensor, out: Tensor, images: int) -> PoolCall | None:
    """Returns what a pooling did to `x`, `(images * n, channels, ...)`; None if it left a single place.

    Args:
        pooling: of the call.
        x: its input.
        out: its result.
        images: number of images in the batch: the first one, its disturbed copies, and the first one again.
    """
    outputs = out[0, 0].numel()
    if len(x) % images or outputs == 1:
        return None
    each = x.unflatten(0, (images, -1)).flatten(3)
    responses = (each - each[:1]).square().sum((1, 2))[1:-1].cpu().double()
    size = None if isinstance(pooling, SequencePooling) else (x.shape[2], x.shape[3])
    return PoolCall(pooling, size, outputs, responses)


def _single(value: Any) -> int:
    return value if isinstance(value, int) else int(value[0])
