"""What is shown while a study runs."""

import os
from pathlib import Path

import pytest

from planted_runs import planted_run
from small_studies import definition
from vicinal.studies.progress import Progress
from vicinal.studies.spec_reader import read_spec
from vicinal.studies.study_folder import StudyFolder


@pytest.fixture
def study(tmp_path):
    """A study of four runs of 10 steps, of which one is finished."""
    folder = StudyFolder(tmp_path)
    runs = read_spec(definition()).runs(tmp_path, Path.cwd())
    planted_run(tmp_path / "runs" / "none-s0", [True, True, False])
    facts = {arm: {"steps": 10} for arm in ("none", "gmm")}
    return folder, runs, facts


def write_steps(folder, name, steps):
    folder = folder.run_folder(name)
    if not folder.exists():
        planted_run(folder, [True], finished=False)
    (folder / "metrics.csv").write_text(f"epoch,step\n1,{steps}\n")


def test_a_line_for_each_run_that_ends(study, capsys):
    folder, runs, facts = study
    with Progress(folder, runs, facts) as progress:
        progress.tick(["gmm-s0"])
        assert capsys.readouterr().out == ""  # finished before
        planted_run(folder.run_folder("gmm-s0"), [True, False])
        folder.note_failure("none-s1", "out of memory")
        progress.tick([])
        progress.tick([])
    assert capsys.readouterr().out == ("[3/4] gmm-s0: test top-1 50.00%\n[3/4] none-s1: failed: out of memory\n")


def test_a_live_table_on_a_terminal(study, capsys, monkeypatch):
    folder, runs, facts = study
    clock = [100.0]
    monkeypatch.setattr("vicinal.studies.progress.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    with Progress(folder, runs, facts) as progress:
        write_steps(folder, "gmm-s0", 5)
        clock[0] += 10
        progress.tick(["gmm-s0"])
        shown = capsys.readouterr().out
        assert shown.splitlines() == [
            "arm   finished  failed  running",
            "none       1/2",
            "gmm        0/2          s0 50%",
            "1 of 4 runs, 38% of all steps, ETA 00:50",  # 10 s for an eighth of all steps, five eighths are left
        ]
        clock[0] += 0.5
        progress.tick(["gmm-s0"])
        assert capsys.readouterr().out == ""
        clock[0] += 1
        progress.tick(["gmm-s0"])
        assert capsys.readouterr().out.startswith("\x1b[4F\x1b[J")
    assert capsys.readouterr().out == "\x1b[4F\x1b[J"


def test_statuses_of_runs(study):
    folder, _, _ = study
    states = {name: folder.status(name).state.value for name in ("none-s0", "gmm-s0")}
    assert states == {"none-s0": "finished", "gmm-s0": "waiting"}
    write_steps(folder, "gmm-s0", 3)
    assert (folder.status("gmm-s0").state.value, folder.status("gmm-s0").steps) == ("started", 3)
    folder.note_failure("gmm-s0", "no space left")
    assert (folder.status("gmm-s0").state.value, folder.status("gmm-s0").final) == ("failed", False)


def test_a_table_larger_than_the_terminal_is_cut(study, capsys, monkeypatch):
    folder, runs, facts = study
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("vicinal.studies.progress.REDRAW_SECONDS", -1)
    monkeypatch.setattr("shutil.get_terminal_size", lambda fallback=None: os.terminal_size((20, 4)))
    with Progress(folder, runs, facts) as progress:
        progress.tick([])
        assert capsys.readouterr().out.splitlines() == ["arm   finished  fai", "...", "1 of 4 runs, 25% of"]
