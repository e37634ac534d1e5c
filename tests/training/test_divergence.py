"""Runs whose weights or loss stop being numbers."""

import math

import pytest

import vicinal
from small_runs import config
from vicinal.cli.main import main
from vicinal.errors import VicinalError
from vicinal.training import train as loop

# an epoch of one step: the loss is finite, then the weights are not, and evaluation meets them first
ONE_STEP = ["--epochs", "2", "--warmup", "0", "--train-size", "32", "--batch-size", "32", "--lr", "1e36"]


def checkpoints(folder):
    return sorted(file.name for file in (folder / "checkpoints").glob("*"))


@pytest.mark.parametrize("val", ["60", "0"])
@pytest.mark.parametrize("words", [ONE_STEP, ["--epochs", "2", "--train-size", "128", "--lr", "1e36"]])
def test_a_rate_that_destroys_the_weights_is_one_line_and_exit_code_2(tmp_path, capsys, words, val):
    folder = tmp_path / "run"
    assert main(["train", *words, "--val-size", val, "--out", str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("vicinal: ")
    assert said.count("\n") == 1
    assert "a lower lr" in said
    assert "resume" not in said
    assert checkpoints(folder) == []
    assert not (folder / "model").exists()
    assert not vicinal.Run(folder).finished

    assert main(["train", *words, "--out", str(folder)]) == 2  # the name is taken
    assert "--resume" not in capsys.readouterr().err
    assert main(["train", "--resume", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "cannot be resumed" in said
    assert "a lower lr" in said
    assert main(["eval", str(folder)]) == 2
    assert "--resume" not in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("minutes", [10, 0], ids=["epochs", "steps"])
@pytest.mark.parametrize("step", [4, 6])
def test_the_last_good_checkpoint_is_kept_and_named(tmp_path, monkeypatch, precision, minutes, step):
    """The loss is not a number after `step` steps: a checkpoint of those weights is good if they were validated."""
    real = loop.train_step

    def broken(state, settings, number, images, labels):
        loss = real(state, settings, number, images, labels)
        return loss * math.nan if number == step else loss

    monkeypatch.setattr(loop, "train_step", broken)
    good = f"step-{5 if (minutes, step) == (0, 6) else 4:08d}.safetensors"  # step 4 ends an epoch
    with pytest.raises(VicinalError, match=rf"nan at step {step + 1} \(epoch 2\).*{good}") as error:
        vicinal.train(config(tmp_path / "run", train_size=128, precision=precision, checkpoint_minutes=minutes))
    assert ("precision fp32" in str(error.value)) == (precision == "bf16")
    assert checkpoints(tmp_path / "run")[-1] == good
    assert not (tmp_path / "run" / "model").exists()


def test_validation_that_is_not_finite_stops_the_run(tmp_path, monkeypatch):
    """A finite loss, then an evaluation with weights that are not: the checkpoint of the epoch before is kept."""
    real = loop.train_step

    def broken(state, settings, number, images, labels):
        loss = real(state, settings, number, images, labels)
        if number == 7:
            state.raw_model.head.weight.data.fill_(math.nan)
        return loss

    monkeypatch.setattr(loop, "train_step", broken)
    with pytest.raises(VicinalError, match=r"validation loss became nan at step 8 \(epoch 2\).*step-00000004") as error:
        vicinal.train(config(tmp_path / "run", train_size=128))
    assert "resume" not in str(error.value)
    assert checkpoints(tmp_path / "run") == ["step-00000004.safetensors"]
