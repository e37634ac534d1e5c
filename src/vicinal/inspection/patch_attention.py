"""`patch_attention` reads how much attention each patch of an image gets, whatever attention a model ends with."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from vicinal.cells import Cells
from vicinal.errors import VicinalError
from vicinal.inspection.attention_tap import find_attention, tap
from vicinal.inspection.image_cells import cells_at, find_size_rule
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
    mean = not single and (queries or ("class" if reads_token else "mean")) == "mean"
    return PatchAttention(model, number, mean, inspection)


def mean_over_patches(queries: Cells, weights: Tensor) -> Tensor:
    """Returns each window's share of the mean over all queries that are patches of the image.

    Args:
        queries: cells of the queries.
        weights: `(images, heads, queries, keys)`, with an axis for windows behind the images if there are several.

    Returns:
        `(images, heads, keys)`, with that axis.
    """
    placed = (queries.index >= 0).to(weights)
    share = placed / placed.sum()
    if queries.windows == 1:
        return torch.einsum("nhqk,q->nhk", weights, share[0])
    return torch.einsum("nwhqk,wq->nwhk", weights, share)


class PatchAttention:
    """Reads the attention of a model that runs inside `with`; made by `patch_attention`."""

    def __init__(self, model: nn.Module, layer: int, mean: bool, inspection: Inspection) -> None:
        queries: Literal["all", "class"] = "all" if mean else "class"
        self._reader = tap(model, [layer], reduce=self._reduce, queries=queries, inspection=inspection)
        self._mean = mean
        self._queries = 0
        """Number of queries in the last run."""
        (self.layer,) = self._reader.layers
        """Site where it is read."""
        self._size_rule = find_size_rule(inspection, self.layer)

    def __enter__(self) -> "PatchAttention":
        self._reader.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._reader.__exit__(*error)

    def _reduce(self, site: AttentionSite, weights: Tensor) -> Tensor:
        """Returns the mean over patches; or each window's share of the mean over class tokens."""
        if not self._mean:
            self._queries = site.logits[-2] + weights.shape[-1] - site.logits[-1]
            return weights / site.windows
        self._queries = weights.shape[-2]
        return mean_over_patches(self._cells(weights.shape[-1])[0], weights)

    def _cells(self, keys: int) -> tuple[Cells, Cells]:
        """Returns the cells of queries and keys on the image of the last run, given the number of keys.

        Raises VicinalError if they are not known.
        """
        site, watch = self.layer, self._reader.watch
        assert isinstance(site.keys, Cells)
        other = watch.other
        as_inspected = site.queries if isinstance(site.queries, Cells) else site.keys, site.keys
        found: tuple[Cells, Cells] | None
        if other is None:
            found = as_inspected
        elif isinstance(other, PatchCoordinates):
            found = as_inspected if other.is_raster(site.keys.rows, site.keys.columns) else None
        else:
            found = cells_at(site, self._size_rule, watch.inspected, other, self._queries, keys)
        if found is None:
            raise watch.unknown_places(site.name)
        return found

    @property
    def map(self) -> Tensor:
        """Attention to each patch in the last run, `(images, rows, columns)`; without gradient."""
        weights, site = self._reader.last.mean(-2), self.layer  # over heads
        _, keys = self._cells(weights.shape[-1])
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
