"""`patch_attention` reads how much attention each patch of an image gets, whatever attention a model ends with."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from vicinal.cells import Cells
from vicinal.errors import VicinalError
from vicinal.inspection.attention_tap import Tap, find_attention, tap
from vicinal.inspection.image_context import ImageSizeHook, noted_size, size_text
from vicinal.inspection.model_inspection import Inspection
from vicinal.inspection.model_runner import Example, ImageSize
from vicinal.inspection.patch_coordinates import PatchCoordinates
from vicinal.inspection.refusal import Refusal
from vicinal.inspection.sites import AttentionSite

__all__ = [
    "PatchAttention",
    "check_has_map",
    "classifies_by_token",
    "has_class_token",
    "has_map",
    "patch_attention",
    "pools_patches",
    "reads_image",
]


def patch_attention(
    model: nn.Module,
    layer: int | None = None,
    *,
    queries: Literal["class", "mean"] | None = None,
    img_size: ImageSize | None = None,
    example: Example | None = None,
    inspection: Inspection | None = None,
) -> "PatchAttention":
    """Returns a reader of how much attention each patch gets, averaged over heads, while a model runs.

    >>> import torch, vicinal
    >>> from vicinal.inspection import patch_attention
    >>> model = vicinal.create_model("vit-micro", img_size=(32, 48))
    >>> with patch_attention(model) as attention:
    ...     logits = model(torch.randn(2, 3, 32, 48))
    >>> attention.map.shape
    torch.Size([2, 8, 12])

    Whose attention, by default: that of a query which reads the whole image, as the class layers of CaiT and attention
    pooling have; of the class token, where the model classifies by it; else the mean over all patches. Windows are put
    back where they were cut from. Attention to a class token or to padding is left out, so the sum over patches may be
    below 1. With a prior attached, it is the attention under the prior.

    Args:
        model: any vision transformer.
        layer: index of an attention layer, negative from the end; by default the last that has a map.
        queries: `class` or `mean`, to overrule the choice.
        img_size: as for `attach`.
        example: as for `attach`.
        inspection: what `inspect` returned for this model, so that it is not probed again.
    """
    inspection = find_attention(model, img_size, example, inspection)
    sites = inspection.sites
    if layer is not None and not -len(sites) <= layer < len(sites):
        raise VicinalError(f"unknown layer {layer}: the model has {len(sites)} attention layers")
    number = _last_with_map(model, sites) if layer is None else layer % len(sites)
    site = sites[number]
    check_has_map(site)
    single = reads_image(site)
    reads_token = site.windows == 1 and has_class_token(model, site) and classifies_by_token(model)
    if single or (queries or ("class" if reads_token else "mean")) == "class":
        reader = tap(model, [number], reduce=mean_over_windows, queries="class", inspection=inspection)
    else:
        reader = tap(model, [number], reduce=mean_over_patches, inspection=inspection)
    return PatchAttention(reader, inspection)


def mean_over_windows(site: AttentionSite, weights: Tensor) -> Tensor:
    """Returns each window's share of the mean over class tokens, where every window has one; else the weights."""
    return weights / site.windows


def mean_over_patches(site: AttentionSite, weights: Tensor) -> Tensor:
    """Returns each window's share of the mean over all queries that are patches of the image.

    Args:
        site: with cells for its queries.
        weights: `(images, heads, queries, keys)`, with an axis for windows behind the images if there are several.

    Returns:
        `(images, heads, keys)`, with that axis.
    """
    assert isinstance(site.queries, Cells)
    placed = (site.queries.index >= 0).to(weights)
    share = placed / placed.sum()
    if site.windows == 1:
        return torch.einsum("nhqk,q->nhk", weights, share[0])
    return torch.einsum("nwhqk,wq->nwhk", weights, share)


