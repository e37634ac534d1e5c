"""Attention without a prior by the native kernels, for models that this package makes.

So the arms of a comparison differ in their prior, and not in the kernel that computes attention. Classes that most
models use have a forward of ours; in others, calls of `F.scaled_dot_product_attention` are replaced.
"""

import functools
import inspect
from typing import Any

import torch
from timm.layers.attention import Attention
from timm.models.swin_transformer import WindowAttention
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import Tensor, nn
from torch.nn import functional as F

from vicinal.attachment.timm_forwards import attention_forward, relative_attention_forward, window_attention_forward
from vicinal.attention import attend
from vicinal.attention.native.path import native_serves
from vicinal.inspection.attention_mode import AttentionMode, FusedCall

__all__ = ["PLAIN_CLASSES", "PlainAttention", "use_package_attention"]

MIN_IMAGES = 8  # or windows: with fewer, entering a mode and leaving it takes a visible part of an attention layer


def use_package_attention(model: nn.Module) -> None:
    """Swaps the class of attention modules that have no prior for one that uses the native kernels where they serve.

    Modules whose forward is not one of `PLAIN_CLASSES` and that do not call `F.scaled_dot_product_attention` stay as
    they are. Names of weights stay, and so do copies and pickles, which name the class before. `attach` and `detach`
    see the class before.

    Args:
        model: any model.
    """
    for module in model.modules():
        base: Any = type(module)
        if not hasattr(base, "plain_class") and (base.forward in PLAIN_CLASSES or _calls_fused_attention(base)):
            module.__class__ = _plain_class(base)


class PlainAttention:
    """Mixed into the class of an attention module without a prior."""

    plain_class: type[nn.Module]
    """The class that the module had."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self.plain_class,), self.__getstate__()


class _Attention(PlainAttention):
    """timm's `Attention`."""

    def forward(self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Returns tokens, `(batch, tokens, dim)`."""
        if is_causal or not native_serves(x):
            return self.plain_class.forward(self, x, attn_mask, is_causal)  # type: ignore[no-any-return]
        return attention_forward(self, x, None, attn_mask)


class _RelativeAttention(PlainAttention):
    """timm's `RelPosAttention`."""

    def forward(self: Any, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """Returns tokens, `(batch, tokens, dim)`."""
        if not native_serves(x):
            return self.plain_class.forward(self, x, shared_rel_pos)  # type: ignore[no-any-return]
        return relative_attention_forward(self, x, None, shared_rel_pos)


class _WindowAttention(PlainAttention):
    """timm's `WindowAttention` of Swin."""

    def forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns windows, `(batch * windows, tokens, dim)`."""
        if not native_serves(x):
            return self.plain_class.forward(self, x, mask)  # type: ignore[no-any-return]
        return window_attention_forward(self, x, None, mask)


class _FusedAttention(PlainAttention):
    """Any class that calls `F.scaled_dot_product_attention`."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns what the class's own forward does; for a few images by that alone, since a mode takes its time."""
        x = args[0] if args else None
        serves = isinstance(x, Tensor) and len(x) >= MIN_IMAGES and native_serves(x)
        if not serves or torch.compiler.is_compiling():
            return self.plain_class.forward(self, *args, **kwargs)
        with _NativeCalls():
            return self.plain_class.forward(self, *args, **kwargs)


class _NativeCalls(AttentionMode):
    """Computes `F.scaled_dot_product_attention` by `attend`, which uses the native kernels where they serve."""

    def on_fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: FusedCall) -> Tensor:
        """Returns the result of attention in one call."""
        if func is not F.scaled_dot_product_attention or call.is_causal or call.enable_gqa:
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        mask, dropout = call.attn_mask, call.dropout_p
        return attend(call.query, call.key, call.value, mask=mask, dropout=dropout, scale=call.scale)


PLAIN_CLASSES: dict[Any, type[PlainAttention]] = {
    Attention.forward: _Attention,
    RelPosAttention.forward: _RelativeAttention,
    WindowAttention.forward: _WindowAttention,
}
"""What is mixed into a class, by the forward of that class."""


@functools.cache
def _calls_fused_attention(base: Any) -> bool:
    """Returns whether the class that defines a module's forward names `scaled_dot_product_attention` in a method."""
    owner = next(cls for cls in base.__mro__ if "forward" in vars(cls))
    methods = filter(inspect.isfunction, vars(owner).values())
    return any(F.scaled_dot_product_attention.__name__ in method.__code__.co_names for method in methods)


@functools.cache
def _plain_class(base: Any) -> type[nn.Module]:
    mixin = PLAIN_CLASSES.get(base.forward, _FusedAttention)
    return type(base.__name__, (mixin, base), {"__module__": __name__, "__doc__": mixin.__doc__, "plain_class": base})


def _rebuild(base: Any) -> nn.Module:
    cls = _plain_class(base)
    return cls.__new__(cls)
