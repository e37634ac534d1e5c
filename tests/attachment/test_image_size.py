"""The size of the current image is known, however the model is run."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from torch import nn

import vicinal
from small_models import cait, images, swin, vit
from vicinal import VicinalError
from vicinal.inspection.image_context import ImageSizeHook

PRIOR = "gab:sigma=2,amplitude=2"  # its start does not depend on the grid
SQUARE, WIDE = (2, 3, 128, 128), (2, 3, 64, 256)  # as many patches of 16 x 16


def dynamic_vit(**options):
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=128, dynamic_img_size=True, depth=2, num_classes=5, **options
    ).eval()


def hooks(model):
    return [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]


def attached_at(size, make=dynamic_vit, **options):
    """Returns a model with the same weights and prior, attached for images of one size."""
    torch.manual_seed(0)
    model = make()
    vicinal.attach(model, PRIOR, img_size=size, **options)
    return model


@torch.no_grad()
def test_modules_in_front_of_the_model_do_not_hide_the_size():
    def make():
        return nn.Sequential(nn.BatchNorm2d(3), dynamic_vit()).eval()

    model, wide, x = attached_at(128, make), attached_at((64, 256), make), torch.randn(WIDE)
    assert torch.equal(model(x), wide(x))
    assert torch.equal(model[1](x), wide[1](x))


def in_a_thread(function):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


@pytest.mark.parametrize("backward", [lambda loss: loss.backward(), lambda loss: in_a_thread(loss.backward)])
@pytest.mark.parametrize("make", [vit, swin, cait])
def test_gradient_checkpointing_gives_the_same_gradients(make, backward):
    torch.manual_seed(0)
    model = make().double().train()
    vicinal.attach(model, "gmm:init=spread+gab")
    x = images(model).double()

    def gradients():
        model.zero_grad()
        torch.manual_seed(0)
        backward(model(x).square().sum())
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    plain = gradients()
    model.set_grad_checkpointing()
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, plain[name], atol=1e-12, rtol=1e-12, msg=name)


@pytest.mark.parametrize("which", ["another model", "another size"])
def test_what_runs_between_forward_and_backward_does_not_disturb_checkpointing(which):
    model, other = dynamic_vit(), dynamic_vit()
    vicinal.attach(model, PRIOR)
    vicinal.attach(other, PRIOR, img_size=(64, 256))
    model.set_grad_checkpointing()
    x = torch.randn(SQUARE)
    model(x).square().sum().backward()
    expected = model.blocks[0].attn.qkv.weight.grad.clone()
    model.zero_grad()
    loss = model(x).square().sum()
    (other if which == "another model" else model)(torch.randn(WIDE))
    loss.backward()
    assert torch.equal(model.blocks[0].attn.qkv.weight.grad, expected)


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_model_follows_the_size_too():
    model = dynamic_vit()
    vicinal.attach(model, PRIOR)
    inputs = [torch.randn(SQUARE), torch.randn(WIDE)]
    expected = [model(x) for x in inputs]
    for function in (model, model.forward_features):
        compiled = torch.compile(function, backend="aot_eager")
        for x in inputs:
            torch.testing.assert_close(compiled(x), function(x), atol=1e-5, rtol=1e-4)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    for x, each in zip(inputs, expected, strict=True):
        torch.testing.assert_close(model(x), each, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_detach_removes_the_hooks():
    model = dynamic_vit()
    mine = model.register_forward_pre_hook(lambda *_: None)
    before = hooks(model)
    vicinal.attach(model, "gab", layers=[0])
    vicinal.attach(model, "gmm", layers=[1])
    assert sum(isinstance(hook, ImageSizeHook) for hook in hooks(model)) == 1
    vicinal.detach(model)
    assert hooks(model) == before
    mine.remove()
    model(torch.randn(WIDE))


@torch.no_grad()
def test_an_attach_that_fails_leaves_no_hooks():
    model = dynamic_vit()
    with pytest.raises(VicinalError):
        vicinal.attach(model, "gab", layers=[9])
    assert hooks(model) == []


@torch.no_grad()
def test_a_copy_has_sizes_of_its_own():
    model, wide = dynamic_vit(), torch.randn(WIDE)
    vicinal.attach(model, PRIOR)
    twin = copy.deepcopy(model)
    x = torch.randn(SQUARE)
    assert torch.equal(twin(x), model(x))
    expected = model(wide)
    twin(x)
    assert torch.equal(twin(wide), expected)
    vicinal.detach(model)
    assert torch.equal(twin(wide), expected)
    assert hooks(model) == []
    vicinal.detach(twin)
    assert hooks(twin) == []
