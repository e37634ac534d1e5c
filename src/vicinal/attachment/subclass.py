"""Swaps the class of an attention module for a subclass that applies a prior, and back.

A subclass keeps every name of the state dict, where a wrapper would rename weights. There is one for each attention
class.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vicinal.attachment.interceptor import PlacedTokens, PriorInterceptor
from vicinal.attachment.patch_prior import prior_of_patches, run_eagerly
from vicinal.cells import Cells, Layout, PairLayout, TokenLines, raster_order
from vicinal.errors import VicinalError
from vicinal.grid import Grid, same_size
from vicinal.inspection.attention_mode import Step
from vicinal.inspection.head_layout import HeadLayout
from vicinal.inspection.image_context import UNKNOWN, NotedSize, SizeRecords, in_backward, is_tracing, noted_size
from vicinal.inspection.patch_coordinates import PatchCoordinates
from vicinal.inspection.sites import AttentionSite
from vicinal.inspection.size_rule import KnownSize, SizeRule, finer_grid, grid_at, lines_at
from vicinal.pooled_tokens import PooledTokens
from vicinal.priors.base import Prior
from vicinal.priors.token_values import TokenPairs

__all__ = ["FAST_FORWARDS", "PriorSite", "WithPrior", "add_prior", "original_class", "remove_prior"]

CLASS_BEFORE = "class_before_prior"  # attribute of a module with a prior, but not of its copies


@dataclass(frozen=True)
class PriorSite:
    """Where in a module's forward its prior acts; copied along with the module."""

    name: str
    head_layout: HeadLayout
    steps: tuple[Step, ...]
    suffix: int = 0
    """How many of the grid's prefix tokens stand behind the last patch."""
    lattice: tuple[int, int] = (1, 1)
    """Rows and columns of patches of the whole image; more than those of the grid, if that is a window."""
    lines: tuple[TokenLines | PooledTokens, TokenLines | PooledTokens] | None = None
    """Queries and keys in places of their own, where they do not share a grid."""
    image_key: str = ""
    """Under which `noted_size` finds the size of the current image; empty if it was not noted."""
    image: tuple[int, int] = UNKNOWN
    """Height and width of the images that the prior was attached for."""
    size_rule: SizeRule = SizeRule.UNKNOWN
    """How the grid changes on images of another size."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Sizes that the module keeps as attributes, such as that of its window, if no other image was tried."""

    @classmethod
    def of(cls, site: AttentionSite) -> "PriorSite":
        """Returns what a module must know of its site."""
        suffix = 0 if site.layout is None else site.layout.suffix
        lattice = (site.queries.rows, site.queries.columns) if isinstance(site.queries, Cells) else (1, 1)
        lines = site.layout.lines if isinstance(site.layout, PairLayout) else None
        return cls(site.name, site.head_layout, site.steps, suffix, lattice, lines)

    def on_images(
        self, module: nn.Module, key: str, image: tuple[int, int], rule: SizeRule, raster: bool
    ) -> "PriorSite":
        """Returns the site with what is known of images of other sizes.

        Args:
            module: of the site.
            key: of the hook that notes the size of the image.
            image: height and width of the images that the prior was attached for.
            rule: how the grid changes with them.
            raster: whether patches stand row by row.
        """
        settings: tuple[tuple[str, Any], ...] = ()
        if rule is SizeRule.UNTRIED:
            settings = tuple(_size_settings(module))
            if self.head_layout.windows > 1:
                rule = SizeRule.WHOLE_WINDOWS
            elif not raster:
                rule = SizeRule.UNKNOWN
        return replace(self, image_key=key, image=image, size_rule=rule, settings=settings)

    def grid_at(self, module: nn.Module, grid: Grid, image: tuple[int, int], tokens: int) -> Grid:
        """Returns the grid of the tokens of an image of another size. Raises VicinalError if it is not known.

        Args:
            module: of the site.
            grid: of the prior.
            image: height and width.
            tokens: number of tokens.
        """
        found = None
        if not same_size(image, UNKNOWN) and not self._changed(module):
            found = grid_at(self.size_rule, KnownSize(self.image, grid, self.lattice), image, tokens)
        if found is None:
            raise self._unknown_grid(module, grid, image, f"{tokens} tokens")
        return found

    def pairs_at(
        self, module: nn.Module, grid: Grid, image: tuple[int, int], queries: int, keys: int
    ) -> tuple[TokenPairs, Grid]:
        """Returns the offsets of all pairs on an image of another size, and the grid of the finer side.

        Args:
            module: of the site.
            grid: of the prior.
            image: height and width.
            queries: number of queries.
            keys: number of keys.
        """
        found = None
        if self.lines is not None and not same_size(image, UNKNOWN) and not self._changed(module):
            found = lines_at(self.size_rule, self.lines, self.image, image, (queries, keys))
        if found is None:
            raise self._unknown_grid(module, grid, image, f"{queries} queries and {keys} keys")
        return _pairs_between(*found), finer_grid(*found)

    def keeps_patches(self, module: nn.Module) -> bool:
        """Returns whether its tokens are prefix tokens and then the patches that the model was given, in order."""
        follows = self.size_rule in (SizeRule.FOLLOWS, SizeRule.UNTRIED) and not self._changed(module)
        return follows and self.lines is None and not self.suffix and self.head_layout.windows == 1

    def _changed(self, module: nn.Module) -> str:
        """Returns the name of a size that the module kept at `attach` and that is another one now, or an empty text."""
        return next((name for name, value in self.settings if getattr(module, name, None) != value), "")

    def _unknown_grid(self, module: nn.Module, grid: Grid, image: tuple[int, int], tokens: str) -> VicinalError:
        wanted = f"the prior of {self.name} was attached for images of {self.image[0]} x {self.image[1]}"
        if image == UNKNOWN:
            return VicinalError(
                f"{wanted}; this call gave the model neither images nor coordinates of patches, so the places of its "
                "tokens are not known"
            )
        why = f"its {tokens} form no grid there that follows from {grid}"
        if self.size_rule is SizeRule.UNKNOWN:
            why = "its tokens sit in other places there"
        if self.size_rule is SizeRule.WHOLE_WINDOWS:
            why = f"its map is not cut into whole windows of {grid} there"
        if self._changed(module):
            why = f"its {self._changed(module)} has changed since"
        return VicinalError(
            f"{wanted}, got {image[0]} x {image[1]}, and {why}: give such images, use vicinal.resize, or detach "
            "and attach again with the img_size in use"
        )


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)  # autograd keeps indices for backward, which it refuses of inference tensors
def _pairs_between(queries: TokenLines | PooledTokens, keys: TokenLines | PooledTokens) -> TokenPairs:
    """Returns the offsets between queries and keys in places of their own."""
    return TokenPairs(keys.places[None] - queries.places[:, None])


