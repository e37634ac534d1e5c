import copy

import pytest
import torch
from timm.layers import AttentionPool2d
from timm.layers.attention import Attention
from timm.models.hiera import Hiera
from timm.models.levit import Levit
from timm.models.nest import Nest
from timm.models.xcit import Xcit
from torch import nn

import vicinal
from by_hand import attention_io, logits_by_hand, project
from small_models import beit, cait, images, swin, swin_v2, vit
from test_ordering import PLACES, Model
from vicinal import Grid, VicinalError
from vicinal.attachment.subclass import WithPrior

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
    model = vit(**options).eval()
    table = vicinal.attach(model, spec)
    assert [layer.grid for layer in table.layers] == [grid] * 3
    for block in model.blocks:
        (x,), _, out = attention_io(block.attn, lambda: model(images(model)))
        logits, bias, v = logits_by_hand(block.attn, x, block.attn.prior)
        expected = project(block.attn, (logits + bias).softmax(-1), v)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_swin_equals_the_formula_with_its_bias_and_shifted_windows(spec):
    model = swin().eval()
    table = vicinal.attach(model, spec)
    assert [layer.grid for layer in table.layers] == [Grid(4, 4)] * 4
    for stage in model.layers:
        for block in stage.blocks:
            args, kwargs, out = attention_io(block.attn, lambda: model(images(model)))
            mask = args[1] if len(args) > 1 else kwargs.get("mask")
            logits, bias, v = logits_by_hand(block.attn, args[0], block.attn.prior)
            logits = logits + bias + block.attn._get_rel_pos_bias().double()
            if mask is not None:
                logits = logits + mask.double().repeat(len(logits) // len(mask), 1, 1)[:, None]
            expected = project(block.attn, logits.softmax(-1), v)
            torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)
    assert any(block.attn_mask is not None for stage in model.layers for block in stage.blocks)


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_cait_multiplies_before_talking_heads_and_adds_at_the_softmax(spec):
    model = cait().eval()
    table = vicinal.attach(model, spec)
    assert len(table.layers) == 2
    assert set(table.left_alone.values()) == {"1 queries see 17 keys, which have no common grid"}
    for block in model.blocks:
        module = block.attn
        (x,), _, out = attention_io(module, lambda: model(images(model)))
        logits, bias, v = logits_by_hand(module, x, module.prior)
        mixed = torch.einsum("bhqk,gh->bgqk", logits, module.proj_l.weight.double())
        mixed = mixed + module.proj_l.bias.double()[:, None, None]
        weights = (mixed + bias).softmax(-1)
        weights = torch.einsum("bhqk,gh->bgqk", weights, module.proj_w.weight.double())
        weights = weights + module.proj_w.bias.double()[:, None, None]
        torch.testing.assert_close(out.double(), project(module, weights, v), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_beit_keeps_its_own_bias(spec):
    model = beit().eval()
    for block in model.blocks:
        nn.init.normal_(block.attn.relative_position_bias_table)
    vicinal.attach(model, spec)
    module = model.blocks[1].attn
    args, _, out = attention_io(module, lambda: model(images(model)))
    logits, bias, v = logits_by_hand(module, args[0], module.prior)
    weights = (logits + bias + module._get_rel_pos_bias().double()).softmax(-1)
    torch.testing.assert_close(out.double(), project(module, weights, v), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("make", [vit, swin])
def test_direct_forwards_equal_the_mode_in_outputs_and_gradients(make, monkeypatch):
    torch.manual_seed(1)
    direct = make()
    vicinal.attach(direct, "gmm:init=spread+gab")
    by_mode = copy.deepcopy(direct)
    for module in by_mode.modules():
        if isinstance(module, WithPrior):
            base = module.plain_class
            module.__class__ = type("ByMode", (WithPrior, base), {"plain_class": base})
    x = images(direct)
    left, right = direct(x), by_mode(x)
    torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-4)
    left.square().sum().backward()
    right.square().sum().backward()
    for (name, a), (_, b) in zip(direct.named_parameters(), by_mode.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("make", [vit, swin, swin_v2, cait, beit])
def test_identity_changes_nothing_names_stay_and_detach_gives_everything_back(make):
    model = make().eval()
    x = images(model)
    before, state = model(x), copy.deepcopy(model.state_dict())
    classes = [type(module) for module in model.modules()]
    table = vicinal.attach(model, "gmm")
    assert not any(layer.changes for layer in table.layers)
    torch.testing.assert_close(model(x), before, atol=1e-5, rtol=1e-4)
    added = set(model.state_dict()) - set(state)
    assert set(state) < set(model.state_dict())
    assert all(".prior." in name for name in added)
    report = model.load_state_dict(state, strict=False)
    assert set(report.missing_keys) == added
    assert report.unexpected_keys == []
    assert vicinal.detach(model) == len(table.layers)
    assert [type(module) for module in model.modules()] == classes
    assert set(model.state_dict()) == set(state)
    assert torch.equal(model(x), before)
    assert vicinal.detach(model) == 0


def test_mode_random_numbers_buffers_and_gradients_stay_as_they_were():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), vit())
    model.train()
    model[2].blocks[1].eval()
    model[0].requires_grad_(False)
    modes = [module.training for module in model.modules()]
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    state = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    vicinal.attach(model, "gab", img_size=32)
    vicinal.detach(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == wanted
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())


