"""A study from its definition to its table."""

import json
import sys

import pytest

import vicinal
from small_studies import ARMS, BASE, definition, finished_study, tables, train_in_process
from vicinal.studies.study import show_study


@pytest.fixture
def one_thread(monkeypatch):
    """Runs in this process say that they use one thread, as those of a study do."""
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)


def test_a_study_runs_every_arm_and_is_not_run_again(tmp_path, capfd, one_thread):
    """A run is bit for bit that of vicinal.train; one that fails is listed and does not stop the rest.

    The run of the baseline is there already, from this process.
    """
    folder, values = tmp_path / "study", definition(seeds=1, arms={**ARMS, "diverging": {"lr": 1e36}})
    train_in_process(values, folder, names={"none-s0"})
    result = vicinal.study(values, out=folder, jobs=2)
    assert "[3/3] " in capfd.readouterr().out
    assert [(row.arm, row.summary.n) for row in result.rows] == [("none", 1), ("gmm", 1), ("diverging", 0)]
    assert list(result.failures) == ["diverging-s0"]
    assert "loss became nan" in result.failures["diverging-s0"]
    assert "failed: diverging-s0: the " in result.table()
    runs = {name: vicinal.Run(folder / "runs" / name) for name in ("none-s0", "gmm-s0")}
    for name, run in runs.items():
        assert run.finished
        assert run.config.prior == name.split("-")[0]
        assert run.environment["threads"] == 1
    assert not (runs["gmm-s0"].folder / "checkpoints").exists()
    value, baseline = (100 * runs[name].results["test"]["top1"] for name in ("gmm-s0", "none-s0"))
    assert result.rows[1].difference.mean == pytest.approx(value - baseline)

    train_in_process(values, tmp_path / "own", names={"gmm-s0"})
    files = [tmp_path / where / "runs" / "gmm-s0" / "model" / "model.safetensors" for where in ("study", "own")]
    assert files[0].read_bytes() == files[1].read_bytes()

    written, logs = tables(folder), {file: file.read_bytes() for file in (folder / "logs").iterdir()}
    assert sorted(file.stem for file in logs) == ["diverging-s0", "gmm-s0"]
    assert vicinal.study(folder).rows == result.rows
    assert tables(folder) == written
    assert {file: file.read_bytes() for file in (folder / "logs").iterdir()} == logs  # what diverged would do so again
    assert str(show_study(folder)) == result.table()
    assert written["table.txt"].decode() == result.table() + "\n"


def test_more_seeds_are_added_to_a_study(tmp_path, monkeypatch):
    first = finished_study(definition(seeds=1), tmp_path, monkeypatch)
    train_in_process(definition(), tmp_path, names={"none-s1", "gmm-s1"})
    second = vicinal.study(definition(), out=tmp_path)
    assert (first.rows[1].summary.n, second.rows[1].summary.n) == (1, 2)
    assert second.rows[1].pairs[0] == first.rows[1].pairs[0]


def test_an_unfinished_study_is_shown(tmp_path, monkeypatch):
    finished_study(definition(seeds=1), tmp_path, monkeypatch)
    (tmp_path / "runs" / "gmm-s0" / "results.json").unlink()
    result = show_study(tmp_path)
    assert (result.finished_runs, result.planned_runs) == (1, 2)
    assert "no pairs yet" in result.table()
    assert "1 of 2 runs finished" in result.table()


def test_a_run_that_was_killed_is_listed_and_run_again(tmp_path, monkeypatch, capsys):
    folder, values = tmp_path / "study", definition(seeds=1, arms={"none": {}})
    with monkeypatch.context() as patch:
        killer = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
        patch.setattr("vicinal.studies.runner.command", lambda *_: killer)
        result = vicinal.study(values, out=folder)
    assert "the process of the run was killed by signal 9" in result.failures["none-s0"]
    assert "see " in result.failures["none-s0"]
    capsys.readouterr()
    again = vicinal.study(folder)
    assert "[1/1] none-s0: val top-1 " in capsys.readouterr().out
    assert not again.failures
    assert again.finished_runs == 1


def test_runs_made_otherwise_are_refused_or_listed(tmp_path, monkeypatch):
    finished_study(definition(seeds=1), tmp_path, monkeypatch)
    with pytest.raises(vicinal.VicinalError, match=r"was started with other settings: now threads 2 in place of 1"):
        vicinal.study(definition(seeds=1, threads=2), out=tmp_path)
    file = tmp_path / "runs" / "gmm-s0" / "environment.json"
    record = json.loads(file.read_text())
    record["resumed"] = [{**record, "attention": "other", "threads": 4}]
    file.write_text(json.dumps(record))
    with pytest.raises(
        vicinal.VicinalError,
        match=r"gmm-s0 was made otherwise than the study: threads 4 in place of 1, attention other",
    ):
        vicinal.study(tmp_path)
    result = vicinal.study(tmp_path, allow_mixed=True)
    assert list(result.mixed) == ["gmm-s0"]
    assert "made otherwise: gmm-s0, threads 4 in place of 1" in result.table()


def test_a_study_keeps_the_attention_path_of_its_first_start(tmp_path, monkeypatch):
    monkeypatch.setattr("vicinal.training.environment.attention_path", lambda device: "torch")
    monkeypatch.setattr("vicinal.studies.run_environment.attention_path", lambda device: "torch")
    finished_study(definition(seeds=1), tmp_path, monkeypatch)
    monkeypatch.setattr("vicinal.studies.run_environment.attention_path", lambda device: "native avx2 0123456789ab")
    with pytest.raises(vicinal.VicinalError, match=r"now attention native avx2 0123456789ab in place of torch"):
        vicinal.study(tmp_path)
    assert vicinal.study(tmp_path, allow_mixed=True).mixed == {}  # nothing was left to run


def test_a_changed_definition_needs_another_folder(tmp_path, monkeypatch):
    finished_study(definition(seeds=1), tmp_path, monkeypatch)
    with pytest.raises(vicinal.VicinalError, match=r"none-s0 was run with lr 0\.001, and the study now has 0\.01"):
        vicinal.study(definition(seeds=1, base={**BASE, "lr": 0.01}), out=tmp_path)


def test_two_processes_do_not_run_one_study(tmp_path, monkeypatch):
    from vicinal.studies.study_folder import StudyFolder

    finished_study(definition(seeds=1), tmp_path, monkeypatch)
    with (
        StudyFolder(tmp_path).locked(),
        pytest.raises(vicinal.VicinalError, match=r"is being run by process \d+ on .*vicinal study show"),
    ):
        vicinal.study(tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("dmeo", "unknown study 'dmeo'; did you mean 'demo'?"),
        ("missing.yaml", "unknown study 'missing.yaml'"),
        (".", "is not the folder of a study: it has no study.yaml"),
    ],
)
def test_a_study_that_is_not_there_is_an_error(source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(vicinal.VicinalError, match=message.replace("?", r"\?")):
        vicinal.study(source)
    assert not list(tmp_path.iterdir())


def test_a_study_that_was_not_started_has_nothing_to_show(tmp_path):
    with pytest.raises(vicinal.VicinalError, match=r"has no runs yet; `vicinal study run demo` starts the study"):
        show_study("demo", out=tmp_path / "demo")
