"""Swap the class of an attention module for a subclass that applies a prior, and back.

The subclass runs the original forward under a mode that multiplies at the first product, Q K^T, before any bias,
window mask or talking heads; adds at the softmax that follows; and takes over `scaled_dot_product_attention`. So it
serves every attention class, and every name in the state dict stays. There is one subclass per attention class.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vicinal.attachment.finding import FOLDED, IN_TURN, PRODUCTS, SOFTMAXES, by_head, heads_third
from vicinal.attachment.multihead import multi_head
from vicinal.attention import attend
from vicinal.errors import VicinalError
from vicinal.priors.base import Prior

__all__ = ["Attached", "no_short_cut", "swap", "swap_back", "without_priors"]


class Attached:
    """Mixed into the class of an attention module that carries a prior."""

    prior: Prior
    prior_heads_axis: int
    prior_fused: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward, under the prior."""
        mode = Intercept(self.prior, self.prior_heads_axis, self.prior_fused)
        with mode:
            result = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not mode.reached:
            raise VicinalError(
                f"the prior did not reach the attention of {original_class(self).__name__}, which is computed in "
                "another way than when the prior was attached; vicinal.detach(model) and attach again"
            )
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickles and copies name the original class, which can be imported anywhere.
        return _rebuild, (original_class(self),), self.__getstate__()


class Intercept(TorchFunctionMode):
    """Applies a prior to the one attention that is computed inside."""

    def __init__(self, prior: Prior, heads_axis: int, fused: bool) -> None:
        super().__init__()
        self.prior, self.heads_axis = prior, heads_axis
        self.multiplied = self.added = fused  # then there is one call to take over, and nothing else to look at
        self.reached = False
        self.turn = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.reached = True
            return attend_fused_call(self.prior, self.heads_axis, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            self.reached = True
            parts = multi_head(*args, **kwargs)
            if parts.q.shape[2] != self.prior.grid.tokens:
                raise token_mismatch(self.prior, parts.q.shape[2])
            return parts.run(attend, self.prior)
        if self.multiplied and not self.added and func in SOFTMAXES:
            self.added = self.reached = True
            bias = self.prior()[1]
            if bias is not None:
                args = (self._apply(torch.add, args[0], bias), *args[1:])
            if self.heads_axis == IN_TURN and self.turn + 1 < self.prior.heads:
                self.turn, self.multiplied, self.added = self.turn + 1, False, False
        result = func(*args, **kwargs)
        if not self.multiplied and func in PRODUCTS and self._is_logits(result):
            self.multiplied = True
            scale = self.prior()[0]
            if scale is not None:
                result = self._apply(torch.mul, result, scale)
        return result

    def _is_logits(self, product: Tensor) -> bool:
        """Whether a product is Q K^T: other products, of position tables for example, have other shapes."""
        if product.dim() < 3 or product.shape[-1] != product.shape[-2]:
            return False
        if self.heads_axis == IN_TURN:
            return product.dim() == 3
        if self.heads_axis == FOLDED:
            return product.dim() == 3 and product.shape[0] % self.prior.heads == 0
        return product.dim() >= 4 and product.shape[self.heads_axis] == self.prior.heads

    def _apply(self, operation: Callable[[Tensor, Tensor], Tensor], logits: Tensor, values: Tensor) -> Tensor:
        if logits.shape[-1] != values.shape[-1] or logits.shape[-2] != values.shape[-2]:
            raise token_mismatch(self.prior, logits.shape[-1])
        return by_head(operation, logits, values.to(logits.dtype), self.heads_axis, self.turn)


def token_mismatch(prior: Prior, tokens: int) -> VicinalError:
    """The error for a sequence of another length than the prior was attached for."""
    return VicinalError(
        f"the prior was attached for {prior.grid.tokens} tokens ({prior.grid}), given {tokens}: "
        "attach with the img_size in use, or detach and attach again; tokens dropped at random are not served"
    )


def attend_fused_call(
    prior: Prior,
    heads_axis: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What `F.scaled_dot_product_attention` was asked for, under the prior."""
    if is_causal or enable_gqa:
        raise VicinalError("a spatial prior serves neither causal nor grouped-query attention")
    if query.shape[-2] != prior.grid.tokens:
        raise token_mismatch(prior, query.shape[-2])
    if heads_axis == FOLDED:
        q, k, v = (heads_third(x, prior.heads, heads_axis) for x in (query, key, value))
        mask = None if attn_mask is None else heads_third(attn_mask, prior.heads, heads_axis)
        return attend(q, k, v, prior=prior, mask=mask, dropout=dropout_p, scale=scale).flatten(0, 1)
    if key.shape[1] == 1 < query.shape[1]:  # one key and value for all heads
        key, value = (x.expand(-1, query.shape[1], *x.shape[2:]) for x in (key, value))
    if query.dim() == 4:
        return attend(query, key, value, prior=prior, mask=attn_mask, dropout=dropout_p, scale=scale)
    # Windows have an axis of their own: fold it into the batch.
    windows = 2 if heads_axis == -4 else 1
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2]).movedim(windows, 1).flatten(0, 1)
    q, k, v = (x.movedim(windows, 1).flatten(0, 1) for x in (query, key, value))
    out = attend(q, k, v, prior=prior, mask=attn_mask, dropout=dropout_p, scale=scale)
    return out.unflatten(0, (query.shape[0], -1)).movedim(1, windows)  # type: ignore[no-any-return]


@functools.cache
def attached_class(base: Any) -> type[nn.Module]:
    """The subclass of an attention class that applies a prior."""
    from vicinal.attachment.direct import DIRECT

    mixin = next((mixin for forward, mixin in DIRECT.items() if base.forward is forward), Attached)
    return type(f"{base.__name__}WithPrior", (mixin, base), {"__module__": __name__, "__doc__": mixin.__doc__})


def original_class(module: object) -> Any:
    """The class that an attached module had."""
    return next(base for base in type(module).__mro__[1:] if not issubclass(base, Attached))


def _rebuild(base: Any) -> nn.Module:
    cls = attached_class(base)
    return cls.__new__(cls)


def swap(module: nn.Module, prior: Prior, heads_axis: int, fused: bool) -> None:
    """Give a module a prior."""
    module.prior = prior
    module.prior_heads_axis = heads_axis  # type: ignore[assignment]
    module.prior_fused = fused  # type: ignore[assignment]
    cls: Any = type(module)
    module.__class__ = attached_class(cls)
    if isinstance(module, nn.MultiheadAttention):
        module.register_forward_hook(no_short_cut)


def no_short_cut(*_: object) -> None:
    """Does nothing: where a hook waits, `nn.TransformerEncoderLayer` does not pass its attention's forward by."""


def swap_back(module: nn.Module) -> None:
    """Take the prior out again."""
    module.__class__ = original_class(module)
    for key, hook in list(module._forward_hooks.items()):
        if hook is no_short_cut:
            del module._forward_hooks[key]
    for name in ("prior", "prior_heads_axis", "prior_fused"):
        delattr(module, name)


@contextlib.contextmanager
def without_priors(model: nn.Module) -> Iterator[set[nn.Module]]:
    """The model as it was before any prior, inside; yields the modules that carry one outside."""
    modules: list[Any] = [module for module in model.modules() if isinstance(module, Attached)]
    carried = [(module, module.prior, module.prior_heads_axis, module.prior_fused) for module in modules]
    for module in modules:
        swap_back(module)
    try:
        yield set(modules)
    finally:
        for each in carried:
            swap(*each)
