"""Number formats inside attention: the dtypes of products and of the softmax, masks as numbers, no denormal numbers.

Denormal numbers are those below the smallest normal one, 1.2e-38 in fp32. Many CPUs multiply them in microcode, more
than ten times slower, and narrow priors make them by the thousand: a window of sigma = 0.5 patches gives a key 7
patches away the weight exp(-98) = 3e-43. `torch.set_flush_denormal` acts on everything else in the process too.
Attention avoids denormal numbers instead: weights and the prior's scale are 0 or at least `smallest_factor` (in
inference of few images, only under a bias). GPUs compute denormal numbers at full speed, so nothing is done there.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.priors.full_precision import smallest_factor
from vicinal.priors.function_transforms import transforms_active

__all__ = [
    "additive_mask",
    "can_have_tiny_weights",
    "drop_tiny_terms",
    "drop_tiny_weights",
    "makes_tiny_weights",
    "product_dtype",
    "softmax_dtype",
    "values_are_readable",
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


def values_are_readable(x: Tensor) -> bool:
    """Returns whether Python can branch on the values of `x`: not while they are traced or transformed."""
    transformed = torch.compiler.is_compiling() or transforms_active()
    return not transformed and type(x) is Tensor and x.device.type != "meta"


def can_have_tiny_weights(logits: Tensor, part: float = 1.0) -> bool:
    """Returns whether the softmax of logits on a CPU can have weights below `smallest_factor ** part`.

    The spread of all logits decides, which is cheaper than that of each row. If values cannot be read, True.
    """
    if logits.device.type != "cpu":
        return False
    if not values_are_readable(logits):
        return True
    if not logits.numel():
        return False
    lowest, highest = logits.detach().aminmax()
    return not highest.item() - lowest.item() <= -part * math.log(smallest_factor(logits.dtype))


def drop_tiny_terms(pairs: Tensor | None) -> Tensor | None:
    """Returns a bias over pairs of tokens, on a CPU with -inf where its exponential is below `smallest_factor`.

    That of the row's largest term is 1. If the logits without bias spread by at most half as far, their weights under
    this bias are 0 or at least `smallest_factor ** 1.5`, and a weight that it drops was below the square root of
    `smallest_factor`, 3e-10 in fp32.

    Args:
        pairs: `(heads, queries, keys)`; None for 0.
    """
    if pairs is None or pairs.device.type != "cpu":
        return pairs
    tiny = pairs - pairs.amax(-1, keepdim=True) < math.log(smallest_factor(pairs.dtype))
    return pairs.masked_fill(tiny, -math.inf) if bool(tiny.any()) else pairs


def drop_tiny_weights(logits: Tensor, maximum: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns `logits - maximum`, with -inf where its exponential is below `smallest_factor`.

    The weight and the gradient of such a logit are exactly 0.

    Args:
        logits: `(..., queries, keys)`.
        maximum: that of each row of logits, detached: `(..., queries, 1)`.
        out: where to write both steps, without autograd; can be `logits`. None makes new tensors.
    """
    shifted = torch.sub(logits, maximum, out=out)
    return F.threshold(shifted, math.log(smallest_factor(logits.dtype)), -math.inf, inplace=True)


def makes_tiny_weights(prior_bias: Tensor | None) -> bool:
    """Returns whether a bias on a CPU gives weights below the square root of `smallest_factor`, 3e-10 in fp32.

    The logits of q and k can then do the rest.
    """
    if prior_bias is None or prior_bias.device.type != "cpu":
        return False
    lowest, highest = prior_bias.detach().aminmax()
    return lowest.item() - highest.item() < math.log(smallest_factor(prior_bias.dtype)) / 2
