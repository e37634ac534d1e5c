"""ELM, the element-wise learnable mask: logits are multiplied by a free number for every pair of patches.

    M(i, j) = any (patches x patches) matrix

Li and Zhang, "Toward a Deeper Understanding: RetNet Viewed through Convolution", arXiv:2309.05375.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.grid import Grid
from vicinal.priors.base import Prior, ScaleBias, flat_parameter
from vicinal.priors.full_precision import widen

__all__ = ["Elementwise"]


class Elementwise(Prior):
    """Multiplies by a free number per pair of patches (ELM).

    Args:
        init: `identity` starts at ones; `paper` at zeros, where Q and K get no gradient in the first step.
        share_heads: one mask for all heads, as in the paper; else one per head.
    """

    per_offset = False

    def __init__(
        self,
        heads: int,
        grid: Grid,
        layer: int = 0,
        depth: int = 1,
        *,
        init: Literal["identity", "paper"] = "identity",
        share_heads: bool = True,
    ) -> None:
        super().__init__(heads, grid, layer, depth)
        self.init, self.share_heads = init, share_heads
        shape = (1 if share_heads else heads, grid.patches, grid.patches)
        self.flat_mask = flat_parameter(torch.ones(shape) if init == "identity" else torch.zeros(shape))

    @property
    def mask(self) -> Tensor:
        """The learned mask, `(heads, patches, patches)`."""
        return self.scale().expand(self.heads, -1, -1)

    def scale(self) -> Tensor:
        """Returns M(i, j), `(heads or 1, patches, patches)`."""
        return widen(self.flat_mask).view(-1, self.grid.patches, self.grid.patches)

    def _on_grid(self, grid: Grid) -> ScaleBias:
        return _interpolate(self.scale(), self.grid, grid), None

    def _carry(self, before: Grid, rescale: bool) -> None:
        mask = _interpolate(self.flat_mask.view(-1, before.patches, before.patches), before, self.grid)
        self.flat_mask = flat_parameter(mask, self.flat_mask.requires_grad)

    def extra_repr(self) -> str:
        """Returns heads, grid and sharing, for `print(model)`."""
        return f"{super().extra_repr()}, share_heads={self.share_heads}"


def _interpolate(mask: Tensor, before: Grid, grid: Grid) -> Tensor:
    """Returns a mask over pairs of patches, interpolated to another grid, `(heads or 1, patches, patches)`."""
    # Interpolates over the keys of every query, then, on the transpose, over the queries of every key.
    old, new = (before.height, before.width), (grid.height, grid.width)
    for _ in range(2):
        maps = F.interpolate(mask.reshape(*mask.shape[:2], *old), size=new, mode="bilinear", align_corners=True)
        mask = maps.flatten(2).mT
    return mask


if __name__ == "__main__":
    from vicinal.priors.plot import main

    main("elm")
