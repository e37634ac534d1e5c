"""The truth is timm's DropPath: a branch of all images, multiplied by its mask."""

import copy

import pytest
import torch
from timm.layers import DropPath

import vicinal
from small_backbones import small
from vicinal.former_bits import FORMER_BITS
from vicinal.models import drop_path

NAMES = ["vit", "swin", "cait", "pit", "t2t"]


class Plain(DropPath):
    """Not `DropPath` itself: its branches run for all images."""


def plain(model):
    model = copy.deepcopy(model)
    for module in model.modules():
        if type(module) is DropPath:
            module.__class__ = Plain
    return model


def step(model, images, seed):
    torch.manual_seed(seed)
    out = model(images)
    model.zero_grad()
    out.square().sum().backward()
    return out.detach(), [each.grad for each in model.parameters()], torch.get_rng_state()


@pytest.mark.parametrize("prior", ["none", "gmm:init=spread"])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_gradients_and_random_numbers_are_those_of_timm(name, prior):
    torch.manual_seed(0)
    model = small(name, prior=prior, drop_path_rate=0.3).double().train()
    images = torch.randn(drop_path.MIN_IMAGES, 3, 32, 32, dtype=torch.float64)
    truth = plain(model)
    for seed in range(2):
        out, gradients, state = step(model, images, seed)
        expected, expected_gradients, expected_state = step(truth, images, seed)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradients, expected_gradients, rtol=1e-12, atol=1e-11)
        assert torch.equal(state, expected_state)


@pytest.fixture
def block():
    torch.manual_seed(0)
    return drop_path.VitBlock(32, 2, drop_path=0.5).train()


@pytest.fixture
def mlp_images(block, monkeypatch):
    """The numbers of images that MLPs were given."""
    seen, forward = [], type(block.mlp).forward

    def counting(self, x):
        seen.append(len(x))
        return forward(self, x)

    monkeypatch.setattr(type(block.mlp), "forward", counting)
    return seen


X = torch.randn(64, 5, 32)


@pytest.mark.skipif(FORMER_BITS, reason="VICINAL_NATIVE=0 computes all images")
def test_a_dropped_image_is_not_computed(block, mlp_images):
    torch.manual_seed(0)
    block(X)
    torch.manual_seed(0)
    X.new_empty(64, 1, 1).bernoulli_(0.5)
    assert mlp_images == [X.new_empty(64, 1, 1).bernoulli_(0.5).sum()]


def test_all_images_are_computed_in_evaluation_in_few_and_for_hooks_and_taps(block, mlp_images):
    block.eval()(X)
    block.train()(X[: drop_path.MIN_IMAGES - 1])
    handle = block.attn.proj.register_forward_hook(lambda *_: None)
    block(X)
    handle.remove()
    handle = block.mlp.fc1.register_full_backward_hook(lambda *_: None)
    block(X)
    handle.remove()
    block.attn.forward = block.attn.forward
    block(X)
    assert mlp_images == [64, drop_path.MIN_IMAGES - 1, 64, 64, 64]


@pytest.mark.parametrize("options", [{"proj_drop": 0.1}, {"attn_drop": 0.1}])
def test_dropout_in_a_branch_draws_the_numbers_of_timm(options):
    torch.manual_seed(0)
    block = drop_path.VitBlock(32, 2, drop_path=0.5, **options).train()
    torch.manual_seed(1)
    out = block(X)
    torch.manual_seed(1)
    assert torch.equal(out, plain(block)(X))


def test_weights_get_a_gradient_where_all_images_are_dropped():
    block = drop_path.VitBlock(32, 2, drop_path=0.999).train()
    torch.manual_seed(0)
    out = block(X[:8])
    assert torch.equal(out, X[:8])
    out.sum().backward()
    assert all(torch.equal(each.grad, torch.zeros_like(each)) for each in block.parameters())


def test_under_autocast(block):
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(1)
        out = block(X)
        torch.manual_seed(1)
        expected = plain(block)(X)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)


def test_a_tap_reads_the_attention_of_all_images():
    model = small("vit", drop_path_rate=0.5).train()
    with vicinal.tap(model, layers="last") as tap:
        model(torch.randn(16, 3, 32, 32))
    assert len(tap.last) == 16
