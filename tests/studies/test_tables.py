"""Tables of studies, as a reader sees them."""

import csv
import io
import json

import pytest

import vicinal
from planted_runs import planted_arm
from vicinal.studies.comparison import compare_arms
from vicinal.studies.observation import Observation
from vicinal.studies.result import StudyResult
from vicinal.studies.spec import Comparison, Sigma
from vicinal.studies.tables import pairs_text

NONE = [800, 810, 790, 805, 795, 800, 803, 798]


def result_of(tmp_path, arms, **options):
    """The result of a study whose arms have planted accuracies; the first is the baseline."""
    observations = [
        Observation(arm, "", run.config.seed, run)
        for arm, accuracies in arms.items()
        for run in planted_arm(tmp_path, arm, accuracies)
    ]
    split, rows = compare_arms(observations, [""], list(arms), next(iter(arms)), **options)
    return StudyResult(
        name="own",
        question="Does it help?",
        split=split,
        metric="top1",
        baseline=next(iter(arms)),
        rows=rows,
        planned_runs=len(observations),
        finished_runs=len(observations),
        failures={},
        mixed={},
        also_differs=(),
        sigma=options.get("sigma"),
    )


def test_a_table_with_a_primary_comparison(tmp_path):
    arms = {"none": NONE, "gmm": [each + 12 for each in NONE], "gab": [*NONE[1:], NONE[0]]}
    result = result_of(tmp_path, arms, primary=Comparison("gmm", ""))
    assert str(result) == (
        "Does it help?\n"
        "\n"
        "top-1 on test images in %, mean ± standard deviation over seeds; 24 of 24 runs finished\n"
        "\n"
        "arm    seeds         top-1  difference    95% interval      p  wins  verdict\n"
        "none       8  80.01 ± 0.61                                           baseline\n"
        "gmm *      8  81.21 ± 0.61       +1.20  [+1.20, +1.20]  0.008   8/8  higher\n"
        "gab        8  80.01 ± 0.61       +0.00  [-0.94, +0.94]  1.000   5/8  no difference shown\n"
        "\n"
        "* the primary comparison, named before the runs and tested as it is.\n"
        "p: exact sign flips of the paired differences.\n"
        "Smallest true difference that this spread and number of seeds would have shown (80 % power): gmm\n"
        "  0.00, gab 1.30."
    )


def test_markdown_has_the_same_cells(tmp_path):
    result = result_of(tmp_path, {"none": NONE, "gmm": [each + 12 for each in NONE]})
    lines = result.markdown().splitlines()
    assert lines[4].startswith("| arm  | seeds |")
    assert lines[7].split("|")[1].strip() == "gmm"
    assert any(line.startswith("- p: exact sign flips") for line in lines)


def test_few_seeds_never_carry_a_verdict(tmp_path):
    result = result_of(
        tmp_path, {"none": NONE[:5], "gmm": [each + 100 for each in NONE[:5]]}, primary=Comparison("gmm", "")
    )
    text = result.table()
    assert "not enough seeds to tell" in text
    assert "5 seeds: no p can be below 0.0625; a verdict needs 6 seeds or more." in text


def test_too_many_comparisons_are_a_map_only(tmp_path):
    arms = {"none": NONE[:6], **{name: [each + 50 for each in NONE[:6]] for name in ("gmm", "gab")}}
    text = result_of(tmp_path, arms).table()
    assert text.count("  map only\n") == 2
    assert "p (Holm)" in text
    assert "map only: 2 comparisons are too many for 6 seeds to show any of them; name one as primary" in text.replace(
        "\n  ", " "
    )


def test_a_known_spread_gives_one_run_an_interval_and_no_verdict(tmp_path):
    arms = {"none": [800], "gmm": [810]}
    text = result_of(tmp_path, arms, sigma=Sigma(0.5, 8, "priors")).table()
    assert "[-0.18, +2.18] by sigma" in text  # 1 -+ 2.3646 * 0.5
    assert "not enough seeds to tell" in text
    assert "in the study priors, 0.5 points over 8 seeds; it is not a verdict." in text.replace("\n  ", " ")


def test_pairs_show_mcnemar(tmp_path):
    text = pairs_text(result_of(tmp_path, {"none": [800, 810], "gmm": [812, 809]}))
    assert text.splitlines()[1].split() == ["-", "gmm", "0", "81.20", "80.00", "12", "0", "<", "0.001"]
    assert text.splitlines()[2].split() == ["-", "gmm", "1", "80.90", "81.00", "0", "1", "1.000"]


def test_files_hold_all_figures(tmp_path):
    result = result_of(tmp_path, {"none": NONE, "gmm": [each + 12 for each in NONE]})
    folder = tmp_path / "files"
    folder.mkdir()
    result.write(folder)
    rows = list(csv.DictReader(io.StringIO((folder / "results.csv").read_text())))
    assert [row["arm"] for row in rows] == ["none", "gmm"]
    assert float(rows[1]["difference"]) == pytest.approx(1.2)
    assert rows[0]["difference"] == ""
    assert rows[1]["verdict"] == "higher"
    document = json.loads((folder / "results.json").read_text())
    assert document["rows"][1]["pairs"][0]["images"]["only_first"] == 12
    pairs = list(csv.DictReader(io.StringIO((folder / "pairs.csv").read_text())))
    assert len(pairs) == 8
    assert pairs[3]["only_arm"] == "12"
    result.save(tmp_path / "own.csv")
    assert (tmp_path / "own.csv").read_bytes() == (folder / "results.csv").read_bytes()


def test_a_run_prints_well(tmp_path):
    run = planted_arm(tmp_path, "gmm", [912], model="vit-micro")[0]
    assert repr(run) == f"Run({tmp_path / 'gmm-s0'}: vit-micro, prior gmm, digits, seed 0; test top-1 91.20%)"
    (run.folder / "results.json").unlink()
    assert repr(vicinal.Run(run.folder)).endswith("seed 0; not finished)")