def _size_settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if type(value) is int or (type(value) is tuple and all(type(x) is int for x in value)):
            yield name, value


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
    prior_pairs: TokenPairs | None
    """Offsets of all pairs, where queries and keys have places of their own; else None."""
    prior_sizes: SizeRecords
    """The image sizes that it ran on."""

    def place_prior(self, queries: Tensor, keys: int) -> PlacedTokens:
        """Returns the prior on the grid of the current image, and the order of the tokens in it.

        Args:
            queries: `(..., tokens, dim)`.
            keys: number of keys.
        """
        site = self.prior_site
        image = self._image_size(queries)
        module: Any = self
        if isinstance(image, PatchCoordinates):
            known = site.keeps_patches(module)
            return PlacedTokens(prior_of_patches(site.name, self.prior, image, queries, known))
        if self.prior_pairs is not None:
            pairs, grid = self.prior_pairs, self.prior.grid
            # Windows of a fixed size hold the same pairs on every image.
            if image is not None and not same_size(image, site.image) and site.size_rule is not SizeRule.FIXED:
                pairs, grid = site.pairs_at(module, grid, image, queries.shape[-2], keys)
            return PlacedTokens(self.prior.between(pairs, grid))
        if image is None or same_size(image, site.image):
            return PlacedTokens(self.prior, self.prior_order, self.prior_position)
        grid = site.grid_at(module, self.prior.grid, image, queries.shape[-2])
        if grid.same_patches(self.prior.grid):
            return PlacedTokens(self.prior, self.prior_order, self.prior_position)
        order = raster_order(grid, site.suffix)
        order = None if order is None else order.to(queries.device)
        return PlacedTokens(self.prior.on(grid), order, None if order is None else order.argsort())

    def has_patches(self) -> bool:
        """Returns whether the current call gave the model patches that were cut before."""
        return isinstance(noted_size(self.prior_site.image_key), PatchCoordinates)

    def _image_size(self, queries: Tensor) -> NotedSize | None:
        """Returns the size of the image that queries `(..., tokens, dim)` are of; None if not noted."""
        key = self.prior_site.image_key
        if not key or is_tracing():
            return None
        if torch.compiler.is_compiling():
            return noted_size(key)
        if in_backward():
            return self.prior_sizes.find(queries) or noted_size(key)
        image = noted_size(key)
        if image is not None and (torch.is_grad_enabled() or self.training):  # type: ignore[attr-defined]
            self.prior_sizes.note(image, queries)
        return image

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the original forward with the prior at its logits."""
        if torch.compiler.is_compiling() and self.has_patches():
            return run_eagerly(self.forward, *args, **kwargs)
        mode = PriorInterceptor(self.place_prior, self.prior_site.head_layout, self.prior_site.steps)
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
        state: Any = self.__getstate__()
        state = {name: value for name, value in state.items() if name != CLASS_BEFORE}
        return _rebuild, (self.plain_class, type(self).__mro__[1] is WithPrior), state


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


def add_prior(module: nn.Module, prior: Prior, site: PriorSite, layout: Layout, *, by_mode: bool = False) -> None:
    """Adds a prior, for a site's heads and grid, to its module; by the interceptor alone if `by_mode`."""
    device = next((x.device for x in module.parameters()), None)
    module.prior = prior
    module.prior_site = site  # type: ignore[assignment]
    module.prior_sizes = SizeRecords()  # type: ignore[assignment]
    order, position = layout.order, layout.position
    module.prior_pairs = TokenPairs(layout.offsets) if isinstance(layout, PairLayout) else None  # type: ignore[assignment]
    module.register_buffer("prior_order", None if order is None else order.to(device), persistent=False)
    module.register_buffer("prior_position", None if position is None else position.to(device), persistent=False)
    module.__dict__[CLASS_BEFORE] = type(module)
    base: Any = original_class(module)
    by_mode = by_mode or order is not None or module.prior_pairs is not None
    module.__class__ = _class_with_prior(base, by_mode)
    if isinstance(module, nn.MultiheadAttention):
        module.register_forward_hook(disable_fast_path)


def disable_fast_path(*_: object) -> None:
    """Does nothing. `nn.TransformerEncoderLayer` bypasses `self_attn.forward`, unless a submodule has hooks."""


def remove_prior(module: nn.Module) -> None:
    """Takes the prior out of a module again."""
    module.__class__ = module.__dict__.pop(CLASS_BEFORE, original_class(module))
    for key, hook in list(module._forward_hooks.items()):
        if hook is disable_fast_path:
            del module._forward_hooks[key]
    for name in ("prior", "prior_site", "prior_pairs", "prior_sizes", "prior_order", "prior_position"):
        delattr(module, name)
