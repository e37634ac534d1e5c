"""Runs whose length is a number of steps."""

import pytest

import vicinal
from small_runs import ALL, assert_same_run, config, die_at
from vicinal.training.config import ConfigError
from vicinal.training.run_length import RunLength

WHOLE_EPOCHS = {"steps": 10, "warmup": 0.5, "train_size": 130}  # two epochs: 130 images in batches of 32 are 5 steps


def test_the_steps_of_whole_epochs_give_the_same_run(tmp_path):
    by_epochs = vicinal.train(config(tmp_path / "epochs", epochs=2))
    by_steps = vicinal.train(config(tmp_path / "steps", **WHOLE_EPOCHS))
    assert_same_run(by_epochs, by_steps)


def test_the_last_epoch_ends_with_the_steps(tmp_path, capsys):
    run = vicinal.train(config(tmp_path / "run", steps=7, warmup=None))
    assert [(row["epoch"], row["step"], row["images_seen"]) for row in run.metrics] == [(1, 5, 130), (2, 7, 194)]
    shown = capsys.readouterr().out
    assert "steps   7 of 32 images: 1.4 epochs of 5" in shown
    assert "epoch 2/2" in shown
    longer = vicinal.train(config(tmp_path / "longer", steps=9, warmup=None))
    assert longer.metrics[1]["step"] == 9
    assert 0 < run.metrics[1]["train_loss"] < 3  # the mean over the 64 images of the shorter epoch, not over 130
    assert run.metrics[1]["train_loss"] == pytest.approx(run.metrics[0]["train_loss"], rel=0.2)


def test_a_run_that_died_in_its_shorter_epoch_goes_on_as_if_it_had_not(tmp_path, monkeypatch):
    whole = vicinal.train(config(tmp_path / "whole", **ALL, steps=8))
    die_at(monkeypatch, [4, 6, 7])
    with pytest.raises(MemoryError):
        vicinal.train(config(tmp_path / "killed", **ALL, steps=8, checkpoint_minutes=0))
    for _ in range(2):
        with pytest.raises(MemoryError):
            vicinal.resume(tmp_path / "killed")
    assert_same_run(whole, vicinal.resume(tmp_path / "killed"))


@pytest.mark.parametrize(
    ("steps", "warmup", "expected"), [(7, None, 1), (100, None, 10), (1, None, 0), (20, 0.5, 4), (20, 0, 0)]
)
def test_a_tenth_of_the_steps_warm_up_unless_told_otherwise(tmp_path, steps, warmup, expected):
    assert RunLength.of(config(tmp_path, steps=steps, warmup=warmup), 8).warmup == expected


def test_a_warmup_as_long_as_the_steps_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"warmup must be shorter than the run of 10 steps, got 2 epochs of 5 steps"):
        vicinal.train(config(tmp_path / "run", steps=10, warmup=2))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("steps", [0, -3, 2.5, "many", True])
def test_unusable_steps_are_an_error(steps):
    with pytest.raises(vicinal.VicinalError, match="steps must be a"):
        vicinal.TrainConfig(steps=steps)
