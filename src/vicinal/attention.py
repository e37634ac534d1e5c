"""How a prior meets Q, K and V:  softmax(scale * (q k^T / sqrt(dim)) + bias + mask) v.

Why a prior costs almost nothing here:

- Without a gradient to follow into it, a bias rides `F.scaled_dot_product_attention`'s fused kernel. In inference a
  prior over tokens is kept between calls.
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
from vicinal.priors.base import Prior, full_precision

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
    if torch.is_autocast_enabled(q.device.type):  # as scaled_dot_product_attention does
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    with full_precision(q.device):
        return _dispatch(q, k, v, prior, mask, dropout, q.shape[-1] ** -0.5 if scale is None else scale, backend)


def _dispatch(
    q: Tensor, k: Tensor, v: Tensor, prior: Prior, mask: Tensor | None, dropout: float, scale: float, backend: Backend
) -> Tensor:
    if backend == "auto" and (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()):
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
    if dropout:
        weights = F.dropout(weights, dropout)
    return weights.to(v.dtype) @ v


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
        ctx.place, ctx.scale, ctx.dropout, ctx.seed = (grid, per_offset), scale, dropout, seed
        cut = _Cut(q, v, logits=1)
        out = cut.result_like(v)
        generator = torch.Generator(q.device).manual_seed(seed) if dropout else None
        for heads in cut.heads:
            scales, biases = _over_tokens(multiply, 1.0, heads, *ctx.place), _over_tokens(add, 0.0, heads, *ctx.place)
            for images, rows in cut.pieces:
                queries = cut.load("q", q[images, heads, rows], scale)
                keys, values = cut.load("k", k[images, heads]), cut.load("v", v[images, heads])
                products = cut.product(0, queries, keys, heads)
                masks = None if mask is None else _mask_piece(mask, images, heads, rows)
                weights = _weights(products, products, scales, biases, masks, rows)
                if dropout:
                    weights = weights * _kept(weights, dropout, generator)
                torch.bmm(cut.matrices(weights), values, out=cut.matrices(out[images, heads, rows]))
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, of the prior's values and of the mask."""
        q, k, v, multiply, add, mask = ctx.saved_tensors
        d_multiply, d_add, d_mask = (
            torch.zeros_like(values) if values is not None and ctx.needs_input_grad[argument] else None
            for values, argument in ((multiply, 3), (add, 4), (mask, 5))
        )
        cut = _Cut(q, v, logits=2 if multiply is None else 3)
        dq, dk, dv = cut.result_like(q), cut.result_like(k), cut.result_like(v)
        generator = torch.Generator(q.device).manual_seed(ctx.seed) if ctx.dropout else None
        for heads in cut.heads:
            scales, biases = _over_tokens(multiply, 1.0, heads, *ctx.place), _over_tokens(add, 0.0, heads, *ctx.place)
            d_scales = torch.zeros_like(scales) if scales is not None and d_multiply is not None else None
            d_biases = torch.zeros_like(biases) if biases is not None and d_add is not None else None
            for images, rows in cut.pieces:
                queries = cut.load("q", q[images, heads, rows], ctx.scale)
                keys, values = cut.load("k", k[images, heads]), cut.load("v", v[images, heads])
                grads = cut.load("gradient", gradient[images, heads, rows])
                products = cut.product(0, queries, keys, heads)
                masks = None if mask is None else _mask_piece(mask, images, heads, rows)
                room = products if scales is None else cut.room_like(2, products)
                weights = _weights(products, room, scales, biases, masks, rows)
                d_weights = cut.product(1, grads, values, heads)
                dropped = weights
                if ctx.dropout:
                    kept = _kept(weights, ctx.dropout, generator)
                    dropped = weights * kept
                    d_weights.mul_(kept)
                earlier = 0.0 if rows.start == 0 else 1.0  # a key gathers over all query rows
                cut.matrices(dv[images, heads]).baddbmm_(cut.matrices(dropped).mT, grads, beta=earlier)
                d_logits = torch.ops.aten._softmax_backward_data.out(
                    d_weights, weights, -1, weights.dtype, grad_input=d_weights
                )
                if d_mask is not None:
                    part = _mask_piece(d_mask, images, heads, rows)
                    part.add_(d_logits.sum_to_size(part.shape))
                if d_biases is not None:
                    _add_images(d_biases[:, rows], d_logits)
                if d_scales is not None:
                    _add_images(d_scales[:, rows], products.mul_(d_logits))
                if scales is not None:
                    d_logits.mul_(scales[:, rows])
                d_products = cut.matrices(d_logits)
                torch.bmm(d_products, keys, out=cut.matrices(dq[images, heads, rows]))
                cut.matrices(dk[images, heads]).baddbmm_(d_products.mT, queries, beta=earlier)
            for d_values, d_tokens in ((d_multiply, d_scales), (d_add, d_biases)):
                if d_values is not None and d_tokens is not None:
                    d_values[heads] = _over_tokens_adjoint(d_tokens, *ctx.place)
        dq, dk, dv = (x.to(q.dtype) for x in (dq.mul_(ctx.scale), dk, dv))
        return dq, dk, dv, d_multiply, d_add, d_mask, None, None, None, None, None


