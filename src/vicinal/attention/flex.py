"""Attention under a prior by PyTorch's flex_attention, which compiles one kernel for it."""

import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from vicinal.attention.precision import additive_mask
from vicinal.errors import VicinalError

__all__ = ["attend_flex"]


def attend_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prior_scale: Tensor | None,
    prior_bias: Tensor | None,
    *,
    mask: Tensor | None,
    dropout: float,
    softmax_scale: float,
) -> Tensor:
    """Returns attention with the prior as the `score_mod` of flex_attention; arguments as for `attend_plain`.

    Raises VicinalError for dropout, and for gradients on a CPU.
    """
    if dropout:
        raise VicinalError(f"backend='flex' has no dropout, given {dropout}; use backend='auto'")
    tensors = (q, k, v, prior_scale, prior_bias, mask)
    if q.device.type == "cpu" and torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise VicinalError("backend='flex' has no backward on a CPU; use backend='auto', or torch.no_grad()")
    added = None if mask is None else additive_mask(mask, torch.float32).expand(*q.shape[:3], k.shape[2])

    def score_mod(score: Tensor, image: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if prior_scale is not None:
            score = score * prior_scale[head, query, key]
        if prior_bias is not None:
            score = score + prior_bias[head, query, key]
        if added is not None:
            score = score + added[image, head, query, key]
        return score

    return _compiled_flex()(q, k, v, score_mod=score_mod, scale=softmax_scale)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return cast("Callable[..., Tensor]", torch.compile(flex_attention))
