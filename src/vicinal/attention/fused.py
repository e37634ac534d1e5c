"""A prior's bias as the `attn_mask` of `F.scaled_dot_product_attention`, whose fused kernels want no gradient of it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.attention.precision import additive_mask, softmax_dtype

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
    """Returns attention under a bias that needs no gradient; arguments as for `attend_plain`.

    The CPU kernel's exponential is 0 below the smallest normal number (`exp_u20`, AVX2 and AVX512), and it divides the
    output, not the weights, by their sum: a narrow bias makes no denormal weights in forward. Its backward does not
    avoid denormal products, so `attend` comes here with a narrow bias in inference only.
    """
    if prior_bias is not None:
        # The CPU kernel adds an fp32 mask to fp32 logits; others want the mask in the dtype of q.
        narrow = q.dtype.itemsize == 2 and q.device.type != "cpu"
        if narrow:  # A large bias would overflow. The softmax ignores a shift of all keys of a query.
            prior_bias = (prior_bias - prior_bias.amax(-1, keepdim=True)).clamp(min=torch.finfo(q.dtype).min)
        dtype = torch.promote_types(prior_bias.dtype, softmax_dtype(q.dtype))
        mask = prior_bias[None] if mask is None else prior_bias + additive_mask(mask, dtype)
        mask = mask.to(q.dtype if narrow else softmax_dtype(q.dtype))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=softmax_scale)