@pytest.mark.parametrize(
    ("layers", "exclude", "expected"),
    [
        ("last", None, [2]),
        ("last 2", None, [1, 2]),
        ("first 2", None, [0, 1]),
        ([0, -1], None, [0, 2]),
        (lambda index, name: index == 1 and name == "blocks.1.attn", None, [1]),
        (None, "blocks.1.*", [0, 2]),
        (None, ["blocks.1.*", "*.2.attn"], [0]),
    ],
)
def test_layers_and_exclude_choose(layers, exclude, expected):
    model = vit()
    table = vicinal.attach(model, "conv:growth=0.4", layers=layers, exclude=exclude)
    assert [layer.name for layer in table.layers] == [f"blocks.{number}.attn" for number in expected]
    for number, block in enumerate(model.blocks):
        assert isinstance(block.attn, WithPrior) == (number in expected)
        if number in expected:
            assert (block.attn.prior.layer, block.attn.prior.depth) == (number, 3)


def test_another_prior_in_other_layers_by_calling_twice():
    model = vit()
    vicinal.attach(model, "gmm", layers=[0])
    vicinal.attach(model, "gab", layers=[1, 2])
    assert [type(block.attn.prior).__name__ for block in model.blocks] == [
        "GaussianMixture",
        "GaussianBias",
        "GaussianBias",
    ]
    assert model.blocks[2].attn.prior.layer == 2
    with pytest.raises(
        VicinalError, match=r"blocks.0.attn carries a prior already; compose as in 'gmm\+gab', or vicinal.detach"
    ):
        vicinal.attach(model, "elm")


def test_layers_are_counted_the_same_where_attention_is_cut_into_pieces():
    model = vit(patch_size=2)  # 257 tokens: two images are more than one piece
    vicinal.attach(model, "gmm", layers=[0])
    first = model.blocks[0].attn.prior
    table = vicinal.attach(model, "gab", layers=[1, 2])
    assert [layer.name for layer in table.layers] == ["blocks.1.attn", "blocks.2.attn"]
    assert (model.blocks[2].attn.prior.layer, model.blocks[2].attn.prior.depth) == (2, 3)
    assert model.blocks[0].attn.prior is first


def test_a_model_without_a_grid_is_refused_and_left_as_it_was():
    model = Xcit(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=4, num_classes=5)
    before = [type(module) for module in model.modules()]
    with pytest.raises(VicinalError, match="Xcit has nothing to attach to"):
        vicinal.attach(model, "gmm")
    assert [type(module) for module in model.modules()] == before


def test_tokens_out_of_order_are_refused_by_name():
    model = Hiera(img_size=(224, 224), embed_dim=24, num_heads=1, stages=(1, 1, 2, 2), num_classes=5)
    table = vicinal.attach(model, "gmm", img_size=224)
    assert "not those of the image, row by row" in table.left_alone["blocks.0.attn"]  # 8 x 8 windows, unrolled
    assert "not those of the image, row by row" in table.left_alone["blocks.3.attn"]  # 14 x 14, unrolled
    assert [layer.name for layer in table.layers] == ["blocks.5.attn"]  # 7 x 7, where nothing is left to unroll


def test_windows_with_heads_in_front_are_served():
    model = Nest(
        img_size=32, patch_size=2, num_levels=2, embed_dims=(12, 24), num_heads=(2, 3), depths=(2, 2), num_classes=5
    )
    table = vicinal.attach(model, "gmm:init=spread")
    assert len(table.layers) == 4
    assert {layer.grid for layer in table.layers} == {Grid(8, 8)}
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_large_images_are_examined_one_by_one():
    model = vit(img_size=640, patch_size=160)
    largest = []
    model.register_forward_pre_hook(lambda _, args: largest.append(len(args[0])))
    assert [layer.grid for layer in vicinal.attach(model, "gmm").layers] == [Grid(4, 4, 1)] * 3
    assert max(largest) == 1
    with pytest.raises(VicinalError, match="its tokens"):
        vicinal.attach(Model(PLACES.T.flatten(), stem=nn.Conv2d(3, 16, 80, 80)), "gmm", img_size=640)


