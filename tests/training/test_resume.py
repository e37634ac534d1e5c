"""A run that was stopped or killed ends as one without interruption."""

import json
import os
import signal

import pytest
import torch

import vicinal
from small_runs import ALL, assert_same_run, config, die_at, weights
from vicinal.attention.native import attention_path
from vicinal.files import write_json
from vicinal.training import train as loop
from vicinal.training.config import ConfigError
from vicinal.training.signals import Interrupted


@pytest.mark.parametrize(
    "minutes", [pytest.param(10, id="epochs", marks=pytest.mark.slow), pytest.param(0, id="steps")]
)
def test_a_run_that_died_goes_on_as_if_it_had_not(tmp_path, monkeypatch, minutes):
    """It dies at steps before, at and behind checkpoints: at the ends of epochs, and at every step."""
    whole = vicinal.train(config(tmp_path / "whole", **ALL))
    deaths = die_at(monkeypatch, [0, 2, 5, 9, 14])
    settings = config(tmp_path / "killed", **ALL, checkpoint_minutes=minutes)
    with pytest.raises(MemoryError):
        vicinal.train(settings)
    for _ in range(4):
        with pytest.raises(MemoryError):
            vicinal.resume(tmp_path / "killed")
    assert not vicinal.Run(tmp_path / "killed").finished
    killed = vicinal.resume(tmp_path / "killed")
    assert not deaths
    assert_same_run(whole, killed)
    assert len(killed.environment["resumed"]) == 5


def test_a_signal_ends_the_step_and_saves(tmp_path, monkeypatch):
    whole = vicinal.train(config(tmp_path / "whole"))
    real = loop.train_step

    def signalled(state, settings, step, images, labels):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(state, settings, step, images, labels)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(loop, "train_step", signalled)
    with pytest.raises(Interrupted, match=r"step 6 of 15; `vicinal train --resume .*stopped`") as stopped:
        vicinal.train(config(tmp_path / "stopped"))
    assert stopped.value.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    assert (
        sorted(file.name for file in (tmp_path / "stopped" / "checkpoints").iterdir())[-1]
        == "step-00000006.safetensors"
    )
    monkeypatch.setattr(loop, "train_step", real)
    assert_same_run(whole, vicinal.resume(tmp_path / "stopped"))


def test_a_run_of_another_attention_path_goes_on_with_a_note(tmp_path, monkeypatch, capsys):
    die_at(monkeypatch, [5, 9])
    with pytest.raises(MemoryError):
        vicinal.train(config(tmp_path / "run"))
    with pytest.raises(MemoryError):
        vicinal.resume(tmp_path / "run")
    assert "attention was computed" not in capsys.readouterr().err

    record = vicinal.Run(tmp_path / "run").environment
    record["resumed"][-1]["attention"] = "native avx2 0123456789ab"
    write_json(tmp_path / "run" / "environment.json", record)
    run = vicinal.resume(tmp_path / "run")
    notes = [line for line in capsys.readouterr().err.splitlines() if "attention was computed" in line]
    assert len(notes) == 1
    assert notes[0].startswith("note: attention was computed by native avx2 0123456789ab so far")
    assert run.finished
    assert run.environment["resumed"][-1]["attention"] == attention_path()
    assert json.loads((run.folder / "results.json").read_text())["attention"] == attention_path()
    assert "attention" not in run.results


def test_a_damaged_checkpoint_is_skipped(tmp_path, monkeypatch):
    whole = vicinal.train(config(tmp_path / "whole"))
    run = vicinal.train(config(tmp_path / "run"))
    (run.folder / "results.json").unlink()
    last = sorted((run.folder / "checkpoints").iterdir())[-1]
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.warns(UserWarning, match=r"step-00000015.safetensors"):
        assert_same_run(whole, vicinal.resume(run.folder))


def test_a_run_that_died_while_it_was_saved_is_finished_by_resuming(tmp_path, monkeypatch):
    def dying(*arguments, **options):
        raise MemoryError

    whole = vicinal.train(config(tmp_path / "whole"))
    monkeypatch.setattr(loop, "save", dying)
    with pytest.raises(MemoryError):
        vicinal.train(config(tmp_path / "run"))
    with pytest.warns(UserWarning, match=r"run is not finished: its checkpoint after epoch 3 is used"):
        unfinished = vicinal.Run(tmp_path / "run").model().state_dict()
    assert all(torch.equal(values, unfinished[name]) for name, values in weights(whole).items())
    monkeypatch.undo()
    assert_same_run(whole, vicinal.resume(tmp_path / "run"))


def test_a_change_of_the_result_on_resume_is_an_error_that_names_it(tmp_path):
    run = vicinal.train(config(tmp_path / "run", epochs=1))
    with pytest.raises(ConfigError, match=r"0.001 .*run .* 0.01 ") as error:
        vicinal.resume(run.folder, run.config.changed(lr=0.01))
    assert error.value.field == "lr"
    assert vicinal.resume(run.folder, run.config.changed(workers=2)).results == run.results
