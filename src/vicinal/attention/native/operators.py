"""The native kernels for autograd and for `torch.compile`: attention of q, k and v, or of their projection.

Eager calls go through an `autograd.Function`, which costs less than the dispatcher's autograd. A compiled graph calls
the operators `vicinal::native_attention` and `vicinal::native_attention_packed`.

Results are in the layout of the next projection: out is `(batch, queries, heads, v_dim)` in memory, gradients of q, k
and v are `(batch, tokens, heads, dim)`. Kept for backward are the inputs, and two numbers for each query: its largest
logit, and 1 / the sum of its exponentials. (One log-sum-exp would lose digits at sharp logits.)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vicinal.attention.recompute import Settings

__all__ = [
    "NATIVE_OPERATORS",
    "NativeArguments",
    "native_attention",
    "native_attention_packed",
    "native_operator_arguments",
]


class NativeArguments(NamedTuple):
    """What attention is computed with besides q, k and v."""

    prior_scale: Tensor | None
    """As for `run_forward` of recompute.py; prior_bias as well."""
    prior_bias: Tensor | None
    mask: Tensor | None
    """Numbers to add to the logits, `(images, heads or 1, queries or 1, keys)`; it repeats over the batch."""
    order: Tensor | None
    """Token at each position of the prior's grid, `(tokens,)`; None if they are in that order."""
    settings: Settings

    @property
    def flat(self) -> tuple[Any, ...]:
        """The arguments in the order of the operators' schemas."""
        return (*self[:4], *self.settings)


def native_attention(q: Tensor, k: Tensor, v: Tensor, given: NativeArguments) -> Tensor:
    """Returns attention, `(batch, heads, queries, v_dim)`, as a view of `(batch, queries, heads, v_dim)`."""
    out: Tensor
    if torch.compiler.is_compiling():
        out = torch.ops.vicinal.native_attention(q, k, v, *given.flat, True)[0]
    elif _needs_gradient(q, k, v, *given[:3]):
        out = _Attention.apply(q, k, v, *given.flat)  # type: ignore[no-untyped-call]
    else:
        out = torch.ops.vicinal_native.forward.default(q, k, v, *given.flat, False)[0]
    return out.transpose(1, 2)


def native_attention_packed(qkv: Tensor, heads: int, given: NativeArguments) -> Tensor:
    """Returns attention, `(batch, tokens, heads * dim)`, of a projection `(batch, tokens, 3 * heads * dim)`."""
    out: Tensor
    if torch.compiler.is_compiling():
        out = torch.ops.vicinal.native_attention_packed(qkv, heads, *given.flat, True)[0]
    elif _needs_gradient(qkv, *given[:3]):
        out = _PackedAttention.apply(qkv, heads, *given.flat)  # type: ignore[no-untyped-call]
    else:
        out = torch.ops.vicinal_native.forward_packed.default(qkv, heads, *given.flat, False)[0]
    return out.flatten(2)


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


class _Attention(torch.autograd.Function):
    """Attention of q, k and v; the positional arguments behind v are those of `NativeArguments.flat`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        out, norms = torch.ops.vicinal_native.forward.default(*args, True)
        _keep(ctx, 3, args, norms)
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        q, k, v, *optional, norms = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:6]
        backward = torch.ops.vicinal_native.backward.default
        gradients = backward(gradient, q, k, v, norms, *optional, *ctx.settings, wanted)
        return (*gradients[:3], *_optional(gradients[3:], wanted), None, *(None for _ in ctx.settings))


class _PackedAttention(torch.autograd.Function):
    """Attention of a projection and a number of heads; then the arguments of `NativeArguments.flat`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        out, norms = torch.ops.vicinal_native.forward_packed.default(*args, True)
        _keep(ctx, 2, args, norms)
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        qkv, *optional, norms = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:5]
        backward = torch.ops.vicinal_native.backward_packed.default
        gradients = backward(gradient, qkv, ctx.heads, norms, *optional, *ctx.settings, wanted)
        return (gradients[0], None, *_optional(gradients[1:], wanted), None, *(None for _ in ctx.settings))


def _keep(ctx: Any, inputs: int, args: Sequence[Any], norms: Tensor) -> None:
    """Keeps what backward needs; the number of heads of a projection comes second."""
    if inputs == 2:
        ctx.heads = args[1]
        args = (args[0], *args[2:])
        inputs = 1
    ctx.save_for_backward(*args[: inputs + 4], norms)
    ctx.settings = args[inputs + 4 : inputs + 4 + len(Settings._fields)]


