"""Recomputed attention as an operator that `torch.compile` calls without looking inside.

Traced, the plain formula keeps logits and weights for backward, and inductor's code for them is slower on a CPU than
the pieces of `RecomputedAttention`. As an operator these stay as they are, in one graph with the rest of the model.
"""

from typing import Any

import torch
from torch import Tensor

from vicinal.attention.recompute import Settings, result_strides, run_backward, run_forward

__all__ = ["recomputed_attention"]

_library = torch.library.Library("vicinal", "DEF")
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? multiply, Tensor? add, Tensor? mask"
_SETTINGS = "int height, int width, int prefix, bool per_offset, float scale, float dropout, int seed"
_library.define(f"recomputed_attention({_TENSORS}, {_SETTINGS}) -> Tensor")
_library.define(
    f"recomputed_attention_backward(Tensor gradient, {_TENSORS}, {_SETTINGS}, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _forward(*arguments: Any) -> Tensor:
    return run_forward(*arguments[:6], settings=Settings(*arguments[6:]))


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, settings, wanted = arguments[:7], Settings(*arguments[7:-1]), arguments[-1]
    gradients = run_backward(*tensors, settings=settings, wanted=wanted)
    return tuple(tensors[0].new_empty(0) if gradient is None else gradient for gradient in gradients)


def _like(x: Tensor, q: Tensor) -> Tensor:
    """What a result of the shape of `x` looks like, without computing it."""
    return torch.empty_strided(x.shape, result_strides(x.shape, q), dtype=q.dtype, device=q.device)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return _like(v, q)


def _fake_backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    optional = [
        q.new_empty(0) if values is None or not wish else torch.empty_like(values)
        for values, wish in zip(rest[:3], rest[-1], strict=True)
    ]
    return _like(q, q), _like(k, q), _like(v, q), *optional


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.settings = inputs[6:]


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
