"""RPE-MLP, the continuous relative position bias: a small MLP of the offset is added to the logits.

    B_h(d) = W2 relu(W1 u(d) + b1),   u(d) = sign(d) log2(1 + |d|) / 3   for each axis

Liu et al., "Swin Transformer V2", arXiv:2111.09883. Offsets are in patches, so the MLP serves other grids too.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.priors.base import Prior
from vicinal.priors.full_precision import widen

__all__ = ["RelativeBiasMlp"]


class RelativeBiasMlp(Prior):
    """Adds a small MLP of the offset (continuous relative position bias).

    Args:
        hidden: width of the hidden layer; `hidden (3 + heads)` parameters.
        init: `identity` starts the last layer at zero; `normal` at N(0, 0.02^2).
    """

    stretch: Tensor

    def __init__(
        self,
        heads: int,
        grid: Grid,
        layer: int = 0,
        depth: int = 1,
        *,
        hidden: int = 64,
        init: Literal["identity", "normal"] = "identity",
    ) -> None:
        super().__init__(heads, grid, layer, depth)
        if hidden < 1:
            raise VicinalError(f"rpe-mlp: hidden must be >= 1, got {hidden}")
        self.hidden, self.init = hidden, init
        self.inner = nn.Linear(2, hidden)
        self.outer = nn.Linear(hidden, heads, bias=False)
        nn.init.normal_(self.outer.weight, std=0.0 if init == "identity" else 0.02)
        # Size of a patch of the grid that the MLP was trained on, in patches of this grid, along rows and columns.
        self.register_buffer("stretch", torch.ones(2))

    def bias_at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Returns B_h(d), `(heads, *shape)`."""
        offsets = torch.stack(torch.broadcast_tensors(rows, columns), dim=-1) / widen(self.stretch)  # (*shape, 2)
        spaced = offsets.sign() * torch.log2(1 + offsets.abs()) / 3
        hidden = F.relu(F.linear(spaced, widen(self.inner.weight), widen(self.inner.bias)))
        return F.linear(hidden, widen(self.outer.weight)).permute(2, 0, 1)

    def _carry(self, before: Grid, rescale: bool) -> None:
        if rescale:
            ratio = [self.grid.height / before.height, self.grid.width / before.width]
            self.stretch.mul_(torch.tensor(ratio, device=self.stretch.device))

    def extra_repr(self) -> str:
        """Returns heads, grid and hidden width, for `print(model)`."""
        return f"{super().extra_repr()}, hidden={self.hidden}"


if __name__ == "__main__":
    from vicinal.priors.plot import main

    main("rpe-mlp:init=normal")
