"""An attached model runs at every size that the model itself takes: the grid follows the image of the current call."""

import copy
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from torch import nn

import vicinal
from by_hand import assert_same, attention_io, formula_by_hand, heads_by_hand, project, raster
from small_models import lively
from vicinal import Grid, VicinalError
from vicinal.inspection.size_rule import KnownSize, SizeRule, grid_at

PRIOR = "gmm:init=spread+gab:amplitude=1.5,sigma=2"
SIZES = [(128, 128), (64, 256), (96, 160), (160, 64)]  # the second has as many patches as the first


def dynamic_vit(**options):
    torch.manual_seed(0)
    options = {"img_size": 128, "dynamic_img_size": True, "depth": 2, "num_classes": 5} | options
    return lively(timm.create_model("vit_tiny_patch16_224", **options)).double().eval()


def attach(model, prior=PRIOR, **options):
    """Attaches a prior in float64."""
    vicinal.attach(model, prior, **options)
    model.double()


def images(size, batch=2):
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(sum(size))).double()


def assert_right(module, run, places):
    """Compares the output of an attention module with the formula, tokens in `places`."""
    (x, *_), _, out = attention_io(module, run)
    q, k, v = heads_by_hand(module, x)
    scale, bias = formula_by_hand(module.prior, places, places)
    logits = scale * (q @ k.mT * q.shape[-1] ** -0.5) + bias
    assert_same(out, project(module, logits.softmax(-1), v))


