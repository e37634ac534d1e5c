"""Fits a table with a mixture of Gaussians of the distance, as the prior `gmm` has it.

    sum_k alpha_k exp(-|d|^2 / (2 (sigma_k^2 + 1e-5))) + c

A mixture has 2 K parameters where a free table has one for each offset. Only the widths are searched for; amplitudes
and c follow by linear least squares.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import least_squares

from vicinal.analysis.fit_checks import (
    Array,
    as_table,
    constant_level,
    fit_problem,
    noise_p_value,
    offsets,
    table_problem,
)
from vicinal.analysis.fit_note import FitNote, NotedFit
from vicinal.analysis.gaussian_fit import MAX_SIGMA_OVER_SIDE, MAX_STEPS, MIN_SIGMA
from vicinal.deprecation import renamed_parameters
from vicinal.errors import VicinalError
from vicinal.priors.base import EPSILON

__all__ = ["MixtureFit", "fit_mixture", "fit_mixtures"]

NUM_CANDIDATES = 24  # widths tried for one more kernel
SHRINKAGE = 1e-9  # ridge penalty: amplitudes of kernels of nearly the same width would grow against each other


@dataclass(frozen=True)
class MixtureFit(NotedFit):
    """A mixture fitted to a table: `alpha`, `sigma` and `constant` are options of the prior `gmm`."""

    alpha: tuple[float, ...]
    sigma: tuple[float, ...]
    """Widths in patches, from narrow to wide."""
    constant: float
    r2: float
    """Explained part of the table's variance."""
    ceiling: float
    """R^2 of the mean at each distance, the maximum for any function of the distance."""
    converged: bool
    fits: bool
    """Whether the mixture explains at least half of the variance, and more than it would explain of noise."""
    notes: tuple[FitNote, ...] = ()
    """Why it does not fit."""

    @property
    def kernels(self) -> int:
        """Number of Gaussians."""
        return len(self.alpha)

    @renamed_parameters(centre="center")
    def values(self, shape: tuple[int, int], center: tuple[int, int] | None = None) -> Array:
        """Returns the mixture as a table of the given shape.

        Args:
            shape: rows and columns.
            center: as for `fit_mixture`.
        """
        x, y = offsets(shape, center)
        kernels = _kernels((x**2 + y**2).ravel(), np.array(self.sigma))
        table: Array = (kernels @ np.array(self.alpha) + self.constant).reshape(shape)
        return table


@renamed_parameters(centre="center")
def fit_mixture(table: ArrayLike, kernels: int, center: tuple[int, int] | None = None) -> MixtureFit:
    """Returns the mixture of `kernels` Gaussians that is nearest to a table, in the sense of least squares.

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
        center: row and column of offset (0, 0); by default `(rows // 2, columns // 2)`.

    Raises:
        VicinalError: if `kernels` is below 1, or the table has another number of axes.
    """
    return fit_mixtures(table, kernels, center)[-1]


@renamed_parameters(centre="center", most="max_kernels")
def fit_mixtures(table: ArrayLike, max_kernels: int, center: tuple[int, int] | None = None) -> list[MixtureFit]:
    """Returns the mixtures of 1, 2, ... `max_kernels` Gaussians.

    The search for each starts from the one before, so that R^2 never falls. Arguments and errors as for `fit_mixture`.
    """
    if not isinstance(max_kernels, int) or max_kernels < 1:
        raise VicinalError(f"kernels must be a whole number >= 1, got {max_kernels!r}")
    values = as_table(table)
    problem = table_problem(values)
    found: list[MixtureFit] = []
    if problem is not None:
        unfitted = MixtureFit((), (), constant_level(values), math.nan, math.nan, False, False, (problem,))
        return [replace(unfitted, alpha=(0.0,) * k, sigma=(1.0,) * k) for k in range(1, max_kernels + 1)]
    profile = _Profile(values, center)
    for kernels in range(1, max_kernels + 1):
        fit = profile.fit(kernels, found[-1].sigma if found else ())
        if found and fit.r2 < found[-1].r2:
            before = found[-1]
            fit = replace(before, alpha=(*before.alpha, 0.0), sigma=(*before.sigma, before.sigma[-1]))
        found.append(fit)
    return found


