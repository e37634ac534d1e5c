"""Fit a table over places by a 2-D Gaussian.

    A exp(-(x - x0)^2 / (2 sigma_x^2) - (y - y0)^2 / (2 sigma_y^2)) + c

That is how Kim et al., arXiv:2305.04722, describe learned relative position biases; they set c to the table's minimum,
here it is fitted. The best A and c follow from the other four by linear least squares, so only those are searched for:
first over all cells and a range of widths, then from the best of them in Gauss-Newton steps.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares
from scipy.stats import beta

from vicinal.errors import VicinalError

__all__ = ["ENOUGH", "GaussianFit", "fit_gaussian"]

Array = NDArray[Any]

ENOUGH = 0.5  # R^2 from which on a table counts as fitted
CHANCE = 0.01  # how often noise may pass for a fit
UNTOLD = 0.05  # how often noise may pass for a width
TRIES = 30  # per cell: places and widths among which noise finds its best, as seen on noise of 16 to 729 cells
FLAT = 4 * float(np.finfo(np.float32).eps)  # of the largest value: differences that single precision hardly tells
NARROWEST = 0.3  # patches: a narrower Gaussian is below 0.4 % of its peak one patch away, so its width hardly shows
NARROW = 1.1 * NARROWEST  # what is found below it was stopped there
WIDEST = 4.0  # sides of the table: a wider Gaussian looks like any parabola
MARGIN = 0.5  # patches from the centre of an outer cell to its edge, where the table ends
STARTS = 3
LEAST = 16  # places: six numbers fit nearly any nine
STEPS = 400  # at most
AXES = ("x", "y")
TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True)
class GaussianFit:
    """A Gaussian fitted to a table. All lengths are in patches; NaN where there was nothing to fit."""

    amplitude: float
    """A, of either sign."""
    offset: float
    """The constant c."""
    sigma_x: float
    """Width along a row."""
    sigma_y: float
    """Width along a column."""
    centre_x: float
    """The peak, to the right of offset 0."""
    centre_y: float
    """The peak, below offset 0."""
    r2: float
    """The part of the table's variance that it explains."""
    converged: bool
    fits: bool
    """Whether it describes the table: it explains at least half of the variance (`ENOUGH`) and more than it would of
    noise, and its peak and widths are such that the table shows them."""
    note: str | None
    """Why it does not fit; or what to know if it does."""

    def values(self, shape: tuple[int, int], centre: tuple[int, int] | None = None) -> Array:
        """The Gaussian as a table; arguments as for `fit_gaussian`."""
        if self.amplitude == 0:
            return np.full(shape, self.offset)
        x, y = places(shape, centre)
        exponent = ((x - self.centre_x) / self.sigma_x) ** 2 + ((y - self.centre_y) / self.sigma_y) ** 2
        table: Array = self.amplitude * np.exp(-exponent / 2) + self.offset
        return table


def fit_gaussian(table: ArrayLike, centre: tuple[int, int] | None = None) -> GaussianFit:
    """The Gaussian that is nearest to a table.

    >>> import numpy as np
    >>> from vicinal.analysis.gaussian_fit import fit_gaussian
    >>> y, x = np.mgrid[-7:8, -7:8]
    >>> fit = fit_gaussian(3 - 2 * np.exp(-((x - 1) ** 2) / 8 - y**2 / 18))
    >>> print(f"{fit.amplitude:.3f} {fit.sigma_x:.3f} {fit.sigma_y:.3f} {fit.centre_x:.3f} {fit.r2:.3f} {fit.fits}")
    -2.000 2.000 3.000 1.000 1.000 True

    Args:
        table: `(rows, columns)`.
        centre: row and column of offset (0, 0); by default the middle.
    """
    values = as_table(table)
    x, y = places(values.shape, centre)
    reason = unfit(values)
    if reason is not None:
        nan = math.nan
        return GaussianFit(0.0, level(values), nan, nan, nan, nan, nan, converged=False, fits=False, note=reason)
    surface = _Surface(x, y, (values - values.mean()) / values.std())
    low, high = surface.bounds()
    solutions = [
        least_squares(surface.residual, start, surface.jacobian, (low, high), max_nfev=STEPS)
        for start in surface.starts()
    ]
    best = min(solutions, key=lambda solution: float(solution.cost))
    amplitude = surface.amplitude(best.x) * values.std()
    offset = values.mean() - amplitude * surface.heights(best.x).mean()
    r2 = max(0.0, 1 - 2 * float(best.cost) / values.size)
    # Noise has many places and widths to choose its best from.
    by_chance = TRIES * values.size * chance(r2, 1, values.size - 2)
    problem = doubt(bool(best.success), r2, by_chance) or _beyond(best.x, low, high) or _too_wide(surface, best)
    note = problem or _narrow(best.x)
    return GaussianFit(
        amplitude=float(amplitude),
        offset=float(offset),
        sigma_x=math.exp(best.x[2]),
        sigma_y=math.exp(best.x[3]),
        centre_x=float(best.x[0]),
        centre_y=float(best.x[1]),
        r2=r2,
        converged=bool(best.success),
        fits=problem is None,
        note=note,
    )