RUNS = {
    "forward": lambda model, x: model(x),
    "forward_features": lambda model, x: model.forward_features(x),
    "forward_intermediates": lambda model, x: model.forward_intermediates(x),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@torch.no_grad()
def test_vit_follows_the_formula_at_every_size(run):
    model = dynamic_vit()
    attach(model)
    grids = [block.attn.prior.grid for block in model.blocks]
    for size in [*SIZES, SIZES[0]]:
        for block in model.blocks:
            places = raster(size[0] // 16, size[1] // 16, prefix=1)
            assert_right(block.attn, lambda size=size: run(model, images(size)), places)
    assert grids == [block.attn.prior.grid for block in model.blocks]


@torch.no_grad()
def test_vit_follows_the_formula_after_set_input_size():
    model = dynamic_vit(dynamic_img_size=False)
    attach(model)
    for size in SIZES[1:]:
        model.set_input_size(size)
        places = raster(size[0] // 16, size[1] // 16, prefix=1)
        assert_right(model.blocks[1].attn, lambda size=size: model(images(size)), places)
    ours = lively(vicinal.create_model("vit-micro", img_size=32, prior=PRIOR, global_pool="token")).double().eval()
    ours.set_input_size((16, 64))
    prefix = 64 // 4 * 16 // 4
    attention = next(module for module in ours.modules() if hasattr(module, "prior_site"))
    (x, *_), _, _ = attention_io(attention, lambda: ours(images((16, 64))))
    assert_right(attention, lambda: ours(images((16, 64))), raster(4, 16, prefix=x.shape[1] - prefix))


def swin(**options):
    torch.manual_seed(0)
    options = {"depths": (2, 2), "embed_dim": 24, "num_heads": (2, 4), "window_size": 4, "num_classes": 5} | options
    model = timm.models.swin_transformer.SwinTransformer(img_size=64, strict_img_size=False, **options)
    return lively(model).double().eval()


@torch.no_grad()
def test_swin_follows_the_formula_in_its_windows_at_every_size():
    model = swin()
    attach(model, img_size=64)
    module = model.layers[0].blocks[0].attn
    for size in [(64, 64), (32, 128), (96, 64)]:
        (x, *_), _, out = attention_io(module, lambda size=size: model(images(size)))
        q, k, v = heads_by_hand(module, x)
        scale, bias = formula_by_hand(module.prior, raster(4, 4), raster(4, 4))
        logits = scale * (q @ k.mT * q.shape[-1] ** -0.5) + bias + module._get_rel_pos_bias()
        assert_same(out, project(module, logits.softmax(-1), v))


@torch.no_grad()
def test_shifted_windows_that_are_padded_raise_instead_of_joining_opposite_edges():
    model = swin()
    attach(model, img_size=64)
    with pytest.raises(VicinalError, match=r"64 x 64.*48 x 72.*whole windows of 4 x 4"):
        model(images((48, 72)))
    model(images((64, 64)))


@torch.no_grad()
def test_a_changed_window_raises():
    model = swin(window_size=4)
    model.patch_embed.strict_img_size = True
    attach(model, img_size=64)
    with warnings.catch_warnings(action="ignore"):  # of timm, about its own speed
        model.set_input_size((32, 128), window_size=(2, 8))
    with pytest.raises(VicinalError, match="window_size has changed"):
        model(images((32, 128)))


@pytest.mark.parametrize("spec", ["gmm:init=spread", "rpe:init=normal", "elm", "conv", "rpe-mlp:init=normal+decay"])
@torch.no_grad()
def test_resize_without_rescaling_is_the_same(spec):
    model = dynamic_vit()
    attach(model, spec)
    for block in model.blocks:
        for parameter in block.attn.prior.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    for size in SIZES[1:]:
        expected = model(images(size))
        resized = copy.deepcopy(model)
        for block in resized.blocks:
            grid = block.attn.prior.grid
            block.attn.prior = block.attn.prior.resize(Grid(size[0] // 16, size[1] // 16, grid.prefix))
            block.attn.prior_site = vicinal.attachment.subclass.replace(block.attn.prior_site, image_key="")
        torch.testing.assert_close(resized(images(size)), expected, atol=1e-12, rtol=1e-12)


def gradients(model, inputs, backward=lambda loss: loss.backward()):
    model.zero_grad()
    backward(sum(model(x).square().sum() for x in inputs))
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def in_a_thread(function):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


BACKWARD = {"here": lambda loss: loss.backward(), "in a thread": lambda loss: in_a_thread(loss.backward)}


@pytest.mark.parametrize("backward", BACKWARD.values(), ids=BACKWARD)
@pytest.mark.parametrize("reentrant", [False, True])
def test_two_sizes_of_as_many_tokens_in_one_checkpointed_step(backward, reentrant, monkeypatch):
    monkeypatch.setattr(timm.layers.config, "_USE_REENTRANT_CKPT", reentrant)
    model = dynamic_vit().train()
    attach(model)
    inputs = [images(size) for size in (*SIZES, SIZES[1])]
    plain = gradients(model, inputs)
    model.set_grad_checkpointing()
    for name, gradient in gradients(model, inputs, backward).items():
        torch.testing.assert_close(gradient, plain[name], atol=1e-12, rtol=1e-12, msg=name)


def test_recomputation_that_could_be_of_two_sizes_raises():
    model = dynamic_vit(depth=1, pos_embed="none").train()
    attach(model)
    model.set_grad_checkpointing()
    loss = model(torch.zeros(1, 3, 128, 128).double()).sum() + model(torch.zeros(1, 3, 64, 256).double()).sum()
    with pytest.raises(VicinalError, match=r"128 x 128, 64 x 256.*which one is repeated"):
        loss.backward()


@torch.no_grad()
def test_threads_have_sizes_of_their_own():
    model = dynamic_vit()
    attach(model)
    inputs = [images(size) for size in SIZES]
    expected = [model(x) for x in inputs]
    barrier = threading.Barrier(len(inputs))

    @torch.no_grad()  # a thread starts with gradients
    def right(number):
        barrier.wait()
        return all(torch.equal(model(inputs[number]), expected[number]) for _ in range(5))

    with ThreadPoolExecutor(len(inputs)) as pool:
        assert all(pool.map(right, range(len(inputs))))


class PooledStem(nn.Module):
    """A ViT over a map of fixed size, whatever the image."""

    def __init__(self):
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 24, 4, 4), nn.AdaptiveAvgPool2d(8)
        self.attn = timm.layers.Attention(24, 2)

    def forward(self, x):
        return self.attn(self.pool(self.stem(x)).flatten(2).mT)


@torch.no_grad()
def test_a_map_of_fixed_size_keeps_its_grid():
    torch.manual_seed(0)
    model = PooledStem().double()
    attach(model, img_size=128)
    for size in SIZES[:3]:
        assert_right(model.attn, lambda size=size: model(images(size)), raster(8, 8))


@torch.no_grad()
def test_tokens_behind_the_patches_stay_behind_them():
    pytest.importorskip("transformers")
    from hugging_face_models import yolos

    model = lively(yolos()).double()
    attach(model, img_size=(32, 48))
    module = next(module for module in model.modules() if hasattr(module, "prior_site"))
    for size in [(32, 48), (48, 48), (64, 24)]:
        x, places = images(size), raster(size[0] // 8, size[1] // 8, prefix=1, suffix=7)
        with vicinal.tap(model, layers="first", img_size=(32, 48)) as tap:
            ((x, *_), _, _) = attention_io(module, lambda x=x: model(x))
        q, k, _ = heads_by_hand(module, x)
        scale, bias = formula_by_hand(module.prior, places, places)
        expected = (scale * (q @ k.mT * q.shape[-1] ** -0.5) + bias).softmax(-1)
        torch.testing.assert_close(tap.last, expected, atol=1e-12, rtol=0)


def test_the_number_of_tokens_decides_between_whole_and_padded_patches():
    known = KnownSize((64, 64), Grid(4, 4, 1), (4, 4))
    assert grid_at(SizeRule.FOLLOWS, known, (72, 40), 1 + 4 * 2) == Grid(4, 2, 1)
    assert grid_at(SizeRule.FOLLOWS, known, (72, 40), 1 + 5 * 3) == Grid(5, 3, 1)
    assert grid_at(SizeRule.FOLLOWS, known, (72, 40), 1 + 7) is None
    assert grid_at(SizeRule.FOLLOWS, known, (72, 72), 1 + 20) is None  # 4 x 5, or 5 x 4
    assert grid_at(SizeRule.FIXED, known, (72, 40), 17) == Grid(4, 4, 1)
    assert grid_at(SizeRule.UNKNOWN, known, (64, 64), 17) is None
