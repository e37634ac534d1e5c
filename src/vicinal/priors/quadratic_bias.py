"""`QuadraticBias`: the coefficients of a bias that is quadratic in the offset.

    B_h(d) = -a_h |d|^2 + b_h . d + c_h

A Gaussian window around mu, -a |d - mu|^2, has b = 2 a mu and c = -a |mu|^2. Coefficients of a sum are sums of
coefficients. Attention under such a bias needs no table (`vicinal.attention.quadratic`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["QuadraticBias", "formula_is_older"]

_FORMULA = ("scale", "bias", "scale_at", "bias_at", "values", "values_on", "_on_grid", "forward", "on")


@dataclass(frozen=True)
class QuadraticBias:
    """The coefficients of `-curvature |d|^2 + slope . d + constant`, d being the offset from query to key in patches.

    >>> import torch
    >>> window = QuadraticBias.window(torch.tensor([0.5]), torch.tensor([[0.0, 1.0]]))
    >>> window.slope, window.constant
    (tensor([[0., 1.]]), tensor([-0.5000]))
    """

    curvature: Tensor
    """a, `(heads,)`."""
    slope: Tensor
    """b along rows and columns, `(heads, 2)`."""
    constant: Tensor
    """c, `(heads,)`. Softmax ignores it unless there are prefix tokens, whose bias is 0."""

    @classmethod
    def window(cls, curvature: Tensor, center: Tensor) -> "QuadraticBias":
        """Returns the coefficients of `-curvature |d - center|^2`.

        Args:
            curvature: `(heads,)`.
            center: along rows and columns, `(heads, 2)`.
        """
        return cls(curvature, 2 * curvature[:, None] * center, -curvature * center.square().sum(1))

    @property
    def learned(self) -> bool:
        """Whether a gradient of the coefficients is wanted."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in (self.curvature, self.slope, self.constant))

    def __add__(self, other: "QuadraticBias") -> "QuadraticBias":
        return QuadraticBias(self.curvature + other.curvature, self.slope + other.slope, self.constant + other.constant)


def formula_is_older(prior: type) -> bool:
    """Returns whether a class of priors inherits its formula from where its `quadratic_bias` is defined, or above.

    A subclass that overrides the formula only has no `quadratic_bias`: the inherited one is of another formula.
    """

    def depth(name: str) -> int:
        return next((i for i, base in enumerate(prior.__mro__) if name in vars(base)), len(prior.__mro__))

    return all(depth(name) >= depth("quadratic_bias") for name in _FORMULA)
