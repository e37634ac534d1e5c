"""What "Q K^T, then softmax, then values" looks like to a `TorchFunctionMode`: the one dispatch that all modes share.

The observer, the tap, the interceptor of priors and the verification subclass `AttentionMode`. They see the same
operations and count them in the same way, so a step found by one is found again by the others.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vicinal.attention import attend

__all__ = ["PRODUCTS", "SOFTMAXES", "AttentionMode", "FusedCall", "Operation", "Step", "product_sides"]

MATMULS = {
    torch.Tensor.__matmul__,
    torch.Tensor.matmul,
    torch.matmul,
    torch.linalg.matmul,
    torch.bmm,
    torch.Tensor.bmm,
}
BADDBMMS = {torch.baddbmm, torch.Tensor.baddbmm}
PRODUCTS = {*MATMULS, *BADDBMMS, torch.einsum}
TENSOR_NAMES = ("input", "other", "mat2", "batch1", "batch2")  # in the order of the arguments
SOFTMAXES = {torch.Tensor.softmax, torch.softmax, F.softmax, torch.special.softmax}


class Operation(Enum):
    """How a module computes an attention."""

    PLAIN = "a product, a softmax and another product"
    FUSED = "one call of F.scaled_dot_product_attention or vicinal.attend"
    MULTI_HEAD = "one call of F.multi_head_attention_forward, as nn.MultiheadAttention does"


class Step(NamedTuple):
    """Which operations of a module's forward are one attention: counts from 0, submodules included."""

    operation: Operation
    product: int
    """Number of the product Q K^T among all products; of the call among all fused ones if it is fused."""
    softmax: int = 0
    """Number of its softmax among all softmaxes; not used if it is fused."""
    transposed: bool = False
    """Whether logits are `(..., keys, queries)`, with the softmax over the second axis from the end."""


class FusedCall(NamedTuple):
    """Arguments of `F.scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class AttentionMode(TorchFunctionMode):
    """Routes the operations of attention to methods, which subclasses override; all else runs unchanged."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self.on_fused(func, args, kwargs, FusedCall(*args, **kwargs))
        if func is attend:
            q, k, v = args
            given = FusedCall(q, k, v, kwargs["mask"], kwargs["dropout"], scale=kwargs["scale"])
            return self.on_fused(func, args, kwargs, given)
        if func is F.multi_head_attention_forward:
            return self.on_multi_head(func, args, kwargs)
        if func in PRODUCTS:
            return self.on_product(func, *_positional(args, kwargs))
        if func in SOFTMAXES:
            return self.on_softmax(func, *_positional(args, kwargs))
        return self.on_other(func, args, kwargs)

    def on_fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: FusedCall) -> Tensor:
        """Returns the result of attention in one call."""
        return func(*args, **kwargs)  # type: ignore[no-any-return]

    def on_multi_head(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of `F.multi_head_attention_forward`."""
        return func(*args, **kwargs)

    def on_product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a matrix product."""
        return func(*args, **kwargs)

    def on_softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a softmax."""
        return func(*args, **kwargs)

    def on_other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of any other operation."""
        return func(*args, **kwargs)


def _positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments of a product or softmax with tensors that were given by name in their places."""
    named = [name for name in TENSOR_NAMES if name in kwargs]
    if not named:
        return args, kwargs
    return (*args, *(kwargs[name] for name in named)), {k: x for k, x in kwargs.items() if k not in named}


def product_sides(func: Any, args: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
    """Returns both sides of a product of rows, `(..., m, dim)` and `(..., n, dim)`, whose result is `(..., m, n)`.

    None for a product of another kind, such as an einsum whose result has other axes behind its rows.
    """
    if func in BADDBMMS:
        return args[1], args[2].mT
    if func in MATMULS:
        return (args[0], args[1].mT) if args[1].dim() >= 2 and args[0].dim() >= 2 else None
    return _einsum_sides(args)


def einsum_operands(args: Sequence[Any]) -> tuple[str, list[Tensor]] | None:
    """Returns equation and operands of `torch.einsum`, given one by one or as a list; None for its other forms."""
    if not args or not isinstance(args[0], str):
        return None
    operands = list(args[1]) if len(args) == 2 and isinstance(args[1], tuple | list) else list(args[1:])
    return args[0].replace(" ", ""), operands


def _einsum_sides(args: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
    parsed = einsum_operands(args)
    if parsed is None or len(parsed[1]) != 2 or "->" not in parsed[0]:
        return None
    equation, operands = parsed
    inputs, out = equation.split("->")
    if "." in equation:  # spell an ellipsis out
        lengths = [x.dim() - len(part.replace("...", "")) for part, x in zip(inputs.split(","), operands, strict=True)]
        free = [letter for letter in "ZYXWVUTSRQPONMLKJIHGFEDCBA" if letter not in equation][: max(lengths)]
        parts = [
            part.replace("...", "".join(free[len(free) - length :]))
            for part, length in zip(inputs.split(","), lengths, strict=True)
        ]
        out = out.replace("...", "".join(free))
    else:
        parts = inputs.split(",")
    one, two = parts
    batch = [c for c in out if c in one and c in two]
    summed = [c for c in one if c in two and c not in out]
    own = [[c for c in out if c in mine and c not in batch] for mine in (one, two)]
    if len(own[0]) != 1 or len(own[1]) != 1 or not summed:
        return None
    swapped = [*batch, *own[1], *own[0]] == list(out)
    if not swapped and [*batch, *own[0], *own[1]] != list(out):
        return None
    known = {*batch, *summed, *own[0], *own[1]}
    if any(len(part) != len(set(part)) or set(part) - known for part in parts):
        return None
    sides = [
        x.permute([part.index(c) for c in (*batch, *mine, *summed)]).flatten(len(batch) + 1)
        for x, part, mine in zip(operands, parts, own, strict=True)
    ]
    return (sides[1], sides[0]) if swapped else (sides[0], sides[1])
