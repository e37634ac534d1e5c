"""How a prior meets Q, K and V:  softmax(scale * (q k^T / sqrt(dim)) + bias + mask) v.

Why a prior costs almost nothing here:

- Without a gradient to follow into it, a bias rides `F.scaled_dot_product_attention`'s fused kernel.
- In training, `RecomputedAttention` keeps q, k, v and the prior's *table* for backward, (2h-1)(2w-1) numbers a head.
  Logits, softmax and the prior's tokens x tokens form are computed again. That is less memory than the fused kernel
  keeps (no output, no log-sum-exp), and eager attention's large part was never arithmetic: it was page faults and cache
  misses on batch x heads x tokens x tokens arrays that are here a few cache-sized pieces, used over and over.
- Under `torch.compile` and `torch.export` the plain formula is traced; fusing it is the compiler's work.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from vicinal.errors import VicinalError, unknown
from vicinal.grid import Grid
from vicinal.priors.base import Prior

__all__ = ["attend", "attend_plain"]

Backend = Literal["auto", "plain", "recompute", "flex"]

# Logits in one piece of RecomputedAttention. On a CPU three buffers of 2 MB lose least to cache misses and to starting
# operations, taken together; a GPU wants enough to be busy.
CPU_PIECE = 2**19
GPU_PIECE = 2**26


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
    if prior is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    _check(q, k, v, prior, mask, dropout, backend)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if torch.is_autocast_enabled(q.device.type):  # as scaled_dot_product_attention does
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        if backend == "auto" and torch.compiler.is_compiling():
            backend = "plain"
        if backend == "plain":
            return attend_plain(q, k, v, *prior(), mask=mask, dropout=dropout, scale=scale)
        if backend == "flex":
            if dropout:
                raise VicinalError(f"backend='flex' has no dropout, given {dropout}; use backend='auto'")
            return _attend_flex(q, k, v, prior, mask, scale)
        multiply, add = prior.values()
        if backend == "auto" and multiply is None and not _needs_gradient(add) and not _needs_gradient(mask):
            bias = _over_tokens(add, 0.0, prior.grid, prior.per_offset, slice(None))
            mask = mask if bias is None else _bias_mask(bias, mask, q.dtype)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
        if mask is not None:
            mask = _additive(mask, torch.promote_types(q.dtype, torch.float32))
            mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
        seed = int(torch.randint(2**62, ())) if dropout else 0
        recomputed = cast("Callable[..., Tensor]", RecomputedAttention.apply)
        return recomputed(q, k, v, multiply, add, mask, prior.grid, prior.per_offset, scale, dropout, seed)


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
    logits = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if multiply is not None:
        logits = logits * multiply
    if add is not None:
        logits = logits + add
    if mask is None:
        weights = logits.softmax(-1)
    else:
        logits = logits + _additive(mask, logits.dtype)
        blind = logits.amax(-1, keepdim=True) == -math.inf  # queries that may see no key get 0
        weights = logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return F.dropout(weights, dropout).to(v.dtype) @ v


class RecomputedAttention(torch.autograd.Function):
    """Attention that keeps q, k, v and the prior's flat tables for backward, and works in pieces that fit the cache.

    All keys of a query are in its piece, so a piece is the plain formula, written over itself. Matrix products run in
    the dtype of q (in fp32 for half precision on a CPU, which multiplies that faster), the rest in at least fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        multiply: Tensor | None,
        add: Tensor | None,
        mask: Tensor | None,
        grid: Grid,
        per_offset: bool,
        scale: float,
        dropout: float,
        seed: int,
    ) -> Tensor:
        """`multiply` and `add` are `Prior.values()`: tables over offsets, or pairs of patches."""
        ctx.save_for_backward(q, k, v, multiply, add, mask)
        ctx.grid, ctx.per_offset, ctx.scale, ctx.dropout, ctx.seed = grid, per_offset, scale, dropout, seed
        cut = _Cut(q, buffers=1)
        out = cut.result(v)
        place = grid, per_offset
        generator = torch.Generator(q.device).manual_seed(seed)
        for head in cut.heads:
            scales, biases = _over_tokens(multiply, 1.0, *place, head), _over_tokens(add, 0.0, *place, head)
            for images, rows in cut.pieces:
                queries = cut.queries(q[images, head, rows], scale)
                keys, values = cut.matrices(k[images, head]), cut.matrices(v[images, head])
                products = cut.product(queries, keys.mT, buffer=0)
                masks = None if mask is None else mask[_within(mask, images, head, rows)]
                weights = _weights(products, products, scales, biases, masks, rows)
                if dropout:
                    weights = weights * _kept(weights, dropout, generator)
                torch.bmm(cut.matrices(weights), values, out=cut.matrices(out[images, head, rows]))
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, of both tables and of the mask."""
        q, k, v, multiply, add, mask = ctx.saved_tensors
        grid, per_offset = place = ctx.grid, ctx.per_offset
        d_multiply, d_add, d_mask = (
            torch.zeros_like(values) if values is not None and ctx.needs_input_grad[argument] else None
            for values, argument in ((multiply, 3), (add, 4), (mask, 5))
        )
        cut = _Cut(q, buffers=2 if multiply is None else 3)
        dq, dk, dv = cut.result(q), cut.result(k), cut.result(v)
        generator = torch.Generator(q.device).manual_seed(ctx.seed)
        for head in cut.heads:
            scales, biases = _over_tokens(multiply, 1.0, *place, head), _over_tokens(add, 0.0, *place, head)
            d_scales = None if d_multiply is None or scales is None else torch.zeros_like(scales)
            d_biases = None if d_add is None or biases is None else torch.zeros_like(biases)
            for images, rows in cut.pieces:
                queries, grads = (
                    cut.queries(q[images, head, rows], ctx.scale),
                    cut.matrices(gradient[images, head, rows]),
                )
                keys, values = cut.matrices(k[images, head]), cut.matrices(v[images, head])
                products = cut.product(queries, keys.mT, buffer=0)
                masks = None if mask is None else mask[_within(mask, images, head, rows)]
                room = products if scales is None else cut.room(queries, buffer=2)
                weights = _weights(products, room, scales, biases, masks, rows)
                d_weights = cut.product(grads, values.mT, buffer=1)
                dropped = weights
                if ctx.dropout:
                    kept = _kept(weights, ctx.dropout, generator)
                    dropped = weights * kept
                    d_weights.mul_(kept)
                earlier = 0.0 if rows.start == 0 else 1.0  # a key gathers over all query rows
                cut.matrices(dv[images, head]).baddbmm_(cut.matrices(dropped).mT, grads, beta=earlier)
                d_logits = torch.ops.aten._softmax_backward_data.out(
                    d_weights, weights, -1, weights.dtype, grad_input=d_weights
                )
                if d_mask is not None:
                    part = d_mask[_within(mask, images, head, rows)]
                    part.add_(d_logits.sum_to_size(part.shape))
                if d_biases is not None:
                    d_biases[..., rows, :].add_(_sum_images(d_logits))
                if d_scales is not None:
                    d_scales[..., rows, :].add_(_sum_images(products.mul_(d_logits)))
                if scales is not None:
                    d_logits.mul_(scales[..., rows, :])
                d_products = cut.matrices(d_logits)
                torch.bmm(d_products, keys, out=cut.matrices(dq[images, head, rows]))
                cut.matrices(dk[images, head]).baddbmm_(d_products.mT, queries, beta=earlier)
            if d_multiply is not None and d_scales is not None:
                d_multiply[head] = _over_tokens_adjoint(d_scales, grid, per_offset)
            if d_add is not None and d_biases is not None:
                d_add[head] = _over_tokens_adjoint(d_biases, grid, per_offset)
        dq, dk, dv = (x.to(q.dtype) for x in (dq.mul_(ctx.scale), dk, dv))
        return dq, dk, dv, d_multiply, d_add, d_mask, None, None, None, None, None


Head = int | slice


class _Cut:
    """Attention cut into pieces, and the buffers that they take turns in.

    A piece is one head of some images: matrices that need no copy, under one head's prior, which stays in the cache.
    Where one head of one image is large by itself, a piece is some of its query rows; where everything is small, one
    piece is all. Logits are `(images, rows, tokens)`, or `(batch, heads, tokens, tokens)` where one piece is all.
    """

    def __init__(self, q: Tensor, buffers: int) -> None:
        batch, heads, tokens, dim = q.shape
        on_cpu = q.device.type == "cpu"
        self.dtype = torch.float32 if on_cpu and q.dtype.itemsize == 2 else q.dtype
        self.soft_dtype = torch.promote_types(q.dtype, torch.float32)
        room = CPU_PIECE if on_cpu else GPU_PIECE
        self.whole = batch * heads * tokens**2 <= room
        images = batch if self.whole else math.ceil(batch / max(1, round(batch * tokens**2 / room)))
        rows = tokens if self.whole else math.ceil(tokens / max(1, round(images * tokens**2 / room)))
        self.heads: list[Head] = [slice(None)] if self.whole else list(range(heads))
        self.pieces = [
            (slice(image, image + images), slice(row, row + rows))
            for image in range(0, batch, images)
            for row in range(0, tokens, rows)
        ]
        shape = (batch, heads, rows) if self.whole else (images, rows)
        self.buffers = [q.new_empty(*shape, tokens, dtype=self.dtype) for _ in range(buffers)]
        self.scaled = q.new_empty(*shape, dim, dtype=self.dtype)

    def result(self, like: Tensor) -> Tensor:
        """Room for a result of that shape, laid out so that its pieces are contiguous."""
        if self.whole:
            return torch.empty(like.shape, dtype=self.dtype, device=like.device)
        return like.new_empty(like.transpose(0, 1).shape, dtype=self.dtype).transpose(0, 1)

    def matrices(self, x: Tensor) -> Tensor:
        """A piece of an array as `(matrices, rows, columns)`, which products take; of a result, a view."""
        return (x.flatten(0, 1) if self.whole else x).to(self.dtype)

    def queries(self, q: Tensor, scale: float) -> Tensor:
        """A piece's queries, scaled: `(matrices, rows, dim)`."""
        out = self.scaled if self.whole else self.scaled[: q.shape[0], : q.shape[1]]
        return self.matrices(torch.mul(q, scale, out=out))

    def room(self, rows: Tensor, buffer: int) -> Tensor:
        """A buffer for the logits of a piece whose rows are `(matrices, rows, dim)`."""
        return self.buffers[buffer] if self.whole else self.buffers[buffer][: rows.shape[0], : rows.shape[1]]

    def product(self, a: Tensor, b: Tensor, buffer: int) -> Tensor:
        """Logits `a b` of a piece."""
        out = self.room(a, buffer)
        torch.bmm(a, b, out=self.matrices(out))
        return out.to(self.soft_dtype)


