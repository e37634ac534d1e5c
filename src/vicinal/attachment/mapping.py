"""`patch_attention`: how much attention each patch of an image gets, whatever kind of attention a model ends with."""

import functools
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from vicinal.attachment.examining import disturbed
from vicinal.attachment.ordering import folding
from vicinal.attachment.placing import LeftAlone, Site
from vicinal.attachment.running import Example, ImageSize, quietly, runner_for
from vicinal.attachment.tapping import Tap, tap
from vicinal.errors import VicinalError
from vicinal.grid import Grid

__all__ = ["PatchAttention", "classifies_by_token", "grid_of_one_query", "has_class_token", "patch_attention"]

MOST_PREFIX = 2  # class and distillation token


def patch_attention(
    model: nn.Module,
    layer: int | None = None,
    *,
    queries: Literal["class", "mean"] | None = None,
    img_size: ImageSize | None = None,
    example: Example | None = None,
) -> "PatchAttention":
    """Read how much attention each patch gets, averaged over heads, while a model runs.

    >>> import torch, vicinal
    >>> from vicinal.attachment import patch_attention
    >>> model = vicinal.create_model("vit-micro", img_size=(32, 48))
    >>> with patch_attention(model) as attention:
    ...     logits = model(torch.randn(2, 3, 32, 48))
    >>> attention.map.shape
    torch.Size([2, 8, 12])

    Whose attention, if it is not said: that of a query which reads the whole image, as the class layers of CaiT and
    attention pooling have; of the class token, where the model classifies by it; else the mean over all patches.
    Windows are put back where they were cut from. What goes to a class token or to padding is left out, so the sum over
    patches may be below 1. With a prior attached, it is the attention under the prior.

    Args:
        model: any vision transformer.
        layer: index of an attention layer, negative from the end; by default the last that has a map.
        queries: `class` or `mean`, to overrule the choice.
        img_size: as for `attach`.
        example: as for `attach`.
    """
    sites = tap(model, None, img_size=img_size, example=example).layers
    if layer is None:
        layer = next((number for number in reversed(range(len(sites))) if _has_map(sites[number])), -1)
    if not -len(sites) <= layer < len(sites):
        raise VicinalError(f"unknown layer {layer}: the model has {len(sites)} attention layers")
    site = sites[layer]
    run = runner_for(model, img_size, example)
    if isinstance(site, LeftAlone):
        if not _has_map(site):
            raise VicinalError(f"the attention of {site.name} has no map: {site.reason}")
        reader = tap(model, [layer], img_size=img_size, example=example)
        return PatchAttention(reader, grid_of_one_query(site, run.image), None)
    reads_token = site.windows == 1 and has_class_token(model, site.grid.prefix) and classifies_by_token(model)
    chosen = queries or ("class" if reads_token else "mean")
    reader = tap(model, [layer], queries=chosen, img_size=img_size, example=example)
    fold = None
    if site.windows > 1:
        with quietly(model):
            fold = folding(site, run.image, functools.partial(disturbed, run))
    return PatchAttention(reader, site.grid, fold)


class PatchAttention:
    """Reads the attention of a model that runs inside `with`; made by `patch_attention`."""

    def __init__(self, reader: Tap, grid: Grid, fold: Callable[[Tensor], Tensor] | None) -> None:
        self._reader, self._grid, self._fold = reader, grid, fold
        (self.layer,) = reader.layers
        """Where it is read."""

    def __enter__(self) -> "PatchAttention":
        self._reader.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._reader.__exit__(*error)

    @property
    def map(self) -> Tensor:
        """`(images, grid height, grid width)`, of the last run; without gradient."""
        weights, grid = self._reader.last.mean(-3 if isinstance(self.layer, LeftAlone) else -2), self._grid
        if isinstance(self.layer, LeftAlone):
            weights = weights.squeeze(-2)
        if weights.shape[-1] != grid.tokens:
            raise VicinalError(
                f"{self.layer.name} saw {weights.shape[-1]} tokens, where {grid.tokens} ({grid}) were expected: "
                "give the img_size in use; tokens dropped at random have no map"
            )
        if self._fold is not None:
            return self._fold(weights) / weights.shape[1]
        return weights[:, grid.prefix :].view(-1, grid.height, grid.width)


def _has_map(site: Site | LeftAlone) -> bool:
    """Whether attention is over patches: of patches, or of one query that reads the image."""
    return isinstance(site, Site) or (site.logits[-2] == 1 < site.logits[-1])


def has_class_token(model: nn.Module, prefix: int) -> bool:
    """Whether one of a layer's prefix tokens is a class token; else they are registers."""
    absent = hasattr(model, "cls_token") and model.cls_token is None
    return prefix > 0 and not absent


def classifies_by_token(model: nn.Module) -> bool:
    """Whether a model reads its class token, if it has one, and not a mean over patches."""
    pool = getattr(model, "global_pool", None)
    return not isinstance(pool, str) or pool == "token"


def grid_of_one_query(site: LeftAlone, image: tuple[int, int]) -> Grid:
    """The grid of the patches that a single query sees, behind as few other tokens as can be."""
    keys = site.logits[-1]
    for prefix in range(MOST_PREFIX + 1):
        try:
            return Grid.from_tokens(keys, prefix=prefix, aspect=image[0] / image[1])
        except VicinalError:
            continue
    raise VicinalError(f"what {site.name} sees, {keys} tokens, forms no grid of the picture's shape")
