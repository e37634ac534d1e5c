"""Reports every attention that a model computes: products of queries and keys, softmaxes of them, fused calls.

A product marks its result. Marks pass on through whatever is done with it, up to a softmax, which marks its own result,
and up to the next product, where weights meet values. Only then is an attention reported, so a softmax that nobody uses
never is. No class of any library is named.
"""

import contextlib
import math
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vicinal.inspection.attention_marks import (
    AttentionCall,
    Frame,
    ProductMark,
    SoftmaxMark,
    marks_of,
    product_arguments,
    set_marks,
    tensors_in,
)
from vicinal.inspection.attention_mode import AttentionMode, FusedCall, Operation, Step, product_sides

__all__ = ["AttentionCall", "AttentionObserver", "observe_attention"]

# Modules that only carry out a step of the attention that holds them.
STEP_MODULES = (nn.Softmax, nn.Dropout, nn.Identity)
# `F.multi_head_attention_forward` hides its operations from modes; a copy that does not look for modes shows them.
_open_multi_head: Any = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda *_: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


class _LastAttention(BaseException):
    """Ends a run early. Not an `Exception`, so that no code of the model takes it for a failure."""


class AttentionObserver(AttentionMode):
    """Reports the attention of a run; subclasses change what attention returns.

    Args:
        model: the model that runs.
        report: called with each attention when its weights meet values.
        count: how many attentions a run has; the model stops after the last one. None if that is not known.
    """

    def __init__(self, model: nn.Module, report: Callable[[AttentionCall], object], count: int | None = None) -> None:
        super().__init__()
        self.model, self._report, self._left = model, report, -1 if count is None else count
        self._frames: list[Frame] = []
        self._forwards: dict[nn.Module, int] = defaultdict(int)
        self._multi_head: tuple[Frame, int] | None = None
        self._groups = 0
        self._last_fused: tuple[AttentionCall, Tensor] | None = None

    def run(self, run: Callable[[], object]) -> None:
        """Runs `run()`, which runs the model, without gradients."""
        hooks: list[Any] = []
        for module in self.model.modules():
            hooks.append(module.register_forward_pre_hook(self._enter))
            hooks.append(module.register_forward_hook(self._leave, always_call=True))
        # nn.TransformerEncoderLayer's fast path computes attention in one call of its own.
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.no_grad(), contextlib.suppress(_LastAttention), self:
                run()
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for hook in hooks:
                hook.remove()

    def attention_result(
        self, call: AttentionCall, weights: Tensor | None, values: Tensor | None, compute: Callable[..., Tensor]
    ) -> Tensor:
        """Returns what an attention gives; here, what it computes.

        Args:
            call: the attention.
            weights: what meets the values; None in a fused call.
            values: of a fused call; None otherwise.
            compute: `compute()` gives the result of the model, `compute(weights)` that for other weights.
        """
        return compute()

    def report(self, call: AttentionCall) -> None:
        """Reports an attention. Ends the run after the last one."""
        self._report(call)
        self._left -= 1
        if self._left == 0:
            raise _LastAttention

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._frames.append(Frame(module, self._forwards[module]))
        self._forwards[module] += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._frames.pop()

    def _owners(self) -> list[Frame]:
        """Returns the modules that run now, innermost first, without those that only carry out a step."""
        frames = [frame for frame in reversed(self._frames) if not isinstance(frame.module, STEP_MODULES)]
        return frames or [Frame(self.model, 0)]

    def _count(self, what: str) -> None:
        if self._multi_head is None:
            for frame in self._frames:
                setattr(frame, what, getattr(frame, what) + 1)

    def on_multi_head(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an opened copy of the function under the observer, whose operations belong to this one call."""
        self._count("fused")
        owner = self._owners()[0]
        self._multi_head = owner, owner.fused - 1
        try:
            with self:
                return _open_multi_head(*args, **kwargs)
        finally:
            self._multi_head = None

    def on_fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: FusedCall) -> Tensor:
        """Reports a fused call."""
        q, k, v = call.query, call.key, call.value
        self._count("fused")
        frame, operation = self._owners()[0], Operation.FUSED
        number = frame.fused - 1
        if self._multi_head is not None:
            (frame, number), operation = self._multi_head, Operation.MULTI_HEAD
        lead = q.shape[:-2] if call.enable_gqa else torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
        logits = (*lead, q.shape[-2], k.shape[-2])
        if call.enable_gqa:
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        found = AttentionCall(frame.module, frame.forward, Step(operation, number), q, k, logits, logits)
        if call.is_causal or call.enable_gqa:
            found.refused = "causal attention" if call.is_causal else "grouped-query attention"
        found.group = self._next_group()
        if self._last_fused is not None and self._last_fused[1] is v:
            before = self._last_fused[0]
            if (before.module, before.forward, before.logits) == (found.module, found.forward, found.logits):
                found.group = before.group  # two maps over the same values: differential attention
        self._last_fused = found, v
        self.report(found)

        def compute(weights: Tensor | None = None) -> Tensor:
            return func(*args, **kwargs) if weights is None else weights.to(v) @ v

        return self.attention_result(found, None, v, compute)

    def on_product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Marks a product, or reports the attention whose weights it multiplies with values."""
        self._count("products")
        softmaxes = [mark for mark in marks_of(args, kwargs) if isinstance(mark, SoftmaxMark)]
        if any(mark.call is not None for mark in softmaxes):
            return self._met(func, args, kwargs, softmaxes)
        result = func(*args, **kwargs)
        sides = product_sides(func, args) if isinstance(result, Tensor) and result.dim() >= 3 else None
        if sides is not None:
            owners, operation = [(frame, frame.products - 1) for frame in self._owners()], Operation.PLAIN
            if self._multi_head is not None:
                owners, operation = [self._multi_head], Operation.MULTI_HEAD
            set_marks(result, [ProductMark(owners, operation, *sides, tuple(result.shape))])
        return result

    def on_softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Marks a softmax, with the attention that it belongs to."""
        self._count("softmaxes")
        products = [mark for mark in marks_of(args, kwargs) if isinstance(mark, ProductMark)]
        result = func(*args, **kwargs)
        if result.dim() >= 3:
            axis = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            set_marks(result, [self._softmax(result, axis, products)])
        return result

    def on_other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Passes marks on to results of about the size of what was marked; a gate spreads over more than that."""
        sizes: dict[Any, int] = {}
        for x in tensors_in(args, kwargs):
            for mark in getattr(x, "_attention_marks", ()):
                sizes[mark] = max(x.numel(), sizes.get(mark, 0))
        result = func(*args, **kwargs)
        if sizes:
            for x in tensors_in((result,), {}):
                set_marks(x, [mark for mark, size in sizes.items() if x.numel() <= 2 * size])
        return result

    def _softmax(self, weights: Tensor, axis: int, products: list[ProductMark]) -> SoftmaxMark:
        """Returns the mark of a softmax, with its attention if a product of its shape came in; the batch may be split.

        The attention is that of the innermost module which runs both.
        """
        shape, axis = tuple(weights.shape), axis % weights.dim() - weights.dim()
        for product in products:
            same = product.shape[-2:] == shape[-2:] and math.prod(product.shape) == math.prod(shape)
            shared = [owner for owner in product.owners if owner[0] in self._frames]
            if not same or axis < -2 or not shared:
                continue
            frame, number = shared[0]
            q, k, logits, transposed = product.q, product.k, product.shape, axis == -2
            if transposed:
                q, k, logits = k, q, (*logits[:-2], logits[-1], logits[-2])
            softmax = 0 if self._multi_head is not None else frame.softmaxes - 1
            step = Step(product.operation, number, softmax, transposed)
            return SoftmaxMark(AttentionCall(frame.module, frame.forward, step, q, k, logits), frame)
        return SoftmaxMark(None)

    def _met(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], softmaxes: list[SoftmaxMark]) -> Tensor:
        """Reports the attentions whose weights meet values in a product."""
        at, weights = next(
            (place, x)
            for place, x in enumerate(product_arguments(args))
            if isinstance(x, Tensor)
            and any(isinstance(mark, SoftmaxMark) for mark in getattr(x, "_attention_marks", ()))
        )
        calls, group = [], self._next_group()
        for mark in softmaxes:
            call, frame = mark.call, mark.frame
            if call is None or frame is None:
                continue
            calls.append(call)
            if not call.used:
                call.used, call.group, call.softmaxes = tuple(weights.shape), group, len(softmaxes)
                if call.step.operation is Operation.PLAIN and frame in self._frames:
                    call.met = frame.products - 1
                self.report(call)

        def compute(others: Tensor | None = None) -> Tensor:
            if others is None:
                return func(*args, **kwargs)  # type: ignore[no-any-return]
            flat = [others if place == at else x for place, x in enumerate(product_arguments(args))]
            on_meta = others.is_meta
            flat = [x.to("meta") if on_meta and isinstance(x, Tensor) else x for x in flat]
            return func(*flat, **kwargs)  # type: ignore[no-any-return]

        return self.attention_result(calls[0], weights, None, compute)

    def _next_group(self) -> int:
        self._groups += 1
        return self._groups


def observe_attention(model: nn.Module, run: Callable[[], object]) -> list[AttentionCall]:
    """Returns every attention that `run()` computes in a model, in order, without queries and keys."""
    found: list[AttentionCall] = []

    def keep(call: AttentionCall) -> None:
        call.q = call.k = torch.empty(0)
        found.append(call)

    AttentionObserver(model, keep).run(run)
    return found
