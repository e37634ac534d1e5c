"""Statistics of runs over seeds: summaries, paired differences, and McNemar's test of two models.

Arms are compared seed by seed, because runs with the same seed share their data split and order. With few seeds:

- The interval is Student's t. A BCa bootstrap is too narrow: its 95 % intervals over 3 seeds cover 77 %.
- The test is the sign-flip permutation test of the mean difference, which assumes only that the difference is
  symmetric around zero where there is no effect. Its smallest p over n seeds is 2^(1-n), so it needs 6 seeds for 0.05.

Functions here do not know whether higher is better, which depends on the metric.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from vicinal.errors import VicinalError

__all__ = [
    "ALPHA",
    "CONFIDENCE",
    "MAX_EXACT_SEEDS",
    "POWER",
    "ArmSummary",
    "McNemar",
    "PairedDifference",
    "compare_pairs",
    "mcnemar",
    "planned_interval",
    "smallest_p",
    "summarize",
]

ALPHA = 0.05
"""Level of all tests."""
CONFIDENCE = 0.95
"""Coverage of all intervals."""
POWER = 0.8
"""Power at which a difference counts as detectable."""
MAX_EXACT_SEEDS = 16
"""Largest number of pairs for which all 2^n sign flips are enumerated: 0.3 s."""
RANDOM_FLIPS: int = 2**MAX_EXACT_SEEDS - 1
"""Random sign flips above that; the smallest p is then 1 / (RANDOM_FLIPS + 1), that of 17 pairs."""
ROUNDING = 100 * float(np.finfo(np.float64).eps)
"""Differences up to this fraction of the largest value are rounding errors."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ArmSummary:
    """Mean and spread of one metric over the seeds of an arm."""

    n: int
    mean: float | None
    """None without values."""
    sd: float | None
    """Standard deviation with n - 1 in the denominator; None for fewer than two values."""


@dataclass(frozen=True)
class PairedDifference:
    """The difference between an arm and its baseline over pairs of runs with the same seed: arm minus baseline."""

    n: int
    """Number of pairs."""
    mean: float | None
    """None without pairs."""
    sd: float | None
    """Standard deviation of the difference; as `low`, `high` and `detectable`, None for fewer than two pairs."""
    low: float | None
    """Lower end of the t interval of the mean."""
    high: float | None
    """Upper end of the t interval of the mean."""
    p: float
    """Two-sided p of the sign-flip permutation test of the mean, not corrected for other comparisons."""
    exact: bool
    """Whether p enumerates all sign flips; otherwise it is of random flips from a fixed seed."""
    smallest_p: float
    """Smallest p that the test gives with that many pairs."""
    wins: int
    """Pairs in which the arm is higher than the baseline."""
    ties: int
    losses: int
    detectable: float | None
    """Smallest true difference that a paired t test of as many pairs with the same standard deviation finds with a
    probability of `POWER`. The permutation test finds it less often: 62 % for 6 pairs, where only differences of one
    sign reach `ALPHA`, and 78 % for 8."""


@dataclass(frozen=True)
class McNemar:
    """Exact McNemar test of two models on the same images. It is about these two models, not about their training."""

    both_correct: int
    only_first: int
    """Images that only the first model classifies correctly."""
    only_second: int
    both_wrong: int
    p: float
    """Two-sided p of the images that only one model classifies correctly; 1 if there are none."""


def summarize(values: Sequence[float]) -> ArmSummary:
    """Returns number, mean and standard deviation of the values of an arm, one per seed.

    >>> summarize([80.0, 82.0, 84.0])
    ArmSummary(n=3, mean=82.0, sd=2.0)

    Raises:
        VicinalError: a value is not finite.
    """
    numbers = _finite("values", values)
    n = len(numbers)
    return ArmSummary(n, float(numbers.mean()) if n else None, float(numbers.std(ddof=1)) if n > 1 else None)


def compare_pairs(values: Sequence[float], baseline_values: Sequence[float]) -> PairedDifference:
    """Returns the difference of an arm to its baseline, with its interval and test.

    >>> difference = compare_pairs([83.0, 82.0, 84.0, 85.0], [81.0, 81.0, 82.0, 82.0])
    >>> difference.mean, difference.p, difference.wins
    (2.0, 0.125, 4)

    Args:
        values: metric of the arm, one value per seed.
        baseline_values: metric of the baseline, with the same seeds in the same order.

    Raises:
        VicinalError: the lengths differ, or a value is not finite.
    """
    arm, baseline = _finite("values", values), _finite("baseline_values", baseline_values)
    if len(arm) != len(baseline):
        raise VicinalError(
            f"values and baseline_values must be pairs, one of each per seed, got {len(arm)} and {len(baseline)}"
        )
    # Scores such as 0.3 and 0.1 + 0.2 are equal. Errors of a subtraction are relative to the scores, which can be much
    # larger than their differences.
    tolerance = ROUNDING * float(np.abs([*arm, *baseline]).max(initial=0))
    differences = arm - baseline
    differences[np.abs(differences) <= tolerance] = 0

    summary = summarize(differences.tolist())
    n, mean, sd = summary.n, summary.mean, summary.sd
    low = high = detectable = None
    if mean is not None and sd is not None:
        low, high = _t_interval(mean, sd / math.sqrt(n), n - 1)
        detectable = _noncentrality(n - 1) * sd / math.sqrt(n)
    return PairedDifference(
        n=n,
        mean=mean,
        sd=sd,
        low=low,
        high=high,
        p=_sign_flip_p(differences, tolerance),
        exact=n <= MAX_EXACT_SEEDS,
        smallest_p=smallest_p(n),
        wins=int((differences > 0).sum()),
        ties=int((differences == 0).sum()),
        losses=int((differences < 0).sum()),
        detectable=detectable,
    )


