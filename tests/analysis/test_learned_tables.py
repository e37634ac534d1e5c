import math

import numpy as np
import pytest
import torch
from timm.models.beit import Beit
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer_relpos import VisionTransformerRelPos

import vicinal
from vicinal.analysis.learned_tables import tables_of

SMALL = {"embed_dim": 24, "num_classes": 5}
WINDOWS = SMALL | {"img_size": 32, "patch_size": 2, "window_size": 4, "depths": (2, 2), "num_heads": (2, 3)}
PATCHES = SMALL | {"img_size": (32, 48), "patch_size": 8, "depth": 2, "num_heads": 3}


def randomized(model):
    """A model whose tables are not small or zero, as they start."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias_table" in name or "mlp" in name:
                parameter.normal_()
    return model.eval()


def check_pairs(table, pairs, height, width, prefix=0):
    """What a table says of each pair of patches is what `pairs` says, `(heads, tokens, tokens)`."""
    assert table.over == "offsets"
    assert table.values.shape == (len(pairs), 2 * height - 1, 2 * width - 1)
    assert table.values.dtype == np.float64
    row_0, column_0 = table.center
    pairs, found = pairs[:, prefix:, prefix:].numpy(force=True), np.empty((len(pairs), height * width, height * width))
    for query in range(height * width):
        for key in range(height * width):
            row, column = key // width - query // width, key % width - query % width
            found[:, query, key] = table.values[:, row_0 + row, column_0 + column]
    np.testing.assert_allclose(found, pairs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("prior", "role"),
    [
        ("gmm:init=spread", "scale"),
        ("rpe:init=normal", "bias"),
        ("rpe-mlp:init=normal", "bias"),
        ("gab:share_heads=false", "bias"),
        ("decay", "bias"),
        ("conv", "bias"),
    ],
)
def test_a_prior_gives_its_table(prior, role):
    model = vicinal.create_model(
        "vit-micro", prior=prior, img_size=(16, 24), patch_size=4, depth=2, global_pool="token"
    )
    first, second = tables_of(model)
    assert [first.name, second.name] == ["blocks.0.attn", "blocks.1.attn"]
    assert (first.kind, first.role) == (prior, role)
    scale, bias = model.blocks[1].attn.prior()
    check_pairs(second, scale if role == "scale" else bias, 4, 6, prefix=1)


def test_a_composition_gives_a_table_of_each_role():
    model = vicinal.create_model(
        "vit-micro",
        prior="gmm:init=spread+gab+rpe:init=normal",
        img_size=16,
        patch_size=4,
        depth=1,
        global_pool="token",
    )
    scale, bias = tables_of(model)
    assert (scale.role, bias.role) == ("scale", "bias")
    for table, pairs in zip((scale, bias), model.blocks[0].attn.prior(), strict=True):
        check_pairs(table, pairs, 4, 4, prefix=1)


def test_a_prior_free_per_pair_gives_what_the_center_patch_sees():
    model = vicinal.create_model(
        "vit-micro", prior="elm:share_heads=false", img_size=(16, 24), patch_size=4, depth=1, global_pool="token"
    )
    prior = model.blocks[0].attn.prior
    with torch.no_grad():
        prior.flat_mask.normal_()
    (table,) = tables_of(model)
    assert (table.over, table.role, table.center) == ("patches", "scale", (2, 3))
    np.testing.assert_array_equal(table.values, prior.mask[:, 2 * 6 + 3].reshape(4, 4, 6).detach().numpy())
    assert table.around_center() is table


@pytest.mark.parametrize("size", [(16, 24), (12, 20), (20, 16)])
def test_around_the_center_is_what_the_patch_there_sees(size):
    model = vicinal.create_model(
        "vit-micro", prior="rpe:init=normal", img_size=size, patch_size=4, depth=1, global_pool="avg"
    )
    (table,) = tables_of(model)
    seen = table.around_center()
    height, width = size[0] // 4, size[1] // 4
    row, column = seen.center
    assert (row, column) == (height // 2, width // 2)
    pairs = model.blocks[0].attn.prior()[1].detach()
    expected = pairs[:, row * width + column].reshape(-1, height, width)
    np.testing.assert_array_equal(seen.values, expected.numpy())


@pytest.mark.parametrize("fused", [True, False])
def test_swin_gives_the_bias_of_shifted_windows_too(fused):
    model = randomized(SwinTransformer(**WINDOWS))
    blocks = [block for layer in model.layers for block in layer.blocks]
    assert any(block.attn_mask is not None for block in blocks)
    for block in blocks:
        block.attn.fused_attn = fused
    tables = tables_of(model)
    assert {table.kind for table in tables} == {"swin_transformer.WindowAttention"}
    assert [table.name for table in tables][:2] == ["layers.0.blocks.0.attn", "layers.0.blocks.1.attn"]
    for table, block in zip(tables, blocks, strict=True):
        check_pairs(table, block.attn._get_rel_pos_bias()[0], 4, 4)


def test_swin_v2_gives_its_continuous_bias():
    model = randomized(SwinTransformerV2(**WINDOWS))
    blocks = [block for layer in model.layers for block in layer.blocks]
    for table, block in zip(tables_of(model), blocks, strict=True):
        offsets = torch.empty(16, 16, 2)
        for query in range(16):
            for key in range(16):
                offsets[query, key] = torch.tensor([query // 4 - key // 4, query % 4 - key % 4]) * 8 / 3
        places = offsets.sign() * torch.log2(1 + offsets.abs()) / math.log2(8)
        pairs = 16 * torch.sigmoid(block.attn.cpb_mlp(places)).permute(2, 0, 1)
        assert table.role == "bias"
        check_pairs(table, pairs, 4, 4)


def test_beit_gives_its_table_without_the_class_token():
    model = randomized(Beit(**PATCHES, use_rel_pos_bias=True, init_values=0.1))
    for table, block in zip(tables_of(model), model.blocks, strict=True):
        assert table.kind == "beit.Attention"
        check_pairs(table, block.attn._get_rel_pos_bias()[0], 4, 6, prefix=1)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"rel_pos_type": "bias"}, "RelPosBias"),
        ({"rel_pos_type": "bias", "class_token": True, "global_pool": "token"}, "RelPosBias"),
        ({"rel_pos_type": "mlp"}, "RelPosMlp"),
        ({"rel_pos_type": "mlp_swin", "class_token": True, "global_pool": "token"}, "RelPosMlp"),
        ({"rel_pos_type": "mlp", "shared_rel_pos": True}, "vision_transformer_relpos.RelPosAttention"),
    ],
)
def test_relative_positions_of_timm_give_their_tables(options, kind):
    model = randomized(VisionTransformerRelPos(**PATCHES, **options))
    tables = tables_of(model)
    assert {table.kind for table in tables} == {kind}
    for table, block in zip(tables, model.blocks, strict=True):
        source = model.shared_rel_pos if options.get("shared_rel_pos") else block.attn.rel_pos
        check_pairs(table, source.get_bias()[0], 4, 6, prefix=int("class_token" in options))


def test_heads_that_take_turns_give_their_tables():
    model = vicinal.create_model("efficientvit_m0", num_classes=5).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attention_biases" in name:
                parameter.normal_()
    table = tables_of(model)[0]
    biases = model.get_submodule(table.name).attention_biases.detach().numpy()  # by distance along rows and columns
    assert table.values.shape == (4, 13, 13)
    for row in range(-6, 7):
        for column in range(-6, 7):
            expected = biases[:, abs(row) * 7 + abs(column)]
            np.testing.assert_allclose(table.values[:, 6 + row, 6 + column], expected, rtol=1e-6)


def test_a_prior_and_a_bias_of_the_model_are_two_tables():
    model = randomized(SwinTransformer(**WINDOWS))
    vicinal.attach(model, "gmm:init=spread")
    tables = tables_of(model)
    assert [(table.name, table.role) for table in tables[:4]] == [
        ("layers.0.blocks.0.attn", "scale"),
        ("layers.0.blocks.0.attn", "bias"),
        ("layers.0.blocks.1.attn", "scale"),
        ("layers.0.blocks.1.attn", "bias"),
    ]
    check_pairs(tables[0], model.layers[0].blocks[0].attn.prior()[0], 4, 4)
    check_pairs(tables[1], model.layers[0].blocks[0].attn._get_rel_pos_bias()[0], 4, 4)


def test_a_wrong_size_of_images_is_told():
    model = randomized(Beit(**PATCHES, use_rel_pos_bias=True, init_values=0.1))
    with pytest.raises(vicinal.VicinalError, match=r"does not run on images of 3 x 40 x 40"):
        tables_of(model, img_size=40)


def test_looking_leaves_the_model_as_it_was():
    model = randomized(SwinTransformer(**WINDOWS)).train()
    vicinal.attach(model, "gab")
    before = {name: values.clone() for name, values in model.state_dict().items()}
    hooks = [[*module._forward_hooks, *module._forward_pre_hooks] for module in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    tables_of(model)
    assert torch.equal(torch.rand(2), expected)
    assert all(module.training for module in model.modules())
    assert [[*module._forward_hooks, *module._forward_pre_hooks] for module in model.modules()] == hooks
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
