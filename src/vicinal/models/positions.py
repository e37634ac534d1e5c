"""Tables of relative positions at another size; timm stretches those of square windows only."""

from torch import Tensor

from vicinal.grid import Grid
from vicinal.priors.relative_bias import stretch_table

__all__ = ["stretch_flat_table"]


def stretch_flat_table(table: Tensor, before: Grid, after: Grid) -> Tensor:
    """A table as timm keeps it, `(offsets, heads)`, stretched from one grid to another."""
    stretched = stretch_table(table.t().reshape(-1, *before.table_shape), after)
    return stretched.flatten(1).t().contiguous()
