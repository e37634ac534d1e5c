"""Attention under a prior that keeps q, k, v and the prior's table for backward, and recomputes the rest in chunks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vicinal.attention.chunks import ChunkedAttention
from vicinal.attention.precision import can_have_tiny_weights, drop_tiny_terms
from vicinal.attention.reference import softmax_weights
from vicinal.grid import Grid

__all__ = ["RecomputedAttention", "Settings", "run_backward", "run_forward"]


class Settings(NamedTuple):
    """Numbers that attention is computed with, besides tensors."""

    height: int
    """Rows of the grid of queries and keys; 0 if the prior's values are over pairs of tokens, without a grid."""
    width: int
    prefix: int
    per_offset: bool
    """With a grid, whether the prior's values are tables over offsets; else they are over pairs of patches."""
    softmax_scale: float
    dropout: float
    seed: int

    @property
    def grid(self) -> Grid | None:
        """The grid of both queries and keys, if the prior has one."""
        return Grid(self.height, self.width, self.prefix) if self.height else None


class RecomputedAttention(torch.autograd.Function):
    """Keeps q, k, v and the prior's values for backward, and works in chunks that fit the cache.

    All keys of a query are in its chunk, so a chunk is the plain formula, written over itself. Matrix products run in
    `product_dtype`, the rest in at least fp32. The factor of q k^T is the `alpha` of the products, which BLAS applies
    before it rounds: a q times 32 ** -0.5, rounded to bf16, had 1.4 times the error in the output.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prior_scale: Tensor | None,
        prior_bias: Tensor | None,
        mask: Tensor | None,
        *settings: Any,
    ) -> Tensor:
        """Returns `(batch, heads, queries, v_dim)`; arguments as for `run_forward`, with the fields of `Settings`."""
        ctx.save_for_backward(q, k, v, prior_scale, prior_bias, mask)
        ctx.settings = Settings(*settings)
        return run_forward(q, k, v, prior_scale, prior_bias, mask, settings=ctx.settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Returns gradients of q, k, v, of the prior's values and of the mask, and None for every setting."""
        wanted: Any = ctx.needs_input_grad[3:6]
        gradients = run_backward(gradient, *ctx.saved_tensors, settings=ctx.settings, wanted=wanted)
        return (*gradients, *(None for _ in ctx.settings))


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prior_scale: Tensor | None,
    prior_bias: Tensor | None,
    mask: Tensor | None,
    *,
    settings: Settings,
) -> Tensor:
    """Returns attention, `(batch, heads, queries, v_dim)`, contiguous, computed chunk by chunk.

    Args:
        q: queries, `(batch, heads, queries, dim)`.
        k: keys, `(batch, heads, keys, dim)`.
        v: values, `(batch, heads, keys, v_dim)`.
        prior_scale: of `PlacedPrior.values()`: `(heads, 2h-1, 2w-1)`, `(heads, patches, patches)`, or, without a grid,
            `(heads, queries, keys)`; None for 1.
        prior_bias: as prior_scale; None for 0.
        mask: numbers to add to the logits, 4-D, each size 1 or that of `(batch, heads, queries, keys)`.
        settings: grid, factor of q k^T and dropout.
    """
    chunked = ChunkedAttention(q, v, logit_buffers=1)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    generator = _generator(q, settings)
    for heads in chunked.head_groups:
        scales, biases = _token_pairs(prior_scale, 1.0, heads, settings), _token_pairs(prior_bias, 0.0, heads, settings)
        narrow = drop_tiny_terms(biases)
        for images, rows in chunked.chunks:
            queries = chunked.load("q", q[images, heads, rows])
            keys, values = chunked.load("k", k[images, heads]), chunked.load("v", v[images, heads])
            products = chunked.product(0, queries, keys, heads, settings.softmax_scale)
            pairs = _rows(scales, rows), _rows(biases, rows), _rows(narrow, rows)
            mask_chunk = _mask_chunk(mask, images, heads, rows)
            weights = _weights(products, *pairs, mask_chunk, out=products)
            if settings.dropout:
                weights = weights * _dropout_factors(weights, settings.dropout, generator)
            chunked.store(out[images, heads, rows], chunked.matrices(weights), values)
    return out


