"""timm's models under a prior, against the formula from their own weights, in float64."""

import copy
from functools import partial

import pytest
import torch

import vicinal
from by_hand import assert_same, attention_io, logits_by_hand, project, raster
from small_models import beit, cait, images, lively, swin, vit, vit_relpos
from vicinal import Grid
from vicinal.attachment.subclass import WithPrior
from vicinal.inspection.refusal import RefusalKind

SPECS = ["gmm:init=spread", "gab", "gmm:init=spread+gab"]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("options", "grid"),
    [
        ({}, Grid(4, 4, 1)),
        ({"img_size": (32, 64), "reg_tokens": 4}, Grid(4, 8, 5)),
        ({"class_token": False, "global_pool": "avg"}, Grid(4, 4)),
    ],
)
@torch.no_grad()
def test_vit_equals_the_formula_from_its_own_weights(options, grid, spec):
    model = lively(vit(**options)).double()
    table = vicinal.attach(model, spec)
    assert [layer.grid for layer in table.layers] == [grid] * 3
    places = raster(grid.height, grid.width, grid.prefix)
    for block in model.blocks:
        (x,), _, out = attention_io(block.attn, lambda: model(images(model).double()))
        logits, bias, v = logits_by_hand(block.attn, x, block.attn.prior, places)
        assert_same(out, project(block.attn, (logits + bias).softmax(-1), v))


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_swin_equals_the_formula_with_its_bias_and_shifted_windows(spec):
    model = lively(swin()).double()
    table = vicinal.attach(model, spec)
    assert [layer.grid for layer in table.layers] == [Grid(4, 4)] * 4
    shifted = 0
    for stage in model.layers:
        for block in stage.blocks:
            args, kwargs, out = attention_io(block.attn, lambda: model(images(model).double()))
            mask = args[1] if len(args) > 1 else kwargs.get("mask")
            logits, bias, v = logits_by_hand(block.attn, args[0], block.attn.prior, raster(4, 4))
            logits = logits + bias + block.attn._get_rel_pos_bias()
            if mask is not None:  # between patches that the shift brought into one window
                shifted += 1
                logits = logits + mask.double().repeat(len(logits) // len(mask), 1, 1)[:, None]
            assert_same(out, project(block.attn, logits.softmax(-1), v))
    assert shifted == 2


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_cait_multiplies_before_talking_heads_and_adds_at_the_softmax(spec):
    model = lively(cait()).double()
    inspection = vicinal.inspect(model)
    assert [site.refusal.kind for site in inspection.refused] == [RefusalKind.SILENT] * 2  # class layers
    table = vicinal.attach(model, spec, inspection=inspection)
    assert [layer.name for layer in table.layers] == ["blocks.0.attn", "blocks.1.attn"]
    for block in model.blocks:
        module = block.attn
        (x,), _, out = attention_io(module, lambda: model(images(model).double()))
        logits, bias, v = logits_by_hand(module, x, module.prior, raster(4, 4))
        mixed = torch.einsum("bhqk,gh->bgqk", logits, module.proj_l.weight) + module.proj_l.bias[:, None, None]
        weights = (mixed + bias).softmax(-1)
        weights = torch.einsum("bhqk,gh->bgqk", weights, module.proj_w.weight) + module.proj_w.bias[:, None, None]
        assert_same(out, project(module, weights, v))


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_beit_keeps_its_own_bias(spec):
    model = lively(beit()).double()
    assert model.blocks[1].attn._get_rel_pos_bias().abs().max() > 0.1
    vicinal.attach(model, spec)
    for block in model.blocks:
        args, _, out = attention_io(block.attn, lambda: model(images(model).double()))
        logits, bias, v = logits_by_hand(block.attn, args[0], block.attn.prior, raster(4, 4, 1))
        assert_same(out, project(block.attn, (logits + bias + block.attn._get_rel_pos_bias()).softmax(-1), v))


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_relative_positions_stay_beside_the_prior(spec):
    model = lively(vit_relpos(class_token=True)).double()
    vicinal.attach(model, spec)
    for block in model.blocks:
        module = block.attn
        args, _, out = attention_io(module, lambda: model(images(model).double()))
        logits, bias, v = logits_by_hand(module, args[0], module.prior, raster(4, 4, 1))
        own = module.rel_pos.get_bias()
        assert own.abs().max() > 0.1
        assert_same(out, project(module, (logits + bias + own).softmax(-1), v))


@pytest.mark.parametrize(
    "make",
    [
        vit,
        swin,
        vit_relpos,
        partial(vit, qk_norm=True),
        partial(vit_relpos, qk_norm=True, class_token=True),
        partial(vit_relpos, rel_pos_type="mlp", shared_rel_pos=True),
        partial(vit_relpos, rel_pos_type="none"),
    ],
)
def test_fast_forwards_equal_the_interceptor_in_outputs_and_gradients(make):
    fast = lively(make()).double()
    vicinal.attach(fast, "gmm:init=spread+gab")
    by_mode = copy.deepcopy(fast)
    for module in by_mode.modules():
        if isinstance(module, WithPrior):
            assert type(module).__mro__[1] is not WithPrior
            base = module.plain_class
            module.__class__ = type("ByMode", (WithPrior, base), {"plain_class": base})
    x = images(fast).double()
    left, right = fast(x), by_mode(x)
    torch.testing.assert_close(left, right, atol=1e-12, rtol=1e-12)
    left.square().sum().backward()
    right.square().sum().backward()
    for (name, a), (_, b) in zip(fast.named_parameters(), by_mode.named_parameters(), strict=True):
        single = a.dtype == torch.float32  # the prior's own parameters
        close = {"atol": 1e-5, "rtol": 1e-5} if single else {"atol": 1e-10, "rtol": 1e-10}
        torch.testing.assert_close(a.grad, b.grad, **close, msg=name)
