"""Attention classes of timm that have no forward of ours: their fused calls are computed by the native kernels."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vicinal
from vicinal.attachment.plain_attention import MIN_IMAGES, use_package_attention
from vicinal.attention.native import library, path, prepare_native

pytestmark = pytest.mark.skipif(not prepare_native().path, reason="no native library here")
MODELS = {  # options, and how many calls there are
    "eva02_tiny_patch14_224": ({"img_size": 28, "depth": 2}, 2),  # rotary positions
    "pvt_v2_b0": ({"depths": (1, 1, 1, 1)}, 4),  # pooled keys
    "beit_base_patch16_224": ({"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3}, 2),  # a bias as a mask
}
IMAGES = {"eva02_tiny_patch14_224": 28}


def make(name):
    """Returns a model without a prior, in float64, and images for it."""
    model = vicinal.create_model(name, num_classes=3, **MODELS[name][0]).double().train()
    size = IMAGES.get(name, 32)
    with torch.no_grad():
        for parameter in model.get_classifier().parameters():
            parameter.normal_()  # some models start with a head of zeros
    return model, torch.randn(MIN_IMAGES, 3, size, size, dtype=torch.float64)


@pytest.fixture
def calls(monkeypatch):
    """Returns a list to which every call of the kernels appends the number of images."""
    found, run = [], path.native_attention

    def counted(q, *args):
        found.append(len(q))
        return run(q, *args)

    monkeypatch.setattr(path, "native_attention", counted)
    return found


def results(model, images):
    parameters = [each for each in model.parameters() if each.requires_grad]
    torch.manual_seed(0)
    out = model(images)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), parameters)]


@pytest.mark.parametrize("name", MODELS)
def test_it_equals_timm_and_its_gradients(name, calls, monkeypatch):
    model, images = make(name)
    ours = results(model, images)
    assert len(calls) == MODELS[name][1]
    monkeypatch.setattr(library, "_ready", False)
    timms = results(model, images)
    assert len(calls) == MODELS[name][1]
    for mine, truth in zip(ours, timms, strict=True):
        torch.testing.assert_close(mine, truth, atol=1e-11, rtol=1e-11)


def test_a_few_images_take_the_forward_of_timm(calls):
    model, images = make("pvt_v2_b0")
    model(images[:1])
    assert not calls


def test_taps_read_the_same_attention(calls, monkeypatch):
    model, images = make("pvt_v2_b0")
    weights = []
    for ready in (True, False):
        monkeypatch.setattr(library, "_ready", ready)
        with vicinal.tap(model) as tap, torch.no_grad():
            model(images)
        weights.append(list(tap.weights.values()))
    assert calls
    for mine, truth in zip(*weights, strict=True):
        torch.testing.assert_close(mine, truth)


def test_attach_detach_and_copies_keep_the_class(calls):
    model, images = make("eva02_tiny_patch14_224")
    classes, before = [type(module) for module in model.modules()], model.eval()(images)
    vicinal.attach(model, "gmm:init=spread", layers="last 1")
    assert not torch.equal(model(images), before)
    vicinal.detach(model)
    use_package_attention(model)
    assert [type(module) for module in model.modules()] == classes
    calls.clear()
    assert torch.equal(copy.deepcopy(model)(images), before)
    assert calls == [MIN_IMAGES] * 2


def test_a_compiled_graph_has_the_call_of_timm(calls):
    model, images = make("eva02_tiny_patch14_224")
    calls.clear()
    compiled = torch.compile(model.eval(), backend="eager", fullgraph=True)(images)
    assert not calls
    torch.testing.assert_close(compiled, model(images))


def test_causal_and_grouped_calls_are_left_to_torch(calls):
    class Own(nn.Module):
        def forward(self, x):
            causal = F.scaled_dot_product_attention(x, x, x, is_causal=True)
            return causal + F.scaled_dot_product_attention(x, x[:, :1], x[:, :1], enable_gqa=True)

    plain, module, x = Own(), Own(), torch.randn(MIN_IMAGES, 2, 5, 4)
    use_package_attention(module)
    assert type(module) is not Own
    assert torch.equal(module(x), plain(x))
    assert not calls


def test_a_class_that_calls_no_fused_attention_stays():
    class Child(nn.Module):
        def forward(self, x):
            return x

    module = Child()
    use_package_attention(module)
    assert type(module) is Child
