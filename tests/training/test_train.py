import json
import math

import numpy as np
import pytest
import safetensors.torch
import torch

import vicinal
import vicinal.data
from small_runs import ALL, assert_same_run, config, weights
from vicinal.errors import VicinalError
from vicinal.training import train as loop
from vicinal.training.config import ConfigError


def test_the_name_is_a_function_in_the_package_and_a_module_in_the_room():
    assert vicinal.train is loop.train
    assert vicinal.fit is vicinal.train


def test_a_run_leaves_what_the_design_says(tmp_path, capsys):
    run = vicinal.train(config(tmp_path / "run", prior="gmm"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("data    digits, ")
    assert [line[:9] for line in lines if line.startswith("epoch")] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert lines[-1].startswith("epoch 3/3  loss ")
    assert {"config.yaml", "metrics.csv", "environment.json", "checkpoints", "model", "tensorboard"} <= {
        file.name for file in run.folder.iterdir()
    }
    assert run.config == config(tmp_path / "run", prior="gmm")
    assert [row["images_seen"] for row in run.metrics] == [130, 260, 390]
    assert [row["step"] for row in run.metrics] == [5, 10, 15]
    environment = run.environment
    assert environment["seed"] == 0
    assert environment["threads"] == torch.get_num_threads()
    assert environment["versions"]["torch"] == torch.__version__
    assert not list(run.folder.rglob(".*"))


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path):
    one, again, other = (
        vicinal.train(config(tmp_path / name, seed=seed, epochs=1)) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert_same_run(one, again)
    assert not torch.equal(weights(one)["head.weight"], weights(other)["head.weight"])


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")  # on a single core
def test_workers_change_nothing(tmp_path):
    none, two = (vicinal.train(config(tmp_path / str(workers), **ALL, workers=workers)) for workers in (0, 2))
    assert_same_run(none, two)


def test_no_run_overwrites_another(tmp_path):
    vicinal.train(config(tmp_path / "run", epochs=1))
    with pytest.raises(VicinalError, match=r"`vicinal train --resume .*run`"):
        vicinal.train(config(tmp_path / "run", epochs=1))
    (tmp_path / "mine").mkdir()
    with pytest.raises(VicinalError, match=r"mine .*--out"):
        vicinal.train(config(tmp_path / "mine"))
    assert list((tmp_path / "mine").iterdir()) == []


def test_losses_read_in_groups_as_on_a_gpu_give_the_same_run(tmp_path, monkeypatch):
    """An epoch has 5 steps: groups of 3 and 2."""

    class GroupsOfThree(loop.LossBuffer):
        def __init__(self, accelerator):
            super().__init__(accelerator)
            self.size = 3

    def broken(state, settings, step, images, labels):
        loss = real(state, settings, step, images, labels)
        return loss * math.nan if step == 5 else loss  # in the middle of a group

    one_by_one = vicinal.train(config(tmp_path / "one"))
    monkeypatch.setattr(loop, "LossBuffer", GroupsOfThree)
    assert_same_run(one_by_one, vicinal.train(config(tmp_path / "groups")))
    real = loop.train_step
    monkeypatch.setattr(loop, "train_step", broken)
    with pytest.raises(VicinalError, match=r"nan at step 6 \(epoch 2\)"):
        vicinal.train(config(tmp_path / "broken"))


def test_pieces_of_a_step_add_up_to_the_step(tmp_path):
    """The last step has 2 images, fewer than pieces."""
    plain = {"mix": "transmix", "mix_prob": 1.0, "prior": "gmm", "precision": "fp64", "epochs": 1, "warmup": 0}
    whole, pieces = (
        vicinal.train(config(tmp_path / str(number), **plain, accumulate=number, clip_grad=0.5)) for number in (1, 4)
    )
    assert whole.metrics[0]["train_loss"] == pytest.approx(pieces.metrics[0]["train_loss"], abs=1e-10)
    assert whole.results["test"]["loss"] == pytest.approx(pieces.results["test"]["loss"], abs=1e-8)


def test_a_run_in_lower_precision_saves_an_ordinary_model(tmp_path):
    run = vicinal.train(config(tmp_path / "run", prior="gmm", mix="transmix", precision="bf16", ema=0.9, epochs=1))
    assert {tensor.dtype for tensor in weights(run).values()} == {torch.float32}
    assert run.model()(torch.zeros(1, 1, 8, 8)).dtype == torch.float32
    again = vicinal.train(config(tmp_path / "again", epochs=1))  # another precision in the same process
    assert again.model()(torch.zeros(1, 1, 8, 8)).dtype == torch.float32


def test_without_validation_there_is_test_only(tmp_path, capsys):
    run = vicinal.train(config(tmp_path / "run", val_size=0, epochs=1))
    assert list(run.results) == ["test"]
    assert run.metrics[0]["val_top1"] is None
    lines = capsys.readouterr().out.splitlines()
    assert "val     none" in lines
    assert "val" not in lines[-1]


def test_a_moving_average_is_what_is_saved(tmp_path):
    run = vicinal.train(config(tmp_path / "run", ema=0.9, epochs=1))
    last = safetensors.torch.load_file(next((run.folder / "checkpoints").iterdir()))
    assert torch.equal(weights(run)["head.weight"], last["ema.head.weight"])
    assert not torch.equal(last["model.head.weight"], last["ema.head.weight"])


def test_a_moving_average_has_the_decay_that_was_given_from_the_first_step_on(tmp_path, monkeypatch):
    real, weights_of_steps = loop.train_step, []

    def recorded(state, settings, step, images, labels):
        if not step:
            weights_of_steps.append(state.raw_model.head.weight.detach().double().clone())
        loss = real(state, settings, step, images, labels)
        weights_of_steps.append(state.raw_model.head.weight.detach().double().clone())
        return loss

    monkeypatch.setattr(loop, "train_step", recorded)
    run = vicinal.train(config(tmp_path / "run", ema=0.8, epochs=2))
    average = weights_of_steps[0]
    for weight in weights_of_steps[1:]:
        average = 0.8 * average + 0.2 * weight
    torch.testing.assert_close(weights(run)["head.weight"].double(), average, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mix", ["none", "both", "transmix"])
@pytest.mark.parametrize("train_size", [97, 99, 129])
def test_steps_take_every_image_with_the_same_weight(tmp_path, mix, train_size):
    """The loss of an epoch without learning is the mean over all images, whatever the last step has."""
    settings = {"lr": 1e-12, "min_lr": 0, "epochs": 1, "warmup": 0, "mix": mix, "precision": "fp64", "crop": False}
    run = vicinal.train(config(tmp_path / "run", **settings, train_size=train_size, mix_prob=0.0))
    assert run.metrics[0]["images_seen"] == train_size
    model, declared = run.model().double(), run.model().pretrained_cfg
    images = vicinal.data.split(vicinal.data.open_dataset("digits"), val_size=60, train_size=train_size).train
    pixels = torch.from_numpy(np.stack([np.asarray(images.image(index)) for index in range(train_size)]))
    with torch.no_grad():
        logits = model((pixels.double()[:, None] / 255 - declared["mean"][0]) / declared["std"][0])
    expected = torch.nn.functional.cross_entropy(logits, torch.from_numpy(images.labels), label_smoothing=0.1)
    assert run.metrics[0]["train_loss"] == pytest.approx(float(expected), rel=1e-5)


def test_another_set_of_classes_starts_from_a_run(tmp_path):
    first = vicinal.train(config(tmp_path / "first", prior="gmm", epochs=1))
    second = vicinal.train(
        config(tmp_path / "second", init_from=str(first.folder), lr=1e-9, min_lr=0, epochs=1, warmup=0)
    )
    for name, tensor in weights(first).items():
        assert torch.allclose(weights(second)[name], tensor, atol=1e-6), name
    assert second.model().pretrained_cfg["mean"] == first.model().pretrained_cfg["mean"]
    larger = vicinal.train(config(tmp_path / "larger", init_from=str(first.folder), img_size=(12,), epochs=1, warmup=0))
    assert larger.model().pretrained_cfg["input_size"] == (1, 12, 12)
    with pytest.raises(ConfigError, match=r"first .*gmm") as error:
        vicinal.train(config(tmp_path / "third", init_from=str(first.folder), prior="gab"))
    assert error.value.field == "prior"
    plain = vicinal.train(config(tmp_path / "plain", epochs=1))
    given = vicinal.train(config(tmp_path / "given", init_from=str(plain.folder), prior="gab", epochs=1, warmup=0))
    assert json.loads((given.folder / "model" / "config.json").read_text())["model_args"]["prior"] != "none"


def test_a_batch_larger_than_the_training_set_shrinks_with_a_word(tmp_path, capsys):
    large, exact = (vicinal.train(config(tmp_path / str(size), batch_size=size)) for size in (512, 130))
    assert (
        "batch_size is 512, but there are 130 training images: each step takes all of them" in capsys.readouterr().err
    )
    first, second = weights(large), weights(exact)
    assert all(torch.equal(first[name], second[name]) for name in first | second)
    losses = [run.results["test"]["loss"] for run in (large, exact)]  # sums over batches of another size
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_what_the_machine_cannot_do_is_said(tmp_path):
    with pytest.raises(ConfigError, match="fp16") as error:
        vicinal.train(config(tmp_path / "run", precision="fp16", device="cpu"))
    assert error.value.field == "precision"
    with pytest.raises(ConfigError, match=r"1 processes x 5 pieces\), got 32") as error:
        vicinal.train(config(tmp_path / "run", accumulate=5))
    assert error.value.field == "batch_size"
    with pytest.raises(ConfigError, match=r"of 32 leaves a single image .* 129 images .*batch normalization") as error:
        vicinal.train(config(tmp_path / "run", model="resnet18", img_size=(32,), train_size=129))
    assert error.value.field == "batch_size"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_compiled_training_learns_the_same(tmp_path):
    mixed = {"prior": "gmm", "mix": "transmix", "mix_prob": 1.0, "precision": "fp64"}
    plain, compiled, other = (
        vicinal.train(config(tmp_path / name, **mixed | changes))
        for name, changes in (("plain", {}), ("compiled", {"compile": True}), ("other", {"mix": "cutmix"}))
    )
    loss, expected, by_area = (run.metrics[-1]["train_loss"] for run in (compiled, plain, other))
    assert loss == pytest.approx(expected, rel=1e-7)
    assert loss != pytest.approx(by_area, rel=1e-5)
    assert compiled.config.compile
