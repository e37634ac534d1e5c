"""Swaps the class of an attention module for a subclass that applies a prior, and back.

A subclass keeps every name of the state dict, where a wrapper would rename weights. There is one for each attention
class.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vicinal.attachment.interceptor import PriorInterceptor
from vicinal.errors import VicinalError
from vicinal.inspection.attention_mode import Step
from vicinal.inspection.head_layout import HeadLayout
from vicinal.inspection.image_context import UNKNOWN, is_tracing, noted_size
from vicinal.inspection.sites import AttentionSite
from vicinal.priors.base import Prior

__all__ = ["FAST_FORWARDS", "PriorSite", "WithPrior", "give_prior", "original_class", "take_prior"]


@dataclass(frozen=True)
class PriorSite:
    """Where in a module's forward its prior acts; copied along with the module."""

    name: str
    head_layout: HeadLayout
    steps: tuple[Step, ...]
    suffix: int = 0
    """How many of the grid's prefix tokens stand behind the last patch."""
    image_key: str = ""
    """Under which `noted_size` finds the size of the current image; empty if it was not noted."""
    image: tuple[int, int] = UNKNOWN
    """Height and width of the images that the prior was attached for."""

    @classmethod
    def of(cls, site: AttentionSite) -> "PriorSite":
        """Returns what a module must know of its site."""
        return cls(site.name, site.head_layout, site.steps, 0 if site.layout is None else site.layout.suffix)

    def check_image(self) -> None:
        """Raises VicinalError if the current image has another size than the prior was attached for.

        An image of another shape may have as many tokens. Where no size was noted in this thread, as when activations
        are recomputed in a backward thread, the forward has been checked already.
        """
        noted = noted_size(self.image_key) if self.image_key else None
        if noted is None or noted == self.image or is_tracing():
            return
        wanted = f"{self.image[0]} x {self.image[1]}"
        if noted == UNKNOWN:
            raise VicinalError(
                f"the prior of {self.name} was attached for images of {wanted}; this call gave the model no image, so "
                "the places of its tokens are not known"
            )
        raise VicinalError(
            f"the prior of {self.name} was attached for images of {wanted}, got {noted[0]} x {noted[1]}: give such "
            "images, use vicinal.resize, or detach and attach again with the img_size in use"
        )


class WithPrior:
    """Mixed into the class of an attention module that carries a prior."""

    plain_class: type[nn.Module]
    """The class that the module had."""
    prior: Prior
    prior_site: PriorSite
    prior_order: Tensor | None
    """Token at each position of the prior's grid; None if they are in that order."""
    prior_position: Tensor | None
    """Position of each token, the inverse of `prior_order`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the original forward with the prior at its logits."""
        self.prior_site.check_image()
        mode = PriorInterceptor(
            self.prior,
            self.prior_site.head_layout,
            self.prior_site.steps,
            self.prior_order,
            self.prior_position,
        )
        with mode:
            result = super().forward(*args, **kwargs)  # type: ignore[misc]
        if mode.applied != len(self.prior_site.steps):
            raise VicinalError(
                f"the prior did not reach the attention of {self.plain_class.__name__}, which is computed in another "
                "way than when the prior was attached; vicinal.detach(model) and attach again"
            )
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickles and copies name the original class, which can be imported anywhere.
        return _rebuild, (self.plain_class, type(self).__mro__[1] is WithPrior), self.__getstate__()


FAST_FORWARDS: dict[Callable[..., Any], type[WithPrior]] = {}
"""Mixins that compute a forward of a library in a faster way, by that forward."""


@functools.cache
def _class_with_prior(base: Any, by_mode: bool) -> type[nn.Module]:
    """Returns the subclass of an attention class that applies a prior, by a fast forward of ours if there is one."""
    mixin = WithPrior if by_mode else next((m for f, m in FAST_FORWARDS.items() if base.forward is f), WithPrior)
    attributes = {"__module__": __name__, "__doc__": mixin.__doc__, "plain_class": base}
    return type(f"{base.__name__}WithPrior", (mixin, base), attributes)


def original_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class of a module without its prior."""
    return getattr(type(module), "plain_class", type(module))


def _rebuild(base: Any, by_mode: bool) -> nn.Module:
    cls = _class_with_prior(base, by_mode)
    return cls.__new__(cls)


def give_prior(
    module: nn.Module, prior: Prior, site: PriorSite, order: Tensor | None = None, *, by_mode: bool = False
) -> None:
    """Gives a module a prior.

    Args:
        module: of the site.
        prior: for the site's heads and grid.
        site: which operations of its forward are the attention.
        order: token at each position of the prior's grid, `(tokens,)`; None if they are in that order.
        by_mode: intercept the module's own forward, even if there is a fast one.
    """
    device = next((x.device for x in module.parameters()), None)
    module.prior = prior
    module.prior_site = site  # type: ignore[assignment]
    position = None if order is None else order.argsort()
    module.register_buffer("prior_order", None if order is None else order.to(device), persistent=False)
    module.register_buffer("prior_position", None if position is None else position.to(device), persistent=False)
    base: Any = type(module)
    module.__class__ = _class_with_prior(base, by_mode or order is not None)
    if isinstance(module, nn.MultiheadAttention):
        module.register_forward_hook(disable_fast_path)


def disable_fast_path(*_: object) -> None:
    """Does nothing. `nn.TransformerEncoderLayer` bypasses `self_attn.forward`, unless a submodule has hooks."""


def take_prior(module: nn.Module) -> None:
    """Takes the prior out of a module again."""
    module.__class__ = original_class(module)
    for key, hook in list(module._forward_hooks.items()):
        if hook is disable_fast_path:
            del module._forward_hooks[key]
    for name in ("prior", "prior_site", "prior_order", "prior_position"):
        delattr(module, name)
