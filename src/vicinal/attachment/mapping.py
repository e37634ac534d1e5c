"""`patch_attention`: how much attention each patch of an image gets, whatever kind of attention a model ends with."""

import functools
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vicinal.attachment.examining import disturbed
from vicinal.attachment.ordering import find_places
from vicinal.attachment.placing import LeftAlone, Site
from vicinal.attachment.running import Example, ImageSize, Runner, quietly, runner_for
from vicinal.attachment.tapping import Tap, tap
from vicinal.attachment.tiling import Places
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
    if layer is not None and not -len(sites) <= layer < len(sites):
        raise VicinalError(f"unknown layer {layer}: the model has {len(sites)} attention layers")
    run = runner_for(model, img_size, example)
    if layer is None:
        layer, places = _last_with_a_map(model, sites, run)
    else:
        places = _places(sites[layer], sites, run)
    site = sites[layer]
    if isinstance(site, LeftAlone):
        reader = tap(model, [layer], img_size=img_size, example=example)
        return PatchAttention(reader, grid_of_one_query(site, run.image), places)
    reads_token = site.windows == 1 and has_class_token(model, site.grid.prefix) and classifies_by_token(model)
    chosen = queries or ("class" if reads_token else "mean")
    if chosen == "mean" and bool(places.padding.any()):
        reader = tap(model, [layer], reduce=_MeanOfImage(places), img_size=img_size, example=example)
    else:
        reader = tap(model, [layer], queries=chosen, img_size=img_size, example=example)
    return PatchAttention(reader, site.grid, places)


def _last_with_a_map(model: nn.Module, sites: list[Site | LeftAlone], run: Runner) -> tuple[int, Places]:
    """Index of the last layer that has a map, among those that the model classifies by; and where its patches are."""
    usable = [
        number
        for number, site in enumerate(sites)
        if isinstance(site, Site) or (_reads_image(site) and not pools_patches(model))
    ]
    last = sites[usable[-1] if usable else -1]
    if isinstance(last, LeftAlone):
        return usable[-1] if usable else -1, _places(last, sites, run)
    places, wrong = _ask_all_alike(last, sites, run)
    # Where that of the last layer cannot be told, that of one before it, on the same grid, may be.
    for number in reversed(usable):
        if sites[number].name in places:
            return number, places[sites[number].name]
    raise VicinalError(f"the attention of {last.name} has no map: {wrong[last.name]}; layer= chooses another")


def _places(site: Site | LeftAlone, sites: list[Site | LeftAlone], run: Runner) -> Places:
    """Where the patches that a layer attends to are; raises if that has no answer."""
    if isinstance(site, Site):
        places, wrong = _ask_all_alike(site, sites, run)
        if site.name in wrong:
            raise VicinalError(f"the attention of {site.name} has no map: {wrong[site.name]}")
        return places[site.name]
    if not _reads_image(site):
        raise VicinalError(f"the attention of {site.name} has no map: {site.reason}")
    grid = grid_of_one_query(site, run.image)
    return Places((grid.height, grid.width), torch.arange(grid.patches)[None])


def _ask_all_alike(site: Site, sites: list[Site | LeftAlone], run: Runner) -> tuple[dict[str, Places], dict[str, str]]:
    """`find_places` for layers of one shape, which are asked in the same runs: one may tell what another does not."""
    alike = [each for each in sites if isinstance(each, Site) and each.call.logits == site.call.logits]
    with quietly(run.model):
        return find_places(alike, run.image, functools.partial(disturbed, run))


class _MeanOfImage:
    """The mean over queries that are patches of the image, and not padding: each window's share of it."""

    def __init__(self, places: Places) -> None:
        real = (~places.padding).double()
        self.share = real * len(real) / real.sum()

    def __call__(self, site: Site | LeftAlone, weights: Tensor) -> Tensor:
        """From `(images, windows, heads, queries, keys)` to `(images, windows, heads, keys)`."""
        weights = weights if weights.dim() == 5 else weights.unsqueeze(1)
        return torch.einsum("nwhqk,wq->nwhk", weights, self.share.to(weights))


class PatchAttention:
    """Reads the attention of a model that runs inside `with`; made by `patch_attention`."""

    def __init__(self, reader: Tap, grid: Grid, places: Places) -> None:
        self._reader, self._grid, self._places = reader, grid, places
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
        weights = weights[..., grid.prefix :]
        windows = len(self._places.cells)
        return self._places.laid(weights.reshape(len(weights), windows, -1)) / windows


def _reads_image(site: Site | LeftAlone) -> bool:
    """Whether one query reads the image."""
    return isinstance(site, LeftAlone) and len(site.logits) == 4 and site.logits[-2] == 1 < site.logits[-1]


def has_class_token(model: nn.Module, prefix: int) -> bool:
    """Whether one of a layer's prefix tokens is a class token; else they are registers."""
    absent = hasattr(model, "cls_token") and model.cls_token is None
    return prefix > 0 and not absent


def classifies_by_token(model: nn.Module) -> bool:
    """Whether a model reads its class token, if it has one, and not a mean over patches."""
    pool = getattr(model, "global_pool", None)
    return not pools_patches(model) and (not isinstance(pool, str) or pool == "token")


def pools_patches(model: nn.Module) -> bool:
    """Whether a model declares that it classifies by the mean or the maximum over patches, as timm or Hugging Face."""
    pool, config = getattr(model, "global_pool", None), getattr(model, "config", None)
    return pool in ("avg", "avgmax", "max") or getattr(config, "use_mean_pooling", False) is True


def grid_of_one_query(site: LeftAlone, image: tuple[int, int]) -> Grid:
    """The grid of the patches that a single query sees, behind as few other tokens as can be."""
    keys = site.logits[-1]
    for prefix in range(MOST_PREFIX + 1):
        try:
            return Grid.from_tokens(keys, prefix=prefix, aspect=image[0] / image[1])
        except VicinalError:
            continue
    raise VicinalError(f"what {site.name} sees, {keys} tokens, forms no grid of the picture's shape")
