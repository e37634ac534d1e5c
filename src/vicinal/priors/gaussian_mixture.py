"""GMM, the Gaussian mixture mask: logits are multiplied by a sum of Gaussians of the distance.

    M(d) = c + sum_k alpha_k exp(-|d|^2 / (2 (sigma_k^2 + 1e-5)))

Li and Zhang, "Toward a Deeper Understanding: RetNet Viewed through Convolution", arXiv:2309.05375, where c = 0.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from vicinal.errors import VicinalError
from vicinal.former_bits import FORMER_BITS
from vicinal.grid import Grid
from vicinal.priors.base import EPSILON, Prior, Values, flat_parameter, initial_values
from vicinal.priors.full_precision import widen

__all__ = ["GaussianMixture"]

MAX_TABLE = 32768  # numbers that torch adds and multiplies without starting threads (at::internal::GRAIN_SIZE)


class GaussianMixture(Prior):
    """Multiplies by a mixture of Gaussians of the distance (GMM).

    Args:
        kernels: number of Gaussians K; 2 K parameters per head.
        init: `identity` starts at M = 1, which leaves a trained model unchanged: c = 1, alpha = 0, widths spaced
            geometrically from half a patch to the grid. `paper` draws sigma ~ N(10, 10^2) and alpha ~ N(0, 2^2).
            `spread` uses the widths of `identity` and draws alpha ~ N(1, 0.5^2).
        share_heads: one mask for all heads.
        sigma: initial widths in patches, in place of those of `init`: a number, one per kernel, or `(kernels, heads)`.
        alpha: initial amplitudes, in place of those of `init`; shapes as for sigma.
        constant: c, not learned; by default 1 for `identity` without `alpha`, else 0.
    """

    def __init__(
        self,
        heads: int,
        grid: Grid,
        layer: int = 0,
        depth: int = 1,
        *,
        kernels: int = 5,
        init: Literal["identity", "paper", "spread"] = "identity",
        share_heads: bool = False,
        sigma: Values | None = None,
        alpha: Values | None = None,
        constant: float | None = None,
    ) -> None:
        super().__init__(heads, grid, layer, depth)
        if kernels < 1:
            raise VicinalError(f"gmm: kernels must be >= 1, got {kernels}")
        self.kernels, self.init, self.share_heads = kernels, init, share_heads
        shape = (kernels, 1 if share_heads else heads)
        drawn_sigma, drawn_alpha = _draw(init, shape, grid)
        self.flat_sigma = flat_parameter(drawn_sigma if sigma is None else initial_values("gmm", "sigma", sigma, shape))
        self.flat_alpha = flat_parameter(drawn_alpha if alpha is None else initial_values("gmm", "alpha", alpha, shape))
        starts_at_one = init == "identity" and alpha is None
        self.constant = float(starts_at_one) if constant is None else constant

    @property
    def sigma(self) -> Tensor:
        """Widths in patches, `(kernels, heads)`."""
        return widen(self.flat_sigma).view(self.kernels, -1).expand(-1, self.heads)

    @property
    def alpha(self) -> Tensor:
        """Amplitudes, `(kernels, heads)`."""
        return widen(self.flat_alpha).view(self.kernels, -1).expand(-1, self.heads)

    def scale_at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Returns M(d), `(heads or 1, *shape)`."""
        sigma, alpha = (widen(x).view(self.kernels, -1, 1, 1) for x in (self.flat_sigma, self.flat_alpha))
        # |d|^2 = rows^2 + columns^2, so each Gaussian is a product of one over rows and one over columns. The rate is
        # part of the exponents: exp2 does not underflow early. For small tables nothing here calls MKL, as `torch.exp`
        # and matrix products do: it starts its threads for a few hundred numbers and, on busy cores, waits for them.
        exponential, base = (torch.exp, 1.0) if FORMER_BITS else (torch.exp2, math.log2(math.e))
        rate = -0.5 * base / (sigma.square() + EPSILON)
        over_rows, over_columns = exponential(rate * rows.square()), exponential(rate * columns.square())
        is_large = FORMER_BITS or rows.shape[0] * columns.shape[1] * rate.numel() >= MAX_TABLE
        if is_large and rows.shape[1] == 1 and columns.shape[0] == 1:  # sum without a table per kernel
            return self.constant + torch.einsum("khy,khx->hyx", (alpha * over_rows)[..., 0], over_columns[..., 0, :])
        return self.constant + (alpha * over_rows * over_columns).sum(0)

    def _carry(self, before: Grid, rescale: bool) -> None:
        if rescale:
            self.flat_sigma.mul_(self.grid.side / before.side)

    def extra_repr(self) -> str:
        """Returns heads, grid, kernels and the constant, for `print(model)`."""
        return f"{super().extra_repr()}, kernels={self.kernels}, constant={self.constant:g}"


def _draw(init: str, shape: tuple[int, int], grid: Grid) -> tuple[Tensor, Tensor]:
    """Returns initial widths and amplitudes, `(kernels, heads)` each."""
    if init == "paper":
        return 10 + 10 * torch.randn(shape), 2 * torch.randn(shape)
    narrow, wide, kernels = math.log(0.5), math.log(max(grid.height, grid.width)), shape[0]
    steps = torch.linspace(narrow, wide, kernels) if kernels > 1 else torch.tensor([(narrow + wide) / 2])
    spread = steps.exp()[:, None].expand(shape)
    return spread, torch.zeros(shape) if init == "identity" else 1 + 0.5 * torch.randn(shape)


if __name__ == "__main__":
    from vicinal.priors.plot import main

    main("gmm:init=spread")
