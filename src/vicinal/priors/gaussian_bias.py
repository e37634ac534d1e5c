"""GAB, the Gaussian attention bias: a Gaussian of the distance is added to the logits.

    B(d) = A^2 exp(-|d|^2 / (2 sigma^2))

Kim et al., "Understanding Gaussian Attention Bias of Vision Transformers Using Effective Receptive Fields",
arXiv:2305.04722. A constant term would cancel in the softmax.
"""

import math

import torch
from torch import Tensor

from vicinal.former_bits import FORMER_BITS
from vicinal.grid import Grid
from vicinal.priors.base import EPSILON, Prior, Values, flat_parameter, initial_values
from vicinal.priors.full_precision import widen

__all__ = ["GaussianBias"]


class GaussianBias(Prior):
    """Adds a Gaussian of the distance (GAB).

    Args:
        share_heads: one Gaussian for all heads, the paper's choice; else one per head.
        sigma: initial width in patches, a number or one per head; by default 0.35 of the grid's side, as the learned
            biases in the paper's Table 1.
        amplitude: initial A, a number or one per head.
    """

    def __init__(
        self,
        heads: int,
        grid: Grid,
        layer: int = 0,
        depth: int = 1,
        *,
        share_heads: bool = True,
        sigma: Values | None = None,
        amplitude: Values = 1.0,
    ) -> None:
        super().__init__(heads, grid, layer, depth)
        self.share_heads = share_heads
        shape = (1 if share_heads else heads,)
        start = 0.35 * grid.side if sigma is None else sigma
        self.flat_sigma = flat_parameter(initial_values("gab", "sigma", start, shape))
        self.flat_amplitude = flat_parameter(initial_values("gab", "amplitude", amplitude, shape))

    @property
    def sigma(self) -> Tensor:
        """Widths in patches, `(heads,)`."""
        return widen(self.flat_sigma).expand(self.heads)

    @property
    def amplitude(self) -> Tensor:
        """Amplitudes A, `(heads,)`."""
        return widen(self.flat_amplitude).expand(self.heads)

    def bias_at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Returns B(d), `(heads or 1, *shape)`."""
        sigma, amplitude = (widen(x)[:, None, None] for x in (self.flat_sigma, self.flat_amplitude))
        distance, width = rows.square() + columns.square(), sigma.square() + EPSILON
        if FORMER_BITS:
            return amplitude.square() * torch.exp(-distance / (2 * width))
        # exp2, because `torch.exp` calls MKL, which starts its threads for a small table (see `gaussian_mixture.py`)
        return amplitude.square() * torch.exp2(-0.5 * math.log2(math.e) / width * distance)

    def _carry(self, before: Grid, rescale: bool) -> None:
        if rescale:
            self.flat_sigma.mul_(self.grid.side / before.side)

    def extra_repr(self) -> str:
        """Returns heads, grid and sharing, for `print(model)`."""
        return f"{super().extra_repr()}, share_heads={self.share_heads}"


if __name__ == "__main__":
    from vicinal.priors.plot import main

    main("gab")
