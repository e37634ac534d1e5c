"""Attention under a prior by PyTorch's flex_attention: one compiled kernel with the prior in its `score_mod`.

A prior over offsets stays a table, which the kernel reads at the offset that it computes from the numbers of query and
key: nothing of tokens x tokens is made. On CUDA, flex_attention gives gradients for q, k, v and for the table, as for
every tensor that a `score_mod` reads. It has no backward on a CPU, and no dropout.
"""

import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from vicinal.attention.placed_prior import PlacedPrior
from vicinal.attention.precision import additive_mask
from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.priors.base import Prior

__all__ = ["attend_flex"]

Lookup = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def attend_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prior: Prior | PlacedPrior,
    *,
    mask: Tensor | None,
    dropout: float,
    softmax_scale: float,
) -> Tensor:
    """Returns attention with the prior as the `score_mod` of flex_attention; arguments as for `attend`.

    Raises VicinalError for dropout, and for gradients on a CPU.
    """
    if dropout:
        raise VicinalError(f"backend='flex' has no dropout, given {dropout}; use backend='auto'")
    prior_scale, prior_bias = prior.values()
    added = None if mask is None else additive_mask(mask, torch.float32).expand(*q.shape[:3], k.shape[2])
    if q.device.type == "cpu":
        tensors = (q, k, v, prior_scale, prior_bias, mask)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            raise VicinalError("backend='flex' has no backward on a CPU; use backend='auto', or torch.no_grad()")
        q, k, v = q.detach(), k.detach(), v.detach()  # flex_attention refuses leaves under torch.no_grad() too
        prior_scale, prior_bias, added = (_materialized(x) for x in (prior_scale, prior_bias, added))
    lookup = _pair_lookup if prior.grid is None else _grid_lookup(prior.grid, prior.per_offset)

    def score_mod(score: Tensor, image: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if prior_scale is not None:
            score = score * lookup(prior_scale, head, query, key, 1.0)
        if prior_bias is not None:
            score = score + lookup(prior_bias, head, query, key, 0.0)
        if added is not None:
            score = score + added[image, head, query, key]
        return score

    return _flex_attention()(q, k, v, score_mod=score_mod, scale=softmax_scale)


def _pair_lookup(values: Tensor, head: Tensor, query: Tensor, key: Tensor, neutral: float) -> Tensor:
    """Returns the number of a query and a key, 0-D, from `(heads, queries, keys)`."""
    return values[head, query, key]


def _grid_lookup(grid: Grid, per_offset: bool) -> Lookup:
    """Returns a function of a prior's values, head, query, key and the number of pairs with a prefix token, 0-D each.

    Args:
        grid: of queries and keys.
        per_offset: whether values are `(heads, 2h-1, 2w-1)` over offsets; else `(heads, patches, patches)`.
    """
    height, width, prefix = grid.height, grid.width, grid.prefix

    def lookup(values: Tensor, head: Tensor, query: Tensor, key: Tensor, neutral: float) -> Tensor:
        placed = (query >= prefix) & (key >= prefix)
        # Prefix tokens read the number of the first patch, which `where` then replaces.
        query, key = torch.where(placed, query - prefix, 0), torch.where(placed, key - prefix, 0)
        if per_offset:
            row = key // width - query // width + (height - 1)
            found = values[head, row, key % width - query % width + (width - 1)]
        else:
            found = values[head, query, key]
        return torch.where(placed, found, neutral) if prefix else found

    return lookup


def _materialized(x: Tensor | None) -> Tensor | None:
    """Returns `x`, which a compiled graph on a CPU writes to memory before flex_attention.

    Inductor's kernel for CPUs fails on tensors that it would compute inside of a `score_mod` (torch 2.13); that for
    CUDA writes them to memory itself.
    """
    if x is None or not torch.compiler.is_compiling():
        return x
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())


def _flex_attention() -> Callable[..., Tensor]:
    """Returns flex_attention, compiled; inside a compiled model itself, as a part of its graph."""
    from torch.nn.attention.flex_attention import flex_attention

    if torch.compiler.is_compiling():
        return cast("Callable[..., Tensor]", flex_attention)
    return _compiled_flex()


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return cast("Callable[..., Tensor]", torch.compile(flex_attention))
