import copy

import pytest
import torch
from timm.layers.attention import Attention
from timm.models.hiera import Hiera
from timm.models.levit import Levit
from timm.models.nest import Nest
from torch import nn

import vicinal
from small_models import beit, cait, images, lively, swin, swin_v2, vit
from test_token_orders import PLACES, Model
from vicinal import Grid, VicinalError
from vicinal.attachment.subclass import WithPrior
from vicinal.inspection import probe


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
    with pytest.raises(VicinalError, match=r"blocks.0.attn.*vicinal.detach"):
        vicinal.attach(model, "elm")


def test_layers_are_counted_the_same_where_attention_is_cut_into_pieces():
    model = vit(patch_size=2)  # 257 tokens: two images are more than one piece
    vicinal.attach(model, "gmm", layers=[0])
    first = model.blocks[0].attn.prior
    table = vicinal.attach(model, "gab", layers=[1, 2])
    assert [layer.name for layer in table.layers] == ["blocks.1.attn", "blocks.2.attn"]
    assert (model.blocks[2].attn.prior.layer, model.blocks[2].attn.prior.depth) == (2, 3)
    assert model.blocks[0].attn.prior is first


def test_windows_with_heads_in_front_are_served():
    model = Nest(
        img_size=32, patch_size=2, num_levels=2, embed_dims=(12, 24), num_heads=(2, 3), depths=(2, 2), num_classes=5
    )
    table = vicinal.attach(model, "gmm:init=spread")
    assert len(table.layers) == 4
    assert {layer.grid for layer in table.layers} == {Grid(8, 8)}
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_last_layer_at_zero_hides_nothing():
    model = Levit(img_size=128, embed_dim=(16,), key_dim=4, depth=(2,), num_heads=(2,), num_classes=5)
    before = copy.deepcopy(model.state_dict())
    table = vicinal.attach(model, "gmm", img_size=128)
    assert [layer.grid for layer in table.layers] == [Grid(8, 8)] * 2
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


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


def test_one_class_per_attention_class():
    first, second = vit(), vit()
    vicinal.attach(first, "gmm")
    vicinal.attach(second, "gab")
    assert type(first.blocks[0].attn) is type(second.blocks[2].attn)
    assert isinstance(first.blocks[0].attn, Attention)


def test_large_images_run_in_fewer_at_a_time(monkeypatch):
    """Two ramps at a time with the plain image before and behind, instead of four."""

    def inspected(model, side):
        batches = []
        hook = model.register_forward_pre_hook(lambda _, args: batches.append(len(args[0])))
        inspection = vicinal.inspect(model, img_size=side)
        hook.remove()
        return max(batches), [site.queries.index for site in inspection.served]

    order = PLACES.T.flatten()
    few, cells = inspected(Model(order), 32)
    assert few == 6
    monkeypatch.setattr(probe, "MAX_PIXELS", 32 * 32 - 1)
    many, same = inspected(Model(order), 32)
    assert many == 4
    assert len(cells) == 2
    assert all(torch.equal(a, b) and torch.equal(a[0], order) for a, b in zip(cells, same, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("make", [vit, swin])
@torch.no_grad()
def test_models_of_other_precision_are_served(make, dtype):
    single = lively(make())
    model = copy.deepcopy(single).to(dtype)
    weights = copy.deepcopy(model.state_dict())
    tables = []
    for each in (model, single):
        torch.manual_seed(0)  # of the prior
        tables.append(vicinal.attach(each, "gmm:init=spread"))
    assert tables[0].layers == tables[1].layers
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())
    assert {x.dtype for x in model.parameters()} == {dtype, torch.float32}  # priors stay in float32
    x = images(model)
    out, expected = model(x.to(dtype)), single(x)
    assert out.dtype == dtype
    close = 1e-4 if dtype == torch.float64 else 40 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), expected, atol=close * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda: vicinal.attach("vit", "gmm"), "str"),
        (lambda: vicinal.attach(nn.Linear(3, 3), "gmm"), "img_size=.*example="),
        (lambda: vicinal.attach(nn.Conv2d(3, 3, 1), "gmm", img_size=8), "Conv2d"),
        (lambda: vicinal.attach(vit(), "gmm", img_size=30), "3 x 30 x 30"),
        (lambda: vicinal.attach(vit(), "gnm"), "'gnm'"),
        (lambda: vicinal.attach(vit(), "gmm", kernels=0), "kernels.*0"),
        (lambda: vicinal.attach(vit(), "gmm", layers=[7]), r"\b7\b.*\b3\b"),
        (lambda: vicinal.attach(vit(), "gmm", layers="last 9"), r"\b3\b.*'last 9'"),
        (lambda: vicinal.attach(vit(), "gmm", layers="middle"), "'middle'"),
        (lambda: vicinal.attach(vit(), "gmm", exclude="*"), r"'\*'.*\b3\b"),
        (lambda: vicinal.attach(vit(), "gmm", example=3), "int"),
        (lambda: vicinal.attach(vit(), "gmm", example={"x": 3}), "'x'"),
        (lambda: vicinal.attach(vit(), "gmm", example=torch.zeros(3, 32)), r"\b2 axes"),
        (lambda: vicinal.attach(vit(patch_drop_rate=0.5), "gmm"), "patch_drop"),
    ],
)
def test_bad_input_is_named(call, value):
    with pytest.raises(VicinalError, match=value):
        call()


def test_bad_options_leave_the_model_as_it_was():
    model = vit()
    with pytest.raises(VicinalError, match="'kernel'"):
        vicinal.attach(model, "gmm:kernel=2")
    assert not any(isinstance(module, WithPrior) or module._forward_pre_hooks for module in model.modules())
    stages = swin()  # 2 heads in the first stage, 4 in the second
    with pytest.raises(VicinalError, match=r"sigma.*\(4,\)"):
        vicinal.attach(stages, "gab:share_heads=false", sigma=[1.0, 2.0])
    assert not any(isinstance(module, WithPrior) or module._forward_pre_hooks for module in stages.modules())


def test_inference_mode_is_refused():
    model = vit()
    with torch.inference_mode(), pytest.raises(VicinalError, match=r"inference_mode\(\)"):
        vicinal.attach(model, "gmm")


def test_the_table_prints_modules_grids_and_what_was_left():
    table = vicinal.attach(cait(), "gab")
    lines = str(table).splitlines()
    assert "gab" in lines[0]
    assert "2 modules" in lines[0]
    assert [line.split() for line in lines[2:4]] == [
        [f"blocks.{number}.attn", "TalkingHeadAttn", "4", "4", "x", "4", "2", "yes"] for number in (0, 1)
    ]
    for line, (name, reason) in zip(lines[4:], table.left_alone.items(), strict=True):
        assert name in line
        assert reason in line
    assert list(table.left_alone) == ["blocks_token_only.0.attn", "blocks_token_only.1.attn"]


def test_mask_units_are_served():
    model = Hiera(img_size=(224, 224), embed_dim=24, num_heads=1, stages=(1, 1, 2, 2), num_classes=5)
    table = vicinal.attach(model, "gmm", img_size=224)
    assert {layer.name: layer.place for layer in table.layers} == {
        "blocks.0.attn": "49 windows of 8 x 8",
        "blocks.1.attn": "49 windows of 16 queries, 64 keys",
        "blocks.2.attn": "49 windows of 4 queries, 16 keys",
        "blocks.3.attn": "14 x 14",
        "blocks.4.attn": "7 x 7, keys 14 x 14",
        "blocks.5.attn": "7 x 7",
    }
    assert table.left_alone == {}
