"""Files that vicinal 0.1.0 wrote open in this version, with the same outputs; see make_fixtures.py."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import safetensors
import torch

import vicinal
from vicinal.attachment import get_priors
from vicinal.cli.main import main
from vicinal.errors import VicinalError
from vicinal.training.evaluate import evaluate_split

HERE = Path(__file__).parent
# Where priors are, for each saved model: the number of attention layers that have one.
LAYERS_WITH_PRIOR = {
    "cait-gmm": 2,
    "pit-gmm": 2,
    "swin-gmm": 3,
    "t2t-gmm": 2,
    "timm-vit-gmm": 2,
    "vit-by-layer": 2,
    "vit-conv": 2,
    "vit-conv-neighbours": 2,
    "vit-decay": 2,
    "vit-decay-learned": 2,
    "vit-elm": 2,
    "vit-gab": 2,
    "vit-gmm": 2,
    "vit-gmm+gab": 2,
    "vit-none": 0,
    "vit-relpos-gmm": 2,
    "vit-rpe": 2,
    "vit-rpe-mlp": 2,
}
every_model = pytest.mark.parametrize("name", LAYERS_WITH_PRIOR)


@pytest.fixture
def fixtures(tmp_path, monkeypatch):
    """Returns a copy of the fixtures that can be written to, which is the working directory too."""
    copy = shutil.copytree(HERE, tmp_path / "fixtures", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.chdir(copy)
    monkeypatch.setenv("VICINAL_CACHE", str(tmp_path / "cache"))
    return copy


def load(name):
    return vicinal.load(HERE / "models" / name)


def input_and_output(name):
    """Returns the input of a saved model, and the output that it had for version 0.1.0, float64 both."""
    with safetensors.safe_open(HERE / "outputs.safetensors", framework="pt") as file:
        made_by, output = json.loads(file.metadata()[name]), file.get_tensor(name)
    generator = torch.Generator().manual_seed(made_by["seed"])
    return 2 * torch.rand(made_by["shape"], generator=generator, dtype=torch.float64) - 1, output


def test_no_saved_model_is_missing_or_left_untested():
    assert {folder.name for folder in (HERE / "models").iterdir()} == LAYERS_WITH_PRIOR.keys()


@every_model
def test_a_saved_model_has_the_same_output(name):
    images, output = input_and_output(name)
    model = load(name)
    assert not model.training
    with torch.no_grad():
        torch.testing.assert_close(model.double()(images), output, rtol=1e-10, atol=1e-10)


@every_model
def test_a_saved_model_has_its_weights_under_the_same_names(name):
    with safetensors.safe_open(HERE / "models" / name / "model.safetensors", framework="pt") as file:
        saved = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    loaded = load(name).state_dict()
    assert loaded.keys() == saved.keys()
    assert all(loaded[key].dtype == saved[key].dtype and torch.equal(loaded[key], saved[key]) for key in saved)


@pytest.mark.parametrize("name", [name for name, layers in LAYERS_WITH_PRIOR.items() if layers])
def test_the_output_of_a_saved_model_depends_on_its_prior(name):
    # else the comparison of outputs would not notice a prior that is lost
    images, output = input_and_output(name)
    model = load(name).double()
    assert len(get_priors(model)) == LAYERS_WITH_PRIOR[name]
    vicinal.detach(model)
    with torch.no_grad():
        assert (model(images) - output).abs().max() > 0.01


def test_a_saved_model_keeps_its_class_names_and_preprocessing():
    declared = load("vit-gmm").pretrained_cfg
    assert declared["label_names"] == [f"class {number}" for number in range(10)]
    assert tuple(declared["input_size"]) == (3, 8, 8)
    assert tuple(declared["mean"]) == (0.1, 0.2, 0.3)
    assert tuple(declared["std"]) == (0.4, 0.5, 0.6)
    assert declared["interpolation"] == "bilinear"
    assert declared["crop_pct"] == 0.9


def test_a_saved_model_can_be_saved_again(tmp_path):
    for name in ("vit-by-layer", "vit-conv-neighbours", "timm-vit-gmm"):
        images, output = input_and_output(name)
        again = vicinal.load(vicinal.save(load(name), tmp_path / name)).double()
        with torch.no_grad():
            torch.testing.assert_close(again(images), output, rtol=1e-10, atol=1e-10)


def test_a_finished_run_opens(fixtures):
    run = vicinal.Run("runs/finished")
    assert run.finished
    assert run.config.epochs == 3
    assert run.config.lr == 0.03
    assert run.config.seed == 3
    assert run.config.img_size == ()
    assert [row["step"] for row in run.metrics] == [32, 64, 96]
    assert run.metrics[-1]["val_loss"] == pytest.approx(1.38112, abs=1e-5)
    assert run.priors.epochs == (0, 1, 2, 3)
    assert run.priors.layers["blocks.1.attn"]["sigma"].shape == (4, 2, 3)  # (epochs, kernels, heads)
    assert run.environment["versions"]["vicinal"] == "0.1.0"
    assert vicinal.resume("runs/finished").results == run.results


@pytest.mark.parametrize(("split", "images"), [("val", 64), ("test", 359)])
def test_a_finished_run_evaluates_to_its_results(fixtures, split, images):
    run = vicinal.Run("runs/finished")
    found, names = evaluate_split(run, split, device="cpu")
    results = run.results[split]
    assert names == list("0123456789")
    assert found.images == results["images"] == images
    assert found.confusion == results["confusion"]
    assert found.per_class == pytest.approx(results["per_class"])
    assert found.top1 == pytest.approx(results["top1"])
    assert found.top5 == pytest.approx(results["top5"])
    assert found.loss == pytest.approx(results["loss"], rel=1e-5)
    assert found.calibration_error == pytest.approx(results["calibration_error"], rel=1e-4)


def test_an_interrupted_run_is_not_resumed_under_other_rules_but_starts_anew(fixtures, tmp_path):
    run = vicinal.Run("runs/interrupted")
    assert not run.finished
    assert run.format == 1
    assert [row["step"] for row in run.metrics] == [32, 64]
    with pytest.raises(VicinalError, match=r"learning rate .*last partial batch .*moving average .*undecayed") as error:
        vicinal.resume("runs/interrupted")
    command = shlex.split(str(error.value).split("`")[1])
    assert command == ["vicinal", "train", "--config", "runs/interrupted/config.yaml", "--out", "runs/interrupted-2"]
    assert main([*command[1:-1], str(tmp_path / "anew"), "--epochs", "2"]) == 0
    assert vicinal.Run(tmp_path / "anew").format == 2
    assert vicinal.Run(tmp_path / "anew").config.prior_lr == 5.0


def test_a_run_that_warmed_up_to_its_end_opens(fixtures, tmp_path):
    """Earlier versions took a warm-up as long as the run."""
    shutil.copytree("runs/finished", tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    file.write_text(file.read_text().replace("warmup: 1.0", "warmup: 3.0"))
    assert vicinal.Run(tmp_path / "run").config.epochs == 3
    assert evaluate_split(vicinal.Run(tmp_path / "run"), "val", device="cpu")[0].images == 64


def test_a_configuration_file_means_the_same():
    config = vicinal.TrainConfig.from_yaml(HERE / "config.yaml")
    expected = {
        "model": "vit-mini",
        "pool": "avg",
        "img_size": (32, 48),
        "patch_size": 8,
        "drop_path": 0.2,
        "pretrained": False,
        "init_from": None,
        "dataset": "cifar10",
        "train_size": 5000,
        "val_size": 500,
        "crop": True,
        "flip": False,
        "erasing": 0.25,
        "mix": "transmix",
        "mix_prob": 0.8,
        "transmix": "reference",
        "smoothing": 0.1,
        "epochs": 15,
        "warmup": 2.5,
        "batch_size": 128,
        "accumulate": 2,
        "opt": "lamb",
        "lr": 0.002,
        "min_lr": 1e-5,
        "prior_lr": 10,
        "weight_decay": 0.05,
        "clip_grad": 1.0,
        "ema": 0.999,
        "precision": "bf16",
        "device": "auto",
        "workers": None,
        "seed": 7,
        "out": Path("runs/cifar10"),
    }
    assert {name: getattr(config, name) for name in expected} == expected
    prior = vicinal.build_prior(config.prior, heads=6, grid=vicinal.Grid(4, 6))
    centers = [[0, 0], [0, 1], [0, -1], [1, 0], [-1, 0], [0, 0]]  # the last head is as wide as the grid
    assert prior.mu.tolist() == centers
    assert prior.sigma.tolist() == [1, 1, 1, 1, 1, 6]
