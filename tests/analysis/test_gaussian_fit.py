import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import curve_fit

import vicinal
from vicinal.analysis import gaussian_fit
from vicinal.analysis.fit_note import NoteKind
from vicinal.analysis.gaussian_fit import fit_gaussian
from vicinal.analysis.mixture_fit import fit_mixture, fit_mixtures


def gaussian(shape, sigma_x, sigma_y, x0=0.0, y0=0.0, amplitude=1.0, constant=0.0):
    """A Gaussian written cell by cell, around the middle."""
    table = np.empty(shape)
    for row in range(shape[0]):
        for column in range(shape[1]):
            x, y = column - shape[1] // 2 - x0, row - shape[0] // 2 - y0
            table[row, column] = amplitude * math.exp(-(x**2) / (2 * sigma_x**2) - y**2 / (2 * sigma_y**2)) + constant
    return table


def mixture(shape, alpha, sigma, constant=0.0):
    """A mixture of Gaussians of the distance, around the middle."""
    kernels = zip(alpha, sigma, strict=True)
    return constant + sum(gaussian(shape, s, s, amplitude=a) for a, s in kernels)


sides = st.integers(7, 19)


@settings(deadline=None, max_examples=40)
@given(
    sides,
    sides,
    st.data(),
    st.sampled_from([-1, 1]),
    st.floats(-6, 6),
    st.floats(-3, 3),
    st.floats(-0.3, 0.3),
    st.floats(-0.3, 0.3),
)
def test_clean_tables_give_what_was_planted(rows, columns, data, sign, size, constant, right, down):
    sigma_x, sigma_y = data.draw(st.floats(0.5, columns)), data.draw(st.floats(0.5, rows))
    amplitude = sign * 10**size
    planted = gaussian((rows, columns), sigma_x, sigma_y, right * columns, down * rows, amplitude, constant * amplitude)
    fit = fit_gaussian(planted)
    assert fit.r2 > 0.999
    assert (fit.converged, fit.fits, fit.kinds) == (True, True, ())
    assert fit.sigma_x == pytest.approx(sigma_x, rel=0.01)
    assert fit.sigma_y == pytest.approx(sigma_y, rel=0.01)
    assert fit.amplitude == pytest.approx(amplitude, rel=0.02)
    assert fit.center_x == pytest.approx(right * columns, abs=0.02)
    assert fit.center_y == pytest.approx(down * rows, abs=0.02)
    np.testing.assert_allclose(fit.values((rows, columns)), planted, atol=1e-3 * abs(amplitude))


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from([1e-6, 1e6, -1.0]), st.floats(-10, 10))
def test_scale_and_constant_of_a_table_change_nothing_else(seed, factor, constant):
    table = gaussian((9, 11), 2.0, 1.5, 1.0) + 0.2 * np.random.default_rng(seed).standard_normal((9, 11))
    one, other = fit_gaussian(table), fit_gaussian(factor * (table + constant))
    assert other.r2 == pytest.approx(one.r2, rel=1e-5)
    assert other.amplitude == pytest.approx(factor * one.amplitude, rel=1e-2)
    assert (other.sigma_x, other.sigma_y) == pytest.approx((one.sigma_x, one.sigma_y), rel=1e-2)
    assert other.fits == one.fits


def test_a_general_fit_of_all_six_numbers_finds_the_same():
    table = gaussian((15, 15), 2.5, 4.0, 0.7, -0.4, -1.3, 0.6)
    table += 0.1 * np.random.default_rng(0).standard_normal((15, 15))

    def model(place, *numbers):
        amplitude, constant, sigma_x, sigma_y, x0, y0 = numbers
        x, y = place
        return amplitude * np.exp(-((x - x0) ** 2) / (2 * sigma_x**2) - (y - y0) ** 2 / (2 * sigma_y**2)) + constant

    y, x = (axis.ravel() - 7.0 for axis in np.indices((15, 15)))
    expected, _ = curve_fit(model, (x, y), table.ravel(), p0=(-1, 0.5, 2, 4, 0, 0))
    fit = fit_gaussian(table)
    found = (fit.amplitude, fit.offset, fit.sigma_x, fit.sigma_y, fit.center_x, fit.center_y)
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    unexplained = ((model((x, y), *expected) - table.ravel()) ** 2).sum() / ((table - table.mean()) ** 2).sum()
    assert fit.r2 == pytest.approx(1 - unexplained, abs=1e-6)


def test_places_are_counted_from_the_center_that_is_given():
    table = gaussian((9, 9), 1.5, 2.0)  # peak in row 4 and column 4
    fit = fit_gaussian(table, center=(1, 6))
    assert (fit.center_x, fit.center_y) == pytest.approx((-2, 3), abs=1e-4)
    np.testing.assert_allclose(fit.values((9, 9), (1, 6)), table, atol=1e-6)