class PatchAttention:
    """Reads the attention of a model that runs inside `with`; made by `patch_attention`."""

    def __init__(self, reader: Tap, inspection: Inspection) -> None:
        self._reader, self._inspection = reader, inspection
        shape = inspection.runner.shape
        self._size_hook = ImageSizeHook(len(shape) + 1, shape[0])
        (self.layer,) = reader.layers
        """Site where it is read."""

    def __enter__(self) -> "PatchAttention":
        self._reader.__enter__()
        self._size_hook.register(list(self._inspection.image_modules))
        return self

    def __exit__(self, *error: Any) -> None:
        self._size_hook.remove(self._inspection.runner.model)
        self._reader.__exit__(*error)

    def _check_image(self) -> None:
        """Raises VicinalError if the last image had another size than the model was inspected on."""
        noted, sizes = noted_size(self._size_hook.key), self._inspection.image_modules.values()
        keys = self.layer.keys
        if isinstance(noted, PatchCoordinates) and isinstance(keys, Cells) and noted.is_raster(keys.rows, keys.columns):
            return
        if noted is not None and sizes and noted not in sizes:
            height, width = self._inspection.runner.image
            raise VicinalError(
                f"the model was inspected on images of {height} x {width}, got {size_text(noted)}: "
                "give the img_size in use"
            )

    @property
    def map(self) -> Tensor:
        """Attention to each patch in the last run, `(images, rows, columns)`; without gradient."""
        self._check_image()
        weights, site = self._reader.last.mean(-2), self.layer  # over heads
        keys = site.keys
        assert isinstance(keys, Cells)
        weights = weights if site.windows > 1 else weights.unsqueeze(1)
        if weights.shape[-1] != keys.tokens:
            raise VicinalError(
                f"{site.name} saw {weights.shape[-1]} tokens, where {keys.tokens} ({site.place or keys}) were "
                "expected: give the img_size in use; tokens dropped at random have no map"
            )
        return keys.to_map(weights)


def _last_with_map(model: nn.Module, sites: list[AttentionSite]) -> int:
    """Returns the index of the last layer that has a map, among those that the model classifies by."""
    usable = [
        number
        for number, site in enumerate(sites)
        if has_map(site) and not (reads_image(site) and pools_patches(model))
    ]
    if not usable:
        raise _no_map(sites[-1], "; layer= chooses another")
    return usable[-1]


def has_map(site: AttentionSite) -> bool:
    """Returns whether attention has a map: its keys are patches, and so are its queries, or one reads the image."""
    if not isinstance(site.keys, Cells):
        return False
    return reads_image(site) or isinstance(site.queries, Cells)


def check_has_map(site: AttentionSite) -> None:
    """Raises VicinalError if the attention of a site has no map."""
    if not has_map(site):
        raise _no_map(site)


def _no_map(site: AttentionSite, hint: str = "") -> VicinalError:
    side = site.keys if isinstance(site.keys, Refusal) else site.queries
    reason = side.reason if isinstance(side, Refusal) else site.reason
    return VicinalError(f"the attention of {site.name} has no map: {reason}{hint}")


def reads_image(site: AttentionSite) -> bool:
    """Returns whether one query reads the image, as in class layers and attention pooling."""
    return site.logits[-2] == 1 < site.logits[-1] and isinstance(site.keys, Cells)


def has_class_token(model: nn.Module, site: AttentionSite) -> bool:
    """Returns whether the first token of a site is a class token; a token without a place may be a register."""
    absent = hasattr(model, "cls_token") and model.cls_token is None
    return not absent and isinstance(site.queries, Cells) and bool((site.queries.index[:, 0] < 0).all())


def classifies_by_token(model: nn.Module) -> bool:
    """Returns whether a model classifies by its class token, if it has one, and not by a mean over patches."""
    pool = getattr(model, "global_pool", None)
    return not pools_patches(model) and (not isinstance(pool, str) or pool == "token")


def pools_patches(model: nn.Module) -> bool:
    """Returns whether a model declares, as timm or Hugging Face, that it pools over patches."""
    pool, config = getattr(model, "global_pool", None), getattr(model, "config", None)
    return pool in ("avg", "avgmax", "max") or getattr(config, "use_mean_pooling", False) is True
