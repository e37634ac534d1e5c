"""Several priors at once: `gmm+gab`.

    logits -> (scale_1 scale_2 ...) logits + (bias_1 + bias_2 + ...)

Scales multiply Q K^T and biases are added after all of them, as in their papers, so the order does not matter.
"""

import functools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.priors.base import Prior, ScaleBias
from vicinal.priors.quadratic_bias import QuadraticBias

__all__ = ["Composition"]


class Composition(Prior):
    """Multiplies all scales and adds all biases of its parts.

    Args:
        parts: priors of the same heads and grid.

    Raises:
        VicinalError: heads or grids differ.
    """

    def __init__(self, parts: Sequence[Prior]) -> None:
        first = parts[0]
        for part in parts:
            if (part.heads, part.grid) != (first.heads, first.grid):
                raise VicinalError(
                    f"composed priors must have the same heads and grid, got {first.heads} heads on {first.grid} "
                    f"and {part.heads} heads on {part.grid}"
                )
        self.per_offset = all(part.per_offset for part in parts)
        super().__init__(first.heads, first.grid, first.layer, first.depth)
        self.parts = nn.ModuleList(parts)

    def values(self) -> ScaleBias:
        """Returns the product of the parts' scales and the sum of their biases."""
        return self.values_on(self.grid)

    def values_on(self, grid: Grid) -> ScaleBias:
        """Returns the product of the parts' scales and the sum of their biases on another grid."""
        return _combine([p.values_on(grid) if self.per_offset else p.pairs_on(grid) for p in self._priors()])

    def at(self, offsets: Tensor, grid: Grid | None = None) -> ScaleBias:
        """Returns the product of the parts' scales and the sum of their biases at any offsets."""
        return _combine([part.at(offsets, grid) for part in self._priors()])

    def quadratic_bias(self) -> QuadraticBias | None:
        """Returns the sum of the parts' coefficients; None if a part is not a quadratic bias."""
        biases = [part.quadratic_bias() for part in self._priors()]
        quadratic = [bias for bias in biases if bias is not None]
        return functools.reduce(operator.add, quadratic) if len(quadratic) == len(biases) else None

    def _priors(self) -> list[Prior]:
        return [part for part in self.parts if isinstance(part, Prior)]

    def _carry(self, before: Grid, rescale: bool) -> None:
        self.parts = nn.ModuleList([part.resize(self.grid, rescale=rescale) for part in self._priors()])


def _combine(pairs: Sequence[ScaleBias]) -> ScaleBias:
    scales = [scale for scale, _ in pairs if scale is not None]
    biases = [bias for _, bias in pairs if bias is not None]
    scale = functools.reduce(torch.mul, scales) if scales else None
    return scale, functools.reduce(torch.add, biases) if biases else None
