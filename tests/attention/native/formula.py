"""The formula of attention in the dtype of its inputs, random calls, and the native kernels' answer to them."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vicinal.attention.native.operators import NativeArguments, native_attention
from vicinal.attention.recompute import Settings
from vicinal.grid import Grid


@dataclass
class Call:
    """Inputs of attention; tables, pairs and masks that need gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    grid: Grid | None = None
    per_offset: bool = True
    scale: Tensor | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None
    order: Tensor | None = None
    direction: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def leaves(self) -> list[Tensor | None]:
        return [self.q, self.k, self.v, self.scale, self.bias, self.mask]


def random_call(
    grid: Grid | None,
    *,
    batch=2,
    heads=2,
    dim=16,
    v_dim=None,
    keys=None,
    per_offset=True,
    scale=True,
    bias=True,
    mask: tuple[int, ...] | None = None,
    permuted=False,
    sharp=1.0,
    seed=0,
    dtype=torch.float64,
    queries=None,
) -> Call:
    """Returns a random call; `mask` is the shape of one, `sharp` multiplies the logits."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    queries = grid.tokens if grid is not None else queries
    keys = queries if keys is None else keys
    if grid is None:
        values = (heads, queries, keys)
    else:
        values = (heads, *grid.table_shape) if per_offset else (heads, grid.patches, grid.patches)
    return Call(
        q=randn(batch, queries, heads, dim).transpose(1, 2) * sharp**0.5,
        k=randn(batch, heads, keys, dim) * sharp**0.5,
        v=randn(batch, keys, heads, v_dim or dim).transpose(1, 2),
        grid=grid,
        per_offset=per_offset,
        scale=randn(*values) if scale else None,
        bias=2 * sharp * randn(*values) if bias else None,
        mask=None if mask is None else randn(*mask),
        order=torch.randperm(queries, generator=generator) if permuted else None,
        direction=randn(batch, heads, queries, v_dim or dim),
    )


def formula(call: Call, q: Tensor, k: Tensor, v: Tensor, scale, bias, mask) -> Tensor:
    """Returns `softmax(q k^T * dim ** -0.5 * scale + bias + mask) v`, one operation after another."""
    if call.order is not None:
        q, k, v = (x[:, :, call.order] for x in (q, k, v))
    logits = q @ k.mT * q.shape[-1] ** -0.5
    if scale is not None:
        logits = logits * over_tokens(call, scale, 1.0)
    if bias is not None:
        logits = logits + over_tokens(call, bias, 0.0)
    if mask is not None:
        logits = logits + mask.repeat(len(q) // len(mask) if len(mask) > 1 else 1, 1, 1, 1)
    out = logits.softmax(-1) @ v
    return out if call.order is None else out[:, :, call.order.argsort()]


def over_tokens(call: Call, values: Tensor, neutral: float) -> Tensor:
    """Returns values over pairs of tokens, `(heads, queries, keys)`, by a loop over pairs of patches."""
    if call.grid is None:
        return values
    height, width, prefix = call.grid.height, call.grid.width, call.grid.prefix
    if call.per_offset:
        rows, columns = (x.flatten() for x in torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
        dy, dx = rows[None] - rows[:, None], columns[None] - columns[:, None]
        values = values[:, dy + height - 1, dx + width - 1]
    return torch.nn.functional.pad(values, (prefix, 0, prefix, 0), value=neutral)


def settings(call: Call, dropout=0.0, seed=0) -> Settings:
    grid = (0, 0, 0, False)
    if call.grid is not None:
        grid = (call.grid.height, call.grid.width, call.grid.prefix, call.per_offset)
    return Settings(*grid, call.q.shape[-1] ** -0.5, dropout, seed)


def by_formula(call: Call, dtype: torch.dtype) -> list[Tensor]:
    """Returns output and gradients of all inputs by the formula in `dtype`."""
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in call.leaves]
    return _results(formula(call, *leaves), leaves, call.direction.to(dtype))


def by_kernel(call: Call, dtype: torch.dtype, prior_dtype: torch.dtype | None = None, **options) -> list[Tensor]:
    """Returns output and gradients of all inputs by the native kernels; q, k and v are in `dtype`."""
    dtypes = [dtype] * 3 + [prior_dtype or dtype] * 3
    leaves = [
        None if x is None else x.detach().to(each, copy=True).requires_grad_()
        for x, each in zip(call.leaves, dtypes, strict=True)
    ]
    q, k, v, *prior = leaves
    given = NativeArguments(*prior, call.order, settings(call, **options))
    return _results(native_attention(q, k, v, given), leaves, call.direction.to(dtype))


def _results(out: Tensor, leaves: list[Tensor | None], direction: Tensor) -> list[Tensor]:
    given = [x for x in leaves if x is not None]
    return [out.detach(), *torch.autograd.grad(out, given, direction)]