def _over_tokens(values: Tensor | None, neutral: float, grid: Grid, per_offset: bool, head: Head) -> Tensor | None:
    """A prior's values for a head, or all, over pairs of tokens."""
    if values is None:
        return None
    return grid.add_prefix(grid.unfold(values[head]) if per_offset else values[head], neutral)


def _over_tokens_adjoint(gradient: Tensor, grid: Grid, per_offset: bool) -> Tensor:
    pairs = grid.drop_prefix(gradient)
    return grid.fold(pairs) if per_offset else pairs


def _weights(
    products: Tensor, out: Tensor, scales: Tensor | None, biases: Tensor | None, masks: Tensor | None, rows: slice
) -> Tensor:
    """softmax(scales * products + biases + masks) of a piece, written to `out`, which is `products` without scales."""
    if scales is not None:
        torch.mul(products, scales[..., rows, :], out=out)
    if biases is not None:
        out.add_(biases[..., rows, :])
    if masks is None:
        return torch.softmax(out, -1, out=out)
    out.add_(masks)
    blind = out.amax(-1, keepdim=True) == -math.inf
    return torch.softmax(out, -1, out=out).masked_fill_(blind, 0.0)


def _sum_images(x: Tensor) -> Tensor:
    return x[0] if len(x) == 1 else x.sum(0)


