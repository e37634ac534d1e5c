"""A prior acts only on images of the size that it was attached for, however the model is run."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from torch import nn

import vicinal
from small_models import cait, images, swin, vit
from vicinal import VicinalError
from vicinal.inspection.image_context import ImageSizeHook

SQUARE, WIDE = (2, 3, 128, 128), (2, 3, 64, 256)  # as many patches of 16 x 16


def dynamic_vit(**options):
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=128, dynamic_img_size=True, depth=2, num_classes=5, **options
    ).eval()


def hooks(model):
    return [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]


RUNS = {
    "forward": lambda model, x: model(x),
    "forward_features": lambda model, x: model.forward_features(x),
    "forward_intermediates": lambda model, x: model.forward_intermediates(x),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("spec", ["gmm", "gab"])
@torch.no_grad()
def test_another_size_of_as_many_tokens_raises_and_names_both(run, spec):
    model = dynamic_vit()
    vicinal.attach(model, spec)
    run(model, torch.randn(SQUARE))
    with pytest.raises(VicinalError, match=r"128 x 128.*64 x 256"):
        run(model, torch.randn(WIDE))
    run(model, torch.randn(SQUARE))


@torch.no_grad()
def test_another_number_of_tokens_raises_too():
    model = dynamic_vit()
    vicinal.attach(model, "gab")
    with pytest.raises(VicinalError, match=r"128 x 128.*64 x 64"):
        model(torch.randn(2, 3, 64, 64))


@torch.no_grad()
def test_a_new_input_size_of_the_model_is_not_one_of_its_priors():
    model = dynamic_vit()
    vicinal.attach(model, "gab")
    model.set_input_size((64, 256))
    with pytest.raises(VicinalError, match=r"128 x 128.*64 x 256"):
        model(torch.randn(WIDE))
    ours = vicinal.create_model("vit-micro", img_size=32, prior="gab").eval()
    ours(torch.randn(2, 3, 32, 32))
    ours.set_input_size((16, 64))
    with pytest.raises(VicinalError, match=r"32 x 32.*16 x 64"):
        ours(torch.randn(2, 3, 16, 64))


@torch.no_grad()
def test_modules_in_front_of_the_model_do_not_hide_the_size():
    model = nn.Sequential(nn.BatchNorm2d(3), dynamic_vit()).eval()
    vicinal.attach(model, "gab", img_size=128)
    model(torch.randn(SQUARE))
    with pytest.raises(VicinalError, match=r"128 x 128.*64 x 256"):
        model(torch.randn(WIDE))
    with pytest.raises(VicinalError, match=r"128 x 128.*64 x 256"):
        model[1](torch.randn(WIDE))


def cut(x, rows, columns, tokens):
    """Returns patches as NaFlex takes them, with padding behind them up to `tokens`."""
    patches = x.unfold(2, 16, 16).unfold(3, 16, 16).permute(0, 2, 3, 4, 5, 1).reshape(len(x), rows * columns, -1)
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).expand(len(x), -1, -1)
    more = (0, 0, 0, tokens - rows * columns)
    valid = torch.arange(tokens).expand(len(x), -1) < rows * columns
    return {
        "patches": nn.functional.pad(patches, more),
        "patch_coord": nn.functional.pad(places, more),
        "patch_valid": valid,
    }


@pytest.mark.parametrize(("rows", "columns"), [(4, 16), (5, 9)])
@torch.no_grad()
def test_patches_cut_by_somebody_else_have_no_known_places(rows, columns):
    model = timm.create_model("naflexvit_base_patch16_gap", depth=2, embed_dim=48, num_heads=4, num_classes=5).eval()
    table = vicinal.attach(model, "gab", img_size=128)
    assert [layer.place for layer in table.layers] == ["8 x 8 + 4 prefix"] * 2
    expected = model(torch.ones(SQUARE))
    given = cut(torch.randn(2, 3, 16 * rows, 16 * columns), rows, columns, 64)
    with pytest.raises(VicinalError, match="128 x 128"):
        model(given)
    assert torch.equal(model(torch.ones(SQUARE)), expected)
    vicinal.detach(model)
    model(given)


@torch.no_grad()
def test_threads_do_not_see_each_others_sizes():
    square, wide = dynamic_vit(), dynamic_vit()
    vicinal.attach(square, "gab")
    vicinal.attach(wide, "gab", img_size=(64, 256))
    inputs = {square: torch.randn(SQUARE), wide: torch.randn(WIDE)}
    expected = {model: model(x) for model, x in inputs.items()}
    barrier = threading.Barrier(4)

    @torch.no_grad()  # a thread starts with gradients
    def right(model):
        barrier.wait()
        return all(torch.equal(model(inputs[model]), expected[model]) for _ in range(5))

    def wrong():
        barrier.wait()
        raised = 0
        for _ in range(5):
            try:
                square(inputs[wide])
            except VicinalError:
                raised += 1
        return raised == 5

    with ThreadPoolExecutor(4) as pool:  # two models at once, and one of them with two sizes at once
        runs = [pool.submit(right, square), pool.submit(right, wide), pool.submit(right, square), pool.submit(wrong)]
        assert all(run.result() for run in runs)


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


def test_another_model_between_forward_and_backward_does_not_disturb_checkpointing():
    model, other = dynamic_vit(), dynamic_vit()
    vicinal.attach(model, "gab")
    vicinal.attach(other, "gab", img_size=(64, 256))
    model.set_grad_checkpointing()
    x = torch.randn(SQUARE)
    model(x).square().sum().backward()
    expected = model.blocks[0].attn.qkv.weight.grad.clone()
    model.zero_grad()
    loss = model(x).square().sum()
    other(torch.randn(WIDE))
    loss.backward()
    assert torch.equal(model.blocks[0].attn.qkv.weight.grad, expected)


def test_a_refused_image_between_forward_and_backward_does_not_give_wrong_gradients():
    model = dynamic_vit()
    vicinal.attach(model, "gab")
    model.set_grad_checkpointing()
    x = torch.randn(SQUARE)
    model(x).square().sum().backward()
    expected = model.blocks[0].attn.qkv.weight.grad.clone()
    model.zero_grad()
    loss = model(x).square().sum()
    with pytest.raises(VicinalError, match="64 x 256"):
        model(torch.randn(WIDE))
    try:
        loss.backward()
    except VicinalError:  # the size of the last image is the refused one: an error is as good as right gradients
        return
    assert torch.equal(model.blocks[0].attn.qkv.weight.grad, expected)


@torch.no_grad()
def test_a_compiled_model_checks_the_size_too():
    model = dynamic_vit()
    vicinal.attach(model, "gab")
    x = torch.randn(SQUARE)
    expected = model(x)
    for function in (model, model.forward_features):
        compiled = torch.compile(function, backend="aot_eager")
        assert torch.allclose(compiled(x), function(x), atol=1e-5)
        with pytest.raises(VicinalError, match=r"128 x 128.*64 x 256"):
            compiled(torch.randn(WIDE))
    for block in model.blocks:
        block.compile(backend="aot_eager")
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(VicinalError, match=r"128 x 128.*64 x 256"):
        model(torch.randn(WIDE))


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
def test_a_copy_checks_sizes_of_its_own():
    model = dynamic_vit()
    vicinal.attach(model, "gab")
    twin = copy.deepcopy(model)
    x = torch.randn(SQUARE)
    assert torch.equal(twin(x), model(x))
    with pytest.raises(VicinalError, match=r"128 x 128.*64 x 256"):
        twin(torch.randn(WIDE))
    vicinal.detach(model)
    with pytest.raises(VicinalError, match=r"128 x 128.*64 x 256"):
        twin(torch.randn(WIDE))
    assert hooks(model) == []
    twin(x)
    vicinal.detach(twin)
    assert hooks(twin) == []
