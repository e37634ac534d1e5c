"""A Gaussian is fitted to a noisy table as well as least squares can: deviations are those of the standard error."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from test_gaussian_fit import gaussian
from vicinal.analysis.gaussian_fit import fit_gaussian


def standard_errors(sigma_x, sigma_y, noise):
    """Returns the standard errors of widths and center by least squares: noise^2 (J^T J)^-1 at what was planted."""
    numbers, step = np.array([sigma_x, sigma_y, 0.5, -1.0, 1.0, 2.0]), 1e-5
    slopes = [
        (gaussian((15, 15), *(numbers + change)) - gaussian((15, 15), *(numbers - change))).ravel() / (2 * step)
        for change in step * np.eye(6)
    ]
    return noise * np.sqrt(np.diag(np.linalg.inv(np.array(slopes) @ np.array(slopes).T)))[:4]


@settings(deadline=None, max_examples=30)
@given(st.floats(1, 4), st.floats(1, 4), st.sampled_from([-1, 1]), st.floats(0, 0.3), st.integers(0, 2**32))
@example(1.0, 1.0, 1, 0.125, 194)  # 2.3 standard errors too narrow
def test_with_noise_it_stays_near_what_was_planted(sigma_x, sigma_y, sign, noise, seed):
    planted = gaussian((15, 15), sigma_x, sigma_y, 0.5, -1.0, sign, 2.0)
    deviations = noise * np.random.default_rng(seed).standard_normal((15, 15))
    fit = fit_gaussian(planted + deviations)
    assert fit.converged
    assert 0 <= fit.r2 <= 1
    # No worse than what was planted, which is among what it searched.
    left = (fit.values((15, 15)) - planted - deviations) ** 2
    assert left.sum() <= (deviations**2).sum() * (1 + 1e-6) + 1e-9
    if noise <= 0.15:
        assert fit.fits == (fit.r2 >= 0.5)
        errors = standard_errors(sigma_x, sigma_y, noise)
        # Fitted widths are skewed upward; their reciprocals are nearly normal.
        narrower = (sigma_x / fit.sigma_x - 1, sigma_y / fit.sigma_y - 1)
        assert (np.abs(narrower) <= 6 * errors[:2] / (sigma_x, sigma_y) + 1e-3).all()
        assert (np.abs((fit.center_x - 0.5, fit.center_y + 1.0)) <= 6 * errors[2:] + 1e-3).all()


@pytest.mark.parametrize("sigmas", [(1.0, 1.0), (1.5, 3.0)])
def test_deviations_by_noise_have_the_size_of_the_standard_error(sigmas):
    random, noise = np.random.default_rng(0), 0.05
    planted, errors = gaussian((15, 15), *sigmas, 0.5, -1.0, 1.0, 2.0), standard_errors(*sigmas, noise)
    fits = [fit_gaussian(planted + noise * random.standard_normal((15, 15))) for _ in range(50)]
    found = np.array([(fit.sigma_x, fit.sigma_y, fit.center_x, fit.center_y) for fit in fits])
    deviations = (found - [*sigmas, 0.5, -1.0]) / errors
    # Over 50 fits the mean has a standard error of 0.14, the root mean square one of 0.1.
    assert np.abs(deviations.mean(0)).max() < 0.5
    assert np.sqrt((deviations**2).mean(0)) == pytest.approx(np.ones(4), abs=0.3)
