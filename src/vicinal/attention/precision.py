"""Number formats inside attention: the dtypes of matrix products and of the softmax, and masks as numbers."""

import math

import torch
from torch import Tensor

__all__ = ["additive_mask", "product_dtype", "softmax_dtype"]


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
