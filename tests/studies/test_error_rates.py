"""Rates over thousands of simulated studies: coverage of intervals, power, and false positives."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from vicinal.studies.statistics import compare_pairs, planned_interval
from vicinal.studies.verdict import Verdict, holm, judge

SHOWN = {Verdict.HIGHER, Verdict.LOWER}
REPEATS = 4000


def simulated_pairs(repeats, n, effect=0.0, spread_of_seeds=3.0):
    """Returns scores of arm and baseline, `(repeats, n)` each. A seed shifts both; the difference has a spread of 1."""
    random = np.random.default_rng([repeats, n, round(1000 * effect)])
    seeds = random.normal(80, spread_of_seeds, (repeats, n))
    arm, baseline = random.normal(0, math.sqrt(0.5), (2, repeats, n))
    return seeds + arm + effect, seeds + baseline


def detectable_for_unit_spread(n):
    scores = np.arange(n) / np.arange(n).std(ddof=1)
    return compare_pairs(scores, np.zeros(n)).detectable


def verdict_of(arm, baseline):
    difference = compare_pairs(arm, baseline)
    return judge(difference, adjusted_p=difference.p, comparisons=1)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "effect"), [(3, 1.0), (6, 0.0), (8, 1.0)])
def test_intervals_cover_the_true_difference_in_93_to_98_percent(n, effect):
    differences = [compare_pairs(*pair) for pair in zip(*simulated_pairs(REPEATS, n, effect), strict=True)]
    assert 0.93 < np.mean([one.low <= effect <= one.high for one in differences]) < 0.98


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_planned_intervals_cover_the_true_difference_in_93_to_98_percent(n):
    earlier = np.subtract(*simulated_pairs(REPEATS, 8)).std(1, ddof=1)
    means = np.subtract(*simulated_pairs(REPEATS, n, effect=1.0)).mean(1)
    intervals = [planned_interval(mean, sd, 8, n) for mean, sd in zip(means, earlier, strict=True)]
    assert 0.93 < np.mean([low <= 1 <= high for low, high in intervals]) < 0.98


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 6, 8])
def test_a_t_test_finds_a_planted_detectable_difference_in_80_percent(n):
    pairs = zip(*simulated_pairs(REPEATS, n, detectable_for_unit_spread(n)), strict=True)
    assert np.mean([compare_pairs(*pair).low > 0 for pair in pairs]) == pytest.approx(0.8, abs=0.025)


def sign_flip_power(n, effect):
    """Returns how often the sign-flip test rejects at 0.05 with the right sign, by all flips of 20,000 samples."""
    differences = np.random.default_rng(0).normal(effect, 1, (20_000, n))
    flips = np.array(list(itertools.product([1, -1], repeat=n)))
    further = (differences @ flips.T >= differences.sum(1, keepdims=True) - 1e-9).mean(1)
    return np.mean(2 * further <= 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("n", [6, 8])
def test_a_planted_detectable_difference_is_judged_higher_with_the_power_of_the_permutation_test(n):
    effect = detectable_for_unit_spread(n)
    power = sign_flip_power(n, effect)
    if n == 6:  # significant only if all differences have the same sign
        assert power == pytest.approx(stats.norm.cdf(effect) ** 6, abs=0.015)
    verdicts = [verdict_of(*pair) for pair in zip(*simulated_pairs(REPEATS, n, effect), strict=True)]
    assert np.mean([verdict is Verdict.HIGHER for verdict in verdicts]) == pytest.approx(power, abs=0.03)
    assert {6: 0.55, 8: 0.7}[n] < power < 0.8  # a little less than that of the t test
    assert Verdict.LOWER not in verdicts


@pytest.mark.slow
@pytest.mark.parametrize("n", [6, 7, 8])
def test_without_an_effect_the_false_positive_rate_is_that_of_the_flips_below_5_percent(n):
    verdicts = [verdict_of(*pair) for pair in zip(*simulated_pairs(REPEATS, n), strict=True)]
    rate = 2 * math.floor(0.05 * 2 ** (n - 1)) / 2**n  # of the values that p can take, k / 2^(n-1), those up to 0.05
    assert rate <= 0.05
    for verdict in SHOWN:
        assert np.mean([one is verdict for one in verdicts]) == pytest.approx(rate / 2, abs=0.01)


@pytest.mark.slow
def test_fewer_than_six_seeds_never_show_an_effect():
    for n in (2, 3, 5):
        verdicts = {verdict_of(*pair) for pair in zip(*simulated_pairs(500, n, effect=5.0), strict=True)}
        assert verdicts == {Verdict.NOT_ENOUGH_SEEDS}


@pytest.mark.slow
@pytest.mark.parametrize("with_effect", [0, 2])
def test_holm_keeps_the_rate_of_any_false_positive_in_a_family_below_5_percent(with_effect):
    """Five arms against one baseline with eight seeds; the first arms have an effect, and the others have none."""
    families, arms, n = 1000, 5, 8
    random = np.random.default_rng(with_effect)
    baseline = random.normal(80, 1, (families, n))
    scores = baseline[:, None] + random.normal(0, 1, (families, arms, n))
    scores[:, :with_effect] += 3.0
    false, found, uncorrected = 0, 0, 0
    for own, others in zip(baseline, scores, strict=True):
        differences = [compare_pairs(other, own) for other in others]
        adjusted = holm([one.p for one in differences])
        shown = [
            judge(one, adjusted_p=p, comparisons=arms) in SHOWN for one, p in zip(differences, adjusted, strict=True)
        ]
        false += any(shown[with_effect:])
        found += sum(shown[:with_effect])
        uncorrected += any(one.p <= 0.05 for one in differences[with_effect:])
    assert stats.binomtest(false, families, 0.05, alternative="greater").pvalue > 0.001
    assert uncorrected / families > 0.1  # so that the bound above means something
    assert found >= 0.9 * families * with_effect
