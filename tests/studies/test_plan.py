"""The plan of a study: runs, cost and disk, without starting it."""

import pytest
import torch

import vicinal
from small_studies import BASE, definition, train_in_process
from vicinal.studies.plan import plan_study


def test_a_plan_counts_runs_steps_and_parameters_and_starts_nothing(tmp_path):
    values = definition(factors={"train_size": [64, 96]}, base={"val_size": 30, "batch_size": 32})
    threads = torch.get_num_threads()
    plan = plan_study(values, out=tmp_path / "study", jobs=2)
    assert torch.get_num_threads() == threads
    assert [(arm.condition, arm.arm, arm.runs, arm.left) for arm in plan.arms] == [
        ("64", "none", 2, 2),
        ("64", "gmm", 2, 2),
        ("96", "none", 2, 2),
        ("96", "gmm", 2, 2),
    ]
    assert {arm.facts.steps for arm in plan.arms} == {4}
    assert plan.arms[1].facts.prior_parameters == 160
    assert plan.seconds == pytest.approx(sum(2 * arm.run_seconds for arm in plan.arms) / 2)
    text = str(plan)
    assert "8 of 8 runs left: about" in text
    assert "with --jobs 2 and 1 thread each" in text
    assert not (tmp_path / "study").exists()


def test_disk_is_that_of_a_run(tmp_path):
    """Within a tenth of what a run takes without its checkpoints."""
    values = definition(seeds=1, arms={"gmm": {"prior": "gmm"}})
    plan = plan_study(values, out=tmp_path)
    train_in_process(values, tmp_path)
    files = [file for file in (tmp_path / "runs" / "gmm-s0").rglob("*") if file.is_file()]
    checkpoints = sum(file.stat().st_size for file in files if file.parent.name == "checkpoints")
    rest = sum(file.stat().st_size for file in files) - checkpoints
    assert plan.arms[0].run_bytes == pytest.approx(rest, rel=0.1)
    assert plan.arms[0].checkpoint_bytes == pytest.approx(checkpoints, rel=0.1)
    assert plan_study(values, out=tmp_path).arms[0].left == 0


def test_bad_plans_are_errors(tmp_path):
    with pytest.raises(vicinal.VicinalError, match="jobs must be at least 1, got 0"):
        plan_study(definition(), out=tmp_path, jobs=0)
    with pytest.raises(vicinal.VicinalError, match=r"base\.train_size: train_size must be from 1 to"):
        plan_study(definition(base={**BASE, "train_size": 10**6}), out=tmp_path)
    with pytest.raises(vicinal.VicinalError, match="differs from the baseline none in prior and lr"):
        plan_study(definition(arms={"none": {}, "gmm": {"prior": "gmm", "lr": 0.1}}), out=tmp_path)
