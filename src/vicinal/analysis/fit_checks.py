"""Checks of fits that Gaussians and mixtures share: which tables can be fitted, and which fits are to be believed."""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import beta

from vicinal.analysis.fit_note import FitNote, NoteKind
from vicinal.errors import VicinalError

__all__ = ["MIN_R2", "Array", "as_table", "constant_level", "fit_problem", "noise_p_value", "offsets", "table_problem"]

Array = NDArray[Any]

MIN_R2 = 0.5  # from which on a table counts as fitted
NOISE_P_VALUE = 0.01  # probability that noise passes for a fit
MIN_RELATIVE_RANGE = 4 * float(np.finfo(np.float32).eps)  # of the largest value: less is rounding of single precision
MIN_SIDE = 3  # cells
MIN_CELLS = 16  # the six parameters of a Gaussian fit nearly any nine cells


def as_table(table: ArrayLike) -> Array:
    """Returns a table in double precision, `(rows, columns)`.

    Raises:
        VicinalError: if it has another number of axes.
    """
    values = np.asarray(table, dtype=np.float64)
    if values.ndim != 2:
        raise VicinalError(f"table must be (rows, columns), got shape {values.shape}; fit one head at a time")
    return values


def offsets(shape: tuple[int, ...], center: tuple[int, int] | None) -> tuple[Array, Array]:
    """Returns the offsets along a table's axes: x `(1, columns)` and y `(rows, 1)`.

    Args:
        shape: rows and columns.
        center: row and column of offset (0, 0); by default `(rows // 2, columns // 2)`.
    """
    row, column = center or (shape[0] // 2, shape[1] // 2)
    return np.arange(shape[1], dtype=float)[None] - column, np.arange(shape[0], dtype=float)[:, None] - row


def table_problem(table: Array) -> FitNote | None:
    """Returns why a table cannot be fitted; None if it can."""
    rows, columns = table.shape
    if min(table.shape) < MIN_SIDE or table.size < MIN_CELLS:
        return FitNote(NoteKind.TOO_SMALL, f"too small: {rows} x {columns} cells")
    if not np.isfinite(table).all():
        return FitNote(NoteKind.NOT_FINITE, "not finite")
    if np.ptp(table) <= MIN_RELATIVE_RANGE * np.abs(table).max():
        return FitNote(NoteKind.FLAT, "flat: the same value everywhere")
    return None


def constant_level(table: Array) -> float:
    """Returns the mean of a table that cannot be fitted; NaN if it is not finite."""
    return float(table.mean()) if np.isfinite(table).all() else math.nan


def noise_p_value(r2: float, parameters: int, left: int) -> float:
    """Returns the probability that a linear fit explains at least `r2` of the variance of noise.

    Args:
        r2: explained part of the variance.
        parameters: number of parameters that explain it.
        left: degrees of freedom that are left.
    """
    return float(beta.sf(r2, parameters / 2, left / 2)) if left > 0 else 1.0


def fit_problem(converged: bool, r2: float, p_value: float) -> FitNote | None:
    """Returns why a fit is not to be believed; None if it is.

    Args:
        converged: whether the search converged.
        r2: explained part of the variance.
        p_value: probability that noise is fitted as well.
    """
    if not converged:
        return FitNote(NoteKind.NOT_CONVERGED, "did not converge")
    if p_value > NOISE_P_VALUE:
        return FitNote(NoteKind.LIKE_NOISE, "fits no better than noise")
    return None if r2 >= MIN_R2 else FitNote(NoteKind.POOR, f"poor: R^2 below {MIN_R2:g}")
