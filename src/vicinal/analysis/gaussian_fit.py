"""Fits a table over offsets with a 2-D Gaussian.

    A exp(-(x - x0)^2 / (2 sigma_x^2) - (y - y0)^2 / (2 sigma_y^2)) + c

Kim et al., arXiv:2305.04722, describe learned relative position biases so; they set c to the table's minimum, here it
is fitted. The best A and c follow from the other four by linear least squares, so only those are searched for (variable
projection): first over all cells and a range of widths, then from the best of them in Gauss-Newton steps.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import least_squares

from vicinal.analysis.fit_checks import (
    MIN_R2,
    Array,
    as_table,
    constant_level,
    fit_problem,
    noise_p_value,
    offsets,
    table_problem,
)
from vicinal.analysis.fit_note import FitNote, NotedFit, NoteKind
from vicinal.deprecation import RenamedAttribute, renamed_parameters

__all__ = ["MIN_R2", "FitNote", "GaussianFit", "NoteKind", "fit_gaussian"]

WIDTH_P_VALUE = 0.05  # of the F-test against the widest Gaussian: above it, sigma is not identifiable
TRIES_PER_CELL = 30  # positions and widths among which noise finds its best, measured on noise of 16 to 729 cells
MIN_SIGMA = 0.3  # patches: a narrower Gaussian is below 0.4 % of its peak one patch away
NARROW_SIGMA = 1.1 * MIN_SIGMA  # a fitted sigma below it is at its lower bound
MAX_SIGMA_OVER_SIDE = 4.0  # a Gaussian wider than that many sides of the table looks like any parabola
EDGE_MARGIN = 0.5  # patches, from the center of an outer cell to its edge, where the table ends
BOUND_TOLERANCE = 1e-3  # a parameter that near to its bound is at it
NUM_STARTS = 3
MAX_STEPS = 400
AXES = ("x", "y")
MIN_POSITIVE = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True)
class GaussianFit(NotedFit):
    """A Gaussian fitted to a table. All lengths are in patches; NaN if the table cannot be fitted."""

    amplitude: float
    """A, of either sign."""
    offset: float
    """The constant c."""
    sigma_x: float
    """Width along a row."""
    sigma_y: float
    """Width along a column."""
    center_x: float
    """Position of the peak, to the right of offset 0."""
    center_y: float
    """Position of the peak, below offset 0."""
    r2: float
    """Explained part of the table's variance."""
    converged: bool
    fits: bool
    """Whether the Gaussian describes the table: it explains at least half of the variance (`MIN_R2`) and more than it
    would explain of noise, its peak is inside the table, and its widths are identifiable."""
    notes: tuple[FitNote, ...] = ()
    """Reasons why it does not fit; or, if it does, limits of the fit."""

    centre_x = RenamedAttribute("center_x")
    centre_y = RenamedAttribute("center_y")

    @renamed_parameters(centre="center")
    def values(self, shape: tuple[int, int], center: tuple[int, int] | None = None) -> Array:
        """Returns the Gaussian as a table of the given shape.

        Args:
            shape: rows and columns.
            center: as for `fit_gaussian`.
        """
        if self.amplitude == 0:
            return np.full(shape, self.offset)
        x, y = offsets(shape, center)
        exponent = ((x - self.center_x) / self.sigma_x) ** 2 + ((y - self.center_y) / self.sigma_y) ** 2
        table: Array = self.amplitude * np.exp(-exponent / 2) + self.offset
        return table


