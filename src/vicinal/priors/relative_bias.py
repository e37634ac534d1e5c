"""RPE, the relative position bias: a free number per head and offset is added to the logits.

    B_h(d) = any (2h-1) x (2w-1) table

Shaw et al., arXiv:1803.02155, in the two-dimensional form of Swin, arXiv:2103.14030.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.grid import Grid
from vicinal.priors.base import Prior, flat_parameter, widen
from vicinal.priors.formula import interpolate_table

__all__ = ["RelativeTable", "stretch_table"]


class RelativeTable(Prior):
    """Adds a free number per offset (relative position bias).

    Args:
        init: `identity` starts at zero; `normal` at N(0, 0.02^2), as in Swin.
        share_heads: one table for all heads.
    """

    free_table = True

    def __init__(
        self,
        heads: int,
        grid: Grid,
        layer: int = 0,
        depth: int = 1,
        *,
        init: Literal["identity", "normal"] = "identity",
        share_heads: bool = False,
    ) -> None:
        super().__init__(heads, grid, layer, depth)
        self.init, self.share_heads = init, share_heads
        shape = (1 if share_heads else heads, *grid.table_shape)
        self.flat_bias = flat_parameter(torch.zeros(shape) if init == "identity" else 0.02 * torch.randn(shape))

    def bias(self) -> Tensor:
        """Returns B_h(d), `(heads or 1, 2h-1, 2w-1)`."""
        return widen(self.flat_bias).view(-1, *self.grid.table_shape)

    def bias_at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Returns B_h between the table's offsets, `(heads or 1, *shape)`."""
        return interpolate_table(self.bias(), rows, columns)

    def _carry(self, before: Grid, rescale: bool) -> None:
        stretched = stretch_table(self.flat_bias.view(-1, *before.table_shape), self.grid)
        self.flat_bias = flat_parameter(stretched, self.flat_bias.requires_grad)

    def extra_repr(self) -> str:
        """Heads, grid and sharing."""
        return f"{super().extra_repr()}, share_heads={self.share_heads}"


def stretch_table(table: Tensor, grid: Grid) -> Tensor:
    """A table over the offsets of one grid, `(heads, 2h-1, 2w-1)`, stretched to those of another."""
    # Both tables have offset (0, 0) in their centre, and aligned corners keep it there.
    return F.interpolate(table[None], size=grid.table_shape, mode="bilinear", align_corners=True)[0]


if __name__ == "__main__":
    from vicinal.priors.plot import main

    main("rpe:init=normal")
