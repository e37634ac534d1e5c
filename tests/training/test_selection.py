"""Early stopping, the best epoch, and classes of different sizes."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.utils.class_weight import compute_class_weight

import vicinal
from small_runs import assert_same_run, config, die_at, weights
from vicinal.training import train as loop
from vicinal.training.accelerator import make_accelerator
from vicinal.training.checkpoints import Progress
from vicinal.training.config import ConfigError
from vicinal.training.setup import prepare


def progress(*accuracies):
    return Progress(epoch=len(accuracies), history=[{"val_top1": value} for value in accuracies])


@pytest.mark.parametrize(
    ("accuracies", "patience", "over"),
    [
        ([], 1, False),
        ([0.1], 1, False),
        ([0.1, 0.1], 1, True),  # equal is not better
        ([0.3, 0.2, 0.25], 3, False),
        ([0.3, 0.2, 0.25, 0.29], 3, True),
        ([0.3, 0.2, 0.25, 0.31], 3, False),
        ([0.3, 0.2, 0.25, 0.29], None, False),
        ([0.3] * 10, None, True),
    ],
)
def test_patience_counts_epochs_without_a_better_one(accuracies, patience, over):
    assert progress(*accuracies).is_over(10, patience) == over


@pytest.fixture
def given_accuracies(monkeypatch):
    """Validation gives these accuracies, epoch by epoch, whatever the weights."""
    real, given = loop.evaluate, [0.2, 0.5, 0.4, 0.3, 0.9]

    def evaluate(model, loader, classes, accelerator):
        found = real(model, loader, classes, accelerator)
        if found.images == 60 and len(seen) < 5:
            object.__setattr__(found, "top1", given[len(seen)])
            seen.append(model.head.weight.detach().clone())
        return found

    seen = []
    monkeypatch.setattr(loop, "evaluate", evaluate)
    return seen


def test_a_run_stops_early_and_keeps_its_best_epoch(tmp_path, given_accuracies):
    run = vicinal.train(config(tmp_path / "run", epochs=5, patience=2, keep="best"))
    assert [row["val_top1"] for row in run.metrics] == [0.2, 0.5, 0.4, 0.3]
    assert run.finished
    assert torch.equal(weights(run)["head.weight"], given_accuracies[1])
    assert torch.equal(load_file(run.folder / "checkpoints" / "best.safetensors")["head.weight"], given_accuracies[1])


def test_by_default_all_epochs_are_trained_and_the_last_is_kept(tmp_path, given_accuracies):
    run = vicinal.train(config(tmp_path / "run", epochs=4))
    assert len(run.metrics) == 4
    assert torch.equal(weights(run)["head.weight"], given_accuracies[3])
    assert not (run.folder / "checkpoints" / "best.safetensors").exists()


def test_the_moving_average_of_the_best_epoch_is_kept(tmp_path, given_accuracies):
    run = vicinal.train(config(tmp_path / "run", epochs=3, ema=0.9, keep="best"))
    assert torch.equal(weights(run)["head.weight"], given_accuracies[1])


def test_the_best_epoch_survives_interruptions(tmp_path, monkeypatch):
    settings = {"epochs": 6, "patience": 2, "keep": "best", "lr": 0.005}
    whole = vicinal.train(config(tmp_path / "whole", **settings))
    die_at(monkeypatch, [3, 6, 11])
    with pytest.raises(MemoryError):
        vicinal.train(config(tmp_path / "killed", **settings))
    for _ in range(2):
        with pytest.raises(MemoryError):
            vicinal.resume(tmp_path / "killed")
    assert_same_run(whole, vicinal.resume(tmp_path / "killed"))


@pytest.mark.parametrize("changes", [{"patience": 3}, {"keep": "best"}])
def test_selection_needs_validation_images(tmp_path, changes):
    with pytest.raises(ConfigError, match="needs validation images") as error:
        vicinal.train(config(tmp_path / "run", val_size=0, **changes))
    assert error.value.field == next(iter(changes))


def test_class_weights_are_those_of_scikit_learn(tmp_path):
    settings = config(tmp_path, train_size=137, balance="weights")
    state = prepare(settings, make_accelerator(settings))
    labels = state.train.images.labels.numpy()
    expected = compute_class_weight("balanced", classes=np.arange(10), y=labels)
    assert state.class_weights.tolist() == pytest.approx(expected.tolist())
    assert len(set(np.bincount(labels))) > 1


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_the_loss_of_a_step_has_the_weights_of_its_classes(tmp_path, precision):
    settings = config(tmp_path, train_size=137, balance="weights", precision=precision, smoothing=0.0, accumulate=2)
    state = prepare(settings, make_accelerator(settings))
    images, labels = next(iter(state.train.batches(0)))
    weight = compute_class_weight("balanced", classes=np.arange(10), y=state.train.images.labels.numpy())[labels]
    with torch.no_grad():
        logits = state.raw_model.train()(images.to(next(state.raw_model.parameters()).dtype)).double()
    losses = -logits.log_softmax(1)[torch.arange(len(labels)), labels]
    loss = loop.train_step(state, settings, 0, images, labels)
    expected = float((losses * torch.from_numpy(weight)).mean())
    assert float(loss) == pytest.approx(expected, rel=1e-9 if precision == "fp64" else 0.02)


def test_balanced_sampling_is_a_setting(tmp_path):
    settings = config(tmp_path, train_size=137, balance="sampling", batch_size=137)
    state = prepare(settings, make_accelerator(settings))
    _, labels = next(iter(state.train.batches(0)))
    assert np.ptp(np.bincount(labels)) <= 1
    assert state.class_weights is None