def run_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prior_scale: Tensor | None,
    prior_bias: Tensor | None,
    mask: Tensor | None,
    *,
    settings: Settings,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Returns gradients of q, k, v, prior_scale, prior_bias and mask, contiguous, computed chunk by chunk.

    Args:
        gradient: of the result of `run_forward`, in its shape.
        q: as for `run_forward`, and so are k, v, prior_scale, prior_bias, mask and settings.
        wanted: whether to compute the gradients of prior_scale, prior_bias and mask; None comes back for the others.
    """
    d_prior_scale, d_prior_bias, d_mask = (
        values.new_zeros(values.shape) if values is not None and wish else None
        for values, wish in zip((prior_scale, prior_bias, mask), wanted, strict=True)
    )
    chunked = ChunkedAttention(q, v, logit_buffers=2 if prior_scale is None else 3)
    dq, dk, dv = (x.new_empty(x.shape, dtype=chunked.dtype) for x in (q, k, v))
    generator = _generator(q, settings)
    for heads in chunked.head_groups:
        scales, biases = _token_pairs(prior_scale, 1.0, heads, settings), _token_pairs(prior_bias, 0.0, heads, settings)
        narrow = drop_tiny_terms(biases)
        d_scales = None if d_prior_scale is None or scales is None else torch.zeros_like(scales)
        d_biases = None if d_prior_bias is None or biases is None else torch.zeros_like(biases)
        for images, rows in chunked.chunks:
            queries = chunked.load("q", q[images, heads, rows])
            keys, values = chunked.load("k", k[images, heads]), chunked.load("v", v[images, heads])
            grads = chunked.load("gradient", gradient[images, heads, rows])
            products = chunked.product(0, queries, keys, heads, settings.softmax_scale)
            pairs = _rows(scales, rows), _rows(biases, rows), _rows(narrow, rows)
            mask_chunk = _mask_chunk(mask, images, heads, rows)
            # The gradient of prior_scale needs the products, so the weights get a buffer of their own.
            buffer = products if scales is None else chunked.buffer_like(2, products)
            weights = _weights(products, *pairs, mask_chunk, out=buffer)
            d_weights = chunked.product(1, grads, values, heads)
            dropped = _drop_weights(weights, d_weights, settings.dropout, generator)
            beta = 0.0 if rows.start == 0 else 1.0  # gradients of keys and values sum over all query rows
            chunked.store(dv[images, heads], chunked.matrices(dropped).mT, grads, beta=beta)
            d_logits = torch.ops.aten._softmax_backward_data.out(
                d_weights, weights, -1, weights.dtype, grad_input=d_weights
            )
            d_mask_chunk = _mask_chunk(d_mask, images, heads, rows)
            _add_gradients(d_logits, products, _rows(d_scales, rows), _rows(d_biases, rows), d_mask_chunk)
            if scales is not None:
                d_logits.mul_(scales[:, rows])
            d_products = chunked.matrices(d_logits)
            scale = settings.softmax_scale
            chunked.store(dq[images, heads, rows], d_products, keys, alpha=scale)
            chunked.store(dk[images, heads], d_products.mT, queries, beta=beta, alpha=scale)
        for d_values, d_pairs in ((d_prior_scale, d_scales), (d_prior_bias, d_biases)):
            if d_values is not None and d_pairs is not None:
                d_values[heads] = _token_pairs_adjoint(d_pairs, settings)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), d_prior_scale, d_prior_bias, d_mask


def _drop_weights(weights: Tensor, d_dropped: Tensor, dropout: float, generator: torch.Generator | None) -> Tensor:
    """Returns the weights after dropout, and turns the gradient of these into that of `weights`, in place."""
    if not dropout:
        return weights
    factors = _dropout_factors(weights, dropout, generator)
    d_dropped.mul_(factors)
    return weights * factors


def _add_gradients(
    d_logits: Tensor, products: Tensor, d_scales: Tensor | None, d_biases: Tensor | None, d_mask: Tensor | None
) -> None:
    """Adds a chunk's gradients of the prior's scale and bias and of the mask, in place; overwrites `products`.

    Args:
        d_logits: gradient of the logits, `(images, heads, rows, keys)`.
        products: scaled products of queries and keys, in the same shape.
        d_scales: of these rows, `(heads, rows, keys)`, or None; so is d_biases.
        d_mask: the part of the mask's gradient that the chunk reads, or None.
    """
    if d_mask is not None:
        d_mask.add_(d_logits.sum_to_size(d_mask.shape))
    if d_biases is not None:
        _add_images(d_biases, d_logits)
    if d_scales is not None:
        _add_images(d_scales, products.mul_(d_logits))


def _weights(
    products: Tensor,
    scales: Tensor | None,
    biases: Tensor | None,
    narrow: Tensor | None,
    mask: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Returns the weights of a chunk, in `out`.

    Args:
        products: q k^T * softmax_scale, `(images, heads, rows, keys)`.
        scales: of the prior, `(heads, rows, keys)`; None for 1.
        biases: as scales; None for 0.
        narrow: `drop_tiny_terms(biases)`. It spares a look at each row where the products alone spread little.
        mask: terms, which broadcast to products; or None.
        out: of the shape of products; can be `products`.
    """
    logits = products if scales is None else torch.mul(products, scales, out=out)
    if mask is not None or can_have_tiny_weights(logits, 1.0 if biases is None else 0.5):
        return softmax_weights(logits, None, biases, mask, out=out)
    return torch.softmax(logits if narrow is None else torch.add(logits, narrow, out=out), -1, out=out)


