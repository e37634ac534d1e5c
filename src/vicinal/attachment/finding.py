"""Find attention by running the model once: who computes softmax over logits, and of what shape?

No class of any library is named here. A module is attention if, while it runs, it calls softmax on logits or
`scaled_dot_product_attention`; what the logits look like tells the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vicinal.attachment.multihead import multi_head
from vicinal.attention import attend
from vicinal.errors import VicinalError

__all__ = [
    "FOLDED",
    "IN_TURN",
    "PRODUCTS",
    "SOFTMAXES",
    "Call",
    "by_head",
    "calls_of",
    "heads_third",
    "same_attention",
]

PRODUCTS = {torch.Tensor.__matmul__, torch.Tensor.matmul, torch.matmul, torch.bmm, torch.Tensor.bmm, torch.einsum}
SOFTMAXES = {torch.Tensor.softmax, torch.softmax, F.softmax}
# Where heads are that have no axis of their own in `(sequences, queries, keys)`:
FOLDED = 0  # in the batch
IN_TURN = 1  # one after another, each with its own product and softmax
# Modules that only carry out a step of the attention that holds them.
STEPS = (nn.Softmax, nn.Dropout, nn.Identity)


@dataclass(frozen=True)
class Call:
    """One attention computed in a run of the model."""

    module: nn.Module
    logits: tuple[int, ...]
    """Shape of the logits, `(..., queries, keys)`."""
    queries: Tensor | None
    """`(..., queries, dim)`: the first factor of the product that gave the logits; None if no product did."""
    fused: bool
    """Through `scaled_dot_product_attention`, or a call that holds it."""
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    """What the module was called with."""


class _Watch(TorchFunctionMode):
    """Records every softmax and fused attention, with the innermost module that runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[tuple[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]] = []
        self.products: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
        self.calls: list[Call] = []

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.running.append((module, (args, kwargs)))
        self.products.pop(module, None)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.running.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        owners = [running for running in self.running if not isinstance(running[0], STEPS)]
        if not owners:
            return result
        module, inputs = owners[-1]
        if func is F.multi_head_attention_forward:
            self.calls.append(_multi_head_call(module, inputs, args, kwargs))
        elif func is F.scaled_dot_product_attention or func is attend:
            query = args[0] if args else kwargs["query"]
            key = args[1] if len(args) > 1 else kwargs["key"]
            self.calls.append(Call(module, (*query.shape[:-1], key.shape[-2]), query, True, inputs))
        elif func in PRODUCTS and isinstance(result, Tensor):
            factor = args[1] if func is torch.einsum else args[0]
            self.products.setdefault(module, []).append((result, factor))
        elif func in SOFTMAXES and result.dim() >= 3:
            shape = tuple(result.shape)
            products = self.products.pop(module, [])
            queries = next((factor for product, factor in products if same_attention(product, shape)), None)
            self.calls.append(Call(module, shape, queries, False, inputs))
        return result


def _multi_head_call(module: nn.Module, inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    try:
        parts = multi_head(*args, **kwargs)
    except VicinalError:  # keys beyond the tokens
        tokens, keys = args[0].shape[0], args[1].shape[0]
        return Call(module, (args[0].shape[-2], args[4], tokens, keys + 1), None, True, inputs)
    return Call(module, (*parts.q.shape[:3], parts.k.shape[2]), parts.q, True, inputs)


def same_attention(product: Tensor, logits: tuple[int, ...]) -> bool:
    """Whether a product can be these logits; its batch may be split off, as Swin does to add its window mask."""
    return product.dim() >= 3 and tuple(product.shape[-3:]) == logits[-3:]


def by_head(
    operation: Callable[[Tensor, Tensor], Tensor], logits: Tensor, values: Tensor, heads_axis: int, turn: int = 0
) -> Tensor:
    """`operation(logits, values)`, where values are `(heads, queries, keys)` and logits have their heads elsewhere."""
    if heads_axis == IN_TURN:
        return operation(logits, values[turn])
    if heads_axis == FOLDED:
        return operation(logits.view(-1, *values.shape), values).view_as(logits)
    return operation(logits, values if heads_axis == -3 else values[:, None])


def heads_third(x: Tensor, heads: int, heads_axis: int) -> Tensor:
    """`(..., heads, queries, keys)`, from wherever the heads are; one head at a time if they take turns."""
    if heads_axis == IN_TURN:
        return x.unsqueeze(1)
    return x.reshape(-1, heads, *x.shape[1:]) if heads_axis == FOLDED else x.movedim(heads_axis, -3)


def calls_of(model: nn.Module, run: Callable[[], object]) -> list[Call]:
    """Every attention that `run` computes in `model`, in order."""
    watch = _Watch()
    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(watch.enter, with_kwargs=True))
        hooks.append(module.register_forward_hook(watch.leave))
    try:
        with torch.no_grad(), watch:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return watch.calls
