"""Runs on the embedded digits, small enough to be trained in a second or two."""

import csv
import json
import math
import os
import signal

import numpy as np
import pytest
import safetensors.torch
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, log_loss, recall_score, top_k_accuracy_score

import vicinal
import vicinal.data
from vicinal.errors import VicinalError
from vicinal.training import train as loop
from vicinal.training.evaluate import evaluate_split
from vicinal.training.prior_history import PriorLog
from vicinal.training.signals import Interrupted

SMALL = {"epochs": 3, "warmup": 1, "train_size": 130, "val_size": 60, "batch_size": 32}
# everything that draws at random or keeps a state
ALL = {
    "prior": "gmm",
    "mix": "transmix",
    "mix_prob": 0.7,
    "mix_per_example": True,
    "mixup_share": 0.5,
    "auto_augment": True,
    "erasing": 0.5,
    "drop_path": 0.3,
    "ema": 0.9,
}


def config(folder, **changes):
    return vicinal.TrainConfig(**{**SMALL, "out": folder, **changes})


def weights(run):
    return safetensors.torch.load_file(run.folder / "model" / "model.safetensors")


def assert_same_run(one, other):
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert one.results == other.results
    timeless = [
        [{key: value for key, value in row.items() if "second" not in key} for row in run.metrics]
        for run in (one, other)
    ]
    assert timeless[0] == timeless[1]
    logs = [run.folder / "priors.csv" for run in (one, other)]
    assert logs[0].exists() == logs[1].exists()
    assert not logs[0].exists() or logs[0].read_bytes() == logs[1].read_bytes()