@renamed_parameters(centre="center")
def fit_gaussian(table: ArrayLike, center: tuple[int, int] | None = None) -> GaussianFit:
    """Returns the Gaussian that is nearest to a table, in the sense of least squares.

    >>> import numpy as np
    >>> from vicinal.analysis.gaussian_fit import fit_gaussian
    >>> y, x = np.mgrid[-7:8, -7:8]
    >>> fit = fit_gaussian(3 - 2 * np.exp(-((x - 1) ** 2) / 8 - y**2 / 18))
    >>> print(f"{fit.amplitude:.3f} {fit.sigma_x:.3f} {fit.sigma_y:.3f} {fit.center_x:.3f} {fit.r2:.3f} {fit.fits}")
    -2.000 2.000 3.000 1.000 1.000 True

    Args:
        table: `(rows, columns)`.
        center: row and column of offset (0, 0); by default `(rows // 2, columns // 2)`.

    Raises:
        VicinalError: if the table has another number of axes.
    """
    values = as_table(table)
    x, y = offsets(values.shape, center)
    problem = table_problem(values)
    if problem is not None:
        nan = math.nan
        return GaussianFit(0.0, constant_level(values), nan, nan, nan, nan, nan, False, False, (problem,))
    surface = _Surface(x, y, (values - values.mean()) / values.std())
    low, high = surface.bounds()
    solutions = [
        least_squares(surface.residual, start, surface.jacobian, (low, high), max_nfev=MAX_STEPS)
        for start in surface.starts()
    ]
    best = min(solutions, key=lambda solution: float(solution.cost))
    amplitude = surface.amplitude(best.x) * values.std()
    offset = values.mean() - amplitude * surface.heights(best.x).mean()
    r2 = max(0.0, 1 - 2 * float(best.cost) / values.size)
    # Bonferroni: the search tries many positions and widths, so noise is fitted better than by one Gaussian.
    p_value = TRIES_PER_CELL * values.size * noise_p_value(r2, 1, values.size - 2)
    problem = fit_problem(bool(best.success), r2, p_value) or _peak_outside(best.x, low, high)
    problem = problem or _too_wide(surface, best)
    note = problem or _too_narrow(best.x)
    return GaussianFit(
        amplitude=float(amplitude),
        offset=float(offset),
        sigma_x=math.exp(best.x[2]),
        sigma_y=math.exp(best.x[3]),
        center_x=float(best.x[0]),
        center_y=float(best.x[1]),
        r2=r2,
        converged=bool(best.success),
        fits=problem is None,
        notes=() if note is None else (note,),
    )


@dataclass(frozen=True)
class _Surface:
    """A table of mean 0 and variance 1, and Gaussians over it.

    The parameters `at` are `(x0, y0, log sigma_x, log sigma_y)`.
    """

    x: Array
    y: Array
    table: Array

    def heights(self, at: Array) -> Array:
        """Returns the Gaussian of amplitude 1, `(rows, columns)`."""
        right, down = self._from_peak(at)
        heights: Array = np.exp(-(right**2 + down**2) / 2)
        return heights

    def amplitude(self, at: Array) -> float:
        """Returns the best amplitude."""
        heights = self._centered(at)
        return float(heights @ self.table.ravel() / max(heights @ heights, MIN_POSITIVE))

    def residual(self, at: Array) -> Array:
        """Returns the table minus the best Gaussian and constant, `(cells,)`."""
        left: Array = self.table.ravel() - self.amplitude(at) * self._centered(at)
        return left

    def jacobian(self, at: Array) -> Array:
        """Returns the Jacobian of `residual`, `(cells, 4)`, in Kaufman's approximation for variable projection.

        Its gradient of the cost is exact.
        """
        right, down = self._from_peak(at)
        factors = (right / np.exp(at[2]), down / np.exp(at[3]), right**2, down**2)
        heights = self.heights(at)
        slopes = np.stack([(heights * factor).ravel() for factor in factors])
        slopes -= slopes.mean(1, keepdims=True)
        centered = self._centered(at)
        slopes -= np.outer(slopes @ centered / max(centered @ centered, MIN_POSITIVE), centered)
        change: Array = -self.amplitude(at) * slopes.T
        return change

    def bounds(self) -> tuple[Array, Array]:
        """Returns lower and upper bounds of the parameters, `(4,)` each."""
        rows, columns = self.table.shape
        low = [self.x.min() - EDGE_MARGIN, self.y.min() - EDGE_MARGIN, math.log(MIN_SIGMA), math.log(MIN_SIGMA)]
        high = [
            self.x.max() + EDGE_MARGIN,
            self.y.max() + EDGE_MARGIN,
            math.log(MAX_SIGMA_OVER_SIDE * columns),
            math.log(MAX_SIGMA_OVER_SIDE * rows),
        ]
        return np.array(low), np.array(high)

    def starts(self) -> list[Array]:
        """Returns starting points: for the best few of a range of widths, the best cell as the peak."""
        x, y, (rows, columns) = self.x.ravel(), self.y.ravel(), self.table.shape
        found = []
        for width_x in np.geomspace(0.4, 2 * columns, 7):
            for width_y in np.geomspace(0.4, 2 * rows, 7):
                # A Gaussian is separable, so two matrix products try all cells as the peak.
                over_x = np.exp(-(((x[:, None] - x) / width_x) ** 2) / 2)
                over_y = np.exp(-(((y[:, None] - y) / width_y) ** 2) / 2)
                mean = np.outer(over_y.mean(0), over_x.mean(0))
                variance = np.outer((over_y**2).mean(0), (over_x**2).mean(0)) - mean**2
                r2 = (over_y.T @ self.table @ over_x / self.table.size) ** 2 / np.maximum(variance, 1e-9)
                row, column = divmod(int(r2.argmax()), columns)
                found.append((r2.max(), [x[column], y[row], math.log(width_x), math.log(width_y)]))
        found.sort(key=lambda each: -float(each[0]))
        return [np.array(start) for _, start in found[:NUM_STARTS]]

    def _centered(self, at: Array) -> Array:
        heights = self.heights(at)
        centered: Array = (heights - heights.mean()).ravel()
        return centered

    def _from_peak(self, at: Array) -> tuple[Array, Array]:
        """Returns distances from the peak in units of sigma, `(1, columns)` and `(rows, 1)`."""
        return (self.x - at[0]) / np.exp(at[2]), (self.y - at[1]) / np.exp(at[3])


