"""Attention under a prior that keeps q, k, v and the prior's table for backward, and recomputes the rest in pieces."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vicinal.grid import Grid

__all__ = ["RecomputedAttention"]

# Logits in one piece of RecomputedAttention. On a CPU three buffers of 2 MB lose least to cache misses and to starting
# operations, taken together; a GPU wants enough to be busy.
CPU_PIECE = 2**19
GPU_PIECE = 2**26


class RecomputedAttention(torch.autograd.Function):
    """Attention that keeps q, k, v and the prior's values for backward, and works in pieces that fit the cache.

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
        *settings: Any,
    ) -> Tensor:
        """`multiply` and `add` are `Prior.values()`, over offsets or pairs of patches; settings as in `Settings`."""
        ctx.save_for_backward(q, k, v, multiply, add, mask)
        ctx.settings = Settings(*settings)
        return run_forward(q, k, v, multiply, add, mask, settings=ctx.settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, of the prior's values and of the mask."""
        wanted: Any = ctx.needs_input_grad[3:6]
        gradients = run_backward(gradient, *ctx.saved_tensors, settings=ctx.settings, wanted=wanted)
        return (*gradients, *(None for _ in ctx.settings))


class Settings(NamedTuple):
    """What attention is computed with, besides tensors."""

    height: int
    width: int
    prefix: int
    per_offset: bool
    scale: float
    dropout: float
    seed: int

    @property
    def place(self) -> tuple[Grid, bool]:
        """The prior's grid, and whether its values are tables over offsets."""
        return Grid(self.height, self.width, self.prefix), self.per_offset


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    multiply: Tensor | None,
    add: Tensor | None,
    mask: Tensor | None,
    *,
    settings: Settings,
) -> Tensor:
    """Attention, piece by piece."""
    cut = _Cut(q, v, logits=1)
    out = cut.result_like(v)
    generator = _generator(q, settings)
    for heads in cut.heads:
        scales, biases = _over_tokens(multiply, 1.0, heads, settings), _over_tokens(add, 0.0, heads, settings)
        for images, rows in cut.pieces:
            queries = cut.load("q", q[images, heads, rows], settings.scale)
            keys, values = cut.load("k", k[images, heads]), cut.load("v", v[images, heads])
            products = cut.product(0, queries, keys, heads)
            masks = None if mask is None else _mask_piece(mask, images, heads, rows)
            weights = _weights(products, products, scales, biases, masks, rows)
            if settings.dropout:
                weights = weights * _kept(weights, settings.dropout, generator)
            torch.bmm(cut.matrices(weights), values, out=cut.matrices(out[images, heads, rows]))
    return out.to(q.dtype)


def run_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    multiply: Tensor | None,
    add: Tensor | None,
    mask: Tensor | None,
    *,
    settings: Settings,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k and v, and of multiply, add and mask if they are wanted, piece by piece."""
    d_multiply, d_add, d_mask = (
        torch.zeros_like(values) if values is not None and wish else None
        for values, wish in zip((multiply, add, mask), wanted, strict=True)
    )
    cut = _Cut(q, v, logits=2 if multiply is None else 3)
    dq, dk, dv = cut.result_like(q), cut.result_like(k), cut.result_like(v)
    generator = _generator(q, settings)
    for heads in cut.heads:
        scales, biases = _over_tokens(multiply, 1.0, heads, settings), _over_tokens(add, 0.0, heads, settings)
        d_scales = torch.zeros_like(scales) if scales is not None and d_multiply is not None else None
        d_biases = torch.zeros_like(biases) if biases is not None and d_add is not None else None
        for images, rows in cut.pieces:
            queries = cut.load("q", q[images, heads, rows], settings.scale)
            keys, values = cut.load("k", k[images, heads]), cut.load("v", v[images, heads])
            grads = cut.load("gradient", gradient[images, heads, rows])
            products = cut.product(0, queries, keys, heads)
            masks = None if mask is None else _mask_piece(mask, images, heads, rows)
            room = products if scales is None else cut.room_like(2, products)
            weights = _weights(products, room, scales, biases, masks, rows)
            d_weights = cut.product(1, grads, values, heads)
            dropped = weights
            if settings.dropout:
                kept = _kept(weights, settings.dropout, generator)
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
                d_values[heads] = _over_tokens_adjoint(d_tokens, settings)
    dq, dk, dv = (x.to(q.dtype) for x in (dq.mul_(settings.scale), dk, dv))
    return dq, dk, dv, d_multiply, d_add, d_mask


def _generator(q: Tensor, settings: Settings) -> torch.Generator | None:
    return torch.Generator(q.device).manual_seed(settings.seed) if settings.dropout else None


class _Cut:
    """Attention cut into pieces, and the buffers that they take turns in.

    A piece is all heads of some images. Where even one image is large, it is one head of some images, so that the prior
    of that head stays in the cache, and where one head of one image is large, some of its query rows. Logits of a piece
    are `(images, heads, rows, tokens)`.
    """

    def __init__(self, q: Tensor, v: Tensor, logits: int) -> None:
        batch, heads, tokens, dim = q.shape
        self.dtype = _product_dtype(q)
        self.soft_dtype = torch.promote_types(q.dtype, torch.float32)
        images_in_piece = _images_in_piece(q)
        group = heads if images_in_piece >= 1 else 1
        images = _share(batch, batch / (images_in_piece * heads / group))
        rows = tokens if images > 1 else _share(tokens, 1 / (images_in_piece * heads / group))
        self.strides = functools.partial(result_strides, q=q)
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
        return torch.empty_strided(x.shape, self.strides(x.shape), dtype=self.dtype, device=x.device)

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


def _images_in_piece(q: Tensor) -> float:
    return (CPU_PIECE if q.device.type == "cpu" else GPU_PIECE) / (q.shape[1] * q.shape[2] ** 2)


def result_strides(shape: Sequence[int], q: Tensor) -> tuple[int, ...]:
    """How results of attention with queries `q` lie in memory: heads first where pieces are single heads."""
    batch, heads, tokens, dim = shape
    if _images_in_piece(q) < 1 and heads > 1:
        return tokens * dim, batch * tokens * dim, dim, 1
    return heads * tokens * dim, tokens * dim, dim, 1


def _product_dtype(q: Tensor) -> torch.dtype:
    return torch.float32 if q.device.type == "cpu" and q.dtype.itemsize == 2 else q.dtype


def _share(total: int, parts: float) -> int:
    """The size of about `parts` even parts of `total`."""
    return max(1, math.ceil(total / max(1, round(parts))))


def _over_tokens(values: Tensor | None, neutral: float, heads: slice, settings: Settings) -> Tensor | None:
    """A prior's values over pairs of tokens: `(heads, tokens, tokens)`."""
    if values is None:
        return None
    grid, per_offset = settings.place
    return grid.add_prefix(grid.unfold(values[heads]) if per_offset else values[heads], neutral)


def _over_tokens_adjoint(gradient: Tensor, settings: Settings) -> Tensor:
    grid, per_offset = settings.place
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
