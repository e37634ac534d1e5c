import itertools
import math
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from vicinal.errors import VicinalError
from vicinal.studies import statistics
from vicinal.studies.statistics import compare_pairs, mcnemar, planned_interval, smallest_p, summarize

# Scores in percent of 10,000 images as they stand in results.json: differences have rounding errors, and often tie.
correct = st.integers(9000, 9020)
pairs = st.lists(st.tuples(correct, correct), min_size=2, max_size=8)


def percent(counts):
    return [100 * count / 10_000 for count in counts]


def enumerated_p(differences):
    """p of the sign-flip test by definition, on whole numbers."""
    flips = list(itertools.product((1, -1), repeat=len(differences)))
    sums = [sum(sign * d for sign, d in zip(signs, differences, strict=True)) for signs in flips]
    return Fraction(sum(abs(total) >= abs(sum(differences)) for total in sums), len(flips))


@pytest.mark.parametrize(
    ("values", "mean", "sd"), [([], None, None), ([3.0], 3.0, None), ([2, 4, 4, 4, 5, 5, 7, 9], 5.0, math.sqrt(32 / 7))]
)
def test_summary_has_the_sample_standard_deviation_from_two_values_on(values, mean, sd):
    assert summarize(values) == statistics.ArmSummary(len(values), mean, None if sd is None else pytest.approx(sd))


@given(pairs)
def test_p_is_that_of_enumerated_sign_flips_of_the_image_counts(counts):
    arm, baseline = zip(*counts, strict=True)
    difference = compare_pairs(percent(arm), percent(baseline))
    truth = enumerated_p([a - b for a, b in counts])
    assert difference.exact
    assert Fraction(difference.p) == truth
    assert difference.p >= difference.smallest_p


def test_ties_between_flips_are_found_where_scipy_misses_them():
    arm, baseline = [9023, 8968, 9034, 8988, 9012, 9003], [9025, 8966, 9033, 8988, 9011, 9002]
    truth = enumerated_p([a - b for a, b in zip(arm, baseline, strict=True)])
    rounded = np.subtract(percent(arm), percent(baseline))
    scipy_p = stats.permutation_test((rounded,), np.mean, permutation_type="samples", n_resamples=np.inf).pvalue
    assert compare_pairs(percent(arm), percent(baseline)).p == float(truth) == 0.5625
    assert scipy_p < 0.4


@pytest.mark.parametrize("n", [2, 3, 5, 8, 10])
def test_p_is_that_of_scipy_with_two_samples_for_numbers_without_ties(n):
    arm, baseline = np.random.default_rng(n).normal(size=(2, n))
    test = stats.permutation_test(
        (arm, baseline), lambda x, y: np.mean(x - y), permutation_type="samples", n_resamples=np.inf
    )
    assert compare_pairs(arm, baseline).p == pytest.approx(test.pvalue, abs=1e-12)


def test_p_of_a_textbook_example():
    """Fisher, Design of Experiments, Darwin's maize: of 2^15 flips, 835 are further and 28 as far to each side."""
    eighths_of_an_inch = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
    difference = compare_pairs(eighths_of_an_inch, [0] * 15)
    assert difference.p == 2 * (835 + 28) / 2**15
    assert stats.ttest_1samp(eighths_of_an_inch, 0).statistic == pytest.approx(2.148, abs=5e-4)  # Fisher's t


@pytest.mark.parametrize(("n", "p"), [(0, 1), (1, 1), (2, 0.5), (5, 0.0625), (6, 0.03125), (8, 0.0078125)])
def test_the_smallest_p_is_reached_by_differences_of_one_sign(n, p):
    difference = compare_pairs([float(i + 2) for i in range(n)], [1.0] * n)
    assert difference.p == difference.smallest_p == smallest_p(n) == p


@pytest.mark.parametrize(("n", "minus"), [(17, 0), (17, 4), (20, 5), (24, 8), (40, 13)])
def test_random_flips_above_sixteen_pairs_agree_with_the_count_of_sign_patterns(n, minus):
    """Differences of one size: flips with as few minus signs, or as few plus signs, are as far from zero."""
    truth = 2 * sum(math.comb(n, k) for k in range(minus + 1)) / 2**n
    difference = compare_pairs([-1.0] * minus + [1.0] * (n - minus), [0.0] * n)
    assert not difference.exact
    spread = math.sqrt(truth / statistics.RANDOM_FLIPS)
    assert abs(difference.p - truth) < 4 * spread + 1 / (statistics.RANDOM_FLIPS + 1)
    assert difference.p >= difference.smallest_p == 2**-16


