"""Attention without a prior by the native kernels, for models that this package makes.

So the arms of a comparison differ in their prior, and not in the kernel that computes attention.
"""

import functools
from typing import Any

from timm.layers.attention import Attention
from timm.models.swin_transformer import WindowAttention
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import Tensor, nn

from vicinal.attachment.timm_forwards import attention_forward, relative_attention_forward, window_attention_forward
from vicinal.attention.native.path import native_serves

__all__ = ["PLAIN_CLASSES", "PlainAttention", "use_package_attention"]


def use_package_attention(model: nn.Module) -> None:
    """Swaps the class of attention modules that have no prior for one that uses the native kernels where they serve.

    Modules whose forward is not one of `PLAIN_CLASSES` stay as they are. Names of weights stay, and so do copies and
    pickles, which name the class before. `attach` and `detach` see the class before.

    Args:
        model: any model.
    """
    for module in model.modules():
        base: Any = type(module)
        if base.forward in PLAIN_CLASSES and not issubclass(base, PlainAttention):
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


PLAIN_CLASSES: dict[Any, type[PlainAttention]] = {
    Attention.forward: _Attention,
    RelPosAttention.forward: _RelativeAttention,
    WindowAttention.forward: _WindowAttention,
}
"""What is mixed into a class, by the forward of that class."""


@functools.cache
def _plain_class(base: Any) -> type[nn.Module]:
    mixin = PLAIN_CLASSES[base.forward]
    return type(base.__name__, (mixin, base), {"__module__": __name__, "__doc__": mixin.__doc__, "plain_class": base})


def _rebuild(base: Any) -> nn.Module:
    cls = _plain_class(base)
    return cls.__new__(cls)
