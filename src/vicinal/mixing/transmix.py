"""TransMix: labels mixed by what the network looks at (Chen et al., https://arxiv.org/abs/2111.09833).

lambda = A . downsample(M), where A is the attention that falls on each patch, averaged over heads, and M the box of
CutMix, by nearest neighbour on the patch grid; the label is (1 - lambda) y + lambda y', y' of the image pasted in.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.errors import VicinalError, unknown

__all__ = ["VARIANTS", "TransMix"]

VARIANTS = {"paper": (False, 0.0), "reference": (True, 0.5)}
"""Whether attention is normalised, and the weight of the area."""


class TransMix:
    """From attention and a box to the weight of the image in the box.

    >>> import torch, vicinal
    >>> attention = torch.full((1, 4, 4), 1 / 17)  # of a class token that sees 16 patches and itself
    >>> mask = torch.zeros(1, 32, 32, dtype=torch.bool)
    >>> mask[:, :16, :8] = True
    >>> vicinal.TransMix()(attention, mask), vicinal.TransMix("reference")(attention, mask)
    (tensor([0.1176]), tensor([0.1250]))

    The paper's equation 7 takes attention as it is, so that what the class token gives to itself counts for the image
    outside the box; the program published with it first divides by what falls on patches, and then averages with the
    area of the box.

    Args:
        variant: `paper`: not normalised, attention only; `reference`, the program: normalised, half attention and half
            area.
        normalize: divide by the attention that falls on patches; as the variant does if not given.
        area_weight: of the box's area, 0 for attention only, 1 for plain CutMix; as the variant does if not given.
    """

    def __init__(
        self,
        variant: Literal["paper", "reference"] = "paper",
        *,
        normalize: bool | None = None,
        area_weight: float | None = None,
    ) -> None:
        if variant not in VARIANTS:
            raise unknown("variant", variant, VARIANTS)
        usual = VARIANTS[variant]
        self.normalize = usual[0] if normalize is None else normalize
        self.area_weight = usual[1] if area_weight is None else area_weight
        if not 0 <= self.area_weight <= 1:
            raise VicinalError(f"area_weight is a share from 0 to 1, given {area_weight}")

    @torch.no_grad()
    def __call__(self, attention: Tensor, mask: Tensor) -> Tensor:
        """The weight of the image in the box, `(batch,)`; no gradient flows through it.

        Args:
            attention: that falls on each patch, `(batch, grid height, grid width)`.
            mask: the box, `(batch, height, width)`, True where the other image is.
        """
        if attention.dim() != 3 or mask.dim() != 3 or len(attention) != len(mask):
            raise VicinalError(
                "TransMix takes attention (batch, grid height, grid width) and a mask (batch, height, width), "
                f"given {tuple(attention.shape)} and {tuple(mask.shape)}"
            )
        weights = attention.to(torch.promote_types(attention.dtype, torch.float32))
        area = mask.to(weights).mean((1, 2))
        inside = F.interpolate(mask[:, None].to(weights), weights.shape[1:], mode="nearest")[:, 0]
        share = (weights * inside).sum((1, 2))
        if self.normalize:
            total = weights.sum((1, 2))
            share = torch.where(total > 0, share / total, area)
        return torch.lerp(share, area, self.area_weight)
