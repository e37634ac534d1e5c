"""Places a prior by the coordinates of patches that were cut before the model was called (NaFlex)."""

import functools

import torch
from torch import Tensor

from vicinal.attention import ImageGroup, PlacedPrior, PriorPerImage
from vicinal.cells import PairLayout
from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.inspection.patch_coordinates import PatchCoordinates, patch_layout
from vicinal.priors.base import Prior
from vicinal.priors.placed import TokenPairs

__all__ = ["prior_of_patches"]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def prior_of_patches(name: str, prior: Prior, coordinates: PatchCoordinates, device: torch.device) -> PlacedPrior:
    """Returns a prior where the tokens of each image sit, in the module's order.

    Raises VicinalError for a prior that is no function of the offset, if the patches of an image fill no grid.

    Args:
        name: of the module.
        prior: whose grid has as many prefix tokens as stand in front of the patches.
        coordinates: of the patches.
        device: of the queries.
    """
    groups = []
    for grid, pairs, order, images in _token_groups(coordinates, prior.grid.prefix, device):
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
