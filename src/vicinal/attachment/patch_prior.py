"""Places a prior by the coordinates of patches that were cut before the model was called (NaFlex)."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vicinal.attention import ImageGroup, PlacedPrior, PriorPerImage
from vicinal.cells import PairLayout
from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.inspection.patch_coordinates import PatchCoordinates, patch_layout
from vicinal.priors.base import Prior
from vicinal.priors.token_values import TokenPairs

__all__ = ["prior_of_patches", "run_eagerly"]


def prior_of_patches(
    name: str, prior: Prior, coordinates: PatchCoordinates, queries: Tensor, known: bool
) -> PlacedPrior:
    """Returns a prior where the tokens of each image sit, in the module's order.

    Raises VicinalError if tokens are not the patches, and for a prior that is no function of the offset if the patches
    of an image fill no grid.

    Args:
        name: of the module.
        prior: whose grid has as many prefix tokens as stand in front of the patches.
        coordinates: of the patches.
        queries: `(..., tokens, dim)`.
        known: whether the module's tokens are prefix tokens and then patches, in the order of the coordinates.
    """
    tokens, prefix = queries.shape[-2], prior.grid.prefix
    if not known or tokens != prefix + coordinates.patches:
        raise VicinalError(
            f"{name} got {coordinates}, and its {tokens} tokens are not known to be {prefix} tokens without a place "
            "and then these patches, in their order; give images, or detach. Patches dropped in a model are not served"
        )
    groups = []
    for grid, pairs, order, images in _token_groups(coordinates, prefix, queries.device):
        if pairs is None:
            groups.append(ImageGroup(prior.on(grid), order, images))
            continue
        if not prior.per_offset:
            raise VicinalError(
                f"the prior of {name} has a free number for every pair of patches of a grid, and the patches of this "
                f"call do not fill one of {grid}: use another prior, or whole images"
            )
        groups.append(ImageGroup(prior.between(pairs, grid), None, images))
    if len(groups) == 1 and groups[0].order is None:
        return groups[0].prior
    return PriorPerImage(groups)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_eagerly(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns what a forward returns, run outside of the compiled graph: places of patches are no constants of it."""
    return forward(*args, **kwargs)


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # autograd keeps indices for backward, which it refuses of inference tensors
def _token_groups(
    coordinates: PatchCoordinates, prefix: int, device: torch.device
) -> list[tuple[Grid, TokenPairs | None, Tensor | None, Tensor | None]]:
    """Returns grid, offsets if patches do not fill it, order and images of each group of images with the same places.

    All layers of a model share them.
    """
    groups = []
    found = coordinates.groups()
    for places, images in found:
        layout = patch_layout(places, prefix)
        pairs = TokenPairs(layout.offsets) if isinstance(layout, PairLayout) else None
        order = None if layout.order is None else layout.order.to(device)
        groups.append((layout.grid, pairs, order, torch.tensor(images, device=device) if len(found) > 1 else None))
    return groups
