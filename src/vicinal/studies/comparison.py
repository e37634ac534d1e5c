"""From finished runs to a result: pairs by seed, statistics, corrected p values and verdicts."""

from collections.abc import Mapping, Sequence

from vicinal.studies.observation import Observation, choose_split, image_test, metric_value
from vicinal.studies.published import Published, find_published
from vicinal.studies.result import ArmRow, SeedPair
from vicinal.studies.spec import Comparison, Metric, Sigma
from vicinal.studies.statistics import PairedDifference, compare_pairs, planned_interval, summarize
from vicinal.studies.verdict import Verdict, holm, judge
from vicinal.training.run_folder import Run

__all__ = ["compare_arms"]


def compare_arms(
    observations: Sequence[Observation],
    conditions: Sequence[str],
    arms: Sequence[str],
    baseline: str,
    *,
    metric: Metric = "top1",
    primary: Comparison | None = None,
    sigma: Sigma | None = None,
) -> tuple[str, tuple[ArmRow, ...]]:
    """Returns the split of the figures, and a row for each arm under each condition, in the given order.

    Args:
        observations: finished runs, each with another arm, condition or seed.
        conditions: names, in the order of the rows.
        arms: names, in the order of the rows.
        baseline: the arm that the others are compared with, under the same condition.
        metric: of the runs.
        primary: the comparison that is tested as it is; p values of all others are corrected by Holm's method.
        sigma: standard deviation of the paired difference in an earlier study.
    """
    split = choose_split(observations)
    runs: dict[tuple[str, str], dict[int, Run]] = {}
    for each in sorted(observations, key=lambda each: each.seed):
        runs.setdefault((each.condition, each.arm), {})[each.seed] = each.run
    keys = [(condition, arm) for condition in conditions for arm in arms]
    pairs = {
        key: _pairs(runs.get(key, {}), runs.get((key[0], baseline), {}), split, metric)
        for key in keys
        if key[1] != baseline
    }
    differences = {
        key: compare_pairs([pair.value for pair in found], [pair.baseline for pair in found])
        for key, found in pairs.items()
    }
    primary_key = None if primary is None else (primary.condition, primary.arm)
    adjusted = _adjusted(differences, primary_key)
    rows = []
    for key in keys:
        own, difference = runs.get(key, {}), differences.get(key)
        rows.append(
            ArmRow(
                condition=key[0],
                arm=key[1],
                summary=summarize([metric_value(run, split, metric) for run in own.values()]),
                difference=difference,
                adjusted_p=None if key == primary_key else adjusted.get(key),
                primary=key == primary_key,
                verdict=None if difference is None else _verdict(key, difference, adjusted, primary_key),
                planned=_planned(difference, sigma),
                published=_published(own) if metric == "top1" and split == "test" else None,
                pairs=tuple(pairs.get(key, ())),
            )
        )
    return split, tuple(rows)


def _pairs(own: Mapping[int, Run], base: Mapping[int, Run], split: str, metric: Metric) -> list[SeedPair]:
    return [
        SeedPair(
            seed=seed,
            value=metric_value(run, split, metric),
            baseline=metric_value(base[seed], split, metric),
            images=image_test(run, base[seed], split),
        )
        for seed, run in own.items()
        if seed in base
    ]


def _adjusted(
    differences: Mapping[tuple[str, str], PairedDifference], primary: tuple[str, str] | None
) -> dict[tuple[str, str], float]:
    """Returns the p of each comparison after Holm's correction over all but the primary one."""
    explored = [key for key in differences if key != primary]
    return dict(zip(explored, holm([differences[key].p for key in explored]), strict=True))


def _verdict(
    key: tuple[str, str],
    difference: PairedDifference,
    adjusted: Mapping[tuple[str, str], float],
    primary: tuple[str, str] | None,
) -> Verdict:
    if key == primary:
        return judge(difference, adjusted_p=difference.p, comparisons=1)
    return judge(difference, adjusted_p=adjusted[key], comparisons=len(adjusted))


def _planned(difference: PairedDifference | None, sigma: Sigma | None) -> tuple[float, float] | None:
    if difference is None or difference.mean is None or sigma is None:
        return None
    return planned_interval(difference.mean, sigma.value, sigma.n, difference.n)


def _published(runs: Mapping[int, Run]) -> Published | None:
    """Returns the published figure of the model, dataset and prior of an arm's runs; None if they have several."""
    configs = [run.config for run in runs.values()]
    found = {find_published(config.model_name, config.dataset, config.prior) for config in configs}
    return found.pop() if len(found) == 1 else None