class _Cut:
    """Attention cut into pieces, and the buffers that they take turns in.

    A piece is all heads of some images. Where even one image is large, it is one head of some images, so that the prior
    of that head stays in the cache, and where one head of one image is large, some of its query rows. Logits of a piece
    are `(images, heads, rows, tokens)`.
    """

    def __init__(self, q: Tensor, v: Tensor, logits: int) -> None:
        batch, heads, tokens, dim = q.shape
        on_cpu = q.device.type == "cpu"
        self.dtype = torch.float32 if on_cpu and q.dtype.itemsize == 2 else q.dtype
        self.soft_dtype = torch.promote_types(q.dtype, torch.float32)
        images_in_piece = (CPU_PIECE if on_cpu else GPU_PIECE) / (heads * tokens**2)
        group = heads if images_in_piece >= 1 else 1
        images = _share(batch, batch / (images_in_piece * heads / group))
        rows = tokens if images > 1 else _share(tokens, 1 / (images_in_piece * heads / group))
        self.by_head = group < heads
        self.heads = [slice(head, head + group) for head in range(0, heads, group)]
        self.pieces = [
            (slice(image, image + images), slice(row, row + rows))
            for image in range(0, batch, images)
            for row in range(0, tokens, rows)
        ]
        matrices = images * group
        self.logits = [q.new_empty(matrices, rows, tokens, dtype=self.dtype) for _ in range(logits)]
        sizes = {"q": (rows, dim), "k": (tokens, dim), "v": (tokens, v.shape[3]), "gradient": (rows, v.shape[3])}
        self.loaded = {name: q.new_empty(matrices, *size, dtype=self.dtype) for name, size in sizes.items()}

    def result_like(self, x: Tensor) -> Tensor:
        """Room for a result of the shape of `x`, laid out so that its pieces are contiguous."""
        if self.by_head:
            return torch.empty(x.transpose(0, 1).shape, dtype=self.dtype, device=x.device).transpose(0, 1)
        return torch.empty(x.shape, dtype=self.dtype, device=x.device)

    def load(self, name: str, x: Tensor, scale: float | None = None) -> Tensor:
        """A piece `(images, heads, rows, dim)` of an input as `(matrices, rows, dim)`, maybe scaled."""
        room = self.loaded[name][: x.shape[0] * x.shape[1], : x.shape[2]]
        if scale is None:
            room.view(x.shape).copy_(x)
        else:
            torch.mul(x, scale, out=room.view(x.shape))
        return room

    def matrices(self, x: Tensor) -> Tensor:
        """`(images, heads, rows, columns)` as products take it, `(matrices, rows, columns)`; of a result, a view."""
        return x.flatten(0, 1).to(self.dtype)

    def product(self, number: int, rows: Tensor, keys: Tensor, heads: slice) -> Tensor:
        """`rows keys^T` of a piece, in one of the buffers for logits."""
        room = self.logits[number][: rows.shape[0], : rows.shape[1]]
        torch.bmm(rows, keys.mT, out=room)
        return room.view(-1, heads.stop - heads.start, *room.shape[1:]).to(self.soft_dtype)

    def room_like(self, number: int, logits: Tensor) -> Tensor:
        """Another of the buffers, in the shape of some logits."""
        if logits.dtype != self.dtype:
            return torch.empty_like(logits)
        return self.logits[number][: logits.shape[0] * logits.shape[1], : logits.shape[2]].view(logits.shape)


def _share(total: int, parts: float) -> int:
    """The size of about `parts` even parts of `total`."""
    return math.ceil(total / max(1, round(parts)))


def _over_tokens(values: Tensor | None, neutral: float, heads: slice, grid: Grid, per_offset: bool) -> Tensor | None:
    """A prior's values over pairs of tokens: `(heads, tokens, tokens)`."""
    if values is None:
        return None
    return grid.add_prefix(grid.unfold(values[heads]) if per_offset else values[heads], neutral)


def _over_tokens_adjoint(gradient: Tensor, grid: Grid, per_offset: bool) -> Tensor:
    pairs = grid.drop_prefix(gradient)
    return grid.fold(pairs) if per_offset else pairs


def _weights(
    products: Tensor, out: Tensor, scales: Tensor | None, biases: Tensor | None, masks: Tensor | None, rows: slice
) -> Tensor:
    """softmax(scales * products + biases + masks) of a piece, written to `out`, which is `products` without scales."""
    if scales is not None:
        torch.mul(products, scales[:, rows], out=out)
    if biases is not None:
        out.add_(biases[:, rows])
    if masks is None:
        return torch.softmax(out, -1, out=out)
    out.add_(masks)
    blind = out.amax(-1, keepdim=True) == -math.inf
    return torch.softmax(out, -1, out=out).masked_fill_(blind, 0.0)


def _add_images(total: Tensor, piece: Tensor) -> None:
    """Add `(images, heads, rows, tokens)`, summed over images, to `(heads, rows, tokens)`."""
    total.add_(piece[0] if len(piece) == 1 else piece.sum(0))


def _mask_piece(mask: Tensor, *piece: slice) -> Tensor:
    """The part of a mask, `(batch or 1, heads or 1, tokens or 1, tokens or 1)`, that falls on a piece, as a view."""
    return mask[tuple(part if size > 1 else slice(None) for part, size in zip(piece, mask.shape[:3], strict=True))]


def _kept(weights: Tensor, dropout: float, generator: torch.Generator | None) -> Tensor:
    """Which weights dropout keeps, scaled so that their mean stays."""
    return torch.empty_like(weights).bernoulli_(1 - dropout, generator=generator).div_(1 - dropout)


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
