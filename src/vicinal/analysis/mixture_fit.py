"""Fit a table by a mixture of Gaussians of the distance, as the prior `gmm` has it.

    sum_k alpha_k exp(-|d|^2 / (2 (sigma_k^2 + 1e-5))) + c

Such a mask learns 2 K numbers where a free table learns one for each offset: can it stand in for it? Only the widths
are searched for; amplitudes and c follow by linear least squares.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import least_squares

from vicinal.analysis.gaussian_fit import NARROWEST, STEPS, WIDEST, Array, as_table, chance, doubt, level, places, unfit
from vicinal.errors import VicinalError
from vicinal.priors.base import EPSILON

__all__ = ["MixtureFit", "fit_mixture", "fit_mixtures"]

CANDIDATES = 24  # widths tried for one more kernel
SHRINKAGE = 1e-9  # keeps amplitudes of kernels of nearly the same width from running away against each other


@dataclass(frozen=True)
class MixtureFit:
    """A mixture fitted to a table: `alpha`, `sigma` and `constant` are options of the prior `gmm`."""

    alpha: tuple[float, ...]
    sigma: tuple[float, ...]
    """Widths in patches, from narrow to wide."""
    constant: float
    r2: float
    """The part of the table's variance that it explains."""
    ceiling: float
    """R^2 of the mean at each distance, which no function of the distance surpasses."""
    converged: bool
    fits: bool
    """Whether it explains at least half of the variance, and more than it would of noise."""
    note: str | None
    """Why not."""

    @property
    def kernels(self) -> int:
        """Number of Gaussians."""
        return len(self.alpha)

    def values(self, shape: tuple[int, int], centre: tuple[int, int] | None = None) -> Array:
        """The mixture as a table; arguments as for `fit_mixtures`."""
        x, y = places(shape, centre)
        kernels = _kernels((x**2 + y**2).ravel(), np.array(self.sigma))
        table: Array = (kernels @ np.array(self.alpha) + self.constant).reshape(shape)
        return table


def fit_mixture(table: ArrayLike, kernels: int, centre: tuple[int, int] | None = None) -> MixtureFit:
    """The mixture of so many Gaussians that is nearest to a table.

    >>> import numpy as np, vicinal
    >>> from vicinal.analysis.mixture_fit import fit_mixture
    >>> y, x = np.mgrid[-7:8, -7:8]
    >>> fit = fit_mixture(1 + np.exp(-(x**2 + y**2) / 32) - 2 * np.exp(-(x**2 + y**2) / 2), kernels=2)
    >>> print([f"{sigma:.3f}" for sigma in fit.sigma], f"{fit.constant:.3f}")
    ['1.000', '4.000'] 1.000
    >>> options = {"kernels": 2, "sigma": fit.sigma, "alpha": fit.alpha, "constant": fit.constant}
    >>> prior = vicinal.build_prior("gmm", heads=3, grid=vicinal.Grid(8, 8), **options)

    Args:
        table: `(rows, columns)`.
        kernels: number of Gaussians.
        centre: row and column of offset (0, 0); by default the middle.
    """
    return fit_mixtures(table, kernels, centre)[-1]


def fit_mixtures(table: ArrayLike, most: int, centre: tuple[int, int] | None = None) -> list[MixtureFit]:
    """The mixtures of 1, 2, ... `most` Gaussians; each starts from the one before, so that R^2 never falls."""
    if not isinstance(most, int) or most < 1:
        raise VicinalError(f"a mixture needs kernels as a whole number >= 1, given {most!r}")
    values = as_table(table)
    reason = unfit(values)
    found: list[MixtureFit] = []
    if reason is not None:
        none = MixtureFit((), (), level(values), math.nan, math.nan, False, False, reason)
        return [replace(none, alpha=(0.0,) * k, sigma=(1.0,) * k) for k in range(1, most + 1)]
    profile = _Profile(values, centre)
    for kernels in range(1, most + 1):
        fit = profile.fit(kernels, found[-1].sigma if found else ())
        if found and fit.r2 < found[-1].r2:
            before = found[-1]
            fit = replace(before, alpha=(*before.alpha, 0.0), sigma=(*before.sigma, before.sigma[-1]))
        found.append(fit)
    return found


