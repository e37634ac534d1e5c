"""A quadratic bias as more channels of q and k: attention under it is `F.scaled_dot_product_attention` alone.

With positions x, offsets d = x_j - x_i and the bias B(d) = -a |d|^2 + b . d + c of `QuadraticBias`:

    B_ij = (2 a x_i + b) . x_j  -  a |x_j|^2  +  (c - a |x_i|^2 - b . x_i)

Each term is a product of a number of the query and one of the key. The last term is the same for all patches as keys,
and softmax ignores it: 3 channels are enough without prefix tokens. A prefix token has B = 0, so the last term stays:
a fourth channel, with 1 in patches and 0 in prefix tokens. A prefix query has 0 in all channels.

The terms are large and cancel. Kernels sum products in at least fp32, so the terms must be exact there:

- Positions are counted from the center of the grid, and `_curvature_limit` bounds a |x|^2. A window that is narrower
  becomes as wide as the limit (sigma 0.05 patches on 14 x 14 in bf16, 0.25 on 64 x 64) and still gets a gradient.
- bf16 and fp16 hold 8 and 11 bits, so a number is a sum of several channels: 2 a x_i + b, a and |x|^2 of two, the last
  term of three. That makes 11 channels, and 8 without prefix tokens. The rounding error e of 2 a x_i + b is made up
  for by -e . x_i in the last term.
- fp16 ends at 65504: a channel of k is a power of two times larger, where that of q would be too large.
- Gradients of logits sum to 0 over keys, but not after a kernel has rounded them. To learn a and b without prefix
  tokens, the last term is a channel that is 0 and has a gradient, so that errors do not grow with |x|^2.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.attention.placed_prior import PlacedPrior
from vicinal.attention.precision import additive_mask, softmax_dtype
from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.priors.base import Prior
from vicinal.priors.quadratic_bias import QuadraticBias
from vicinal.priors.token_values import PriorOnGrid

__all__ = ["attend_quadratic", "bias_channels", "quadratic_bias", "quadratic_is_exact"]

WIDTH_MULTIPLE = 8  # of the channels of a head, for flash attention
NARROWEST_SIGMA = 0.3  # in patches; grids on which such a window would not be exact are refused
LOGIT_ERROR = {1: 2.0**-11, 2: 2.0**-8}
"""Bound of the error of the bias, by the parts that a number is split into: 1 in fp32 and fp64, 2 in bf16 and fp16."""


def quadratic_bias(prior: Prior | PlacedPrior) -> QuadraticBias | None:
    """Returns the coefficients of a prior on a grid that is a bias quadratic in the offset; None for others."""
    return prior.quadratic_bias() if isinstance(prior, Prior | PriorOnGrid) else None


def quadratic_is_exact(grid: Grid, dtype: torch.dtype, softmax_scale: float, learned: bool) -> bool:
    """Returns whether channels hold the bias for windows of `NARROWEST_SIGMA` or wider.

    Args:
        grid: of queries and keys.
        dtype: of q and k.
        softmax_scale: factor of q k^T.
        learned: whether the prior needs a gradient. Kernels round gradients of channels to `dtype`. With prefix tokens
            that of sigma is then off by a part of its size that grows with eps |x|^2 / sigma^2.
    """
    if not softmax_scale > 0 or _curvature_limit(grid, dtype) < 0.5 / NARROWEST_SIGMA**2:
        return False
    if learned and grid.prefix and _parts(dtype) > 1 and torch.finfo(dtype).eps * _extent(grid)[1] > 1:
        return False
    # The limit of the curvature keeps the sides of a grid below 110: positions and squares are exact in 8 and 16 bits.
    largest = torch.finfo(dtype).max
    shifts, (half_side, squares) = _shifts(grid, dtype, softmax_scale), _extent(grid)
    return max(half_side * shifts.linear, squares * shifts.square, shifts.constant) <= largest


def attend_quadratic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prior: Prior | PlacedPrior,
    *,
    mask: Tensor | None,
    dropout: float,
    softmax_scale: float,
) -> Tensor:
    """Returns attention under a prior that is a quadratic bias; arguments as for `attend`.

    Raises VicinalError for other priors, and where channels of the dtype of q cannot hold the bias.
    """
    bias, grid = quadratic_bias(prior), prior.grid
    if bias is None or grid is None:
        raise VicinalError(
            "backend='quadratic' must have a prior that is a quadratic bias on a grid, such as conv or conv+conv; use "
            "backend='auto'"
        )
    if not quadratic_is_exact(grid, q.dtype, softmax_scale, bias.learned):
        raise VicinalError(
            f"backend='quadratic' is not exact on a grid of {grid} in {q.dtype} with scale {softmax_scale} "
            f"and {'a learned' if bias.learned else 'a frozen'} prior; use backend='auto'"
        )
    more_q, more_k = bias_channels(bias, grid, q.dtype, softmax_scale)
    # Flash attention wants one width of q, k and v.
    width = max(q.shape[3] + more_q.shape[2], v.shape[3])
    width += -width % WIDTH_MULTIPLE
    wide_q, wide_k = (
        torch.cat([x, F.pad(more, (0, width - x.shape[3] - more.shape[2])).expand(len(x), -1, -1, -1)], -1)
        for x, more in ((q, more_q), (k, more_k))
    )
    if mask is not None and mask.dtype != torch.bool:  # the CPU kernel adds an fp32 mask, others one of the dtype of q
        mask = additive_mask(mask, softmax_dtype(q.dtype) if q.device.type == "cpu" else q.dtype)
    wide_v = F.pad(v, (0, width - v.shape[3]))
    out = F.scaled_dot_product_attention(wide_q, wide_k, wide_v, attn_mask=mask, dropout_p=dropout, scale=softmax_scale)
    return out[..., : v.shape[3]]


def bias_channels(bias: QuadraticBias, grid: Grid, dtype: torch.dtype, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Returns the channels of q and of k, each `(heads, tokens, 3 to 11)` of `dtype`.

    Their product times `softmax_scale` is the bias over pairs of tokens; without prefix tokens, up to a constant for
    each query.

    Args:
        bias: coefficients for every head.
        grid: of queries and keys.
        dtype: of q and k.
        softmax_scale: factor of q k^T, > 0.
    """
    exact, parts = torch.promote_types(bias.curvature.dtype, softmax_dtype(dtype)), _parts(dtype)
    center = torch.tensor([(grid.height - 1) / 2, (grid.width - 1) / 2], dtype=exact, device=bias.curvature.device)
    x = grid.coordinates(bias.curvature.device).to(exact) - center
    square = x.square().sum(1, keepdim=True)
    shifts = _shifts(grid, dtype, softmax_scale)
    a, ratio = _held_curvature(bias.curvature.to(exact) / softmax_scale, grid, dtype, softmax_scale)
    b = bias.slope.to(exact) * (ratio / softmax_scale)[:, None]
    c = bias.constant.to(exact) * (ratio / softmax_scale)
    linear = 2 * a[:, None, None] * x + b[:, None]
    linear_parts = _split(linear / shifts.linear, parts, dtype)
    held = sum(part.detach().to(exact) for part in linear_parts) * shifts.linear
    queries, keys = list(linear_parts), [x * shifts.linear] * parts
    for curvature in _split(-a[:, None, None].expand(-1, grid.patches, 1) / shifts.square, parts, dtype):
        for part in _split(square * shifts.square, parts, dtype):
            queries.append(curvature)
            keys.append(part)
    if grid.prefix or bias.learned:
        last = c[:, None, None] - a[:, None, None] * square - (b[:, None] * x).sum(2, keepdim=True)
        last = (last - ((held - linear.detach()) * x).sum(2, keepdim=True)) / shifts.constant
        last_parts = _split(last, parts + (parts > 1), dtype) if grid.prefix else [last - last.detach()]
        queries += last_parts
        keys += [torch.full_like(square, shifts.constant)] * len(last_parts)
    more_q, more_k = (torch.cat([y.to(dtype).expand(len(a), -1, -1) for y in side], 2) for side in (queries, keys))
    return F.pad(more_q, (0, 0, grid.prefix, 0)), F.pad(more_k, (0, 0, grid.prefix, 0))