def _token_pairs(values: Tensor | None, neutral: float, heads: slice, settings: Settings) -> Tensor | None:
    """Returns a prior's values over pairs of tokens, `(heads, queries, keys)`, `neutral` with a prefix token."""
    if values is None:
        return None
    grid = settings.grid
    if grid is None:
        return values[heads]
    return grid.add_prefix(grid.unfold(values[heads]) if settings.per_offset else values[heads], neutral)


def _token_pairs_adjoint(gradient: Tensor, settings: Settings) -> Tensor:
    """Returns the gradient of a prior's values from that over pairs of tokens, `(heads, queries, keys)`."""
    grid = settings.grid
    if grid is None:
        return gradient
    pairs = grid.drop_prefix(gradient)
    return grid.fold(pairs) if settings.per_offset else pairs


def _rows(values: Tensor | None, rows: slice) -> Tensor | None:
    """Returns the query rows of `(heads, queries, keys)` as a view, `(heads, rows, keys)`."""
    return None if values is None else values[:, rows]


def _mask_chunk(mask: Tensor | None, *chunk: slice) -> Any:
    """Returns the part of a mask that falls on a chunk (images, heads, rows), as a view; None for None."""
    if mask is None:
        return None
    return mask[tuple(part if size > 1 else slice(None) for part, size in zip(chunk, mask.shape[:3], strict=True))]


def _add_images(total: Tensor, chunk: Tensor) -> None:
    """Adds `(images, heads, rows, keys)`, summed over images, to `total`, `(heads, rows, keys)`."""
    total.add_(chunk[0] if len(chunk) == 1 else chunk.sum(0))


def _generator(q: Tensor, settings: Settings) -> torch.Generator | None:
    """Returns the generator of dropout, alike in forward and backward; None without dropout."""
    return torch.Generator(q.device).manual_seed(settings.seed) if settings.dropout else None


def _dropout_factors(weights: Tensor, dropout: float, generator: torch.Generator | None) -> Tensor:
    """Returns 0 for a share of `dropout` of the weights, and 1 / (1 - dropout) for the others."""
    return torch.empty_like(weights).bernoulli_(1 - dropout, generator=generator).div_(1 - dropout)