class _Profile:
    """A table by distance: a function of the distance meets its means, or nothing."""

    def __init__(self, table: Array, centre: tuple[int, int] | None) -> None:
        x, y = places(table.shape, centre)
        self.squared, which, counts = np.unique((x**2 + y**2).ravel(), return_inverse=True, return_counts=True)
        self.mean, self.spread, self.cells = float(table.mean()), float(table.std()), table.size
        means = np.bincount(which, (table.ravel() - self.mean) / self.spread) / counts
        self.weights = np.sqrt(counts / table.size)
        self.target = self.weights * means
        self.ceiling = float(self.target @ self.target)
        self.low, self.high = math.log(NARROWEST), math.log(WIDEST * max(table.shape))

    def fit(self, kernels: int, before: Sequence[float]) -> MixtureFit:
        """The mixture, from the widths of the one before and one more, or from widths spread evenly."""
        known = np.clip(np.log(np.array(before)), self.low, self.high)
        more = [np.append(known, width) for width in np.linspace(self.low, self.high, CANDIDATES + 2)[1:-1]]
        starts = [min(more, key=lambda logs: float(np.square(self._residual(logs)).sum()))]
        starts.append(np.linspace(self.low, self.high, kernels + 2)[1:-1])
        solutions = [
            least_squares(self._residual, start, self._jacobian, (self.low, self.high), ftol=1e-6, max_nfev=STEPS)
            for start in starts
        ]
        best = min(solutions, key=lambda solution: float(solution.cost))
        logs = np.sort(best.x)
        design, alpha = self._solve(logs)
        left = self.target - design[: len(self.target)] @ alpha
        r2 = max(0.0, self.ceiling - float(left @ left))
        explaining = min(2 * kernels, len(self.target) - 1)
        problem = doubt(bool(best.success), r2, chance(r2, explaining, self.cells - 1 - explaining))
        level = self.weights**2 @ _kernels(self.squared, np.exp(logs))
        return MixtureFit(
            alpha=tuple(float(number) for number in alpha * self.spread),
            sigma=tuple(float(number) for number in np.exp(logs)),
            constant=float(self.mean - self.spread * level @ alpha),
            r2=r2,
            ceiling=self.ceiling,
            converged=bool(best.success),
            fits=problem is None,
            note=problem,
        )

    def _solve(self, logs: Array) -> tuple[Array, Array]:
        """For these widths: what amplitudes multiply, to meet the target and to stay small, and the best of them."""
        design = np.vstack([self._weighted(_kernels(self.squared, np.exp(logs))), SHRINKAGE**0.5 * np.eye(len(logs))])
        return design, np.linalg.lstsq(design, self._goal(logs))[0]

    def _residual(self, logs: Array) -> Array:
        design, alpha = self._solve(logs)
        left: Array = self._goal(logs) - design @ alpha
        return left

    def _jacobian(self, logs: Array) -> Array:
        """How the residual changes, but for what amplitudes make up for, as in `fit_gaussian`."""
        design, alpha = self._solve(logs)
        squared_widths = np.exp(2 * logs)
        kernels = _kernels(self.squared, np.exp(logs))
        slopes = kernels * self.squared[:, None] * squared_widths / (squared_widths + EPSILON) ** 2
        change = np.vstack([self._weighted(slopes) * alpha, np.zeros((len(logs), len(logs)))])
        basis, _ = np.linalg.qr(design)
        jacobian: Array = basis @ (basis.T @ change) - change
        return jacobian

    def _goal(self, logs: Array) -> Array:
        return np.append(self.target, np.zeros(len(logs)))

    def _weighted(self, columns: Array) -> Array:
        """Functions of the distance, less their means over the table: the constant makes up for those."""
        weighted: Array = self.weights[:, None] * (columns - self.weights**2 @ columns)
        return weighted


def _kernels(squared: Array, sigma: Array) -> Array:
    """Each Gaussian at each squared distance: `(distances, kernels)`."""
    kernels: Array = np.exp(-squared[:, None] / (2 * (sigma**2 + EPSILON)))
    return kernels