def smallest_p(n: int) -> float:
    """Returns the smallest p that the sign-flip test of n pairs gives: the one for differences of one sign.

    >>> [smallest_p(n) for n in (0, 1, 5, 6)]
    [1.0, 1.0, 0.0625, 0.03125]
    """
    return 2.0 ** -min(max(n - 1, 0), MAX_EXACT_SEEDS)


def planned_interval(mean: float, sigma: float, sigma_n: int, n: int) -> tuple[float, float]:
    """Returns the interval of a mean difference whose standard deviation is known from an earlier study.

    It gives one or two quick runs an interval; it is not a test of them.

    >>> low, high = planned_interval(1.0, sigma=0.5, sigma_n=8, n=1)
    >>> print(f"{low:.2f} to {high:.2f}")
    -0.18 to 2.18

    Args:
        mean: mean of the n paired differences.
        sigma: standard deviation of the paired difference in the earlier study.
        sigma_n: number of seeds of the earlier study, which gives the degrees of freedom.
        n: number of pairs that `mean` is of.

    Raises:
        VicinalError: a number is out of range.
    """
    _finite("mean", [mean])
    _finite("sigma", [sigma])
    if sigma < 0:
        raise VicinalError(f"sigma must be at least 0, got {sigma}")
    if sigma_n < 2:
        raise VicinalError(f"sigma_n must be at least 2 seeds, got {sigma_n}: one seed has no standard deviation")
    if n < 1:
        raise VicinalError(f"n must be at least 1 pair, got {n}")
    return _t_interval(mean, sigma / math.sqrt(n), sigma_n - 1)


def mcnemar(first_correct: Sequence[bool], second_correct: Sequence[bool]) -> McNemar:
    """Returns the exact McNemar test of two models: a binomial test of the images that only one classifies correctly.

    >>> mcnemar([True, True, True, False], [True, False, False, False])
    McNemar(both_correct=1, only_first=2, only_second=0, both_wrong=1, p=0.5)

    Args:
        first_correct: whether the first model classifies each image correctly.
        second_correct: the same of the second model, with images in the same order.

    Raises:
        VicinalError: the lengths differ, or a value is neither true nor false.
    """
    first, second = (
        _truths(name, values) for name, values in (("first_correct", first_correct), ("second_correct", second_correct))
    )
    if len(first) != len(second):
        raise VicinalError(
            f"first_correct and second_correct must be of the same images, got {len(first)} and {len(second)}"
        )
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    discordant = only_first + only_second
    return McNemar(
        both_correct=int((first & second).sum()),
        only_first=only_first,
        only_second=only_second,
        both_wrong=int((~first & ~second).sum()),
        p=float(stats.binomtest(only_first, discordant).pvalue) if discordant else 1.0,
    )


def _sign_flip_p(differences: Floats, tolerance: float) -> float:
    """Returns the share of sign flips whose mean is at least as far from zero as that of the differences."""
    n = len(differences)
    if n < 2:
        return 1.0  # both flips of one difference are equally far from zero
    # Flips depend on the magnitudes only: p is the same for any order of the pairs, and with the arms swapped.
    magnitudes = np.sort(np.abs(differences))
    least = abs(float(differences.mean())) - tolerance
    if n <= MAX_EXACT_SEEDS:
        # scipy's own p misses ties: its tolerance is relative to the mean, and rounding errors are not.
        test = stats.permutation_test(
            (magnitudes,), np.mean, permutation_type="samples", vectorized=True, n_resamples=np.inf
        )
        return float((np.abs(test.null_distribution) >= least).mean())
    signs = np.random.default_rng(0).choice(np.array([-1.0, 1.0]), size=(RANDOM_FLIPS, n))
    as_far = int((np.abs(signs @ magnitudes / n) >= least).sum())
    return (1 + as_far) / (1 + RANDOM_FLIPS)  # Phipson and Smyth 2010: the observed signs are one of the flips


def _t_interval(mean: float, standard_error: float, degrees_of_freedom: int) -> tuple[float, float]:
    """Returns both ends of Student's t interval of a mean."""
    margin = float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees_of_freedom)) * standard_error
    return mean - margin, mean + margin


def _noncentrality(degrees_of_freedom: int) -> float:
    """Returns the true mean, in standard errors, that a two-sided t test finds with a probability of `POWER`.

    Only results with the right sign count; at this power, those with the other sign have a probability below 1e-6.
    """
    critical = stats.t.ppf(1 - ALPHA / 2, degrees_of_freedom)
    return float(special.nctdtrinc(degrees_of_freedom, 1 - POWER, critical))


def _finite(name: str, values: Sequence[float]) -> Floats:
    """Returns the values as an array, or raises VicinalError for one that is not a finite number."""
    numbers = np.array(values, dtype=np.float64)
    wrong = np.flatnonzero(~np.isfinite(numbers))
    if len(wrong):
        raise VicinalError(
            f"{name} must be finite numbers, got {numbers[wrong[0]]}; leave out runs whose metric is not a number"
        )
    return numbers


def _truths(name: str, values: Sequence[bool]) -> NDArray[np.bool_]:
    """Returns the values as a bool array, or raises VicinalError for one that is neither true nor false."""
    truths = np.asarray(values)
    wrong = np.flatnonzero((truths != 0) & (truths != 1))
    if len(wrong):
        raise VicinalError(f"{name} must be true or false for every image, got {truths[wrong[0]]}")
    return truths.astype(bool)
