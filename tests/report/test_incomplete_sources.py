"""Reports of what is not complete: a page that says what is missing, or a short error."""

import shutil
from pathlib import Path

import pytest

from page_text import page_text
from planted_runs import planted_arm, planted_run
from planted_study import planted_metrics, planted_study
from small_studies import BASE, definition
from vicinal.cli.main import main
from vicinal.errors import VicinalError
from vicinal.report import write_report

OLD_RUNS = Path(__file__).parent.parent / "compatibility" / "runs"


def study_page(folder, values=None, **planted):
    """The text of the report of a planted study."""
    planted_study(folder, values or definition(), **planted)
    return page_text(write_report(folder))


def test_a_study_that_is_not_finished(tmp_path):
    text = study_page(tmp_path / "s", unfinished={"gmm-s1"}, not_started={"none-s1"})
    assert "2 of 4 runs not finished yet." in text
    assert "Not enough seeds to tell whether gmm differs from none" in text
    assert "+2.50" in text  # 5 of 200 images


def test_a_study_of_which_no_run_is_finished(tmp_path):
    names = {f"{arm}-s{seed}" for arm in ("none", "gmm") for seed in (0, 1)}
    text = study_page(tmp_path / "started", unfinished=names)
    assert "4 of 4 runs not finished yet." in text
    assert "No answer yet." in text
    assert "Training curves" in text
    assert "4 of 4 runs not finished yet." in study_page(tmp_path / "new", not_started=names)


def test_a_study_with_a_failed_run(tmp_path):
    study = planted_study(tmp_path / "s", definition(), not_started={"gmm-s1"})
    study.note_failure("gmm-s1", "the loss became <nan>")
    text = page_text(write_report(study.folder))
    assert "1 of 4 runs failed" in text
    assert "the loss became <nan>" in text
    assert "not finished yet" not in text


def test_one_seed_has_no_interval_and_one_arm_no_comparison(tmp_path):
    text = study_page(tmp_path / "seed", definition(seeds=1))
    assert "1 seed." in text
    assert "p = 1.000" in text
    assert "95% interval +" not in text
    text = study_page(tmp_path / "arm", definition(arms={"gmm": {"prior": "gmm"}}, baseline="gmm"))
    assert "gmm: test top-1 50.25% ± 0.35 over 2 seeds" in text
    assert "No answer yet" not in text


def test_no_validation_split(tmp_path):
    text = study_page(tmp_path / "s", definition(base={**BASE, "val_size": 0}))
    assert "training loss" in text
    assert "validation top-1 in %" not in text
    assert "no validation split" in text


def test_two_hundred_classes_stay_small(tmp_path):
    planted_study(tmp_path / "s", definition(), classes=200)
    assert write_report(tmp_path / "s").stat().st_size < 1_000_000


def test_runs_without_priors_or_models_say_so(tmp_path):
    arms = {"slow": {"prior": "none"}, "fast": {"prior": "none", "lr": 0.01}}
    text = study_page(tmp_path / "s", definition(arms=arms, baseline="slow"))
    assert "lr" in text
    assert "not known" in text  # parameters of models that are not there
    assert "slow-s0 is not finished" in text  # below the heading of receptive fields


def test_a_single_run_without_a_prior(tmp_path, study_folder):
    text = page_text(write_report(study_folder / "runs" / "none-s0", out=tmp_path / "report.html"))
    assert "none-s0: test top-1" in text
    assert "Mean distance from a patch" in text


def test_runs_of_earlier_versions(tmp_path):
    for name in ("finished", "interrupted"):
        shutil.copytree(OLD_RUNS / name, tmp_path / name)
        text = page_text(write_report(tmp_path / name))
        assert name in text
        assert "training loss" in text
    assert "The run is not finished" in text
    with pytest.raises(VicinalError, match="have the same settings and the seed 3"):
        write_report([tmp_path / "finished", tmp_path / "interrupted"])


def test_a_comparison_of_different_datasets_without_pairs(tmp_path):
    runs = [
        planted_run(tmp_path / "a", [True, False], prior="none", dataset="digits"),
        planted_run(tmp_path / "b", [True, True], prior="gmm", dataset="cifar10"),
    ]
    text = page_text(write_report([run.folder for run in runs], out=tmp_path / "r.html"))
    assert "No answer yet." in text
    assert "digits, cifar10" in text


