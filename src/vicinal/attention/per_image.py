"""A prior whose tokens sit in other places from image to image, such as patches of pictures of several shapes."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vicinal.attention.placed_prior import PlacedPrior
from vicinal.errors import VicinalError
from vicinal.priors.base import ScaleBias

__all__ = ["ImageGroup", "PriorPerImage", "ordered_mask"]


class ImageGroup(NamedTuple):
    """Images of a batch whose tokens sit in the same places."""

    prior: PlacedPrior
    """The prior in these places."""
    order: Tensor | None = None
    """Token at each position of the prior, `(tokens,)`; None if they are in that order."""
    images: Tensor | None = None
    """Their indices in the batch; None for all images."""


class PriorPerImage:
    """A prior for a batch of images with places of their own, as a `PlacedPrior` over tokens in the module's order.

    `attend` runs the images of each group under their own prior.

    Args:
        groups: every image of the batch in one of them.
    """

    grid = None
    """`values` are over pairs of tokens."""
    per_offset = False

    def __init__(self, groups: Sequence[ImageGroup]) -> None:
        self.groups = groups
        first = groups[0].prior
        self.heads, self.queries, self.keys = first.heads, first.queries, first.keys
        indices = [group.images for group in groups if group.images is not None]
        self.place_in_groups = torch.cat(indices).argsort() if indices else None
        """Place of each image among the images of all groups, one group after another; None for one group."""

    @property
    def device(self) -> torch.device | None:
        """Where the parameters are; None if there are none."""
        return self.groups[0].prior.device

    def values(self) -> ScaleBias:
        """Returns scale and bias, each `(images or 1, heads, queries, keys)` or None; 1 and 0 without a place."""
        found: list[list[Tensor]] = [[], []]
        for prior, order, images in self.groups:
            position = None if order is None else order.argsort()
            for kept, x in zip(found, prior(), strict=True):
                if x is not None:
                    x = x if position is None else x[:, position][:, :, position]
                    kept.append(x.expand(1 if images is None else len(images), *x.shape))
        scale, bias = (self._in_batch_order(kept) if kept else None for kept in found)
        return scale, bias

    def __call__(self) -> ScaleBias:
        """Returns `values()`."""
        return self.values()

    def split(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> Iterator[tuple[PlacedPrior, Tensor, Tensor, Tensor, Tensor | None]]:
        """Yields the prior, queries, keys, values and mask of each group, in the order of its prior.

        Args:
            q: queries, `(batch, heads, tokens, dim)`.
            k: keys, as q.
            v: values, as q.
            mask: as for `attend`.
        """
        self.check_images(len(q))
        for prior, order, images in self.groups:
            tensors, its_mask = (q, k, v), mask
            if images is not None:
                tensors = tuple(x.index_select(0, images) for x in tensors)  # type: ignore[assignment]
                if mask is not None and mask.dim() == 4 and len(mask) > 1:
                    its_mask = mask.index_select(0, images)
            if order is not None:
                tensors = tuple(x.index_select(-2, order) for x in tensors)  # type: ignore[assignment]
                its_mask = ordered_mask(its_mask, order)
            yield prior, *tensors, its_mask

    def join(self, outputs: Sequence[Tensor]) -> Tensor:
        """Returns outputs of the groups, `(images, heads, tokens, dim)` each, as one of the batch."""
        orders = [group.order for group in self.groups]
        pairs = zip(outputs, orders, strict=True)
        return self._in_batch_order([x if order is None else x.index_select(-2, order.argsort()) for x, order in pairs])

    def check_images(self, images: int) -> None:
        """Raises VicinalError if the batch has another number of images than places were given for."""
        if self.place_in_groups is not None and len(self.place_in_groups) != images:
            raise VicinalError(
                f"the patches of {len(self.place_in_groups)} images have coordinates, and attention ran on {images}: "
                "images of different shapes are served in whole batches only"
            )

    def _in_batch_order(self, tensors: Sequence[Tensor]) -> Tensor:
        if self.place_in_groups is None:
            return tensors[0]
        return torch.cat(list(tensors)).index_select(0, self.place_in_groups)


def ordered_mask(mask: Tensor | None, order: Tensor) -> Tensor | None:
    """Returns a mask over pairs of tokens in another order; axes of length 1 stay.

    Args:
        mask: as for `attend`; None stays None.
        order: token at each position, `(tokens,)`.
    """
    if mask is None:
        return None
    for axis in (-2, -1):
        if mask.dim() >= -axis and mask.shape[axis] > 1:
            mask = mask.index_select(axis, order)
    return mask
