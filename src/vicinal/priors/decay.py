"""Decay: attention weights fall by a factor gamma with every step between two patches.

    attention * gamma_h^|d|_1   that is   B_h(d) = |d|_1 log(gamma_h),   gamma_h = 1 - 2^(-5 - h)

Sun et al., "Retentive Network", arXiv:2307.08621; with the Manhattan distance of Fan et al., "RMT", arXiv:2309.11523.
"""

import torch
from torch import Tensor, nn

from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.priors.base import Prior, Values, initial_values
from vicinal.priors.full_precision import widen

__all__ = ["Decay"]


class Decay(Prior):
    """Multiplies attention by gamma to the Manhattan distance (RetNet, RMT).

    Args:
        gamma: decay in (0, 1], a number or one per head; by default 1 - 2^(-5 - head), as in RetNet.
        learnable: learn gamma, one parameter per head, which stays in (0, 1).
    """

    rate: Tensor

    def __init__(
        self,
        heads: int,
        grid: Grid,
        layer: int = 0,
        depth: int = 1,
        *,
        gamma: Values | None = None,
        learnable: bool = False,
    ) -> None:
        super().__init__(heads, grid, layer, depth)
        self.learnable = learnable
        if gamma is None:
            step = -torch.log1p(-torch.exp2(-5.0 - torch.arange(heads)))
        else:
            start = initial_values("decay", "gamma", gamma, (heads,))
            if not bool(((start > 0) & (start <= 1)).all()):
                raise VicinalError(f"decay: gamma must be in (0, 1], got {start.tolist()}")
            step = -start.log()
        rate = step.log()  # the logarithm of -log(gamma) > 0 is unconstrained
        if learnable:
            self.rate = nn.Parameter(rate)
        else:
            self.register_buffer("rate", rate)

    @property
    def gamma(self) -> Tensor:
        """Decay per step, `(heads,)`."""
        return torch.exp(-torch.exp(widen(self.rate)))

    def bias_at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Returns |d|_1 log(gamma_h), `(heads, *shape)`."""
        return -torch.exp(widen(self.rate))[:, None, None] * (rows.abs() + columns.abs())

    def _carry(self, before: Grid, rescale: bool) -> None:
        if rescale:
            self.rate.sub_(torch.tensor(self.grid.side / before.side).log().to(self.rate.device))

    def extra_repr(self) -> str:
        """Returns heads, grid and whether gamma is learned, for `print(model)`."""
        return f"{super().extra_repr()}, learnable={self.learnable}"


if __name__ == "__main__":
    from vicinal.priors.plot import main

    main("decay")