def test_pooling_by_attention_is_left_alone():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches, self.pool = nn.Conv2d(3, 24, 8, 8), AttentionPool2d(24, feat_size=4, num_heads=4)

        def forward(self, x):
            return self.pool(self.patches(x))

    with pytest.raises(VicinalError, match="pool: its output does not depend on what patches see of each other"):
        vicinal.attach(Pooled(), "gmm", img_size=32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("make", [vit, swin])
def test_models_of_other_precision_are_served(make, dtype):
    model = make().to(dtype).eval()
    before = model(images(model).to(dtype))
    vicinal.attach(model, "gmm:init=spread")
    assert before.dtype == model(images(model).to(dtype)).dtype == dtype


def test_a_last_layer_at_zero_hides_nothing():
    model = Levit(img_size=128, embed_dim=(16,), key_dim=4, depth=(2,), num_heads=(2,), num_classes=5)
    before = copy.deepcopy(model.state_dict())
    table = vicinal.attach(model, "gmm", img_size=128)
    assert [layer.grid for layer in table.layers] == [Grid(8, 8)] * 2
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: vicinal.attach("vit", "gmm"), "takes a torch.nn.Module, given str"),
        (
            lambda: vicinal.attach(nn.Linear(3, 3), "gmm"),
            "does not say the size of its images; give img_size= or example=",
        ),
        (lambda: vicinal.attach(nn.Conv2d(3, 3, 1), "gmm", img_size=8), "nothing to attach to: no softmax"),
        (lambda: vicinal.attach(vit(), "gmm", img_size=30), "does not run on images of 3 x 30 x 30"),
        (lambda: vicinal.attach(vit(), "gnm"), "unknown prior 'gnm'"),
        (lambda: vicinal.attach(vit(), "gmm", kernels=0), "kernels >= 1"),
        (lambda: vicinal.attach(vit(), "gmm", layers=[7]), "unknown layer 7: the model has 3"),
        (
            lambda: vicinal.attach(vit(), "gmm", layers="last 9"),
            "'first N' or 'last N' with N from 1 to 3, given 'last 9'",
        ),
        (lambda: vicinal.attach(vit(), "gmm", layers="middle"), "given 'middle'"),
        (lambda: vicinal.attach(vit(), "gmm", exclude="*"), "leave none of 3 attention layers"),
        (lambda: vicinal.attach(vit(), "gmm", example=3), "a tensor or a mapping of keyword arguments, given int"),
        (lambda: vicinal.attach(vit(), "gmm", example=torch.zeros(3, 32)), "given an example of 2 axes"),
        (lambda: vicinal.attach(vit(patch_drop_rate=0.5), "gmm"), "drops patches at random"),
    ],
)
def test_bad_input_says_what_to_do(make, message):
    with pytest.raises(VicinalError, match=message):
        make()


def test_bad_options_leave_the_model_as_it_was():
    model = vit()
    with pytest.raises(VicinalError, match="unknown option"):
        vicinal.attach(model, "gmm:kernel=2")
    assert not any(isinstance(module, WithPrior) for module in model.modules())
    stages = swin()  # 2 heads in the first stage, 4 in the second
    with pytest.raises(VicinalError, match=r"gab takes sigma as one number or as shape \(4,\)"):
        vicinal.attach(stages, "gab:share_heads=false", sigma=[1.0, 2.0])
    assert not any(isinstance(module, WithPrior) for module in stages.modules())


def test_inference_mode_is_refused():
    with (
        torch.inference_mode(),
        pytest.raises(VicinalError, match=r"torch.inference_mode\(\) forbids; call it outside"),
    ):
        vicinal.attach(vit(), "gmm")


def test_another_image_size_afterwards_is_an_error_that_says_so():
    model = vit(dynamic_img_size=True)
    vicinal.attach(model, "gmm")
    with pytest.raises(VicinalError, match=r"attached for 17 tokens \(4 x 4 \+ 1 prefix\), given 65"):
        model(torch.randn(1, 3, 64, 64))


def test_examples_tell_the_shape():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = vit()

        def forward(self, *, pixel_values):
            return self.model(pixel_values)

    model = Wrapped()
    with pytest.raises(VicinalError, match="example="):
        vicinal.attach(model, "gmm", img_size=32)
    assert len(vicinal.attach(model, "gmm", example={"pixel_values": torch.zeros(1, 3, 32, 32)}).layers) == 3
    other = vit()
    assert len(vicinal.attach(other, "gmm", example=torch.zeros(1, 3, 32, 32)).layers) == 3


def test_the_table_prints_modules_grids_and_what_was_left():
    text = str(vicinal.attach(cait(), "gab"))
    assert text.splitlines()[0] == "gab attached to 2 modules"
    assert "blocks.0.attn  TalkingHeadAttn  4      4 x 4  2           yes" in text
    assert "left alone: blocks_token_only.0.attn: 1 queries see 17 keys" in text


def test_one_class_per_attention_class():
    first, second = vit(), vit()
    vicinal.attach(first, "gmm")
    vicinal.attach(second, "gab")
    assert type(first.blocks[0].attn) is type(second.blocks[2].attn)
    assert isinstance(first.blocks[0].attn, Attention)
