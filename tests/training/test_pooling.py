"""The pooling of a run: the mean in vit-mini and vit-micro, the class token in the recipe paper and in earlier runs."""

import pytest
import torch

import vicinal
from small_runs import config
from vicinal.attachment import get_priors
from vicinal.models import BACKBONES
from vicinal.training.accelerator import make_accelerator
from vicinal.training.config import TrainConfig, recipe
from vicinal.training.setup import prepare

SMALL_VITS = ["vit-mini", "vit-micro"]


def pool_of(tmp_path, settings):
    settings = settings.changed(device="cpu", dataset="digits", img_size=8, patch_size=2, cache_dir=tmp_path)
    return prepare(settings, make_accelerator(settings)).raw_model.global_pool


@pytest.mark.parametrize("name", SMALL_VITS)
@pytest.mark.parametrize(("pool", "all_learn"), [(None, True), ("avg", True), ("token", False)])
def test_every_layers_prior_learns_with_the_mean(name, pool, all_learn):
    torch.manual_seed(0)
    model = vicinal.create_model(name, prior="gmm:init=spread", img_size=32, global_pool=pool)
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    gradients = [sum(each.grad.abs().sum() for each in prior.parameters()) for prior in get_priors(model).values()]
    assert all(gradient > 0 for gradient in gradients[:-1])
    assert bool(gradients[-1] > 0) is all_learn


@pytest.mark.parametrize("name", SMALL_VITS)
def test_the_mean_is_the_default_and_the_paper_has_the_token(tmp_path, name):
    assert pool_of(tmp_path, TrainConfig(model=name)) == "avg"
    assert pool_of(tmp_path, TrainConfig(model=name, pool="token")) == "token"
    assert pool_of(tmp_path, recipe("paper", model=name)) == "token"
    assert pool_of(tmp_path, recipe("paper", model=name, pool="avg")) == "avg"


def test_the_paper_keeps_the_pooling_of_every_other_model():
    for name, backbone in BACKBONES.items():
        assert backbone.paper_pool == ("token" if name in SMALL_VITS else backbone.validate_pool(None))
    assert BACKBONES["vit"].paper_pool == BACKBONES["pit"].paper_pool == BACKBONES["cait"].paper_pool == "token"
    assert BACKBONES["swin"].paper_pool == BACKBONES["t2t"].paper_pool == "avg"


def test_a_model_of_timm_has_its_own_pooling(tmp_path):
    settings = recipe("paper", model="vit_tiny_patch16_224", img_size=16, device="cpu", cache_dir=tmp_path)
    assert prepare(settings, make_accelerator(settings)).raw_model.global_pool == "token"
    assert TrainConfig(pool="paper", init_from="runs/x").init_from == "runs/x"


def test_no_pooling_in_the_file_of_an_earlier_run_is_that_of_the_paper(tmp_path):
    before = tmp_path / "before.yaml"
    before.write_text("model: vit-mini\npool: null\n")
    assert TrainConfig.from_yaml(before).pool == "paper"
    now = tmp_path / "now.yaml"
    now.write_text("model: vit-mini\n")
    assert TrainConfig.from_yaml(now).pool is None
    now.write_text(TrainConfig(model="vit-mini").to_yaml())
    assert TrainConfig.from_yaml(now) == TrainConfig(model="vit-mini")


def test_a_new_run_is_resumed_with_its_own_pooling(tmp_path):
    run = vicinal.train(config(tmp_path / "run", epochs=1, warmup=0))
    assert run.config.pool is None
    assert run.model().global_pool == "avg"
    assert vicinal.resume(run.folder).results == run.results
