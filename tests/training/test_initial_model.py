"""Runs that start from weights that were trained before."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

import vicinal
from small_runs import config, weights
from vicinal.cli.main import main
from vicinal.training.accelerator import make_accelerator
from vicinal.training.config import ConfigError, recipe
from vicinal.training.setup import prepare

NO_TRAINING = {"lr": 1e-12, "min_lr": 0, "epochs": 1, "warmup": 0}


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    """A ViT with a prior, 8 x 8 pixels with patches of 2."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    return vicinal.train(config(folder, prior="gmm", epochs=1, patch_size=2))


@pytest.fixture(scope="module")
def timm_file(tmp_path_factory):
    torch.manual_seed(1)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=7, depth=12)
    for parameter in model.parameters():
        parameter.data.add_(0.01 * torch.randn_like(parameter))
    file = tmp_path_factory.mktemp("files") / "tiny.safetensors"
    save_file(model.state_dict(), file)
    return file


def prepared(settings):
    return prepare(settings, make_accelerator(settings))


def grown(images, patch, factor):
    """Images in which every patch is resized on its own, as `resample_patch_embed` assumes."""
    count, channels, height, width = images.shape
    patches = images.unfold(2, patch, patch).unfold(3, patch, patch).reshape(-1, 1, patch, patch)
    larger = F.interpolate(patches, scale_factor=factor, mode="bicubic", antialias=True)
    larger = larger.reshape(count, channels, height // patch, width // patch, patch * factor, patch * factor)
    return larger.permute(0, 1, 2, 4, 3, 5).reshape(count, channels, height * factor, width * factor)


@pytest.mark.parametrize("factor", [2, 3])
def test_a_larger_image_has_as_many_tokens_and_the_same_output(tmp_path, digits_run, factor, capsys):
    settings = config(tmp_path / "run", init_from=str(digits_run.folder), img_size=(8 * factor,), **NO_TRAINING)
    run = vicinal.train(settings)
    said = capsys.readouterr().err
    assert f"patches of 2: at {8 * factor} x {8 * factor} it has patches of {2 * factor} and 4 x 4 tokens" in said
    model = run.model()
    assert model.patch_embed.grid_size == (4, 4)
    images = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(model(grown(images, 2, factor)), digits_run.model()(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "patch", "tokens", "chosen"),
    [(16, 2, (8, 8), 2), (12, None, (4, 4), 3), (10, None, (5, 5), 2), (8, 4, (2, 2), 4), (12, 6, (2, 2), 6)],
)
def test_patches_are_those_asked_for_or_keep_the_tokens(digits_run, tmp_path, size, patch, tokens, chosen):
    settings = config(tmp_path, init_from=str(digits_run.folder), img_size=(size,), patch_size=patch)
    state = prepared(settings)
    assert state.raw_model.patch_embed.grid_size == tokens
    assert state.raw_model.patch_embed.patch_size == (chosen, chosen)
    assert len(state.notes) == (patch is None)
    assert state.raw_model.blocks[0].attn.prior.grid.height == tokens[0]


def test_a_model_that_cannot_change_its_patches_keeps_them(tmp_path):
    saved = str(vicinal.save(vicinal.create_model("t2t", depth=1, in_chans=1), tmp_path / "first"))
    state = prepared(config(tmp_path / "x", init_from=saved, img_size=(64,)))
    assert "patches of 4 and 16 x 16 tokens" in state.notes[0]
    with pytest.raises(ConfigError, match=r"cannot become 8: the model would have other layers") as error:
        prepared(config(tmp_path / "x", init_from=saved, img_size=(64,), patch_size=8))
    assert error.value.field == "patch_size"


def test_a_file_of_a_timm_model_gives_all_weights_but_the_head(tmp_path, timm_file):
    settings = config(
        tmp_path, model="vit_tiny_patch16_224", init_from=str(timm_file), img_size=(32,), prior="gmm", train_size=32
    )
    model = prepared(settings).raw_model
    expected = timm.create_model(
        "vit_tiny_patch16_224",
        num_classes=7,
        img_size=32,
        in_chans=1,
        pretrained=True,
        pretrained_cfg_overlay={"file": str(timm_file), "num_classes": 7, "custom_load": False},
    ).state_dict()
    found = {name: values for name, values in model.state_dict().items() if ".prior." not in name}
    assert found.keys() == expected.keys()
    for name, values in found.items():
        if name.startswith("head."):
            assert len(values) == 10
        else:
            assert torch.equal(values, expected[name]), name


def test_such_a_run_is_saved_as_an_ordinary_model(tmp_path, timm_file):
    words = ["--model", "vit_tiny_patch16_224", "--init-from", str(timm_file), "--img-size", "32", "--train-size", "16"]
    words += ["--epochs", "1", "--val-size", "0", "--freeze", "--prior", "gmm"]
    assert main(["train", *words, "--out", str(tmp_path / "run")]) == 0
    arguments = json.loads((tmp_path / "run" / "model" / "config.json").read_text())["model_args"]
    assert "pretrained_cfg_overlay" not in arguments
    assert vicinal.Run(tmp_path / "run").model()(torch.zeros(1, 1, 32, 32)).shape == (1, 10)


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        ({"model": None}, "model", "must name the timm model"),
        ({"model": "vit"}, "model", "must name the timm model"),
        ({"model": "vit_small_patch16_224", "init_from": "x.pth"}, "init_from", "safetensors file, got x.pth"),
        ({"init_from": "missing.safetensors"}, "init_from", "safetensors file, got missing"),
        ({"model": "resnet18"}, "init_from", "weights of resnet18, got .*tiny.safetensors, which has"),
        ({"model": "vit_tiny_patch16_224", "pretrained": True}, "init_from", "pretrained"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, timm_file, changes, field, said):
    with pytest.raises(ConfigError, match=said) as error:
        prepared(config(tmp_path, **{"model": "vit_tiny_patch16_224", "init_from": str(timm_file), **changes}))
    assert error.value.field == field
    assert "\n" not in str(error.value)


def test_a_frozen_model_trains_its_head_and_priors_only(tmp_path, digits_run):
    settings = config(tmp_path / "run", init_from=str(digits_run.folder), freeze=True, epochs=2, ema=0.5)
    before, after = weights(digits_run), weights(vicinal.train(settings))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {"head.weight", "head.bias"} < changed
    assert all(name.startswith("head.") or ".prior." in name for name in changed)
    assert any(".prior." in name for name in changed)


def test_frozen_batch_norms_keep_their_statistics(tmp_path):
    first = vicinal.train(config(tmp_path / "first", model="resnet10t", img_size=(32,), epochs=1))
    run = vicinal.train(config(tmp_path / "run", init_from=str(first.folder), freeze=True, epochs=1))
    before, after = weights(first), weights(run)
    assert any("running_mean" in name for name in before)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"fc.weight", "fc.bias"}


