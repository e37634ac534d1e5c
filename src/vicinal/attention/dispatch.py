"""How a prior meets Q, K and V:  softmax(scale * (q k^T / sqrt(dim)) + bias + mask) v.

Why a prior costs little here, though no fused kernel multiplies logits or learns a bias:

- Without a gradient to follow into it, a bias rides `F.scaled_dot_product_attention`'s fused kernel. In inference a
  prior over tokens is kept between calls.
- In training, `RecomputedAttention` keeps q, k, v and the prior's *table* for backward: (2h-1)(2w-1) numbers a head.
  Logits, softmax and the prior's tokens x tokens form are computed again. That is less memory than the fused kernel
  keeps (no output, no log-sum-exp). And most of the time of eager attention was never arithmetic: it was page faults
  and cache misses on batch x heads x tokens x tokens arrays, which are a few cache-sized pieces here.
- Under `torch.compile`, training on a CPU calls the same as an operator (compile_op.py). Elsewhere, and under
  `torch.export`, the plain formula is traced; fusing it is the compiler's work.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from vicinal.attention.compile_op import recomputed_attention
from vicinal.attention.recompute import CPU_PIECE, RecomputedAttention
from vicinal.errors import VicinalError, unknown
from vicinal.priors.base import Prior, autocasting, full_precision

__all__ = ["attend", "attend_plain", "attention_weights"]

Backend = Literal["auto", "plain", "recompute", "flex"]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    prior: Prior | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attention under a spatial prior: `softmax(prior(q k^T * scale) + mask) v`, `(batch, heads, tokens, dim)`.

    >>> import torch, vicinal
    >>> prior = vicinal.build_prior("gmm", heads=4, grid=vicinal.Grid(8, 8, prefix=1))
    >>> q, k, v = torch.randn(3, 2, 4, 65, 16)
    >>> vicinal.attend(q, k, v, prior=prior).shape
    torch.Size([2, 4, 65, 16])

    Args:
        q: queries, `(batch, heads, tokens, dim)`.
        k: keys, as q.
        v: values, as q; their dim may differ.
        prior: what multiplies and shifts the logits; None for plain attention.
        mask: True where a key may be seen, or numbers to add; broadcasts to `(batch, heads, tokens, tokens)`.
        dropout: probability that an attention weight is dropped. Applied whenever it is > 0: pass 0 in evaluation.
        scale: factor of q k^T; `dim ** -0.5` by default.
        backend: `auto` chooses; `plain` is the formula, `recompute` the memory-saving path, `flex` compiles
            PyTorch's flex_attention (made for CUDA; no dropout, and no backward on CPU).
    """
    if not torch.compiler.is_compiling() and has_torch_function((q, k, v)):  # a tap reads along
        return handle_torch_function(
            attend, (q, k, v), q, k, v, prior=prior, mask=mask, dropout=dropout, scale=scale, backend=backend
        )
    if prior is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    _check(q, k, v, prior, mask, dropout, backend)
    if autocasting(q.device):  # as scaled_dot_product_attention does
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    with full_precision(q.device):
        return _dispatch(q, k, v, prior, mask, dropout, q.shape[-1] ** -0.5 if scale is None else scale, backend)


def _dispatch(
    q: Tensor, k: Tensor, v: Tensor, prior: Prior, mask: Tensor | None, dropout: float, scale: float, backend: Backend
) -> Tensor:
    compiling = torch.compiler.is_compiling()
    if backend == "auto" and (
        torch._C._are_functorch_transforms_active() or (compiling and not _as_operator(q, dropout))
    ):
        backend = "plain"
    if backend == "plain":
        return attend_plain(q, k, v, *prior(), mask=mask, dropout=dropout, scale=scale)
    if backend == "flex":
        return _attend_flex(q, k, v, prior, mask, dropout, scale)
    if backend == "auto" and not torch.is_grad_enabled():
        multiply, add = prior()  # kept between calls
        if multiply is None:
            return _attend_fused(q, k, v, add, mask, dropout, scale)
        if q.numel() // q.shape[3] * q.shape[2] <= CPU_PIECE and q.dtype.itemsize > 2:
            return attend_plain(q, k, v, multiply, add, mask=mask, dropout=dropout, scale=scale)
    multiply, add = prior.values()
    if backend == "auto" and multiply is None and not _needs_gradient(add) and not _needs_gradient(mask):
        return _attend_fused(q, k, v, prior()[1], mask, dropout, scale)
    if mask is not None:
        mask = _additive(mask, torch.promote_types(q.dtype, torch.float32))
        mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
    seed = int(torch.randint(2**62, ())) if dropout else 0
    recomputed = recomputed_attention if compiling else cast("Callable[..., Tensor]", RecomputedAttention.apply)
    grid = prior.grid
    settings = (grid.height, grid.width, grid.prefix, prior.per_offset, scale, dropout, seed)
    return recomputed(q, k, v, multiply, add, mask, *settings)