def _optional(gradients: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Returns the gradients of scale, bias and mask, None where not wanted."""
    return [each if wish else None for each, wish in zip(gradients, wanted, strict=True)]


# --- operators for compiled graphs ----------------------------------------------------------------------------------

_OPTIONS = (
    "Tensor? prior_scale, Tensor? prior_bias, Tensor? mask, Tensor? order, SymInt height, SymInt width, SymInt prefix, "
    "bool per_offset, float softmax_scale, float dropout, int seed"
)
_library = torch.library.Library("vicinal", "FRAGMENT")
_library.define(f"native_attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}, bool training) -> (Tensor, Tensor)")
_library.define(
    f"native_attention_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor norms, {_OPTIONS}, "
    "bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(f"native_attention_packed(Tensor qkv, SymInt heads, {_OPTIONS}, bool training) -> (Tensor, Tensor)")
_library.define(
    f"native_attention_packed_backward(Tensor gradient, Tensor qkv, SymInt heads, Tensor norms, {_OPTIONS}, "
    "bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor)"
)


def native_operator_arguments(func: Any, args: Sequence[Any]) -> tuple[Tensor, Tensor, NativeArguments]:
    """Returns q, k, `(batch, heads, tokens, dim)` each, and the other arguments of a call of an operator."""
    if func is torch.ops.vicinal.native_attention_packed:
        qkv, heads = args[:2]
        q, k, _ = qkv.reshape(*qkv.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, _arguments(args[2:])
    return args[0], args[1], _arguments(args[3:])


def _arguments(args: Sequence[Any]) -> NativeArguments:
    scale, bias, mask, order, *settings = args[: 4 + len(Settings._fields)]
    return NativeArguments(scale, bias, mask, order, Settings(*settings))


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, queries = q.shape[:3]
    return (
        q.new_empty(batch, queries, heads, v.shape[3]),
        q.new_empty(batch, heads, queries, 2, dtype=_compute_dtype(q)),
    )


def _fake_forward_packed(qkv: Tensor, heads: int, *_: Any) -> tuple[Tensor, Tensor]:
    batch, tokens, channels = qkv.shape
    return (
        qkv.new_empty(batch, tokens, heads, channels // (3 * heads)),
        qkv.new_empty(batch, heads, tokens, 2, dtype=_compute_dtype(qkv)),
    )


def _fake_optional(x: Tensor, args: Sequence[Any]) -> list[Tensor]:
    """Returns the gradients of scale, bias and mask, empty where not wanted; `args` begins with these three."""
    return [
        x.new_empty(0, dtype=torch.float64) if values is None or not wish else values.new_empty(values.shape)
        for values, wish in zip(args[:3], args[-1], strict=True)
    ]


def _fake_backward(_: Tensor, q: Tensor, k: Tensor, v: Tensor, __: Tensor, *args: Any) -> tuple[Tensor, ...]:
    inputs = [x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2) for x in (q, k, v)]
    return (*inputs, *_fake_optional(q, args))


def _fake_backward_packed(_: Tensor, qkv: Tensor, __: int, ___: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return (qkv.new_empty(qkv.shape), *_fake_optional(qkv, args))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    _keep(ctx, 3, inputs, output[1])


def _setup_packed(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    _keep(ctx, 2, inputs, output[1])


def _autograd(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, *optional, norms = ctx.saved_tensors
    wanted = [bool(wish) for wish in ctx.needs_input_grad[3:6]]
    backward = torch.ops.vicinal.native_attention_backward
    gradients = backward(gradient.contiguous(), q, k, v, norms, *optional, *ctx.settings, wanted)
    return (*gradients[:3], *_optional(gradients[3:], wanted), None, *(None for _ in ctx.settings), None)


def _autograd_packed(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    qkv, *optional, norms = ctx.saved_tensors
    wanted = [bool(wish) for wish in ctx.needs_input_grad[2:5]]
    backward = torch.ops.vicinal.native_attention_packed_backward
    gradients = backward(gradient.contiguous(), qkv, ctx.heads, norms, *optional, *ctx.settings, wanted)
    return (gradients[0], None, *_optional(gradients[1:], wanted), None, *(None for _ in ctx.settings), None)


_library.impl("native_attention", lambda *args: torch.ops.vicinal_native.forward(*args), "CPU")
_library.impl("native_attention_backward", lambda *args: torch.ops.vicinal_native.backward(*args), "CPU")
_library.impl("native_attention_packed", lambda *args: torch.ops.vicinal_native.forward_packed(*args), "CPU")
_library.impl("native_attention_packed_backward", lambda *args: torch.ops.vicinal_native.backward_packed(*args), "CPU")
torch.library.register_fake("vicinal::native_attention", _fake_forward, lib=_library)
torch.library.register_fake("vicinal::native_attention_backward", _fake_backward, lib=_library)
torch.library.register_fake("vicinal::native_attention_packed", _fake_forward_packed, lib=_library)
torch.library.register_fake("vicinal::native_attention_packed_backward", _fake_backward_packed, lib=_library)
torch.library.register_autograd("vicinal::native_attention", _autograd, setup_context=_setup, lib=_library)
torch.library.register_autograd(
    "vicinal::native_attention_packed", _autograd_packed, setup_context=_setup_packed, lib=_library
)

NATIVE_OPERATORS = (torch.ops.vicinal.native_attention, torch.ops.vicinal.native_attention_packed)
"""What a compiled graph calls."""