@pytest.mark.parametrize("shape", [(4, 4), (7, 7), (8, 12), (15, 15)])
def test_noise_is_flagged(shape):
    random = np.random.default_rng(5)
    fits = [fit_gaussian(random.standard_normal(shape)) for _ in range(12)]
    assert not any(fit.fits for fit in fits)
    assert sum(fit.kinds == (NoteKind.LIKE_NOISE,) for fit in fits) >= 11


@pytest.mark.parametrize("value", [0.0, 1.0, -3e5])
def test_a_flat_table_is_flagged(value):
    table = np.full((7, 9), value, dtype=np.float32)
    fit = fit_gaussian(table)
    assert (fit.fits, fit.kinds) == (False, (NoteKind.FLAT,))
    assert (fit.amplitude, fit.offset) == (0, value)
    assert math.isnan(fit.r2)
    np.testing.assert_array_equal(fit.values((7, 9)), table)
    assert fit_mixture(table, 2).notes == fit.notes
    np.testing.assert_array_equal(fit_mixture(table, 2).values((7, 9)), table)


def test_rounding_of_single_precision_is_flat():
    noise = np.random.default_rng(0).standard_normal((9, 9)) * 1e-8
    assert fit_gaussian((1 + noise).astype(np.float32)).kinds == (NoteKind.FLAT,)


@pytest.mark.parametrize(
    ("table", "kind", "axes"),
    [
        (np.full((7, 7), np.nan), NoteKind.NOT_FINITE, ""),
        (np.where(np.eye(7) > 0, np.inf, 0), NoteKind.NOT_FINITE, ""),
        (np.arange(10.0).reshape(2, 5), NoteKind.TOO_SMALL, "2 x 5"),
        (np.arange(9.0).reshape(3, 3), NoteKind.TOO_SMALL, "3 x 3"),
        (gaussian((9, 9), 1.5, 1e9), NoteKind.TOO_WIDE, "along y "),
        (
            -np.add.outer(np.arange(-4, 5) ** 2, np.arange(-4, 5) ** 2),
            NoteKind.PARABOLA,
            "along x and y",
        ),
        (
            -np.add.outer(np.arange(-4, 5) ** 2, 3 * np.arange(-8, 9) ** 2),
            NoteKind.PARABOLA,
            "along x and y",
        ),
        (gaussian((9, 9), 2.0, 2.0, 6.0), NoteKind.PEAK_OUTSIDE, "along x"),
        (gaussian((9, 9), 0.8, 0.8, -3, -3) + gaussian((9, 9), 0.8, 0.8, 3, 3), NoteKind.POOR, "0.5"),
    ],
)
def test_what_does_not_fit_says_why(table, kind, axes):
    fit = fit_gaussian(table)
    assert (fit.fits, fit.kinds) == (False, (kind,))
    assert axes in fit.note


@pytest.mark.parametrize("peak", [(4.45, 0.0), (-4.3, 4.2), (1.0, -4.45)])
def test_a_peak_in_an_outer_cell_is_in_the_table(peak):
    fit = fit_gaussian(gaussian((9, 9), 2.0, 1.5, *peak))
    assert (fit.fits, fit.kinds, fit.note) == (True, (), None)
    assert (fit.center_x, fit.center_y) == pytest.approx(peak, abs=0.01)


def r2_at_width(table, sigma):
    """Of the best Gaussian of one width around the middle, amplitude and constant by numpy."""
    heights = gaussian(table.shape, sigma, sigma).ravel()
    design = np.stack([heights, np.ones_like(heights)], 1)
    left = table.ravel() - design @ np.linalg.lstsq(design, table.ravel())[0]
    return 1 - left @ left / ((table - table.mean()) ** 2).sum()


def test_a_width_that_the_table_does_not_tell_is_flagged():
    table = gaussian((9, 9), 6.0, 6.0, amplitude=5.0)
    table[4, 4] -= 1  # no Gaussian follows that, and it hides the difference that the width makes
    fit = fit_gaussian(table)
    assert fit.r2 == pytest.approx(r2_at_width(table, fit.sigma_x))
    assert r2_at_width(table, 1000) == pytest.approx(fit.r2, abs=1e-3)
    assert fit.sigma_x < 20  # of 36 that are looked at
    assert (fit.fits, fit.kinds) == (False, (NoteKind.PARABOLA,))


def test_a_width_is_flagged_along_its_own_axis_only():
    table = gaussian((9, 9), 1.5, 15.0) + 0.15 * np.random.default_rng(0).standard_normal((9, 9))
    fit = fit_gaussian(table)
    assert fit.kinds == (NoteKind.TOO_WIDE,)
    assert "along y " in fit.note


def test_a_single_patch_that_stands_out_fits_with_a_note():
    table = np.zeros((9, 9))
    table[4, 4] = -2
    fit = fit_gaussian(table)
    assert fit.fits
    assert fit.kinds == (NoteKind.TOO_NARROW,)
    assert "along x and y" in fit.note
    assert fit.amplitude == pytest.approx(-2, rel=0.02)


