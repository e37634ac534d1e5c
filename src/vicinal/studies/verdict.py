"""What the table of a study says about a difference, and Holm's correction for the number of comparisons."""

from collections.abc import Sequence
from enum import StrEnum

from vicinal.errors import VicinalError
from vicinal.studies.statistics import ALPHA, PairedDifference

__all__ = ["MIN_SEEDS", "Verdict", "holm", "judge"]

MIN_SEEDS = 6
"""Pairs that any verdict needs: with fewer, the sign-flip test never gives a p of `ALPHA` or less."""


class Verdict(StrEnum):
    """What is known of a difference to the baseline."""

    NOT_ENOUGH_SEEDS = "not_enough_seeds"
    MAP_ONLY = "map_only"
    HIGHER = "higher"
    LOWER = "lower"
    NOT_SHOWN = "not_shown"

    @property
    def text(self) -> str:
        """The verdict in words, for tables."""
        return _TEXTS[self]


_TEXTS = {
    Verdict.NOT_ENOUGH_SEEDS: "not enough seeds to tell",
    Verdict.MAP_ONLY: "map only",
    Verdict.HIGHER: "higher",
    Verdict.LOWER: "lower",
    Verdict.NOT_SHOWN: "no difference shown",
}


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p values adjusted by Holm's step-down method, in the given order.

    The i-th smallest of m, from i = 0, is multiplied by m - i, and is at least as large as the ones before it. If all
    that are at most `ALPHA` are rejected, the probability of any false rejection in the family is at most `ALPHA`.

    >>> holm([0.03, 0.01, 0.5])
    [0.06, 0.03, 0.5]

    Raises:
        VicinalError: a p value is not from 0 to 1.
    """
    adjusted, largest = list(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        _check_p("p_values", p_values[index])
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def judge(difference: PairedDifference, *, adjusted_p: float, comparisons: int) -> Verdict:
    """Returns the verdict on one difference.

    `MAP_ONLY` stands for a family of so many comparisons that the smallest possible p times their number is above
    `ALPHA`: 6 seeds carry 1 comparison, 7 carry 3, and 8 carry 6. The verdict follows the permutation test; the t
    interval, which assumes more, can contain zero where it is `HIGHER` or `LOWER`, and the other way round.

    >>> from vicinal.studies.statistics import compare_pairs
    >>> difference = compare_pairs([3.0, 5.0, 4.0, 6.0, 3.0, 4.0], [1.0, 2.0, 2.0, 3.0, 2.0, 1.0])
    >>> judge(difference, adjusted_p=difference.p, comparisons=1).text
    'higher'

    Args:
        difference: the paired difference.
        adjusted_p: its p after Holm's correction; that of the difference itself for the primary comparison.
        comparisons: number of comparisons in the family that was corrected; 1 for the primary comparison.

    Raises:
        VicinalError: `adjusted_p` is not from 0 to 1 or is below the p of the difference, or `comparisons` is below 1.
    """
    _check_p("adjusted_p", adjusted_p)
    if adjusted_p < difference.p:
        raise VicinalError(f"adjusted_p must be at least the p of the difference, {difference.p}, got {adjusted_p}")
    if comparisons < 1:
        raise VicinalError(f"comparisons must be at least 1, got {comparisons}")
    if difference.n < MIN_SEEDS or difference.mean is None:
        return Verdict.NOT_ENOUGH_SEEDS
    if difference.smallest_p * comparisons > ALPHA:
        return Verdict.MAP_ONLY
    if adjusted_p > ALPHA:
        return Verdict.NOT_SHOWN
    return Verdict.HIGHER if difference.mean > 0 else Verdict.LOWER


def _check_p(name: str, p: float) -> None:
    """Raises VicinalError for a number that is not a probability."""
    if not 0 <= p <= 1:  # false for NaN as well
        raise VicinalError(f"{name} must be from 0 to 1, got {p}")