class _Profile:
    """The means of a table at each distance: a function of the distance cannot explain more."""

    def __init__(self, table: Array, center: tuple[int, int] | None) -> None:
        x, y = offsets(table.shape, center)
        self.squared, which, counts = np.unique((x**2 + y**2).ravel(), return_inverse=True, return_counts=True)
        self.mean, self.spread, self.cells = float(table.mean()), float(table.std()), table.size
        means = np.bincount(which, (table.ravel() - self.mean) / self.spread) / counts
        self.weights = np.sqrt(counts / table.size)
        self.target = self.weights * means
        self.ceiling = float(self.target @ self.target)
        self.low, self.high = math.log(MIN_SIGMA), math.log(MAX_SIGMA_OVER_SIDE * max(table.shape))

    def fit(self, kernels: int, before: Sequence[float]) -> MixtureFit:
        """Returns the best mixture of a number of kernels.

        The search starts from the widths of the mixture before and one more, and from widths spread evenly.
        """
        known = np.clip(np.log(np.array(before)), self.low, self.high)
        more = [np.append(known, width) for width in np.linspace(self.low, self.high, NUM_CANDIDATES + 2)[1:-1]]
        starts = [min(more, key=lambda logs: float(np.square(self._residual(logs)).sum()))]
        starts.append(np.linspace(self.low, self.high, kernels + 2)[1:-1])
        solutions = [
            least_squares(self._residual, start, self._jacobian, (self.low, self.high), ftol=1e-6, max_nfev=MAX_STEPS)
            for start in starts
        ]
        best = min(solutions, key=lambda solution: float(solution.cost))
        logs = np.sort(best.x)
        design, alpha = self._solve(logs)
        left = self.target - design[: len(self.target)] @ alpha
        r2 = max(0.0, self.ceiling - float(left @ left))
        explaining = min(2 * kernels, len(self.target) - 1)
        p_value = noise_p_value(r2, explaining, self.cells - 1 - explaining)
        problem = fit_problem(bool(best.success), r2, p_value)
        level = self.weights**2 @ _kernels(self.squared, np.exp(logs))
        return MixtureFit(
            alpha=tuple(float(number) for number in alpha * self.spread),
            sigma=tuple(float(number) for number in np.exp(logs)),
            constant=float(self.mean - self.spread * level @ alpha),
            r2=r2,
            ceiling=self.ceiling,
            converged=bool(best.success),
            fits=problem is None,
            notes=() if problem is None else (problem,),
        )

    def _solve(self, logs: Array) -> tuple[Array, Array]:
        """Returns the design matrix of given widths, with rows of the ridge penalty below, and the best amplitudes."""
        design = np.vstack([self._weighted(_kernels(self.squared, np.exp(logs))), SHRINKAGE**0.5 * np.eye(len(logs))])
        return design, np.linalg.lstsq(design, self._goal(logs))[0]

    def _residual(self, logs: Array) -> Array:
        design, alpha = self._solve(logs)
        left: Array = self._goal(logs) - design @ alpha
        return left

    def _jacobian(self, logs: Array) -> Array:
        """Returns the Jacobian of the residual in Kaufman's approximation, as in `fit_gaussian`."""
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
        """Returns functions of the distance minus their means over the table, which the constant absorbs, weighted."""
        weighted: Array = self.weights[:, None] * (columns - self.weights**2 @ columns)
        return weighted


def _kernels(squared: Array, sigma: Array) -> Array:
    """Returns each Gaussian at each squared distance, `(distances, kernels)`."""
    kernels: Array = np.exp(-squared[:, None] / (2 * (sigma**2 + EPSILON)))
    return kernels
