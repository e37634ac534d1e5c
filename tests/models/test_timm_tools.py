"""timm's registry and tools work with the backbones."""

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2

import vicinal
from small_backbones import small
from vicinal.models import BACKBONES


def count(model):
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def test_registered_with_timm():
    assert set(timm.list_models("vicinal_*")) == {backbone.timm_name for backbone in BACKBONES.values()}
    model = timm.create_model("vicinal_swin", num_classes=7)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 7)
    assert not timm.list_models("vicinal_*", pretrained=True)


def test_a_prior_through_timms_own_door():
    model = timm.create_model("vicinal_vit_mini", prior="gmm:kernels=2")
    assert count(model) - count(timm.create_model("vicinal_vit_mini")) == 6 * 6 * 2 * 2


@pytest.mark.parametrize(
    "name",
    ["vit", "swin", "pit", "t2t", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cait", "vit-relpos"))],
)
def test_timms_tools_work(name):
    options = {"prior": "gmm:init=paper", "drop_path_rate": 0.0}
    model = vicinal.create_model(name, **options).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        out, (last, features) = model(images), model.forward_intermediates(images)
        torch.testing.assert_close(model.forward_head(model.forward_features(images)), out)
    assert all(each.shape[0] == 2 and each.dim() == 4 for each in features)
    assert last.shape[0] == 2

    pyramid = timm.create_model(BACKBONES[name].timm_name, features_only=True, **options)(images)
    assert [tuple(each.shape[2:]) for each in pyramid] in ([(8, 8)] * 3, [(16, 16), (8, 8), (4, 4)])

    groups = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75).param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert len({group["lr_scale"] for group in groups}) > 3
    decayed = {id(parameter) for group in groups if group["weight_decay"] for parameter in group["params"]}
    assert not any(id(p) in decayed for key, p in model.named_parameters() if ".prior." in key or "pos_embed" in key)

    config = timm.data.resolve_model_data_config(model)
    assert config["input_size"] == (3, 32, 32)
    model.reset_classifier(4)
    assert model(images).shape == (2, 4)


@pytest.mark.parametrize("name", ["vit", "swin", "cait", "pit", "t2t"])
def test_gradient_checkpointing_changes_no_gradient(name):
    model = small(name, prior="gab", drop_path_rate=0.0)
    images = torch.randn(2, 3, 32, 32)

    def gradients():
        model.zero_grad()
        model(images).square().sum().backward()
        return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    model.set_grad_checkpointing()
    for key, gradient in gradients().items():
        torch.testing.assert_close(gradient, plain[key], rtol=1e-4, atol=1e-5)