@dataclass(frozen=True)
class _Surface:
    """A table of mean 0 and variance 1, and Gaussians over it at `(x0, y0, log sigma_x, log sigma_y)`."""

    x: Array
    y: Array
    table: Array

    def heights(self, at: Array) -> Array:
        """The Gaussian of amplitude 1."""
        right, down = self._from_peak(at)
        heights: Array = np.exp(-(right**2 + down**2) / 2)
        return heights

    def amplitude(self, at: Array) -> float:
        """The best one."""
        heights = self._centred(at)
        return float(heights @ self.table.ravel() / max(heights @ heights, TINY))

    def residual(self, at: Array) -> Array:
        """What is left of the table."""
        left: Array = self.table.ravel() - self.amplitude(at) * self._centred(at)
        return left

    def jacobian(self, at: Array) -> Array:
        """How that changes, but for what amplitude and constant make up for: Kaufman's form, of exact gradient."""
        right, down = self._from_peak(at)
        factors = (right / np.exp(at[2]), down / np.exp(at[3]), right**2, down**2)
        heights = self.heights(at)
        slopes = np.stack([(heights * factor).ravel() for factor in factors])
        slopes -= slopes.mean(1, keepdims=True)
        centred = self._centred(at)
        slopes -= np.outer(slopes @ centred / max(centred @ centred, TINY), centred)
        change: Array = -self.amplitude(at) * slopes.T
        return change

    def bounds(self) -> tuple[Array, Array]:
        """The least and the greatest of what is searched."""
        rows, columns = self.table.shape
        low = [self.x.min() - MARGIN, self.y.min() - MARGIN, math.log(NARROWEST), math.log(NARROWEST)]
        high = [self.x.max() + MARGIN, self.y.max() + MARGIN, math.log(WIDEST * columns), math.log(WIDEST * rows)]
        return np.array(low), np.array(high)

    def starts(self) -> list[Array]:
        """The best Gaussians with a cell for their peak, of the best few widths out of a range of them."""
        x, y, (rows, columns) = self.x.ravel(), self.y.ravel(), self.table.shape
        found = []
        for width_x in np.geomspace(0.4, 2 * columns, 7):
            for width_y in np.geomspace(0.4, 2 * rows, 7):
                # A Gaussian is a product of one over rows and one over columns, so all peaks are tried in two products.
                over_x = np.exp(-(((x[:, None] - x) / width_x) ** 2) / 2)
                over_y = np.exp(-(((y[:, None] - y) / width_y) ** 2) / 2)
                mean = np.outer(over_y.mean(0), over_x.mean(0))
                variance = np.outer((over_y**2).mean(0), (over_x**2).mean(0)) - mean**2
                r2 = (over_y.T @ self.table @ over_x / self.table.size) ** 2 / np.maximum(variance, 1e-9)
                row, column = divmod(int(r2.argmax()), columns)
                found.append((r2.max(), [x[column], y[row], math.log(width_x), math.log(width_y)]))
        found.sort(key=lambda each: -float(each[0]))
        return [np.array(start) for _, start in found[:STARTS]]

    def _centred(self, at: Array) -> Array:
        heights = self.heights(at)
        centred: Array = (heights - heights.mean()).ravel()
        return centred

    def _from_peak(self, at: Array) -> tuple[Array, Array]:
        """Distances from the peak in widths, `(1, columns)` and `(rows, 1)`."""
        return (self.x - at[0]) / np.exp(at[2]), (self.y - at[1]) / np.exp(at[3])


