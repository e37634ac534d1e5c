"""timm's attention without a prior by the native kernels, for models that this package makes.

So the arms of a comparison differ in their prior, and not in the kernel that computes attention.
"""

import functools
from typing import Any

from timm.layers.attention import Attention
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn

from vicinal.attachment.timm_forwards import attention_forward, window_attention_forward
from vicinal.attention.native.path import native_serves

__all__ = ["use_package_attention"]


def use_package_attention(model: nn.Module) -> None:
    """Swaps the class of timm's attention modules that have no prior for one that calls `attend_packed` where
    the native kernels serve it.

    Modules whose forward is not timm's own stay as they are. Names of weights stay, and so do copies and pickles, which
    name timm's class. `attach` and `detach` see timm's class.

    Args:
        model: any model.
    """
    for module in model.modules():
        base: Any = type(module)
        if base.forward in _MIXINS:
            module.__class__ = _plain_class(base)


class _PlainAttention:
    """Mixed into the class of an attention module without a prior."""

    plain_class: type[nn.Module]
    """The class that the module had."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self.plain_class,), self.__getstate__()


class _Attention(_PlainAttention):
    """timm's `Attention`."""

    def forward(self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Returns tokens, `(batch, tokens, dim)`."""
        if is_causal or not native_serves(x):
            return self.plain_class.forward(self, x, attn_mask, is_causal)  # type: ignore[no-any-return]
        return attention_forward(self, x, None, attn_mask)


class _WindowAttention(_PlainAttention):
    """timm's `WindowAttention` of Swin."""

    def forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns windows, `(batch * windows, tokens, dim)`."""
        if not native_serves(x):
            return self.plain_class.forward(self, x, mask)  # type: ignore[no-any-return]
        return window_attention_forward(self, x, None, mask)


_MIXINS: dict[Any, type[_PlainAttention]] = {
    Attention.forward: _Attention,
    WindowAttention.forward: _WindowAttention,
}


@functools.cache
def _plain_class(base: Any) -> type[nn.Module]:
    mixin = _MIXINS[base.forward]
    return type(base.__name__, (mixin, base), {"__module__": __name__, "__doc__": mixin.__doc__, "plain_class": base})


def _rebuild(base: Any) -> nn.Module:
    cls = _plain_class(base)
    return cls.__new__(cls)