def test_random_flips_agree_with_all_flips(monkeypatch):
    arm, baseline = np.random.default_rng(0).normal([[0.6], [0.0]], 1, size=(2, 12))
    exact = compare_pairs(arm, baseline)
    monkeypatch.setattr(statistics, "MAX_EXACT_SEEDS", 11)
    drawn = compare_pairs(arm, baseline)
    assert (exact.exact, drawn.exact) == (True, False)
    assert drawn == compare_pairs(arm, baseline)
    assert 0.02 < exact.p < 0.98
    assert drawn.p == pytest.approx(exact.p, abs=4 * math.sqrt(exact.p * (1 - exact.p) / statistics.RANDOM_FLIPS))


def test_random_flips_never_give_p_zero_and_do_not_depend_on_order_or_sign():
    assert compare_pairs(np.arange(1, 41), np.zeros(40)).p == 2**-16
    differences = np.random.default_rng(0).normal(0.2, 1, 20)
    p = compare_pairs(differences, np.zeros(20)).p
    assert p == compare_pairs(differences[::-1], np.zeros(20)).p == compare_pairs(np.zeros(20), differences).p


def test_interval_of_a_textbook_example():
    """Student 1908, sleep data: the mean difference is 1.58 hours, with a 95 % interval from 0.70 to 2.46."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    difference = compare_pairs(second, first)
    assert difference.mean == pytest.approx(1.58)
    assert (difference.low, difference.high) == pytest.approx((0.7001142, 2.4598858), abs=1e-7)
    assert difference.sd == pytest.approx(1.229995, abs=1e-6)
    assert (difference.wins, difference.ties, difference.losses) == (9, 1, 0)


def t_test_power(effect, sd, n):
    """Power of a two-sided t test for the mean of n normal numbers: over the chi distribution of their spread."""
    critical, shift = stats.t.ppf(0.975, n - 1), effect * math.sqrt(n) / sd
    spread = stats.chi(n - 1, scale=1 / math.sqrt(n - 1))

    def rejected(s):
        return (stats.norm.sf(critical * s - shift) + stats.norm.cdf(-critical * s - shift)) * spread.pdf(s)

    return integrate.quad(rejected, 0, spread.isf(1e-13), limit=200)[0]


@pytest.mark.parametrize("n", [2, 3, 6, 8, 20, 100])
def test_a_t_test_finds_the_detectable_difference_with_80_percent_power(n):
    differences = np.random.default_rng(n).normal(size=n)
    difference = compare_pairs(differences, [0.0] * n)
    assert t_test_power(difference.detectable, difference.sd, n) == pytest.approx(0.8, abs=2e-6)


def test_detectable_difference_agrees_with_the_sample_size_of_a_textbook():
    """R's pwr.t.test(d=0.5, power=0.8, type="paired") needs 33.37 pairs."""
    ratio = {}
    for n in (33, 34):
        difference = compare_pairs(np.arange(n), np.zeros(n))
        ratio[n] = difference.detectable / difference.sd
    assert ratio[34] < 0.5 < ratio[33]


@pytest.mark.parametrize(("change", "p"), [(0.0, 1.0), (0.5, 0.03125), (-0.5, 0.03125)])
def test_equal_differences_have_no_spread(change, p):
    difference = compare_pairs([80 + i + change for i in range(6)], [80.0 + i for i in range(6)])
    assert (difference.mean, difference.low, difference.high) == (change, change, change)
    assert (difference.sd, difference.detectable, difference.p) == (0, 0, p)
    assert (difference.wins, difference.ties, difference.losses) == (
        6 * (change > 0),
        6 * (change == 0),
        6 * (change < 0),
    )


def test_scores_that_differ_by_a_rounding_error_tie():
    difference = compare_pairs([0.1 + 0.2] * 6, [0.3] * 6)
    assert (difference.mean, difference.p, difference.ties) == (0, 1, 6)


@pytest.mark.parametrize(("values", "mean"), [([], None), ([2.0], 1.0)])
def test_fewer_than_two_pairs_have_no_spread_and_p_one(values, mean):
    difference = compare_pairs(values, [1.0] * len(values))
    assert (difference.n, difference.mean, difference.p) == (len(values), mean, 1)
    assert {difference.sd, difference.low, difference.high, difference.detectable} == {None}


@given(pairs)
def test_swapped_arms_mirror_the_difference(counts):
    arm, baseline = (percent(side) for side in zip(*counts, strict=True))
    one, other = compare_pairs(arm, baseline), compare_pairs(baseline, arm)
    assert (one.mean, one.low, one.high) == (-other.mean, -other.high, -other.low)
    assert (one.wins, one.losses, one.ties) == (other.losses, other.wins, other.ties)
    assert (one.p, one.sd, one.detectable) == (other.p, other.sd, other.detectable)


