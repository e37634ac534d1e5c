"""`attend_packed`: attention of a projection to queries, keys and values in one piece."""

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from vicinal.attention.call_checks import check_call
from vicinal.attention.dispatch import attend
from vicinal.attention.native.path import attend_native_packed, native_serves
from vicinal.attention.per_image import PriorPerImage
from vicinal.attention.placed_prior import PlacedPrior, token_counts
from vicinal.errors import VicinalError
from vicinal.priors.base import Prior
from vicinal.priors.full_precision import autocasting

__all__ = ["attend_packed"]


def attend_packed(
    qkv: Tensor,
    *,
    heads: int,
    prior: Prior | PlacedPrior | None = None,
    mask: Tensor | None = None,
    dropout: float = 0,
    scale: float | None = None,
) -> Tensor:
    """Returns attention of the output of a `qkv` layer, `(batch, tokens, heads * dim)`, as the next layer wants it.

    The native kernels read q, k and v where they are, and write the gradient of `qkv` in one piece. Elsewhere it is
    `attend` of their views.

    >>> import torch, vicinal
    >>> from vicinal.attention import attend_packed
    >>> prior = vicinal.build_prior("gmm", heads=4, grid=vicinal.Grid(8, 8, prefix=1))
    >>> attend_packed(torch.randn(2, 65, 3 * 64), heads=4, prior=prior).shape
    torch.Size([2, 65, 64])

    Args:
        qkv: `(batch, tokens, 3 * heads * dim)`: all queries, then all keys, then all values, each head by head.
        heads: number of heads.
        prior: as for `attend`; mask, dropout and scale as well.
        mask: as for `attend`.
        dropout: as for `attend`.
        scale: as for `attend`.
    """
    if qkv.dim() != 3 or qkv.shape[2] % (3 * heads):
        raise VicinalError(f"qkv must be (batch, tokens, 3 * {heads} heads * dim), got {tuple(qkv.shape)}")
    seen = not torch.compiler.is_compiling() and has_torch_function((qkv,))  # inside a tap, for example
    in_place = not seen and not autocasting(qkv.device) and qkv.is_contiguous()
    if isinstance(prior, PriorPerImage) or not in_place or not native_serves(qkv, dropout=dropout):
        q, k, v = _views(qkv, heads)
        return attend(q, k, v, prior=prior, mask=mask, dropout=dropout, scale=scale).transpose(1, 2).flatten(2)
    if mask is not None or dropout or not _fits(prior, qkv, heads):
        check_call(*_views(qkv, heads), prior, mask, dropout)
    softmax_scale = (qkv.shape[2] // (3 * heads)) ** -0.5 if scale is None else scale
    return attend_native_packed(qkv, heads, prior, mask=mask, dropout=dropout, softmax_scale=softmax_scale)


def _views(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v, `(batch, heads, tokens, dim)` each."""
    # Dynamo does not trace `Tensor.unflatten` under a mode, such as a tap's.
    q, k, v = qkv.reshape(*qkv.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _fits(prior: Prior | PlacedPrior | None, qkv: Tensor, heads: int) -> bool:
    """Returns whether a prior is for these heads and tokens; for one image, `check_call` takes a tenth of attention."""
    if prior is None:
        return True
    tokens = qkv.shape[1]
    return prior.heads == heads and token_counts(prior) == (tokens, tokens) and prior.device in (None, qkv.device)
