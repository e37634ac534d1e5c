import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vicinal.errors import VicinalError
from vicinal.studies.statistics import compare_pairs
from vicinal.studies.verdict import MIN_SEEDS, Verdict, holm, judge


def with_p_smallest(n, sign=1.0):
    """The difference of n seeds that all go the same way."""
    return compare_pairs([sign * (seed + 1.0) for seed in range(n)], [0.0] * n)


def rejected_by_holm(p_values, alpha):
    """Holm's step-down definition: from the smallest p on, reject while p <= alpha / (remaining hypotheses)."""
    rejected = set()
    remaining = set(range(len(p_values)))
    while remaining:
        index = min(remaining, key=lambda i: p_values[i])
        if p_values[index] * len(remaining) > alpha:
            break
        remaining.remove(index)
        rejected.add(index)
    return rejected


probabilities = st.integers(0, 64).map(lambda k: k / 64)


@given(st.lists(probabilities, max_size=8), st.integers(0, 63).map(lambda k: k / 64))
def test_holm_rejects_what_the_step_down_definition_rejects_at_every_level(p_values, alpha):
    adjusted = holm(p_values)
    assert {i for i, p in enumerate(adjusted) if p <= alpha} == rejected_by_holm([Fraction(p) for p in p_values], alpha)
    assert all(p <= q <= 1 for p, q in zip(p_values, adjusted, strict=True))


@given(st.lists(probabilities, min_size=1, max_size=8))
def test_holm_keeps_the_order_of_p_values(p_values):
    adjusted = dict(zip(p_values, holm(p_values), strict=True))
    assert [adjusted[p] for p in sorted(adjusted)] == sorted(adjusted.values())
    assert holm(sorted(p_values)) == sorted(holm(p_values))


def test_holm_of_a_textbook_example():
    """R's p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm")."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.2]) == [0.2]


@pytest.mark.parametrize("n", range(6))
def test_fewer_than_six_seeds_are_never_significant(n):
    difference = with_p_smallest(n)
    assert n < MIN_SEEDS
    assert judge(difference, adjusted_p=difference.p, comparisons=1) is Verdict.NOT_ENOUGH_SEEDS


@pytest.mark.parametrize(("n", "comparisons"), [(6, 1), (7, 3), (8, 6), (10, 25)])
def test_seeds_carry_a_number_of_comparisons(n, comparisons):
    difference = with_p_smallest(n)
    for family, verdict in ((comparisons, Verdict.HIGHER), (comparisons + 1, Verdict.MAP_ONLY)):
        adjusted_p = holm([difference.p] + [1.0] * (family - 1))[0]
        assert judge(difference, adjusted_p=adjusted_p, comparisons=family) is verdict


def test_a_primary_comparison_of_six_seeds_or_more_is_never_map_only():
    for n in (6, 7, 8, 12, 17):
        difference = compare_pairs([(-1.0) ** seed for seed in range(n)], [0.0] * n)
        assert judge(difference, adjusted_p=difference.p, comparisons=1) is Verdict.NOT_SHOWN


@pytest.mark.parametrize("n", [6, 8, 17])
def test_the_direction_is_that_of_the_mean(n):
    for sign, verdict in ((1, Verdict.HIGHER), (-1, Verdict.LOWER)):
        difference = with_p_smallest(n, sign)
        assert judge(difference, adjusted_p=difference.p, comparisons=1) is verdict
        assert judge(difference, adjusted_p=0.051, comparisons=1) is Verdict.NOT_SHOWN
        assert judge(difference, adjusted_p=0.05, comparisons=1) is verdict


def test_equal_scores_are_not_shown_to_differ():
    difference = compare_pairs([80.0] * 8, [80.0] * 8)
    assert judge(difference, adjusted_p=difference.p, comparisons=1) is Verdict.NOT_SHOWN


def test_verdicts_have_different_words_and_a_stable_name():
    assert len({verdict.text for verdict in Verdict}) == len(Verdict)
    assert Verdict.NOT_ENOUGH_SEEDS.text == "not enough seeds to tell"
    assert Verdict.MAP_ONLY.text == "map only"
    assert Verdict("map_only") is Verdict.MAP_ONLY


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: holm([0.1, math.nan]), "p_values must be from 0 to 1, got nan"),
        (lambda d: holm([1.1]), "p_values must be from 0 to 1, got 1.1"),
        (lambda d: judge(d, adjusted_p=math.nan, comparisons=1), "adjusted_p must be from 0 to 1, got nan"),
        (lambda d: judge(d, adjusted_p=0.03, comparisons=1), "adjusted_p must be at least the p .* 0.03125, got 0.03"),
        (lambda d: judge(d, adjusted_p=0.04, comparisons=0), "comparisons must be at least 1, got 0"),
    ],
)
def test_bad_numbers_are_refused(call, message):
    with pytest.raises(VicinalError, match=message):
        call(with_p_smallest(6))