def attend_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    multiply: Tensor | None = None,
    add: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float,
) -> Tensor:
    """The formula, in the order of the papers: the reference that every other path is tested against."""
    weights = _weights(q, k, multiply, add, mask, scale)
    if dropout:
        weights = F.dropout(weights, dropout)
    return weights.to(v.dtype) @ v


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    prior: Prior | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    queries: slice = slice(None),
) -> Tensor:
    """What `attend` multiplies the values with: `(batch, heads, queries, tokens)`.

    >>> import torch, vicinal
    >>> from vicinal.attention import attention_weights
    >>> prior = vicinal.build_prior("gab", heads=4, grid=vicinal.Grid(8, 8, prefix=1))
    >>> q, k = torch.randn(2, 1, 4, 65, 16)
    >>> attention_weights(q, k, prior=prior, queries=slice(1)).shape  # of the class token only
    torch.Size([1, 4, 1, 65])

    Args:
        q: queries, `(batch, heads, tokens, dim)`.
        k: keys, as q.
        prior: as for `attend`.
        mask: as for `attend`.
        scale: as for `attend`.
        queries: which queries to compute; the others cost nothing.
    """
    neutral = prior is None or (queries.stop is not None and 0 <= queries.stop <= prior.grid.prefix)
    multiply, add = (None, None) if prior is None or neutral else prior()
    if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask[..., queries, :]
    return _weights(
        q[..., queries, :],
        k,
        None if multiply is None else multiply[..., queries, :],
        None if add is None else add[..., queries, :],
        mask,
        q.shape[-1] ** -0.5 if scale is None else scale,
    )


def _weights(
    q: Tensor, k: Tensor, multiply: Tensor | None, add: Tensor | None, mask: Tensor | None, scale: float
) -> Tensor:
    logits = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if multiply is not None:
        logits = logits * multiply
    if add is not None:
        logits = logits + add
    if mask is None:
        return logits.softmax(-1)
    logits = logits + _additive(mask, logits.dtype)
    blind = logits.amax(-1, keepdim=True) == -math.inf  # queries that may see no key get 0
    return logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of True and False, or of numbers, as numbers to add to the logits."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf)


def _attend_fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, dropout: float, scale: float
) -> Tensor:
    """A bias that needs no gradient, as the `attn_mask` of PyTorch's fused kernels."""
    if bias is not None:
        if q.dtype.itemsize == 2:  # the best key of each query at 0, which softmax ignores: else a large bias overflows
            bias = (bias - bias.amax(-1, keepdim=True)).clamp(min=torch.finfo(q.dtype).min)
        mask = bias[None] if mask is None else bias + _additive(mask, bias.dtype)
        mask = mask.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)


def _as_operator(q: Tensor, dropout: float) -> bool:
    """Whether a compiled model calls recomputed attention instead of tracing the formula: training on a CPU."""
    return torch.is_grad_enabled() and not torch.compiler.is_exporting() and q.device.type == "cpu" and not dropout


def _needs_gradient(x: Tensor | None) -> bool:
    return x is not None and x.requires_grad and torch.is_grad_enabled()


def _attend_flex(
    q: Tensor, k: Tensor, v: Tensor, prior: Prior, mask: Tensor | None, dropout: float, scale: float
) -> Tensor:
    """The prior as the `score_mod` of PyTorch's flex_attention, which compiles one kernel for it."""
    if dropout:
        raise VicinalError(f"backend='flex' has no dropout, given {dropout}; use backend='auto'")
    multiply, add = prior()
    if q.device.type == "cpu" and any(_needs_gradient(x) for x in (q, k, v, multiply, add, mask)):
        raise VicinalError("backend='flex' has no backward on a CPU; use backend='auto', or torch.no_grad()")
    added = None if mask is None else _additive(mask, torch.float32).expand(*q.shape[:2], q.shape[2], k.shape[2])

    def score_mod(score: Tensor, image: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if multiply is not None:
            score = score * multiply[head, query, key]
        if add is not None:
            score = score + add[head, query, key]
        if added is not None:
            score = score + added[image, head, query, key]
        return score

    return _compiled_flex()(q, k, v, score_mod=score_mod, scale=scale)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return cast("Callable[..., Tensor]", torch.compile(flex_attention))


def _check(q: Tensor, k: Tensor, v: Tensor, prior: Prior, mask: Tensor | None, dropout: float, backend: str) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.shape != q.shape or v.shape[:3] != q.shape[:3] or v.dim() != 4:
        raise VicinalError(f"attend takes q, k and v as (batch, heads, tokens, dim) alike, given {shapes}")
    if q.shape[1] != prior.heads:
        raise VicinalError(f"the prior is for {prior.heads} heads, given {q.shape[1]}; {shapes}")
    if q.shape[2] != prior.grid.tokens:
        grid = prior.grid
        if grid.prefix >= q.shape[2]:
            raise VicinalError(
                f"the prior's {grid.prefix} prefix tokens leave no patch in {q.shape[2]} tokens; {shapes}"
            )
        raise VicinalError(
            f"the prior is for {grid.tokens} tokens ({grid}), given {q.shape[2]}; {shapes}. "
            "Another image size needs prior.resize(grid)"
        )
    if not q.dtype.is_floating_point or not q.device == k.device == v.device == (prior.device or q.device):
        devices = ", ".join(f"{name} {x.device}" for name, x in (("q", q), ("k", k), ("v", v), ("prior", prior)))
        raise VicinalError(f"attend takes floating-point numbers on one device, given {q.dtype}; {devices}")
    if not 0.0 <= dropout < 1.0:
        raise VicinalError(f"dropout is a probability in [0, 1), given {dropout}")
    if backend not in get_args(Backend):
        raise unknown("backend", backend, get_args(Backend))
    if mask is not None:
        wanted = (*q.shape[:3], k.shape[2])
        fits = mask.dim() <= 4 and all(
            m in (1, n) for m, n in zip(reversed(mask.shape), reversed(wanted), strict=False)
        )
        if not fits:
            raise VicinalError(
                f"mask must broadcast to (batch, heads, tokens, tokens) = {wanted}, given {tuple(mask.shape)}"
            )
