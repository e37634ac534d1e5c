"""The learning rate of every step, against the reference's formula."""

import math

import pytest

import vicinal
from small_runs import config
from vicinal.training.accelerator import make_accelerator
from vicinal.training.config import ConfigError, TrainConfig
from vicinal.training.setup import prepare


def reference_rate(step, steps, warmup, lr, min_lr):
    """Linear from min_lr to lr over the warm-up, then a cosine over the steps that are left."""
    if step < warmup:
        return min_lr + (lr - min_lr) * step / warmup
    return min_lr + (lr - min_lr) * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


def rates(settings, steps):
    """The rates of the first group that is not one of priors, and of priors, at every step."""
    state = prepare(settings, make_accelerator(settings))
    found = []
    for step in range(steps):
        state.schedule.step_update(step)
        found.append([group["lr"] for group in state.optimizer.param_groups])
    return [each[0] for each in found], [each[-1] for each in found]


@pytest.mark.parametrize(("warmup", "lr", "min_lr"), [(3, 1e-3, 1e-6), (0, 0.02, 0), (1.5, 1e-4, 1e-5)])
def test_every_rate_is_that_of_the_reference(tmp_path, warmup, lr, min_lr):
    settings = config(
        tmp_path, epochs=10, warmup=warmup, lr=lr, min_lr=min_lr, prior="gmm", train_size=128, prior_lr=7.0
    )
    network, priors = rates(settings, 41)  # one step more than the run has
    expected = [reference_rate(step, 40, round(4 * warmup), lr, min_lr) for step in range(41)]
    assert network == pytest.approx(expected, rel=1e-12, abs=1e-18)
    assert priors == pytest.approx([7 * rate for rate in expected], rel=1e-12, abs=1e-18)
    assert max(network) == pytest.approx(lr)
    assert network[-1] == pytest.approx(min_lr, abs=1e-18)


def test_the_rate_in_the_metrics_is_that_of_the_last_step_of_the_epoch(tmp_path):
    run = vicinal.train(config(tmp_path / "run", warmup=1, train_size=128))
    assert [row["lr"] for row in run.metrics] == pytest.approx(
        [reference_rate(step, 12, 4, 1e-3, 1e-6) for step in (3, 7, 11)]
    )


@pytest.mark.parametrize("epochs", [1, 2, 50, 300])
def test_a_tenth_of_the_epochs_warm_up_unless_told_otherwise(tmp_path, epochs):
    assert TrainConfig(epochs=epochs).warmup_epochs == epochs / 10
    assert TrainConfig(epochs=epochs, warmup=0.5).warmup_epochs == 0.5


def test_two_epochs_need_no_other_flag(tmp_path):
    settings = vicinal.TrainConfig(epochs=2, train_size=320, out=tmp_path)
    network, _ = rates(settings, 10)
    assert network == pytest.approx([reference_rate(step, 10, 1, 1e-3, 1e-6) for step in range(10)])


@pytest.mark.parametrize("warmup", [3, 4])
def test_a_warm_up_as_long_as_the_run_is_refused(warmup):
    with pytest.raises(ConfigError, match=rf"warmup must be below the number of epochs \(3\), got {warmup}") as error:
        TrainConfig(epochs=3, warmup=warmup)
    assert error.value.field == "warmup"


def test_a_run_of_one_step_has_the_highest_rate(tmp_path):
    network, _ = rates(config(tmp_path, epochs=1, warmup=0.9, train_size=32), 1)
    assert network == [1e-3]