def _within(mask: Tensor, images: slice, head: Head, rows: slice) -> tuple[Head, ...]:
    """Where a piece lies in a mask of `(batch or 1, heads or 1, tokens or 1, tokens or 1)`."""
    one = slice(0, 1)
    only = 0 if isinstance(head, int) else one
    batch, heads, tokens = mask.shape[:3]
    return images if batch > 1 else one, head if heads > 1 else only, rows if tokens > 1 else one


def _kept(weights: Tensor, dropout: float, generator: torch.Generator) -> Tensor:
    """Which weights dropout keeps, scaled so that their mean stays."""
    return torch.empty_like(weights).bernoulli_(1 - dropout, generator=generator).div_(1 - dropout)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of True and False, or of numbers, as numbers to add to the logits."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf)


def _bias_mask(bias: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A bias and a mask as one `attn_mask` of the dtype that the fused kernels take."""
    if dtype.itemsize == 2:  # the best key of each query at 0, which softmax ignores: else a large bias overflows
        bias = (bias - bias.amax(-1, keepdim=True)).clamp(min=torch.finfo(dtype).min)
    total = bias[None] if mask is None else bias + _additive(mask, bias.dtype)
    return total.to(dtype)


def _needs_gradient(x: Tensor | None) -> bool:
    return x is not None and x.requires_grad and torch.is_grad_enabled()


def _attend_flex(q: Tensor, k: Tensor, v: Tensor, prior: Prior, mask: Tensor | None, scale: float) -> Tensor:
    """The prior as the `score_mod` of PyTorch's flex_attention, which compiles one kernel for it."""
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
    if not q.dtype.is_floating_point or not q.device == k.device == v.device == prior.device:
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
