"""Full precision for the values of priors: no autocast, at least fp32, no factors that make products denormal."""

import contextlib
import math

import torch
from torch import Tensor

__all__ = ["autocasting", "full_precision", "smallest_factor", "widen", "zero_tiny_factors"]


def autocasting(device: torch.device) -> bool:
    """Returns whether autocast is enabled for a device; the meta device has no autocast."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which autocast is disabled for a device."""
    if autocasting(device):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def smallest_factor(dtype: torch.dtype) -> float:
    """Returns the square root of the smallest normal number of `dtype`: 1.1e-19 in fp32, 1.5e-154 in fp64.

    A product of two numbers is normal if neither is smaller. Softmax divides exponentials of at least 1.1e-19 by the
    sum of their row, which is at most the number of tokens: with 1,000 tokens the smallest weight is 1.1e-22, and
    d_logits = weight * (d_weight - sum) is normal where the bracket exceeds 1.1e-16. Zero weights in place of smaller
    ones change an output by less than 1,000 * 1.1e-19 of the largest value; a rounding error of fp32 is 6e-8.
    """
    return math.sqrt(torch.finfo(dtype).tiny)


def zero_tiny_factors(x: Tensor) -> Tensor:
    """Returns `x`, on a CPU with 0 in place of numbers below `smallest_factor`; all of `x` gets its gradient."""
    if x.device.type != "cpu":
        return x
    return x - x.detach().masked_fill(x.detach().abs() >= smallest_factor(x.dtype), 0.0)


def widen(values: Tensor) -> Tensor:
    """Returns values in fp32 or wider, so that a model cast to half precision computes exact tables."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
