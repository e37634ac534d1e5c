"""Recomputed attention as an operator that `torch.compile` calls as a whole.

Traced, the plain formula keeps logits and weights for backward, and Inductor's code for it is slower on a CPU than the
chunks of `RecomputedAttention`. The operator keeps those, in one graph with the rest of the model.

Sizes can be symbolic (`torch.compile(dynamic=True)`): the fake kernels do not branch on them, and all results are
contiguous whatever the chunks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vicinal.attention.recompute import Settings, run_backward, run_forward

__all__ = ["OperatorArguments", "operator_arguments", "recomputed_attention"]

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? prior_scale, Tensor? prior_bias, Tensor? mask"
_SETTINGS = "SymInt height, SymInt width, SymInt prefix, bool per_offset, float softmax_scale, float dropout, int seed"


class OperatorArguments(NamedTuple):
    """The arguments of one call of the operator, by name; see `run_forward`."""

    q: Tensor
    k: Tensor
    v: Tensor
    prior_scale: Tensor | None
    prior_bias: Tensor | None
    mask: Tensor | None
    settings: Settings


def operator_arguments(args: Sequence[Any]) -> OperatorArguments:
    """Returns the positional arguments of a call of the operator by name, in the order of the schema above."""
    q, k, v, prior_scale, prior_bias, mask, *settings = args
    return OperatorArguments(q, k, v, prior_scale, prior_bias, mask, Settings(*settings))


_library = torch.library.Library("vicinal", "DEF")
_library.define(f"recomputed_attention({_TENSORS}, {_SETTINGS}) -> Tensor")
_library.define(
    f"recomputed_attention_backward(Tensor gradient, {_TENSORS}, {_SETTINGS}, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _forward(*args: Any) -> Tensor:
    call = operator_arguments(args)
    return run_forward(*call[:6], settings=call.settings)


def _backward(gradient: Tensor, *args: Any) -> tuple[Tensor, ...]:
    call = operator_arguments(args[:-1])
    gradients = run_backward(gradient, *call[:6], settings=call.settings, wanted=args[-1])
    return tuple(gradient.new_empty(0) if each is None else each for each in gradients)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def _fake_backward(gradient: Tensor, *args: Any) -> tuple[Tensor, ...]:
    q, k, v, *optional = operator_arguments(args[:-1])[:6]
    gradients = [
        q.new_empty(0) if values is None or not wish else values.new_empty(values.shape)
        for values, wish in zip(optional, args[-1], strict=True)
    ]
    return *(q.new_empty(x.shape) for x in (q, k, v)), *gradients


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    call = operator_arguments(inputs)
    ctx.save_for_backward(*call[:6])
    ctx.settings = call.settings


def _autograd(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    wanted = [bool(wish) for wish in ctx.needs_input_grad[3:6]]
    backward = torch.ops.vicinal.recomputed_attention_backward
    gradients = backward(gradient, *ctx.saved_tensors, *ctx.settings, wanted)
    optional = [each if wish else None for each, wish in zip(gradients[3:], wanted, strict=True)]
    return (*gradients[:3], *optional, *(None for _ in ctx.settings))


for _device in ("CPU", "CUDA"):
    _library.impl("recomputed_attention", _forward, _device)
    _library.impl("recomputed_attention_backward", _backward, _device)
torch.library.register_fake("vicinal::recomputed_attention", _fake_forward, lib=_library)
torch.library.register_fake("vicinal::recomputed_attention_backward", _fake_backward, lib=_library)
torch.library.register_autograd("vicinal::recomputed_attention", _autograd, setup_context=_setup, lib=_library)

recomputed_attention = torch.ops.vicinal.recomputed_attention
