"""`vicinal study` and `vicinal compare` as a user types them."""

from pathlib import Path

import pytest
import yaml

from small_studies import train_in_process
from vicinal.cli.main import main
from vicinal.studies.study_path import ready_studies

DEFINITION = {
    "question": "Does it work?",
    "base": {"train_size": 64, "val_size": 0},
    "arms": {"none": {"prior": "none"}, "gmm": {"prior": "gmm"}},
    "budget": {"steps": 2},
    "seeds": 1,
}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(DEFINITION, sort_keys=False))
    return "own.yaml"


def test_plan_run_show_and_compare(file, capsys, monkeypatch):
    assert main(["study", "plan", file]) == 0
    assert "2 of 2 runs left" in capsys.readouterr().out
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    train_in_process(DEFINITION, "runs/own")  # test_study.py starts processes
    assert main(["study", "run", file, "--jobs", "2"]) == 0
    shown = capsys.readouterr().out
    assert "Does it work?" in shown
    assert "not enough seeds to tell" in shown
    assert main(["study", "show", "runs/own"]) == 0
    assert capsys.readouterr().out.strip() == shown[shown.index("Does it work?") :].strip()
    assert main(["study", "show", file, "--markdown"]) == 0
    assert "| gmm *" in capsys.readouterr().out
    assert main(["study", "show", "runs/own", "--pairs"]) == 0
    assert "McNemar p" in capsys.readouterr().out
    assert main(["compare", "runs/own/runs/none-s0", "runs/own/runs/g*"]) == 0
    assert capsys.readouterr().out.splitlines()[3].split()[:2] == ["none", "1"]
    assert main(["compare", "runs/own/runs/*", "--pairs", "--baseline", "gmm"]) == 0
    assert "only baseline" in capsys.readouterr().out


def test_ready_studies_are_listed(capsys):
    assert main(["study", "list"]) == 0
    shown = capsys.readouterr().out
    assert "demo\n  question  " in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["study", "rnu", "demo"], "unknown action 'rnu'; did you mean 'run'?"),
        (["study", "run", "dmeo"], "unknown study 'dmeo'; did you mean 'demo'?"),
        (["study", "run", "own.yaml", "--jobs", "0"], "jobs must be at least 1, got 0"),
        (["study", "show", "demo"], "has no runs yet; `vicinal study run demo` starts the study"),
        (["study", "copy", "dmeo", "x.yaml"], "unknown ready study 'dmeo'; did you mean 'demo'?"),
        (["study", "copy", "demo", "own.yaml"], "own.yaml exists already"),
        (["study", "copy", "demo", "missing/x.yaml"], "the folder missing does not exist"),
        (["compare", "runs/x"], "runs/x"),
        (["compare"], "a comparison needs finished runs of at least two arms, got 0 finished runs"),
    ],
)
def test_bad_words_are_short_messages(file, words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_ready_study_is_copied(file, capsys):
    assert main(["study", "copy", "demo", "mine.yaml"]) == 0
    assert "wrote mine.yaml; edit it, then: vicinal study run mine.yaml" in capsys.readouterr().out
    assert Path("mine.yaml").read_bytes() == ready_studies()["demo"].read_bytes()


def test_help_names_the_actions(capsys):
    assert main(["study", "--help"]) == 0
    assert "plan STUDY" in capsys.readouterr().out
