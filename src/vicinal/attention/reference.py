"""The formula: `softmax(prior_scale * (q k^T * softmax_scale) + prior_bias + mask) v`, one operation after another.

Every other path is tested against it. `softmax_weights`, from products to weights, is shared with the path that
recomputes.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.attention.placed_prior import PlacedPrior
from vicinal.attention.precision import (
    additive_mask,
    can_have_tiny_weights,
    drop_tiny_weights,
    product_dtype,
    softmax_dtype,
    values_are_readable,
)
from vicinal.priors.base import Prior

__all__ = ["attend_plain", "attention_weights", "softmax_weights"]


def attend_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prior_scale: Tensor | None = None,
    prior_bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    softmax_scale: float,
) -> Tensor:
    """Returns attention by the formula, in the order of the papers: `(batch, heads, queries, v_dim)`.

    Args:
        q: queries, `(batch, heads, queries, dim)`.
        k: keys, `(batch, heads, keys, dim)`.
        v: values, `(batch, heads, keys, v_dim)`.
        prior_scale: factors of the logits, `(heads, queries, keys)`; None for 1.
        prior_bias: terms of the logits, as prior_scale; None for 0.
        mask: as for `attend`.
        dropout: as for `attend`.
        softmax_scale: factor of q k^T.
    """
    weights = _weights(q, k, prior_scale, prior_bias, mask, softmax_scale)
    if dropout:
        weights = F.dropout(weights, dropout)
    dtype = product_dtype(q)
    return (weights.to(dtype) @ v.to(dtype)).to(v.dtype)


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    prior: Prior | PlacedPrior | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    queries: slice = slice(None),
) -> Tensor:
    """Returns the weights by which `attend` multiplies the values, `(batch, heads, queries, keys)`, at least fp32.

    >>> import torch, vicinal
    >>> from vicinal.attention import attention_weights
    >>> prior = vicinal.build_prior("gab", heads=4, grid=vicinal.Grid(8, 8, prefix=1))
    >>> q, k = torch.randn(2, 1, 4, 65, 16)
    >>> attention_weights(q, k, prior=prior, queries=slice(1)).shape  # of the class token only
    torch.Size([1, 4, 1, 65])

    Args:
        q: queries, `(batch, heads, queries, dim)`.
        k: keys, `(batch, heads, keys, dim)`.
        prior: as for `attend`.
        mask: as for `attend`.
        scale: as for `attend`.
        queries: the queries whose weights are computed.
    """
    prefix = 0 if prior is None or prior.grid is None else prior.grid.prefix
    neutral = prior is None or (queries.stop is not None and 0 <= queries.stop <= prefix)
    prior_scale, prior_bias = (None, None) if prior is None or neutral else prior()
    if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask[..., queries, :]
    return _weights(
        q[..., queries, :],
        k,
        None if prior_scale is None else prior_scale[..., queries, :],
        None if prior_bias is None else prior_bias[..., queries, :],
        mask,
        q.shape[-1] ** -0.5 if scale is None else scale,
    )


def _weights(
    q: Tensor,
    k: Tensor,
    prior_scale: Tensor | None,
    prior_bias: Tensor | None,
    mask: Tensor | None,
    softmax_scale: float,
) -> Tensor:
    """Returns attention weights, `(batch, heads, queries, keys)`; the prior's values are over the same pairs."""
    q, k, dtype = q.to(product_dtype(q)), k.to(product_dtype(k)), softmax_dtype(q.dtype)
    products = (q @ k.mT).to(dtype)
    # New tensors are for autograd; in inference of one image their page faults cost as much as the arithmetic.
    out = products if values_are_readable(products) and not torch.is_grad_enabled() else None
    products = torch.mul(products, softmax_scale, out=out)
    mask = None if mask is None else additive_mask(mask, dtype)
    # Biases narrow attention. A look at logits without one takes longer than the rare tiny weight in inference.
    return softmax_weights(products, prior_scale, prior_bias, mask, out, look=out is None or prior_bias is not None)


def softmax_weights(
    products: Tensor,
    prior_scale: Tensor | None,
    prior_bias: Tensor | None,
    mask: Tensor | None,
    out: Tensor | None = None,
    look: bool = True,
) -> Tensor:
    """Returns `softmax(prior_scale * products + prior_bias + mask)`, of the shape of `products`.

    Args:
        products: q k^T * softmax_scale, `(..., queries, keys)`.
        prior_scale: factors, which broadcast to products; None for 1.
        prior_bias: terms, which broadcast to products; None for 0.
        mask: terms, which broadcast to products; a query whose terms are all -inf gets weights of 0.
        out: where to write every step, without autograd; can be `products`. None makes new tensors.
        look: whether to look for tiny weights, to drop them.
    """
    logits = products
    if prior_scale is not None:
        logits = torch.mul(logits, prior_scale, out=out)
    if prior_bias is not None:
        logits = torch.add(logits, prior_bias, out=out)
    if mask is not None:
        logits = torch.add(logits, mask, out=out)
    tiny = look and can_have_tiny_weights(logits)
    if mask is None and not tiny:
        return torch.softmax(logits, -1, out=out)
    maximum = logits.detach().amax(-1, keepdim=True)
    if mask is None:
        return torch.softmax(drop_tiny_weights(logits, maximum, out), -1, out=out)
    masked = maximum == -math.inf
    if tiny:
        logits = drop_tiny_weights(logits, maximum.masked_fill(masked, 0.0), out)
    if out is not None:
        return torch.softmax(logits, -1, out=out).masked_fill_(masked, 0.0)
    return logits.masked_fill(masked, 0.0).softmax(-1).masked_fill(masked, 0.0)