def test_too_few_steps_are_flagged(monkeypatch):
    monkeypatch.setattr(gaussian_fit, "MAX_STEPS", 1)
    table = gaussian((15, 15), 2.5, 4.0, 0.7, -0.4) + 0.1 * np.random.default_rng(0).standard_normal((15, 15))
    fit = fit_gaussian(table)
    assert (fit.converged, fit.fits, fit.kinds) == (False, False, (NoteKind.NOT_CONVERGED,))


@pytest.mark.parametrize("fit", [fit_gaussian, lambda table: fit_mixture(table, 2)])
def test_a_table_has_two_axes(fit):
    with pytest.raises(vicinal.VicinalError, match=r"\(3, 15, 15\)"):
        fit(np.zeros((3, 15, 15)))


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.floats(-3, 3).filter(lambda a: abs(a) > 0.2), min_size=3, max_size=3),
    st.floats(0.5, 0.8),
    st.floats(1.5, 2.5),
    st.floats(4, 8),
    st.floats(-2, 2),
)
def test_a_planted_mixture_of_three_is_found(alpha, narrow, middle, wide, constant):
    planted = mixture((15, 15), alpha, (narrow, middle, wide), constant)
    fits = fit_mixtures(planted, 4)
    assert [fit.kernels for fit in fits] == [1, 2, 3, 4]
    assert fits[2].r2 > 0.999
    assert fits[2].fits
    assert all(before.r2 <= after.r2 for before, after in itertools.pairwise(fits))
    np.testing.assert_allclose(fits[2].values((15, 15)), planted, atol=0.05 * np.ptp(planted))


def test_kernels_that_lie_apart_are_found_one_by_one():
    fit = fit_mixture(mixture((15, 15), (-2, 3, 1), (0.6, 2, 6), 0.5), 3)
    np.testing.assert_allclose(fit.sigma, (0.6, 2, 6), rtol=1e-2)
    np.testing.assert_allclose(fit.alpha, (-2, 3, 1), rtol=1e-2)
    assert fit.constant == pytest.approx(0.5, rel=1e-2)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32), st.sampled_from([(7, 7), (15, 15), (8, 12)]))
def test_r2_never_falls_with_more_kernels_and_stays_below_that_of_any_function(seed, shape):
    random = np.random.default_rng(seed)
    table = gaussian(shape, 2.0, 3.0) + random.uniform(0, 2) * random.standard_normal(shape)
    fits = fit_mixtures(table, 5)
    assert all(before.r2 <= after.r2 for before, after in itertools.pairwise(fits))
    row, column = np.indices(shape)
    squared = (row - shape[0] // 2) ** 2 + (column - shape[1] // 2) ** 2
    means = np.array([[table[squared == squared[r, c]].mean() for c in range(shape[1])] for r in range(shape[0])])
    assert fits[0].ceiling == pytest.approx(np.var(means) / np.var(table), rel=1e-9)
    for fit in fits:
        assert fit.r2 <= fit.ceiling + 1e-12
        assert fit.r2 == pytest.approx(1 - np.mean((table - fit.values(shape)) ** 2) / np.var(table), abs=1e-9)


def test_noise_is_no_mixture():
    random = np.random.default_rng(2)
    for shape in ((7, 7), (15, 15)):
        assert not any(fit.fits for fit in fit_mixtures(random.standard_normal(shape), 4))


def test_a_mixture_can_be_planted_into_the_prior():
    random = np.random.default_rng(1)
    table = mixture((15, 15), (-1, 2, 1), (0.7, 1.8, 5)) + 0.2 * random.standard_normal((15, 15))
    fit = fit_mixture(table, 5)
    options = {"sigma": fit.sigma, "alpha": fit.alpha, "constant": fit.constant}
    prior = vicinal.build_prior("gmm", heads=2, grid=vicinal.Grid(8, 8), kernels=5, **options)
    planted = prior.table()[0].detach()
    expected = torch.from_numpy(fit.values((15, 15))).expand(2, -1, -1).float()
    torch.testing.assert_close(planted, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernels", [0, -1, 2.5, "3"])
def test_kernels_are_counted(kernels):
    with pytest.raises(vicinal.VicinalError, match=f"kernels .* {kernels!r}"):
        fit_mixture(np.eye(5), kernels)


def test_old_spellings_warn_and_work():
    table = gaussian((9, 13), 2.0, 1.5)
    with pytest.warns(DeprecationWarning, match="center="):
        old = fit_gaussian(table, centre=(1, 6))
    assert old == fit_gaussian(table, center=(1, 6))
    with pytest.warns(DeprecationWarning, match="center_x"):
        assert old.centre_x == old.center_x
    with pytest.warns(DeprecationWarning, match="center="):
        assert np.array_equal(old.values((9, 13), centre=(1, 6)), old.values((9, 13), (1, 6)))
    with pytest.warns(DeprecationWarning, match="max_kernels"):
        assert len(fit_mixtures(table, most=2)) == 2
