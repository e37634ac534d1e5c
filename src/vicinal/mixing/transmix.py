"""TransMix: CutMix labels weighted by attention (Chen et al., https://arxiv.org/abs/2111.09833).

lambda = A . downsample(M), where A is the attention paid to each patch, averaged over heads, and M the CutMix box,
resampled to the patch grid by nearest neighbor. The label is (1 - lambda) y + lambda y', with y' the label of the image
in the box.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.errors import VicinalError, unknown_name

__all__ = ["VARIANTS", "TransMix"]

VARIANTS = {"paper": (False, 0.0), "reference": (True, 0.5)}
"""Whether attention is normalized, and the weight of the area."""


class TransMix:
    """Computes the label weight of the image in a CutMix box from attention.

    >>> import torch, vicinal
    >>> attention = torch.full((1, 4, 4), 1 / 17)  # a class token attends to 16 patches and itself
    >>> mask = torch.zeros(1, 32, 32, dtype=torch.bool)
    >>> mask[:, :16, :8] = True
    >>> vicinal.TransMix()(attention, mask), vicinal.TransMix("reference")(attention, mask)
    (tensor([0.1176]), tensor([0.1250]))

    Equation 7 of the paper does not normalize attention, so the class token's attention to itself counts for the image
    outside the box. The code published with the paper divides by the attention paid to patches, and averages the result
    with the area of the box.

    Args:
        variant: `paper`: no normalization, attention only; `reference`, the published code: normalized, weighted 0.5
            with the area.
        normalize: divide by the attention paid to patches; the variant's choice by default.
        area_weight: weight of the box's area, from 0, attention only, to 1, plain CutMix; the variant's choice by
            default.

    Raises:
        VicinalError: the variant is unknown, or `area_weight` is out of range.
    """

    def __init__(
        self,
        variant: Literal["paper", "reference"] = "paper",
        *,
        normalize: bool | None = None,
        area_weight: float | None = None,
    ) -> None:
        if variant not in VARIANTS:
            raise unknown_name("variant", variant, VARIANTS)
        default_normalize, default_area_weight = VARIANTS[variant]
        self.normalize = default_normalize if normalize is None else normalize
        self.area_weight = default_area_weight if area_weight is None else area_weight
        if not 0 <= self.area_weight <= 1:
            raise VicinalError(f"area_weight must be from 0 to 1, got {area_weight}")

    @torch.no_grad()
    def __call__(self, attention: Tensor, mask: Tensor) -> Tensor:
        """Returns the label weight of the image in the box, `(batch,)`, without a gradient.

        Args:
            attention: attention paid to each patch, `(batch, grid height, grid width)`.
            mask: the box, bool `(batch, height, width)`, True inside.

        Raises:
            VicinalError: a shape is wrong.
        """
        if attention.dim() != 3 or mask.dim() != 3 or len(attention) != len(mask):
            raise VicinalError(
                "attention must be (batch, grid height, grid width) and mask (batch, height, width), "
                f"got {tuple(attention.shape)} and {tuple(mask.shape)}"
            )
        weights = attention.to(torch.promote_types(attention.dtype, torch.float32))
        area = mask.to(weights).mean((1, 2))
        inside = F.interpolate(mask[:, None].to(weights), weights.shape[1:], mode="nearest")[:, 0]
        share = (weights * inside).sum((1, 2))
        if self.normalize:
            total = weights.sum((1, 2))
            share = torch.where(total > 0, share / total, area)
        return torch.lerp(share, area, self.area_weight)
