"""Reimplements `F.multi_head_attention_forward` with a replaceable attention function.

A `TorchFunctionMode` sees that call, which `nn.MultiheadAttention` makes, but not the operations inside it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.errors import VicinalError

__all__ = ["MultiHead", "multi_head"]


@dataclass(frozen=True)
class MultiHead:
    """One call of `F.multi_head_attention_forward`, up to queries, keys and values."""

    q: Tensor
    k: Tensor
    v: Tensor
    """`(batch, heads, tokens, dim)` each."""
    mask: Tensor | None
    """Added to the logits."""
    dropout: float
    batched: bool
    need_weights: bool
    average_weights: bool
    out_projection: tuple[Tensor, Tensor | None]

    def run(self, attention: Callable[..., Tensor], weights: Callable[..., Tensor]) -> tuple[Tensor, Tensor | None]:
        """Returns output and weights as `F.multi_head_attention_forward` does.

        Args:
            attention: `attention(q, k, v, mask=, dropout=)` gives the output, `(batch, heads, tokens, dim)`.
            weights: `weights(q, k, mask=)` gives the weights, `(batch, heads, tokens, keys)`; used where the caller
                wants them.
        """
        given = None
        if self.need_weights:
            given = weights(self.q, self.k, mask=self.mask)
            out = F.dropout(given, self.dropout) @ self.v
            given = given.mean(1) if self.average_weights else given
        else:
            out = attention(self.q, self.k, self.v, mask=self.mask, dropout=self.dropout)
        out = F.linear(out.permute(2, 0, 1, 3).flatten(2), *self.out_projection)
        if self.batched:
            return out, given
        return out.squeeze(1), None if given is None else given.squeeze(0)


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
    """Returns queries, keys and values of a call; the arguments are those of `F.multi_head_attention_forward`.

    Raises:
        VicinalError: for keys beyond the tokens and for causal attention.
    """
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
    inputs = zip((query, key, value), weights, biases, strict=True)
    q, k, v = (_project(x, weight, bias, num_heads) for x, weight, bias in inputs)
    mask = _mask(attn_mask, key_padding_mask, num_heads)
    dropout, projection = dropout_p if training else 0.0, (out_proj_weight, out_proj_bias)
    return MultiHead(q, k, v, mask, dropout, batched, need_weights, average_attn_weights, projection)


def _project(x: Tensor, weight: Tensor | None, bias: Tensor | None, heads: int) -> Tensor:
    """Returns one of queries, keys and values, `(batch, heads, tokens, dim)`, from `(tokens, batch, channels)`."""
    assert weight is not None
    projected = F.linear(x, weight, bias)  # (tokens, batch, heads * dim)
    return projected.view(*projected.shape[:2], heads, -1).permute(1, 2, 0, 3)


def _mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, heads: int) -> Tensor | None:
    """Returns the sum of both masks, which broadcasts to `(batch, heads, queries, keys)`; None if there is none."""
    mask = None
    if attn_mask is not None:
        mask = _added(attn_mask if attn_mask.dim() == 2 else attn_mask.view(-1, heads, *attn_mask.shape[1:]))
    if key_padding_mask is not None:
        padding = _added(key_padding_mask[:, None, None])
        mask = padding if mask is None else mask + padding
    return mask


def _added(mask: Tensor) -> Tensor:
    """Returns a mask as values to add to the logits; in masks of `nn.MultiheadAttention` True hides a key."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask, -torch.inf)