def _peak_outside(at: Array, low: Array, high: Array) -> FitNote | None:
    """Returns a note that names the axes along which the peak is at its bound, the table's edge."""
    outside = [
        axis
        for axis, peak, lower, upper in zip(AXES, at, low, high, strict=False)
        if not lower + BOUND_TOLERANCE <= peak <= upper - BOUND_TOLERANCE
    ]
    if not outside:
        return None
    return FitNote(NoteKind.PEAK_OUTSIDE, f"peak outside the table along {' and '.join(outside)}")


def _too_wide(surface: _Surface, best: Any) -> FitNote | None:
    """Returns a note that names the axes along which sigma is not identifiable.

    Along these, a fit with sigma at its upper bound is not significantly worse (F-test, p > `WIDTH_P_VALUE`).
    """
    low, high = surface.bounds()
    left = surface.table.size - 6  # degrees of freedom
    wide = []
    for number, axis in enumerate(AXES, 2):
        start, lower, upper = best.x.copy(), low.copy(), high.copy()
        start[number], lower[number] = high[number], high[number] - BOUND_TOLERANCE
        upper[5 - number] += math.log(10)  # in a parabola both widths grow together
        widest = least_squares(surface.residual, start, surface.jacobian, (lower, upper), max_nfev=MAX_STEPS)
        gained = max(0.0, 1 - float(best.cost) / max(float(widest.cost), MIN_POSITIVE))
        if noise_p_value(gained, 1, left) > WIDTH_P_VALUE:
            wide.append(axis)
    if not wide:
        return None
    if len(wide) == len(AXES):
        return FitNote(NoteKind.PARABOLA, "a parabola: too wide along x and y to tell how wide")
    return FitNote(NoteKind.TOO_WIDE, f"too wide along {wide[0]} to tell how wide")


def _too_narrow(at: Array) -> FitNote | None:
    """Returns a note that names the axes along which sigma is at its lower bound."""
    narrow = [axis for axis, log in zip(AXES, at[2:], strict=True) if log < math.log(NARROW_SIGMA)]
    if not narrow:
        return None
    return FitNote(NoteKind.TOO_NARROW, f"too narrow along {' and '.join(narrow)} to tell how narrow")