class _Shifts(NamedTuple):
    """Powers of two that channels of k are multiplied by, and those of q divided by."""

    linear: float
    square: float
    constant: float


def _shifts(grid: Grid, dtype: torch.dtype, softmax_scale: float) -> _Shifts:
    """Returns the powers of two for which the channels of q are finite, for centers within four times the grid."""
    curvature, reach = _curvature_limit(grid, dtype) / softmax_scale, 4 * (math.sqrt(_extent(grid)[1]) + 1)
    bounds = 2 * curvature * reach, curvature, curvature * reach**2
    largest = torch.finfo(dtype).max / 2
    return _Shifts(*(2.0 ** max(0, math.ceil(math.log2(bound / largest))) for bound in bounds))


def _extent(grid: Grid) -> tuple[float, float]:
    """Returns the largest position along an axis and the largest |x|^2, counted from the center of the grid."""
    down, across = (grid.height - 1) / 2, (grid.width - 1) / 2
    return max(down, across), down**2 + across**2


def _curvature_limit(grid: Grid, dtype: torch.dtype) -> float:
    """Returns the largest curvature for which the error of the bias is below `LOGIT_ERROR`.

    Terms of up to 2 a |x|^2 are summed with a relative error of half of eps, a few times: 2 a |x|^2 eps bounds what
    they sum to in practice.
    """
    eps = torch.finfo(softmax_dtype(dtype)).eps
    return LOGIT_ERROR[_parts(dtype)] / (2 * eps * max(_extent(grid)[1], 0.5))


def _parts(dtype: torch.dtype) -> int:
    """Returns the number of channels whose sum holds a number: two for bf16 and fp16, else one."""
    return 2 if dtype.itemsize == 2 else 1


def _held_curvature(a: Tensor, grid: Grid, dtype: torch.dtype, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Returns `a` as channels of `dtype` hold it, within the limit, and its ratio to `a`: `(heads,)` each.

    All coefficients times the ratio are the same window, a little wider. The ratio has no gradient.
    """
    limit = _curvature_limit(grid, dtype) / softmax_scale
    held, shift = a.detach().clamp(-limit, limit), _shifts(grid, dtype, softmax_scale).square
    held = sum((part.to(a.dtype) for part in _split(held / shift, _parts(dtype), dtype)), torch.zeros_like(a)) * shift
    ratio = torch.where(a.detach() == 0, 1.0, held / a.detach())
    return held + (a - a.detach()) * ratio, ratio


def _split(x: Tensor, parts: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns tensors of the shape of `x` whose sum is x; all but the first are rounded and have no gradient.

    Args:
        x: in at least fp32.
        parts: how many; 1 returns x itself.
        dtype: of each part.
    """
    if parts == 1:
        return [x]
    largest = torch.finfo(dtype).max
    first = x.clamp(-largest, largest).to(dtype)
    rest, found = x.detach() - first.detach().to(x.dtype), [first]
    for _ in range(parts - 1):
        found.append(rest.clamp(-largest, largest).to(dtype))
        rest = rest - found[-1].to(x.dtype)
    return found