def places(shape: tuple[int, ...], centre: tuple[int, int] | None) -> tuple[Array, Array]:
    """Offsets along a table's axes, x `(1, columns)` and y `(rows, 1)`."""
    row, column = centre or (shape[0] // 2, shape[1] // 2)
    return np.arange(shape[1], dtype=float)[None] - column, np.arange(shape[0], dtype=float)[:, None] - row


def as_table(table: ArrayLike) -> Array:
    """A table in double precision."""
    values = np.asarray(table, dtype=np.float64)
    if values.ndim != 2:
        raise VicinalError(f"a table is (rows, columns), given shape {values.shape}; fit one head at a time")
    return values


def unfit(table: Array) -> str | None:
    """Why there is nothing to fit, if so."""
    if min(table.shape) < 3 or table.size < LEAST:
        return f"too small: {table.shape[0]} x {table.shape[1]} places"
    if not np.isfinite(table).all():
        return "not finite"
    return "flat: the same everywhere" if np.ptp(table) <= FLAT * np.abs(table).max() else None


def level(table: Array) -> float:
    """The constant that stands for a table with nothing to fit."""
    return float(table.mean()) if np.isfinite(table).all() else math.nan


def chance(r2: float, explaining: int, left: int) -> float:
    """How often given numbers explain that much of noise: `explaining` of them, with `left` degrees of freedom left."""
    return float(beta.sf(r2, explaining / 2, left / 2)) if left > 0 else 1.0


def doubt(converged: bool, r2: float, by_chance: float) -> str | None:
    """Why not to believe a fit, if so."""
    if not converged:
        return "did not converge"
    if by_chance > CHANCE:
        return "no better than on noise"
    return None if r2 >= ENOUGH else f"poor: R^2 below {ENOUGH:g}"


def _beyond(at: Array, low: Array, high: Array) -> str | None:
    """Along which axes the peak was stopped at the table's edge."""
    outside = [
        axis
        for axis, peak, least, most in zip(AXES, at, low, high, strict=False)
        if not least + 1e-3 <= peak <= most - 1e-3
    ]
    return f"peak outside the table along {' and '.join(outside)}" if outside else None


def _too_wide(surface: _Surface, best: Any) -> str | None:
    """Along which axes the table does not tell how wide the Gaussian is.

    That is where a Gaussian of the greatest width is hardly worse, all else being the best then: where an F-test of the
    width does not tell them apart.
    """
    low, high = surface.bounds()
    left = surface.table.size - 6  # degrees of freedom
    open_ended = []
    for number, axis in enumerate(AXES, 2):
        start, least, most = best.x.copy(), low.copy(), high.copy()
        start[number], least[number] = high[number], high[number] - 1e-3
        most[5 - number] += math.log(10)  # in a parabola both widths grow together
        widest = least_squares(surface.residual, start, surface.jacobian, (least, most), max_nfev=STEPS)
        gained = max(0.0, 1 - float(best.cost) / max(float(widest.cost), TINY))
        if chance(gained, 1, left) > UNTOLD:
            open_ended.append(axis)
    shape = "a parabola: " if len(open_ended) == 2 else ""
    return f"{shape}too wide along {' and '.join(open_ended)} to tell how wide" if open_ended else None


def _narrow(at: Array) -> str | None:
    narrow = [axis for axis, log in zip(AXES, at[2:], strict=True) if log < math.log(NARROW)]
    return f"too narrow along {' and '.join(narrow)} to tell how narrow" if narrow else None
