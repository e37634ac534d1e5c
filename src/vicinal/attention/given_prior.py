"""Values of a prior that are computed already, as what attention needs of a prior."""

from dataclasses import dataclass

import torch

from vicinal.grid import Grid
from vicinal.priors.base import ScaleBias

__all__ = ["GivenPrior"]


@dataclass(frozen=True)
class GivenPrior:
    """A `PlacedPrior` that returns given values."""

    pair: ScaleBias
    """Scale and bias, as of `PlacedPrior.values`."""
    heads: int
    queries: int
    keys: int
    grid: Grid | None
    per_offset: bool

    @property
    def device(self) -> torch.device | None:
        """Device of the values; None if there are none."""
        return next((x.device for x in self.pair if x is not None), None)

    def values(self) -> ScaleBias:
        """Returns the values."""
        return self.pair

    def quadratic_bias(self) -> None:
        """Returns None: given values are not a formula."""

    def __call__(self) -> ScaleBias:
        """Returns scale and bias over pairs of tokens, each `(heads, queries, keys)` or None."""
        grid = self.grid
        if grid is None:
            return self.pair
        scale, bias = (
            None if x is None else grid.add_prefix(grid.unfold(x) if self.per_offset else x, neutral)
            for x, neutral in zip(self.pair, (1.0, 0.0), strict=True)
        )
        return scale, bias