def test_unfinished_and_damaged_runs_are_left_out_of_a_comparison(tmp_path):
    runs = planted_arm(tmp_path, "none", [800, 810, 790]) + planted_arm(tmp_path, "gmm", [812, 815, 801])
    (runs[0].folder / "predictions.csv").unlink()
    (runs[1].folder / "results.json").unlink()
    (runs[2].folder / "results.json").write_text('{"test": {"top1": 0.5')
    (runs[3].folder / "metrics.csv").write_text("epoch,step\n1,many\n")
    text = page_text(write_report([run.folder for run in runs], out=tmp_path / "r.html"))
    assert "Not finished: none-s1." in text
    assert "none-s2 is left out" in text
    assert "results.json cannot be read" in text
    assert "gmm-s0 is left out" in text
    assert "metrics.csv cannot be read" in text
    assert "No answer yet." in text


def test_a_damaged_run_of_a_study_is_listed_as_failed(tmp_path):
    study = planted_study(tmp_path / "s", definition())
    (study.run_folder("gmm-s1") / "results.json").write_text("{")
    text = page_text(write_report(study.folder))
    assert "gmm-s1 is left out" in text
    assert "1 of 4 runs failed" in text
    assert study.checked_status("gmm-s1").final


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '{"test": 3}', '{"test": {"images": 3}}', '{"test": {"top1": "a"}}']
)
def test_results_that_are_not_as_they_were_written_name_the_file(tmp_path, content):
    run = planted_run(tmp_path / "run", [True])
    (run.folder / "results.json").write_text(content)
    with pytest.raises(VicinalError, match=r"run/results\.json cannot be read"):
        run.results  # noqa: B018


def test_runs_without_predictions_have_no_test_of_images(tmp_path):
    study = planted_study(tmp_path / "s", definition())
    for file in study.folder.glob("runs/*/predictions.csv"):
        file.unlink()
    assert "not known" in page_text(write_report(study.folder))


def test_a_single_run_that_is_not_finished_or_damaged(tmp_path):
    run = planted_run(tmp_path / "run", [True], finished=False)
    text = page_text(write_report(run.folder))
    assert "The run is not finished" in text
    assert "training loss" not in text
    planted_metrics(run)
    assert "training loss" in page_text(write_report(run.folder))
    (run.folder / "results.json").write_text("")
    with pytest.raises(VicinalError, match=r"results\.json cannot be read"):
        write_report(run.folder)


def test_bad_paths_are_short_errors(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = planted_run(tmp_path / "run", [True])
    planted_study(tmp_path / "study", definition(seeds=1))
    (tmp_path / "taken.html").mkdir()
    for arguments, words in (
        (["missing"], "there is no run missing"),
        (["."], "is neither a study nor a run"),
        (["no-*"], "no run folder fits 'no-*'"),
        ([], "needs the folder of a study"),
        (["study", "run"], "one study or about runs"),
        (["run", "--out", "page.pdf"], "must be the name of an HTML file"),
        (["run", "--out", "no/page.html"], "must be in a folder that exists"),
        (["run", "--out", "taken.html"], "taken.html cannot be written"),
    ):
        assert main(["report", *arguments]) == 2, arguments
        message = capsys.readouterr().err
        assert words in message
        assert "Traceback" not in message
    assert main(["report", "run", "--out", "page.html"]) == 0
    assert "wrote page.html (0.0 MB)" in capsys.readouterr().out
    assert page_text(tmp_path / "page.html").startswith("run - vicinal report")
    assert not (run.folder / "report.html").exists()


def test_a_dataset_that_moved_leaves_out_what_needs_images(tmp_path, study_folder):
    for name in ("none-s0", "gmm-s0"):
        shutil.copytree(study_folder / "runs" / name, tmp_path / name)
        file = tmp_path / name / "config.yaml"
        text = file.read_text()
        assert "dataset: digits" in text
        file.write_text(text.replace("dataset: digits", f"dataset: folder:{tmp_path}/moved"))
    text = page_text(write_report([tmp_path / "none-s0", tmp_path / "gmm-s0"], out=tmp_path / "report.html"))
    assert f"{tmp_path}/moved" in text
    assert "135,402" in text  # the number of parameters needs no images
    assert "Learned masks" in text
    assert "Mean distance from a patch" not in text