def test_a_run_leaves_what_the_design_says(tmp_path, capsys):
    run = vicinal.fit(config(tmp_path / "run", prior="gmm"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[-1].startswith("epoch 3/3  loss ")
    assert {"config.yaml", "metrics.csv", "environment.json", "checkpoints", "model", "tensorboard"} <= {
        file.name for file in run.folder.iterdir()
    }
    assert run.config == config(tmp_path / "run", prior="gmm")
    assert [row["images_seen"] for row in run.metrics] == [128, 256, 384]
    assert [row["step"] for row in run.metrics] == [4, 8, 12]
    environment = run.environment
    assert environment["seed"] == 0
    assert environment["threads"] == torch.get_num_threads()
    assert environment["versions"]["torch"] == torch.__version__
    assert not list(run.folder.rglob(".*"))


def test_the_options_of_priors_are_written_down_every_epoch(tmp_path):
    run = vicinal.fit(config(tmp_path / "run", prior="gmm:kernels=3+conv:sigma=2", epochs=2))
    with open(run.folder / "priors.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["epoch", "layer", "option", "kernel", "head", "value"]
    modules = {name: module for name, module in run.model().named_modules() if hasattr(module, "prior")}
    heads = next(iter(modules.values())).prior.heads
    assert len(rows) == 3 * len(modules) * heads * (3 + 3 + 1 + 2)
    for row in rows:
        mixture, convolution = modules[row["layer"]].prior.parts
        head, kernel = int(row["head"]) - 1, int(row["kernel"]) - 1 if row["kernel"] else None
        if row["epoch"] == "2":
            values = {
                "gmm.sigma": mixture.sigma,
                "gmm.alpha": mixture.alpha,
                "conv.sigma": convolution.sigma[None],
                "conv.mu_row": convolution.mu[:, 0][None],
                "conv.mu_column": convolution.mu[:, 1][None],
            }[row["option"]]
            assert float(row["value"]) == pytest.approx(values[kernel or 0, head].item(), rel=1e-7)
            assert (kernel is None) == row["option"].startswith("conv")
        elif row["epoch"] == "0" and row["option"] in ("gmm.alpha", "gmm.sigma"):
            start = 0.0 if row["option"] == "gmm.alpha" else (0.5, 2**0.5, 4.0)[kernel]  # half a patch to the grid
            assert float(row["value"]) == pytest.approx(start, abs=1e-6)
    history = run.priors
    assert history.epochs == (0, 1, 2)
    for name, module in modules.items():
        moved = history.layers[name]["gmm.alpha"]
        assert moved.shape == (3, 3, heads)
        assert np.array_equal(moved[-1].astype("f4"), module.prior.parts[0].alpha.detach().numpy())
        assert history.layers[name]["conv.mu_row"].shape == (3, heads)
    assert any(np.abs(each["gmm.alpha"][1]).max() > 0 for each in history.layers.values())


@pytest.mark.parametrize("prior", ["none", "rpe", "elm"])
def test_where_no_option_is_read_there_is_no_file_of_them(tmp_path, prior):
    run = vicinal.fit(config(tmp_path / "run", prior=prior, epochs=1))
    assert run.priors is None
    assert not (run.folder / "priors.csv").exists()


def test_with_a_moving_average_the_options_are_those_of_the_trained_network(tmp_path):
    run = vicinal.fit(config(tmp_path / "run", prior="gab", ema=0.9, epochs=1))
    last = safetensors.torch.load_file(next((run.folder / "checkpoints").iterdir()))
    for layer, options in run.priors.layers.items():
        assert np.array_equal(options["sigma"][1, :1].astype("f4"), last[f"model.{layer}.prior.flat_sigma"].numpy())


def test_lines_that_were_cut_short_or_are_of_a_repeated_epoch_are_dropped(tmp_path):
    run = vicinal.fit(config(tmp_path / "run", prior="gab", epochs=2))
    file = run.folder / "priors.csv"
    written = file.read_text()
    file.write_text(written + "3,blocks.0.attn,sigma,,1,2.5\n1")
    assert run.priors.epochs == (0, 1, 2)
    PriorLog(run.folder, run.model()).start(epochs=2, steps=8)
    assert file.read_text() == written
    file.write_text("epoch,layer\n0,blocks.0.attn\n")
    with pytest.raises(VicinalError, match=r"priors.csv is damaged .*; expected the columns epoch,layer,option"):
        assert run.priors


def test_the_test_figure_is_that_of_the_saved_model(tmp_path):
    """Again from the pictures of the test split, one by one, and scikit-learn's figures."""
    run = vicinal.fit(config(tmp_path / "run", epochs=5))
    model = run.model()
    declared = model.pretrained_cfg
    test = vicinal.data.open_dataset("digits").test
    pixels = torch.from_numpy(np.stack([np.asarray(test.image(index)) for index in range(len(test))]))
    images = (pixels.float()[:, None] / 255 - declared["mean"][0]) / declared["std"][0]
    with torch.no_grad():
        logits = torch.cat([model(image[None]) for image in images])
    found = run.results["test"]
    assert found["images"] == len(test) == 359
    assert found["top1"] == pytest.approx(accuracy_score(test.labels, logits.argmax(1)))
    assert found["top5"] == pytest.approx(top_k_accuracy_score(test.labels, logits, k=5))
    assert found["loss"] == pytest.approx(log_loss(test.labels, logits.double().softmax(1)), rel=1e-5)
    assert found["confusion"] == confusion_matrix(test.labels, logits.argmax(1), labels=range(10)).tolist()
    assert found["per_class"] == pytest.approx(recall_score(test.labels, logits.argmax(1), average=None))
    probabilities, gaps = logits.double().softmax(1).numpy(), 0.0
    confidence, right = probabilities.max(1), logits.argmax(1).numpy() == test.labels
    for number in range(15):
        inside = (confidence >= number / 15) & (confidence < (number + 1) / 15)
        if inside.any():
            gaps += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
    assert found["calibration_error"] == pytest.approx(gaps, rel=1e-4)
    assert declared["label_names"] == [str(number) for number in range(10)]


def test_a_run_is_evaluated_again_on_its_own_splits(tmp_path):
    run = vicinal.fit(config(tmp_path / "run", epochs=1, val_size=60))
    found = {split: evaluate_split(run, split)[0] for split in ("train", "val", "test")}
    assert (found["train"].images, found["val"].images) == (130, 60)
    for split in ("val", "test"):
        again, before = found[split].as_dict(), dict(run.results[split])
        for name in ("loss", "calibration_error"):  # sums over batches of another size
            assert again.pop(name) == pytest.approx(before.pop(name), rel=1e-6)
        assert again == before
    assert found["val"].top1 == run.metrics[-1]["val_top1"]


def test_a_run_in_lower_precision_does_not_change_how_others_are_evaluated(tmp_path):
    run = vicinal.fit(config(tmp_path / "run", epochs=1, val_size=60))
    vicinal.fit(config(tmp_path / "other", epochs=1, precision="bf16"))
    assert evaluate_split(run, "test")[0].loss == pytest.approx(run.results["test"]["loss"], rel=1e-6)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path):
    one, again, other = (
        vicinal.fit(config(tmp_path / name, seed=seed, epochs=1)) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert_same_run(one, again)
    assert not torch.equal(weights(one)["head.weight"], weights(other)["head.weight"])


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")  # on a single core
def test_workers_change_nothing(tmp_path):
    none, two = (vicinal.fit(config(tmp_path / str(workers), **ALL, workers=workers)) for workers in (0, 2))
    assert_same_run(none, two)


@pytest.mark.parametrize("minutes", [10, 0], ids=["epochs", "steps"])
def test_a_run_that_died_goes_on_as_if_it_had_not(tmp_path, monkeypatch, minutes):
    """It dies at steps before, at and behind checkpoints: at the ends of epochs, and at every step."""
    whole = vicinal.fit(config(tmp_path / "whole", **ALL))
    real, deaths = loop.train_step, [0, 2, 5, 8, 11]

    def dying(job, settings, step, images, labels):
        if deaths and step == deaths[0]:
            deaths.pop(0)
            raise MemoryError
        return real(job, settings, step, images, labels)

    monkeypatch.setattr(loop, "train_step", dying)
    settings = config(tmp_path / "killed", **ALL, checkpoint_minutes=minutes)
    with pytest.raises(MemoryError):
        vicinal.fit(settings)
    for _ in range(4):
        with pytest.raises(MemoryError):
            vicinal.resume(tmp_path / "killed")
    assert not vicinal.Run(tmp_path / "killed").finished
    killed = vicinal.resume(tmp_path / "killed")
    assert not deaths
    assert_same_run(whole, killed)
    assert len(killed.environment["resumed"]) == 5


def test_a_signal_ends_the_step_and_saves(tmp_path, monkeypatch):
    whole = vicinal.fit(config(tmp_path / "whole"))
    real = loop.train_step

    def signalled(job, settings, step, images, labels):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(job, settings, step, images, labels)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(loop, "train_step", signalled)
    with pytest.raises(Interrupted, match=r"stopped after step 6 of 12; `vicinal train --resume .*stopped` continues"):
        vicinal.fit(config(tmp_path / "stopped"))
    assert signal.getsignal(signal.SIGTERM) == before
    assert (
        sorted(file.name for file in (tmp_path / "stopped" / "checkpoints").iterdir())[-1]
        == "step-00000006.safetensors"
    )
    monkeypatch.setattr(loop, "train_step", real)
    assert_same_run(whole, vicinal.resume(tmp_path / "stopped"))


def test_a_damaged_checkpoint_is_skipped(tmp_path, monkeypatch):
    whole = vicinal.fit(config(tmp_path / "whole"))
    run = vicinal.fit(config(tmp_path / "run"))
    (run.folder / "results.json").unlink()
    last = sorted((run.folder / "checkpoints").iterdir())[-1]
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.warns(UserWarning, match=r"step-00000012.safetensors is damaged"):
        assert_same_run(whole, vicinal.resume(run.folder))


def test_a_run_that_died_while_it_was_saved_is_finished_by_resuming(tmp_path, monkeypatch):
    def dying(*arguments, **options):
        raise MemoryError

    whole = vicinal.fit(config(tmp_path / "whole"))
    monkeypatch.setattr(loop, "save", dying)
    with pytest.raises(MemoryError):
        vicinal.fit(config(tmp_path / "run"))
    with pytest.raises(VicinalError, match="is not finished; `vicinal train --resume"):
        vicinal.Run(tmp_path / "run").model()
    monkeypatch.undo()
    assert_same_run(whole, vicinal.resume(tmp_path / "run"))


def test_no_run_overwrites_another(tmp_path):
    vicinal.fit(config(tmp_path / "run", epochs=1))
    with pytest.raises(
        VicinalError, match=r"exists already; `vicinal train --resume .*run` continues it, or give another"
    ):
        vicinal.fit(config(tmp_path / "run", epochs=1))
    (tmp_path / "mine").mkdir()
    with pytest.raises(VicinalError, match="exists already; give another name with --out"):
        vicinal.fit(config(tmp_path / "mine"))
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_change_of_the_result_on_resume_is_an_error_that_names_it(tmp_path):
    run = vicinal.fit(config(tmp_path / "run", epochs=1))
    with pytest.raises(VicinalError, match=r"--lr was 0.001 in .*run and cannot become 0.01"):
        vicinal.resume(run.folder, run.config.changed(lr=0.01))
    assert vicinal.resume(run.folder, run.config.changed(workers=2)).results == run.results


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, monkeypatch, precision):
    real = loop.train_step

    def broken(job, settings, step, images, labels):
        loss = real(job, settings, step, images, labels)
        return loss * math.nan if step == 6 else loss

    monkeypatch.setattr(loop, "train_step", broken)
    with pytest.raises(
        VicinalError, match=r"the loss became nan at step 7 \(epoch 2\); step-00000004.safetensors, from"
    ):
        vicinal.fit(config(tmp_path / "run", precision=precision))
    assert [file.name for file in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004.safetensors"]
    assert not (tmp_path / "run" / "model").exists()


def test_pieces_of_a_step_add_up_to_the_step(tmp_path):
    plain = {"mix": "transmix", "mix_prob": 1.0, "prior": "gmm", "precision": "fp64", "epochs": 1, "warmup": 0}
    whole, pieces = (
        vicinal.fit(config(tmp_path / str(number), **plain, accumulate=number, clip_grad=0.5)) for number in (1, 4)
    )
    assert whole.metrics[0]["train_loss"] == pytest.approx(pieces.metrics[0]["train_loss"], abs=1e-10)
    assert whole.results["test"]["loss"] == pytest.approx(pieces.results["test"]["loss"], abs=1e-8)


def test_a_run_in_lower_precision_saves_an_ordinary_model(tmp_path):
    run = vicinal.fit(config(tmp_path / "run", prior="gmm", mix="transmix", precision="bf16", ema=0.9, epochs=1))
    assert {tensor.dtype for tensor in weights(run).values()} == {torch.float32}
    assert run.model()(torch.zeros(1, 1, 8, 8)).dtype == torch.float32
    again = vicinal.fit(config(tmp_path / "again", epochs=1))  # another precision in the same process
    assert again.model()(torch.zeros(1, 1, 8, 8)).dtype == torch.float32


def test_without_validation_there_is_test_only(tmp_path, capsys):
    run = vicinal.fit(config(tmp_path / "run", val_size=0, epochs=1))
    assert list(run.results) == ["test"]
    assert run.metrics[0]["val_top1"] is None
    assert "val" not in capsys.readouterr().out


def test_a_moving_average_is_what_is_saved(tmp_path):
    run = vicinal.fit(config(tmp_path / "run", ema=0.9, epochs=1))
    last = safetensors.torch.load_file(next((run.folder / "checkpoints").iterdir()))
    assert torch.equal(weights(run)["head.weight"], last["ema.head.weight"])
    assert not torch.equal(last["model.head.weight"], last["ema.head.weight"])


def test_another_set_of_classes_starts_from_a_run(tmp_path):
    first = vicinal.fit(config(tmp_path / "first", prior="gmm", epochs=1))
    second = vicinal.fit(
        config(tmp_path / "second", init_from=str(first.folder), lr=1e-9, min_lr=0, epochs=1, warmup=0)
    )
    for name, tensor in weights(first).items():
        assert torch.allclose(weights(second)[name], tensor, atol=1e-6), name
    assert second.model().pretrained_cfg["mean"] == first.model().pretrained_cfg["mean"]
    larger = vicinal.fit(config(tmp_path / "larger", init_from=str(first.folder), img_size=(12,), epochs=1, warmup=0))
    assert larger.model().pretrained_cfg["input_size"] == (1, 12, 12)
    with pytest.raises(VicinalError, match="has a prior already"):
        vicinal.fit(config(tmp_path / "third", init_from=str(first.folder), prior="gab"))
    plain = vicinal.fit(config(tmp_path / "plain", epochs=1))
    given = vicinal.fit(config(tmp_path / "given", init_from=str(plain.folder), prior="gab", epochs=1, warmup=0))
    assert json.loads((given.folder / "model" / "config.json").read_text())["model_args"]["prior"] != "none"


def test_what_the_machine_cannot_do_is_said(tmp_path):
    with pytest.raises(VicinalError, match="--precision fp16 needs a GPU"):
        vicinal.fit(config(tmp_path / "run", precision="fp16", device="cpu"))
    with pytest.raises(VicinalError, match="--batch-size 32 cannot be cut into 1 processes x 5 pieces"):
        vicinal.fit(config(tmp_path / "run", accumulate=5))
    with pytest.raises(VicinalError, match="130 images, got 512"):
        vicinal.fit(config(tmp_path / "run", batch_size=512))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_compiled_training_learns_the_same(tmp_path):
    mixed = {"prior": "gmm", "mix": "transmix", "mix_prob": 1.0, "precision": "fp64"}
    plain, compiled, other = (
        vicinal.fit(config(tmp_path / name, **mixed | changes))
        for name, changes in (("plain", {}), ("compiled", {"compile": True}), ("other", {"mix": "cutmix"}))
    )
    loss, expected, by_area = (run.metrics[-1]["train_loss"] for run in (compiled, plain, other))
    assert loss == pytest.approx(expected, rel=1e-7)
    assert loss != pytest.approx(by_area, rel=1e-5)
    assert compiled.config.compile