def test_the_recipe_finetune_decays_by_layer_and_not_in_priors(tmp_path, digits_run):
    settings = recipe("finetune", init_from=str(digits_run.folder), train_size=64, out=tmp_path)
    assert settings.epochs <= 20
    rates = {}
    state = prepared(settings)
    names = {id(parameter): name for name, parameter in state.raw_model.named_parameters()}
    state.schedule.step_update(settings.epochs * state.train.steps // 10)  # the end of the warm-up
    for group in state.optimizer.param_groups:
        rates |= {names[id(each)]: group["lr"] for each in group["params"]}
    assert rates["head.weight"] == pytest.approx(settings.lr)
    assert rates["blocks.1.mlp.fc1.weight"] == pytest.approx(settings.layer_decay * rates["blocks.2.mlp.fc1.weight"])
    of_priors = [rate for name, rate in rates.items() if ".prior." in name]
    assert of_priors == [pytest.approx(30 * settings.lr)] * len(of_priors)
    assert of_priors


def test_the_recipe_finetune_on_the_command_line(tmp_path, digits_run, capsys):
    words = ["--recipe", "finetune", "--init-from", str(digits_run.folder), "--train-size", "64", "--epochs", "2"]
    assert main(["train", *words, "--val-size", "0", "--out", str(tmp_path / "run")]) == 0
    found = vicinal.Run(tmp_path / "run").config
    assert (found.layer_decay, found.warmup_epochs, found.prior_lr) == (0.75, 0.2, 30.0)
    assert main(["train", "--recipe", "finetune", "--out", str(tmp_path / "none")]) == 2
    assert "--layer-decay needs weights that were trained before" in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{"freeze": True}, {"layer_decay": 0.5}])
def test_fine_tuning_needs_weights(tmp_path, changes):
    with pytest.raises(ConfigError, match="needs weights that were trained before") as error:
        vicinal.train(config(tmp_path / "run", **changes))
    assert error.value.field == next(iter(changes))
    assert not (tmp_path / "run").exists()
