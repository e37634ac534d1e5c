"""A prior's bias as the `attn_mask` of `F.scaled_dot_product_attention`, whose fused kernels want no gradient of it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.attention.precision import additive_mask

__all__ = ["attend_fused"]


def attend_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prior_bias: Tensor | None,
    *,
    mask: Tensor | None,
    dropout: float,
    softmax_scale: float,
) -> Tensor:
    """Returns attention under a bias that needs no gradient; arguments as for `attend_plain`."""
    if prior_bias is not None:
        if q.dtype.itemsize == 2:
            # A large bias would overflow. The softmax ignores a shift of all keys of a query.
            prior_bias = (prior_bias - prior_bias.amax(-1, keepdim=True)).clamp(min=torch.finfo(q.dtype).min)
        mask = prior_bias[None] if mask is None else prior_bias + additive_mask(mask, prior_bias.dtype)
        mask = mask.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=softmax_scale)
