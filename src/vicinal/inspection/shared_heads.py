"""Which heads of the logits share one head of the weights: the two maps of differential attention do."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vicinal.inspection.attention_marks import AttentionCall
from vicinal.inspection.attention_observer import AttentionObserver
from vicinal.inspection.head_layout import Factor, HeadLayout
from vicinal.inspection.model_runner import ModelRunner
from vicinal.inspection.probe import Key, key_of

__all__ = ["find_shared_heads"]


def find_shared_heads(runner: ModelRunner, layouts: Mapping[Key, HeadLayout]) -> dict[Key, tuple[int, ...]]:
    """Returns, for each attention, the head of its weights that every head of its logits goes into.

    The model runs once on noise. In place of a softmax, head `i` gives 1 at every key `i + n * heads` and 0 elsewhere,
    so the keys that a head of the weights attends to name the heads of the logits that it came from.

    Args:
        runner: the model, and its images.
        layouts: of the attentions whose weights have other heads than their logits.

    Returns:
        Heads by attention; those that do not go into one head each are left out.
    """
    observer = _SharingObserver(runner, layouts)
    observer.run(functools.partial(runner, runner.noise(1)))
    return observer.found


class _SharingObserver(AttentionObserver):
    """Replaces softmaxes by patterns that name their heads."""

    def __init__(self, runner: ModelRunner, layouts: Mapping[Key, HeadLayout]) -> None:
        super().__init__(runner.model, lambda call: None)
        self.layouts = layouts
        self.found: dict[Key, tuple[int, ...]] = {}

    def on_softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the pattern instead of the softmax of an attention in question."""
        result = super().on_softmax(func, args, kwargs)
        call = next((mark.call for mark in getattr(result, "_attention_marks", ()) if mark.call is not None), None)
        axis = None if call is None else self._head_axis(call)
        if call is not None and axis is not None and tuple(result.shape) == call.logits:
            heads = result.shape[axis]
            pattern = torch.arange(result.shape[-1]) % heads == torch.arange(heads)[:, None]
            sizes = [heads if place == axis else 1 for place in range(result.dim() - 1)]
            result.copy_(pattern.view(*sizes, -1).expand(result.shape))
        return result

    def attention_result(
        self, call: AttentionCall, weights: Tensor | None, values: Tensor | None, compute: Callable[..., Tensor]
    ) -> Tensor:
        """Reads which heads went into which."""
        axis = self._head_axis(call)
        if axis is not None and weights is not None and weights.dim() == len(call.logits):
            heads = call.logits[axis]
            seen = weights.movedim(axis, 0).flatten(1, -2)[:, 0, :heads] != 0  # (heads of weights, heads of logits)
            if seen.shape[1] == heads and bool((seen.sum(0) == 1).all()):
                self.found[key_of(call)] = tuple(seen.int().argmax(0).tolist())
        return compute()

    def _head_axis(self, call: AttentionCall) -> int | None:
        """Returns the one axis that counts heads and nothing else; None if there is no such axis."""
        layout = self.layouts.get(key_of(call))
        axes = () if layout is None else layout.axes
        alone = [place for place, axis in enumerate(axes) if [factor for factor, _ in axis] == [Factor.HEADS]]
        return alone[0] if len(alone) == 1 else None
