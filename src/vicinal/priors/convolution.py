"""Conv, attention as a convolution: each head attends to one neighbor, like one tap of a convolution kernel.

    B_h(d) = -|d - mu_h|^2 / (2 (sigma_h^2 + 1e-5))

With Gaussian windows around the nine offsets of a 3 x 3 neighborhood, attention starts as a convolution and can learn
to leave it: Cordonnier et al., "On the Relationship between Self-Attention and Convolutional Layers", arXiv:1911.03584.
"""

from typing import Literal

import torch
from torch import Tensor

from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.priors.base import EPSILON, Prior, Values, flat_parameter, initial_values
from vicinal.priors.full_precision import widen
from vicinal.priors.quadratic_bias import QuadraticBias
from vicinal.priors.spec import current_options

__all__ = ["Convolution"]


class Convolution(Prior):
    """Adds a Gaussian window around a learned offset, one per head.

    Args:
        centers: initial offsets: `neighbors`, nearest first, (0, 0), (0, 1), (0, -1), (1, 0), (-1, 0), diagonals, then
            the ring of the 5 x 5 neighborhood; or `zero`, all at (0, 0).
        sigma: initial width in patches, a number or one per head. With a single number, every ninth head and the last
            one are centered and as wide as the grid, so that each layer keeps global attention; a single head is not.
        growth: relative growth of the widths per layer; offsets grow half as fast.
    """

    def __init__(
        self,
        heads: int,
        grid: Grid,
        layer: int = 0,
        depth: int = 1,
        *,
        centers: Literal["neighbors", "zero"] = "neighbors",
        sigma: Values = 1.0,
        growth: float = 0.0,
    ) -> None:
        super().__init__(heads, grid, layer, depth)
        if growth < 0:
            raise VicinalError(f"conv: growth must be >= 0, got {growth}")
        centers = current_options("conv", {"centers": centers}, warn=True)["centers"]
        self.centers, self.growth = centers, growth
        width = initial_values("conv", "sigma", sigma, (heads,)) * (1 + growth * layer)
        center = torch.zeros(heads, 2)
        wide = _wide_heads(heads) if isinstance(sigma, float | int) else torch.zeros(heads, dtype=torch.bool)
        if centers == "neighbors":
            center[~wide] = _neighbors(heads - int(wide.sum())) * (1 + growth / 2 * layer)
        width = torch.where(wide, float(max(grid.height, grid.width)), width)
        self.flat_mu = flat_parameter(center)
        self.flat_sigma = flat_parameter(width)

    @property
    def mu(self) -> Tensor:
        """Window centers as (rows, columns) from the query, `(heads, 2)`."""
        return widen(self.flat_mu).view(self.heads, 2)

    @property
    def sigma(self) -> Tensor:
        """Widths in patches, `(heads,)`."""
        return widen(self.flat_sigma)

    def bias_at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Returns B_h(d), `(heads, *shape)`."""
        row, column = self.mu[:, :, None, None].unbind(1)
        distance = (rows - row).square() + (columns - column).square()
        return -distance / (2 * (self.sigma.square() + EPSILON))[:, None, None]

    def quadratic_bias(self) -> QuadraticBias:
        """Returns the coefficients of B_h."""
        return QuadraticBias.window(0.5 / (self.sigma.square() + EPSILON), self.mu)

    def _carry(self, before: Grid, rescale: bool) -> None:
        if rescale:
            ratio = [self.grid.height / before.height, self.grid.width / before.width]
            self.flat_mu.view(-1, 2).mul_(torch.tensor(ratio, device=self.flat_mu.device))
            self.flat_sigma.mul_(self.grid.side / before.side)

    def extra_repr(self) -> str:
        """Returns heads, grid, centers and growth, for `print(model)`."""
        return f"{super().extra_repr()}, centers={self.centers}, growth={self.growth:g}"


def _wide_heads(heads: int) -> Tensor:
    """Returns which heads start as wide as the grid, bool `(heads,)`."""
    number = torch.arange(1, heads + 1)
    return ((number % 9 == 0) | (number == heads)) & (heads > 1)


def _neighbors(count: int) -> Tensor:
    """Returns the first `count` offsets of a 5 x 5 neighborhood, `(count, 2)`, nearest first, repeated after 25."""
    offsets = [(row, column) for row in range(-2, 3) for column in range(-2, 3)]
    offsets.sort(key=lambda d: (d[0] ** 2 + d[1] ** 2, abs(d[0]), -d[0], -d[1]))
    return torch.tensor([offsets[i % len(offsets)] for i in range(count)], dtype=torch.float32).view(-1, 2)


if __name__ == "__main__":
    from vicinal.priors.plot import main

    main("conv")
