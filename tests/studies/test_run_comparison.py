"""Statistics of any finished runs, against formulas on planted figures."""

import itertools
import json
import math

import numpy as np
import pytest
from scipy import stats

import vicinal
from planted_runs import planted_arm, planted_run
from vicinal.studies.verdict import Verdict

NONE, GMM = [800, 810, 790, 805, 795, 800, 803, 798], [812, 815, 801, 806, 809, 811, 802, 815]


def enumerated_p(differences):
    """Share of all sign flips whose sum is at least as large, in whole images."""
    sums = [
        sum(sign * each for sign, each in zip(signs, differences, strict=True))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    return sum(abs(each) >= abs(sum(differences)) for each in sums) / len(sums)


def test_arms_are_paired_by_seed(tmp_path):
    runs = planted_arm(tmp_path, "none", NONE) + planted_arm(tmp_path, "gmm", GMM)
    result = vicinal.compare(runs[::-1])  # the order of runs is that of arms only
    none, gmm = result.rows
    assert (none.arm, none.difference, gmm.arm) == ("none", None, "gmm")
    differences = [b - a for a, b in zip(NONE, GMM, strict=True)]
    points = np.array(differences) / 10
    found = gmm.difference
    assert found.mean == pytest.approx(points.mean())
    low, high = stats.t.interval(0.95, 7, points.mean(), points.std(ddof=1) / math.sqrt(8))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert found.p == pytest.approx(enumerated_p(differences))
    assert (found.wins, found.losses) == (7, 1)
    assert gmm.verdict is Verdict.HIGHER
    assert gmm.summary.sd == pytest.approx(np.std(np.array(GMM) / 10, ddof=1))
    assert [pair.images.only_first for pair in gmm.pairs] == [max(each, 0) for each in differences]
    assert gmm.pairs[0].images.p == pytest.approx(2 * 0.5**12)
    assert not gmm.primary


def test_seeds_that_one_arm_lacks_are_left_out_of_the_difference(tmp_path):
    runs = planted_arm(tmp_path, "none", NONE) + planted_arm(tmp_path, "gmm", GMM[:3])
    row = vicinal.compare(runs).rows[1]
    assert (row.summary.n, row.difference.n, [pair.seed for pair in row.pairs]) == (3, 3, [0, 1, 2])
    assert row.verdict is Verdict.NOT_ENOUGH_SEEDS
    assert vicinal.compare(runs).rows[0].summary.n == 8


def test_several_arms_are_corrected_by_holm(tmp_path):
    runs = [
        run
        for prior, values in (("none", NONE), ("gmm", GMM), ("gab", [each + 1 for each in NONE]), ("elm", NONE[::-1]))
        for run in planted_arm(tmp_path, prior, values)
    ]
    rows = vicinal.compare(runs).rows[1:]
    ordered = sorted(rows, key=lambda row: row.difference.p)
    running = 0
    for rank, row in enumerate(ordered):
        running = max(running, min(1, (3 - rank) * row.difference.p))
        assert row.adjusted_p == pytest.approx(running)


def test_other_data_is_another_condition(tmp_path):
    runs = []
    for size in (100, 200):
        runs += planted_arm(tmp_path / str(size), "none", NONE[:2], train_size=size)
        runs += planted_arm(tmp_path / str(size), "gmm", GMM[:2], train_size=size)
    rows = vicinal.compare(runs).rows
    assert [(row.condition, row.arm) for row in rows] == [
        ("100", "none"),
        ("100", "gmm"),
        ("200", "none"),
        ("200", "gmm"),
    ]


def test_arms_that_differ_in_several_settings_are_named_by_all_of_them(tmp_path):
    runs = [
        planted_run(tmp_path / "a", [True, False], prior="none", pool="token"),
        planted_run(tmp_path / "b", [True, True], prior="gmm", pool="avg"),
    ]
    result = vicinal.compare(runs)
    assert [row.arm for row in result.rows] == ["prior=none pool=token", "prior=gmm pool=avg"]
    assert result.also_differs == ("pool",)
    assert "Arms also differ in: pool." in result.table()


def test_unfinished_runs_and_other_environments_are_listed(tmp_path):
    runs = [
        planted_run(tmp_path / "a", [True, False]),
        planted_run(tmp_path / "b", [True, True], prior="gmm", environment={"threads": 2}),
        planted_run(tmp_path / "c", [True, True], prior="gab", finished=False),
    ]
    result = vicinal.compare(runs)
    assert result.failures == {str(tmp_path / "c"): "not finished"}
    assert result.mixed == {str(tmp_path / "b"): "threads 2 in place of 1"}
    assert (result.finished_runs, result.planned_runs) == (2, 3)


def test_without_test_images_validation_counts_and_other_predictions_are_not_compared(tmp_path):
    runs = [
        planted_run(tmp_path / "a", [True, False], split="val"),
        planted_run(tmp_path / "b", [True, True, True], split="val", prior="gmm"),
    ]
    result = vicinal.compare(runs, metric="f1")
    assert result.split == "val"
    assert result.rows[1].pairs[0].images is None
    assert result.rows[1].pairs[0].value == pytest.approx(25)
    assert "macro F1 on val images" in result.table()


def test_patterns_are_expanded(tmp_path):
    planted_arm(tmp_path, "none", NONE[:2])
    planted_arm(tmp_path, "gmm", GMM[:2])
    (tmp_path / "gmm-other").mkdir()  # not a run
    assert [row.summary.n for row in vicinal.compare([f"{tmp_path}/none-*", f"{tmp_path}/gmm-*"]).rows] == [2, 2]
    with pytest.raises(vicinal.VicinalError, match=r"no run folder fits '.*missing-\*'"):
        vicinal.compare([f"{tmp_path}/missing-*"])


def test_what_cannot_be_compared_is_an_error(tmp_path):
    run = planted_run(tmp_path / "a", [True])
    twin = planted_run(tmp_path / "b", [True])
    other = planted_run(tmp_path / "c", [True], prior="gmm")
    with pytest.raises(
        vicinal.VicinalError, match=r"needs finished runs of at least two arms, got 1 finished runs of 1"
    ):
        vicinal.compare([run])
    with pytest.raises(vicinal.VicinalError, match=r"a and .*b have the same settings and the seed 0; leave one"):
        vicinal.compare([run, twin, other])
    with pytest.raises(vicinal.VicinalError, match=r"unknown arm 'gnm'; did you mean 'gmm'"):
        vicinal.compare([run, other], baseline="gnm")
    with pytest.raises(vicinal.VicinalError, match="nothing-here"):
        vicinal.compare([tmp_path / "nothing-here"])
    (tmp_path / "a" / "results.json").write_text(json.dumps({}))
    with pytest.raises(vicinal.VicinalError, match="neither test nor validation figures"):
        vicinal.compare([run, other])


def test_published_figures_stand_beside_ours_where_model_and_dataset_match(tmp_path):
    shared = {"model": "vit", "dataset": "cifar10"}
    runs = planted_arm(tmp_path, "none", NONE[:2], **shared) + planted_arm(tmp_path, "gmm", GMM[:2], **shared)
    result = vicinal.compare(runs)
    assert [row.published.value for row in result.rows] == [93.65, 95.06]
    assert "published, other protocol: GMM paper" in result.table()
    runs += planted_arm(tmp_path, "gab", GMM[:2], **shared)
    assert vicinal.compare(runs).rows[2].published is None
