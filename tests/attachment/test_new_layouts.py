"""Tokens in uncommon layouts, placed by the model's own code, against the formula in float64."""

import itertools

import pytest
import torch
from timm.layers.diff_attention import DiffAttention
from timm.models.hiera import Hiera
from torch import nn

import vicinal
from by_hand import assert_same, attention_io, heads_by_hand, logits_by_hand, prior_by_hand, project, raster
from hugging_face_models import eomt, library, rf_detr_backbone, yolos
from small_models import lively, vit
from vicinal import Grid

SPECS = ["gmm:init=spread", "gab", "gmm:init=spread+gab"]


def noise(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def first_output(module, run):
    args, kwargs, out = attention_io(module, run)
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    return given, out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_yolos_has_detection_tokens_behind_its_patches(spec):
    model = yolos().double()
    table = vicinal.attach(model, spec, img_size=(32, 48))
    assert [layer.place for layer in table.layers] == ["4 x 6 + 1 prefix + 7 suffix"] * 2
    for layer in table.layers:
        module = model.get_submodule(layer.name)
        (x,), out = first_output(module, lambda: model(noise(2, 3, 32, 48)))
        logits, bias, v = logits_by_hand(module, x, module.prior, raster(4, 6, prefix=1, suffix=7))
        assert_same(out, project(module, (logits + bias).softmax(-1), v))


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_rf_detr_has_a_class_token_in_every_window_and_in_its_layer_over_all_windows(spec):
    model = rf_detr_backbone().double()
    table = vicinal.attach(model, spec, img_size=64)
    grids = [Grid(8, 8, 4) if number == 2 else Grid(4, 4, 1) for number in range(4)]
    assert [layer.grid for layer in table.layers] == grids
    windows = [[(row + top, column + left) for row, column in raster(4, 4)] for top in (0, 4) for left in (0, 4)]
    everywhere = [place for window in windows for place in (None, *window)]
    for layer, grid in zip(table.layers, grids, strict=True):
        module = model.get_submodule(layer.name)
        (x,), out = first_output(module, lambda: model(noise(2, 3, 64, 64)))
        places = raster(4, 4, prefix=1) if grid.height == 4 else everywhere
        assert x.shape[:2] == (2 * 4 if grid.height == 4 else 2, len(places))
        logits, bias, v = logits_by_hand(module, x, module.prior, places)
        assert_same(out, project(module, (logits + bias).softmax(-1), v))


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_eomt_has_queries_among_its_tokens_in_the_last_layers(spec):
    model = eomt().double()
    model.attn_mask_probs.zero_()  # the masks of its queries are in float32, which float64 attention does not take
    table = vicinal.attach(model, spec, img_size=32)
    assert [layer.grid for layer in table.layers] == [Grid(4, 4, 5)] * 2 + [Grid(4, 4, 15)] * 2
    for layer in table.layers:
        module = model.get_submodule(layer.name)
        (x,), out = first_output(module, lambda: model(noise(2, 3, 32, 32)))
        logits, bias, v = logits_by_hand(module, x, module.prior, raster(4, 4, layer.grid.prefix))
        assert_same(out, project(module, (logits + bias).softmax(-1), v))


def hiera():
    """16 x 16 places in windows of 4 x 4, then 8 x 8 places, which all attend to each other, then 4 x 4."""
    model = Hiera(
        img_size=(64, 64),
        embed_dim=24,
        num_heads=2,
        stages=(1, 2, 1),
        q_pool=2,
        mask_unit_size=(4, 4),
        mask_unit_attn=(True, False, False),
        num_classes=5,
    )
    return lively(model).double()


def unrolled(side, levels):
    """Place of every token behind Hiera's `Unroll`: the innermost 2 x 2 first, and the mask unit last."""
    unit = 2**levels
    tokens = []
    for steps in itertools.product(itertools.product(range(2), repeat=2), repeat=levels):
        row, column = (sum(step[axis] << level for level, step in enumerate(steps)) for axis in (0, 1))
        tokens += [(row + unit * down, column + unit * right) for down, right in raster(side // unit, side // unit)]
    return tokens


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_hiera_has_mask_units_and_a_permuted_global_stage(spec):
    model = hiera()
    assert model.unroll.schedule == [(2, 2)] * 2
    x = torch.arange(256.0).view(1, 256, 1)
    assert [divmod(int(cell), 16) for cell in model.unroll(x)[0, :, 0]] == unrolled(16, 2)
    table = vicinal.attach(model, spec, img_size=64)
    grids = {layer.name: layer.place for layer in table.layers}
    assert grids == {
        "blocks.0.attn": "16 windows of 4 x 4",
        "blocks.1.attn": "16 windows of 4 queries, 16 keys",  # by hand in test_pooled_keys
        "blocks.2.attn": "8 x 8",
        "blocks.3.attn": "4 x 4, keys 8 x 8",
    }
    pixels = noise(2, 3, 64, 64)

    module = model.blocks[0].attn  # tokens (16 in a unit, 16 units)
    (x,), out = first_output(module, lambda: model(pixels))
    q, k, v = (y.unflatten(2, (16, 16)).transpose(2, 3) for y in heads_by_hand(module, x))
    local = [(row % 4, column % 4) for row, column in unrolled(16, 2)[::16]]
    scale, bias = (y[:, None] for y in prior_by_hand(module.prior, local))
    attended = (scale * (q @ k.mT * q.shape[-1] ** -0.5) + bias).softmax(-1) @ v
    expected = attended.transpose(1, 3).reshape(2, 256, -1)  # as the module's own last lines
    assert_same(out, nn.functional.linear(expected, module.proj.weight, module.proj.bias))

    module = model.blocks[2].attn
    (x,), out = first_output(module, lambda: model(pixels))
    logits, bias, v = logits_by_hand(module, x, module.prior, unrolled(8, 1))
    assert_same(out, project(module, (logits + bias).softmax(-1), v))


def differential_vit(fused, **options):
    model = vit(attn_layer=DiffAttention, **options)
    for block in model.blocks:
        block.attn.fused_attn = fused
    return lively(model).double()


def differential_by_hand(module, x, places):
    """Output of timm's `DiffAttention`, both of whose maps are under the same prior."""
    qkv = (x @ module.qkv.weight.T + module.qkv.bias).chunk(3, -1)
    # (maps, batch, heads, tokens, dim) each
    q, k = (y.unflatten(-1, (module.num_heads, 2, -1)).permute(3, 0, 2, 1, 4) for y in qkv[:2])
    v = qkv[2].unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
    scale, bias = prior_by_hand(module.prior, places)
    first, second = (scale * (q @ k.mT * q.shape[-1] ** -0.5) + bias).softmax(-1)
    out = (first - module._compute_lambda().double() * second) @ v
    out = out * (out.square().mean(-1, keepdim=True) + module.sub_norm.eps).rsqrt() * module.sub_norm.weight
    out = (out * (1 - module.lambda_init)).transpose(1, 2).flatten(2)
    return nn.functional.linear(out, module.proj.weight, module.proj.bias)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_both_maps_of_differential_attention_are_under_the_same_prior(fused, spec):
    model = differential_vit(fused)
    table = vicinal.attach(model, spec)
    assert [(layer.heads, layer.grid) for layer in table.layers] == [(4, Grid(4, 4, 1))] * 3
    for block in model.blocks:
        (x,), out = first_output(block.attn, lambda: model(noise(2, 3, 32, 32)))
        assert_same(out, differential_by_hand(block.attn, x, raster(4, 4, 1)))


@torch.no_grad()
def test_differential_attention_is_the_same_fused_and_not_and_exchanges_state_dicts():
    fused, plain = differential_vit(True), differential_vit(False)
    for model in (fused, plain):
        vicinal.attach(model, "gmm:init=spread+gab")
    for parameter in fused.parameters():
        parameter.add_(0.01 * torch.randn_like(parameter))
    plain.load_state_dict(fused.state_dict())
    x = noise(2, 3, 32, 32)
    torch.testing.assert_close(fused(x), plain(x), atol=1e-12, rtol=0)


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_an_image_smaller_than_a_window_is_padded_and_padding_is_neutral(spec):
    from torchvision.models.swin_transformer import SwinTransformer

    model = SwinTransformer([2, 2], 12, [2], [2], [4, 4], num_classes=5, stochastic_depth_prob=0.0)
    model = lively(model).double()
    table = vicinal.attach(model, spec, img_size=(6, 4))  # 3 x 2 patches
    assert [(layer.grid.height, layer.grid.width) for layer in table.layers] == [(3, 2)] * 2
    places = [(row, column) if row < 3 and column < 2 else None for row, column in raster(4, 4)]
    for layer in table.layers:
        module = model.get_submodule(layer.name)
        (x,), out = first_output(module, lambda: model(noise(2, 3, 6, 4)))
        window = nn.functional.pad(x, (0, 0, 0, 2, 0, 1)).flatten(1, 2)
        logits, bias, v = logits_by_hand(module, window, module.prior, places)
        expected = project(module, (logits + bias + module.get_relative_position_bias()).softmax(-1), v)
        assert_same(out, expected.view(2, 4, 4, -1)[:, :3, :2])


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_a_single_window_that_is_rolled_is_placed_where_its_patches_are(spec):
    transformers = library()
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=12, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    model = lively(transformers.SwinBackbone(config)).double()  # keeps its shift in a stage of one window
    table = vicinal.attach(model, spec)
    assert [layer.grid for layer in table.layers] == [Grid(4, 4)] * 4
    module = model.get_submodule(table.layers[3].name)
    (x, mask), out = first_output(module, lambda: model(noise(2, 3, 16, 16)))
    assert x.shape[:2] == (2, 16)
    rolled = [((row + 2) % 4, (column + 2) % 4) for row, column in raster(4, 4)]
    logits, bias, v = logits_by_hand(module, x, module.prior, rolled)
    logits = logits + bias + module.relative_position_bias() + mask
    assert_same(out, project(module, logits.softmax(-1), v))


class HeadsInTurn(nn.Module):
    """Heads one after another, each of which is given what the one before it computed, as in EfficientViT."""

    def __init__(self, fused):
        super().__init__()
        self.patches, self.fused = nn.Conv2d(3, 24, 8, 8), fused
        self.heads = nn.ModuleList(nn.Linear(8, 24) for _ in range(3))

    def attend(self, x):
        if self.fused:
            return nn.functional.scaled_dot_product_attention(*x.unsqueeze(1).chunk(3, -1))[:, 0]
        q, k, v = x.chunk(3, -1)
        return (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1) @ v

    def forward(self, x):
        out = [torch.zeros(())]
        for head, part in zip(self.heads, self.patches(x).flatten(2).mT.chunk(3, -1), strict=True):
            out.append(self.attend(head(out[-1] + part)))
        return torch.cat(out[1:], -1)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_heads_that_take_turns_have_a_head_of_the_prior_each(fused, spec):
    model = lively(HeadsInTurn(fused)).double()
    (layer,) = vicinal.attach(model, spec, img_size=32).layers
    assert (layer.heads, layer.grid) == (3, Grid(4, 4))
    x = noise(2, 3, 32, 32)
    scale, bias = prior_by_hand(model.prior, raster(4, 4))
    out = [torch.zeros(())]
    for number, part in enumerate(model.patches(x).flatten(2).mT.chunk(3, -1)):
        q, k, v = model.heads[number](out[-1] + part).chunk(3, -1)
        out.append((scale[number] * (q @ k.mT * 8**-0.5) + bias[number]).softmax(-1) @ v)
    assert_same(model(x), torch.cat(out[1:], -1))