@given(pairs, st.floats(1e-3, 1e3), st.integers(-100, 100))
def test_scale_and_shift_do_not_change_p_and_wins(counts, scale, shift):
    arm, baseline = (np.array(percent(side)) for side in zip(*counts, strict=True))
    one, other = compare_pairs(arm, baseline), compare_pairs(scale * (arm + shift), scale * (baseline + shift))
    assert (one.p, one.wins, one.ties, one.losses) == (other.p, other.wins, other.ties, other.losses)
    for name in ("mean", "sd", "low", "high", "detectable"):
        assert getattr(other, name) == pytest.approx(scale * getattr(one, name), rel=1e-9, abs=1e-10 * scale)


@settings(max_examples=30)
@given(st.lists(st.tuples(correct, correct), min_size=2, max_size=20), st.randoms(use_true_random=False))
def test_the_order_of_pairs_does_not_matter(counts, random):
    shuffled = random.sample(counts, len(counts))
    one, other = (compare_pairs(*(percent(side) for side in zip(*some, strict=True))) for some in (counts, shuffled))
    assert (one.p, one.exact, one.wins, one.ties) == (other.p, other.exact, other.wins, other.ties)
    assert (one.mean, one.sd) == pytest.approx((other.mean, other.sd), abs=1e-12)


def test_planned_interval_is_the_t_interval_with_the_earlier_degrees_of_freedom():
    low, high = planned_interval(0.4, sigma=0.5, sigma_n=8, n=2)
    assert (low + high) / 2 == pytest.approx(0.4)
    assert high - 0.4 == pytest.approx(2.36462 * 0.5 / math.sqrt(2), rel=1e-5)  # 2.365: t table, 7 degrees of freedom


@given(pairs)
def test_planned_interval_from_the_same_pairs_is_their_own(counts):
    difference = compare_pairs(*(percent(side) for side in zip(*counts, strict=True)))
    n = difference.n
    assert planned_interval(difference.mean, difference.sd, n, n) == (difference.low, difference.high)


@pytest.mark.parametrize(
    ("both", "first", "second", "neither"), [(5, 3, 1, 2), (0, 0, 9, 0), (900, 31, 52, 17), (4, 6, 6, 0)]
)
def test_mcnemar_is_the_binomial_sum_over_discordant_images(both, first, second, neither):
    one = [True] * both + [True] * first + [False] * second + [False] * neither
    two = [True] * both + [False] * first + [True] * second + [False] * neither
    fewer, discordant = min(first, second), first + second
    p = min(1, Fraction(2 * sum(math.comb(discordant, k) for k in range(fewer + 1)), 2**discordant))
    result = mcnemar(one, two)
    assert (result.both_correct, result.only_first, result.only_second, result.both_wrong) == (
        both,
        first,
        second,
        neither,
    )
    assert result.p == pytest.approx(float(p), rel=1e-9)
    assert mcnemar(np.array(two, dtype=int), np.array(one, dtype=int)).p == pytest.approx(result.p, rel=1e-12)


@pytest.mark.parametrize("correct", [[], [True, False, True]])
def test_mcnemar_without_discordant_images_has_p_one(correct):
    result = mcnemar(correct, correct)
    assert (result.p, result.only_first, result.only_second) == (1, 0, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: summarize([1.0, math.nan]), "values must be finite numbers, got nan; leave out runs"),
        (lambda: compare_pairs([1.0, math.inf], [1.0, 2.0]), "values must be finite numbers, got inf"),
        (lambda: compare_pairs([1.0], [-math.inf]), "baseline_values must be finite numbers, got -inf"),
        (lambda: compare_pairs([1.0], [1.0, 2.0]), "values and baseline_values must be pairs, .* got 1 and 2"),
        (lambda: mcnemar([True], []), "first_correct and second_correct must be of the same images, got 1 and 0"),
        (lambda: mcnemar([1], [3]), "second_correct must be true or false for every image, got 3"),
        (lambda: planned_interval(math.nan, 1, 8, 1), "mean must be finite numbers, got nan"),
        (lambda: planned_interval(0, -1, 8, 1), "sigma must be at least 0, got -1"),
        (lambda: planned_interval(0, 1, 1, 1), "sigma_n must be at least 2 seeds, got 1"),
        (lambda: planned_interval(0, 1, 8, 0), "n must be at least 1 pair, got 0"),
    ],
)
def test_bad_numbers_are_refused(call, message):
    with pytest.raises(VicinalError, match=message):
        call()


def test_statistics_do_not_import_torch():
    code = "import vicinal.studies.verdict, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
