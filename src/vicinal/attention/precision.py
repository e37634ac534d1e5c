"""Number formats inside attention: the dtypes of products and of the softmax, masks as numbers, no denormal numbers.

Denormal numbers are those below the smallest normal one, 1.2e-38 in fp32. Many CPUs multiply them in microcode, more
than ten times slower, and narrow priors make them by the thousand: a window of sigma = 0.5 patches gives a key 7
patches away the weight exp(-98) = 3e-43. `torch.set_flush_denormal` acts on everything else in the process too.
Attention avoids denormal numbers instead: weights and the prior's scale are 0 or at least `smallest_factor`. GPUs
compute denormal numbers at full speed, so nothing is done there.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "additive_mask",
    "drop_tiny_weights",
    "makes_tiny_weights",
    "product_dtype",
    "smallest_factor",
    "softmax_dtype",
    "zero_tiny_factors",
]


def softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of logits and weights for queries of `dtype`: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def product_dtype(q: Tensor) -> torch.dtype:
    """Returns the dtype of matrix products with queries `q`: theirs, but fp32 for half precision on a CPU.

    CPUs multiply fp32 matrices faster than half-precision ones, and results are rounded to half precision only once.
    """
    return torch.float32 if q.device.type == "cpu" and q.dtype.itemsize == 2 else q.dtype


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mask as numbers to add to the logits, of the same shape: 0 where a bool mask is True, else -inf."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf)


def smallest_factor(dtype: torch.dtype) -> float:
    """Returns the square root of the smallest normal number of `dtype`: 1.1e-19 in fp32, 1.5e-154 in fp64.

    A product of two numbers is normal if neither is smaller. Softmax divides exponentials of at least 1.1e-19 by the
    sum of their row, which is at most the number of tokens: with 1,000 tokens the smallest weight is 1.1e-22, and
    d_logits = weight * (d_weight - sum) is normal where the bracket exceeds 1.1e-16. Zero weights in place of smaller
    ones change an output by less than 1,000 * 1.1e-19 of the largest value; a rounding error of fp32 is 6e-8.
    """
    return math.sqrt(torch.finfo(dtype).tiny)


def drop_tiny_weights(logits: Tensor, maximum: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns `logits - maximum`, with -inf where its exponential is below `smallest_factor`.

    The weight and the gradient of such a logit are exactly 0.

    Args:
        logits: `(..., queries, tokens)`.
        maximum: that of each row of logits, detached: `(..., queries, 1)`.
        out: where to write both steps, without autograd; can be `logits`. None makes new tensors.
    """
    shifted = torch.sub(logits, maximum, out=out)
    limit = math.log(smallest_factor(logits.dtype))
    return F.threshold(shifted, limit, -math.inf, inplace=out is not None)


def zero_tiny_factors(x: Tensor | None) -> Tensor | None:
    """Returns `x`, on a CPU with 0 in place of numbers below `smallest_factor`; all of `x` gets its gradient."""
    if x is None or x.device.type != "cpu":
        return x
    limit = smallest_factor(x.dtype)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return F.hardshrink(x, limit)
    return x - x.detach().masked_fill(x.detach().abs() > limit, 0.0)


def makes_tiny_weights(prior_bias: Tensor | None) -> bool:
    """Returns whether a bias on a CPU gives weights below the square root of `smallest_factor`, 3e-10 in fp32.

    The logits of q and k can then do the rest.
    """
    if prior_bias is None or prior_bias.device.type != "cpu":
        return False
    lowest, highest = prior_bias.aminmax()
    return bool(lowest - highest < math.log(smallest_factor(prior_bias.dtype)) / 2)
