"""What a compiled graph calls in place of `attend`, read as its arguments."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from vicinal.attention.compile_op import operator_arguments, recomputed_attention
from vicinal.attention.given_prior import GivenPrior
from vicinal.attention.native.operators import NATIVE_OPERATORS, native_operator_arguments

__all__ = ["CompiledCall", "compiled_call"]


class CompiledCall(NamedTuple):
    """Queries and keys in the order of the prior, and what their weights depend on; see `attend`."""

    q: Tensor
    k: Tensor
    prior: GivenPrior
    mask: Tensor | None
    scale: float


def compiled_call(func: Any, args: Sequence[Any]) -> CompiledCall | None:
    """Returns the arguments of an operator that computes attention; None for another function."""
    if func is recomputed_attention:
        given = operator_arguments(args)
        q, k, settings, mask = given.q, given.k, given.settings, given.mask
        pair = given.prior_scale, given.prior_bias
    elif func in NATIVE_OPERATORS:
        q, k, native = native_operator_arguments(func, args)
        settings, mask = native.settings, native.mask
        pair = native.prior_scale, native.prior_bias
        if native.order is not None:
            q, k = (x.index_select(-2, native.order) for x in (q, k))
        if mask is not None and 1 < len(mask) < len(q):  # of the windows of each image
            mask = mask.repeat(len(q) // len(mask), 1, 1, 1)
    else:
        return None
    prior = GivenPrior(pair, q.shape[1], q.shape[2], k.shape[2], settings.grid, settings.per_offset)
    return CompiledCall(q, k, prior, mask, settings.softmax_scale)
