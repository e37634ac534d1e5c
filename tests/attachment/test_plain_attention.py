"""Attention without a prior in models of this package: by the native kernels, otherwise as timm computes it."""

import copy
import pickle

import pytest
import torch
from timm.layers.attention import Attention
from timm.models.swin_transformer import WindowAttention
from torch.nn import functional as F

import vicinal
from vicinal.attachment import timm_forwards
from vicinal.attachment.plain_attention import use_package_attention
from vicinal.attention.native import library, prepare_native

pytestmark = pytest.mark.skipif(not prepare_native().path, reason="no native library here")
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def small(name):
    """Returns a model without a prior, in float64."""
    return vicinal.create_model(name, img_size=32, drop_path_rate=0.0).double()


def gradients(model):
    loss = F.cross_entropy(model(IMAGES), torch.tensor([1, 2, 3]))
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("name", ["vit", "swin", "pit", "t2t", "vit-relpos"])
def test_it_equals_timm_and_its_gradients(name, monkeypatch):
    model = small(name)
    ours = [model(IMAGES), *gradients(model)]
    monkeypatch.setattr(library, "_ready", False)
    timms = [model(IMAGES), *gradients(model)]
    for mine, truth in zip(ours, timms, strict=True):
        torch.testing.assert_close(mine, truth, atol=1e-11, rtol=1e-11)


def test_the_kernels_are_called(monkeypatch):
    called, run = [], timm_forwards.attend_packed

    def counted(*args, **options):
        called.append(1)
        return run(*args, **options)

    monkeypatch.setattr(timm_forwards, "attend_packed", counted)
    small("vit")(IMAGES)
    small("swin")(IMAGES)
    assert len(called) == 9 + 12


@pytest.mark.parametrize("name", ["vit", "pit", "t2t", "vit-relpos"])
def test_no_attention_of_a_backbone_is_left_to_torch(name, monkeypatch):
    model = small(name)

    def refused(*_, **__):
        raise AssertionError("called scaled_dot_product_attention")

    monkeypatch.setattr(F, "scaled_dot_product_attention", refused)
    model(IMAGES)
    monkeypatch.setattr(library, "_ready", False)
    with pytest.raises(AssertionError, match="called"):
        model(IMAGES)


def test_a_model_of_the_user_is_left_alone():
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    vicinal.inspect(model)
    vicinal.attach(model, "gmm", layers="last 1")
    assert type(model.blocks[0].attn) is Attention
    vicinal.detach(model)
    assert {type(block.attn) for block in model.blocks} == {Attention}


@pytest.mark.parametrize(("name", "layers"), [("swin", "last 2"), ("t2t", None)])
def test_attach_and_detach_give_the_same_model_back(name, layers):
    model = small(name)
    before, classes = model(IMAGES), [type(module) for module in model.modules()]
    vicinal.attach(model, "gmm:init=spread", layers=layers)
    assert not torch.equal(model(IMAGES), before)
    vicinal.detach(model)
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(model(IMAGES), before)


def test_copies_and_pickles_name_the_class_of_timm():
    model = small("swin")
    module = model.layers[0].blocks[0].attn
    assert type(module).plain_class is WindowAttention
    text = pickle.dumps(module)
    assert b"plain_attention" in text
    for twin in (copy.deepcopy(module), pickle.loads(text)):
        assert type(twin) is type(module)
        x = torch.randn(2, 16, 96, dtype=torch.float64)
        assert torch.equal(twin(x), module(x))
    vicinal.attach(model, "gmm")
    twin = copy.deepcopy(model)
    assert torch.equal(twin.eval()(IMAGES), model.eval()(IMAGES))
    assert vicinal.detach(twin) == 12


@pytest.mark.parametrize("name", ["vit", "swin", "t2t", "vit-relpos"])
def test_a_second_time_changes_nothing(name):
    model = small(name)
    classes = [type(module) for module in model.modules()]
    use_package_attention(model)
    assert [type(module) for module in model.modules()] == classes


def test_another_forward_than_that_of_timm_stays():
    class Own(Attention):
        def forward(self, x, **_):
            return x

    module = Own(8)
    use_package_attention(module)
    assert type(module) is Own
