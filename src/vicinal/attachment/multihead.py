"""`F.multi_head_attention_forward`, opened: what `nn.MultiheadAttention` calls, with its heart to be put in.

A mode sees that call, but nothing inside it. So what leads to q, k and v, and from the output on, is done here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.attention import attention_weights
from vicinal.errors import VicinalError
from vicinal.priors.base import Prior

__all__ = ["MultiHead", "multi_head"]


@dataclass(frozen=True)
class MultiHead:
    """One call of `F.multi_head_attention_forward`."""

    q: Tensor
    k: Tensor
    v: Tensor
    """`(batch, heads, tokens, dim)` each."""
    mask: Tensor | None
    """Numbers to add to the logits."""
    dropout: float
    batched: bool
    need_weights: bool
    average_weights: bool
    out_projection: tuple[Tensor, Tensor | None]

    def run(self, attention: Callable[..., Tensor], prior: Prior | None) -> tuple[Tensor, Tensor | None]:
        """The call's result; `attention(q, k, v, prior=, mask=, dropout=)` is at its heart."""
        weights = None
        if self.need_weights:
            weights = attention_weights(self.q, self.k, prior=prior, mask=self.mask)
            out = F.dropout(weights, self.dropout) @ self.v
            weights = weights.mean(1) if self.average_weights else weights
        else:
            out = attention(self.q, self.k, self.v, prior=prior, mask=self.mask, dropout=self.dropout)
        out = F.linear(out.permute(2, 0, 1, 3).flatten(2), *self.out_projection)
        if self.batched:
            return out, weights
        return out.squeeze(1), None if weights is None else weights.squeeze(0)


def multi_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    **static: Any,
) -> MultiHead:
    """Up to q, k and v. The arguments are those of `F.multi_head_attention_forward`, tokens first."""
    if bias_k is not None or add_zero_attn or is_causal or any(each is not None for each in static.values()):
        raise VicinalError("a spatial prior serves no keys beyond the tokens, and no causal attention")
    batched = query.dim() == 3
    if not batched:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    if use_separate_proj_weight:
        weights = [q_proj_weight, k_proj_weight, v_proj_weight]
    else:
        assert in_proj_weight is not None
        weights = list(in_proj_weight.chunk(3))
    biases = [None] * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    heads = []
    for x, weight, bias in zip((query, key, value), weights, biases, strict=True):
        assert weight is not None
        projected = F.linear(x, weight, bias)  # (tokens, batch, heads * dim)
        heads.append(projected.view(*projected.shape[:2], num_heads, -1).permute(1, 2, 0, 3))
    mask = None
    if attn_mask is not None:
        mask = _hiding(attn_mask if attn_mask.dim() == 2 else attn_mask.view(-1, num_heads, *attn_mask.shape[1:]))
    if key_padding_mask is not None:
        padding = _hiding(key_padding_mask[:, None, None])
        mask = padding if mask is None else mask + padding
    q, k, v = heads
    return MultiHead(
        q,
        k,
        v,
        mask,
        dropout_p if training else 0.0,
        batched,
        need_weights,
        average_attn_weights,
        (out_proj_weight, out_proj_bias),
    )


def _hiding(mask: Tensor) -> Tensor:
    """As numbers to add; True hides a key in masks of `nn.MultiheadAttention`."""
    return (
        torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask
    )
