"""RPE, the relative position bias: a learned number per head and offset is added to the logits.

    B_h(d) = a free (2h-1) x (2w-1) table

Shaw et al., arXiv:1803.02155, in the two-dimensional form of Swin, arXiv:2103.14030.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.grid import Grid
from vicinal.priors.base import Prior, flat_parameter
from vicinal.priors.formula import interpolate_table
from vicinal.priors.full_precision import widen

__all__ = ["RelativeBias", "stretch_flat_table", "stretch_table"]


class RelativeBias(Prior):
    """Adds a learned number per offset (relative position bias).

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
        """Returns heads, grid and sharing, for `print(model)`."""
        return f"{super().extra_repr()}, share_heads={self.share_heads}"


def stretch_table(table: Tensor, grid: Grid) -> Tensor:
    """Returns a table over offsets, `(heads, 2h-1, 2w-1)`, interpolated to the offsets of another grid."""
    # align_corners keeps offset (0, 0) in the center of the table.
    return F.interpolate(table[None], size=grid.table_shape, mode="bilinear", align_corners=True)[0]


def stretch_flat_table(table: Tensor, before: Grid, after: Grid) -> Tensor:
    """Returns a table over offsets in timm's layout, `(offsets, heads)`, interpolated to another grid.

    timm's own interpolation takes square windows only.
    """
    stretched = stretch_table(table.t().reshape(-1, *before.table_shape), after)
    return stretched.flatten(1).t().contiguous()


if __name__ == "__main__":
    from vicinal.priors.plot import main

    main("rpe:init=normal")
