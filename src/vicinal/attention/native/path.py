"""Attention by the native kernels: whether they serve a call, and the call itself."""

import torch
from torch import Tensor

from vicinal.attention.native.library import native_ready
from vicinal.attention.native.operators import NativeArguments, native_attention, native_attention_packed
from vicinal.attention.placed_prior import PlacedPrior, current_values
from vicinal.attention.precision import additive_mask, softmax_dtype
from vicinal.attention.recompute import Settings
from vicinal.priors.base import Prior
from vicinal.priors.function_transforms import transforms_active

__all__ = ["attend_native", "attend_native_packed", "native_serves"]

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def native_serves(x: Tensor, *others: Tensor, dropout: float = 0.0) -> bool:
    """Returns whether the native kernels compute attention of queries `x`, or of a projection `x`.

    Not under function transforms, which see no operations inside of a kernel, nor where a graph is exported to other
    machines. A compiled graph would drop the same weights in every step, so dropout is not for it.

    Args:
        x: queries, `(batch, heads, queries, dim)`, or a projection, `(batch, tokens, 3 * heads * dim)`.
        others: further inputs, which must have the same dtype.
        dropout: as for `attend`.
    """
    if not native_ready() or x.device.type != "cpu" or x.dtype not in DTYPES:
        return False
    if any(other.dtype != x.dtype for other in others) or transforms_active():
        return False
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting() and not dropout
    return type(x) in (Tensor, torch.nn.Parameter) and not torch._C._is_tracing()


def attend_native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prior: Prior | PlacedPrior | None,
    *,
    mask: Tensor | None,
    dropout: float,
    softmax_scale: float,
    order: Tensor | None = None,
) -> Tensor:
    """Returns attention, `(batch, heads, queries, v_dim)`; arguments as for `attend`."""
    given = _arguments(prior, q, k.shape[2], mask, dropout, softmax_scale, order)
    return native_attention(q, k, v, given)


def attend_native_packed(
    qkv: Tensor,
    heads: int,
    prior: Prior | PlacedPrior | None,
    *,
    mask: Tensor | None,
    dropout: float,
    softmax_scale: float,
) -> Tensor:
    """Returns attention, `(batch, tokens, heads * dim)`; arguments as for `attend_packed`."""
    given = _arguments(prior, qkv, qkv.shape[1], mask, dropout, softmax_scale, None)
    return native_attention_packed(qkv, heads, given)


def _arguments(
    prior: Prior | PlacedPrior | None,
    x: Tensor,
    keys: int,
    mask: Tensor | None,
    dropout: float,
    softmax_scale: float,
    order: Tensor | None,
) -> NativeArguments:
    scale = bias = grid = None
    per_offset = False
    if prior is not None:
        scale, bias = current_values(prior)
        grid, per_offset = prior.grid, prior.per_offset
    if mask is not None:
        mask = additive_mask(mask, softmax_dtype(x.dtype))
        mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
        mask = mask if mask.shape[3] == keys else mask.expand(*mask.shape[:3], keys)
    # Dynamo makes an argument of a float such as dropout; 0.0 stays a constant of the graph.
    seed, dropout = (int(torch.randint(2**62, ())), dropout) if dropout else (0, 0.0)
    placed = (0, 0, 0, False) if grid is None else (grid.height, grid.width, grid.prefix, per_offset)
    return NativeArguments(scale, bias, mask, order, Settings(*placed, softmax_scale, dropout, seed))
