"""Initial weights, norms and drop path are those of the reference."""

import math

import pytest
import torch
from timm.layers import DropPath
from torch import nn

import vicinal
from vicinal.models import BACKBONES


def stds(parameter):
    return float(parameter.detach().std())


def test_vit_starts_as_the_reference_does():
    model = vicinal.create_model("vit")
    block = model.blocks[4]
    assert stds(block.attn.qkv.weight) == pytest.approx(math.sqrt(2 / (192 + 576)), rel=0.02)
    assert stds(block.mlp.fc1.weight) == pytest.approx(math.sqrt(2 / (192 + 384)), rel=0.02)
    assert stds(model.patch_embed.proj.weight) == pytest.approx(math.sqrt(2 / (48 + 192)), rel=0.03)
    assert stds(model.pos_embed) == pytest.approx(1, rel=0.03)
    assert stds(model.cls_token) == pytest.approx(1, rel=0.2)
    assert not model.head.bias.any()


def test_cait_starts_as_the_reference_does():
    model = vicinal.create_model("cait")
    starts = [float(block.gamma_1.detach()[0]) for block in model.blocks]
    assert starts == pytest.approx([0.1] * 18 + [1e-5] * 6)
    assert all((block.gamma_2 == 0.1).all() for block in model.blocks_token_only)
    assert stds(model.blocks[0].attn.kv.weight) == pytest.approx(math.sqrt(2 / (108 + 512)), rel=0.02)
    mixing = torch.stack([block.attn.mix_logits for block in model.blocks])
    assert stds(mixing) == pytest.approx(1, rel=0.15)


def test_swin_starts_as_torch_does_and_t2t_at_two_hundredths():
    swin, t2t = vicinal.create_model("swin"), vicinal.create_model("t2t")
    assert stds(swin.layers[1].blocks[0].mlp.fc1.weight) == pytest.approx(math.sqrt(1 / (3 * 192)), rel=0.02)
    assert stds(swin.patch_embed.pos_embed) == pytest.approx(0.02, rel=0.05)
    assert stds(t2t.blocks[0].mlp.fc1.weight) == pytest.approx(0.02, rel=0.02)
    assert stds(t2t.patch_embed.transformers[0].attn.qkv.weight) == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("name", BACKBONES)
def test_norms_have_the_references_epsilon(name):
    norms = [module for module in vicinal.create_model(name).modules() if isinstance(module, nn.LayerNorm)]
    assert {norm.eps for norm in norms} == {1e-5}


def rates(model):
    """Drop path rates by block, 0 where nothing is dropped."""
    blocks = [module for module in model.modules() if hasattr(module, "mlp") and hasattr(module, "attn")]
    return [
        [
            child.drop_prob if isinstance(child, DropPath) else 0.0
            for name, child in block.named_children()
            if "drop" in name
        ]
        for block in blocks
    ]


@pytest.mark.parametrize("name", ["vit", "cait", "pit", "vit-relpos", "vit-d30"])
def test_drop_path_is_the_same_in_all_blocks(name):
    assert {rate for block in rates(vicinal.create_model(name, drop_path_rate=0.2)) for rate in block} == {0.2}
    assert {rate for block in rates(vicinal.create_model(name, drop_path_rate=0)) for rate in block} == {0.0}


@pytest.mark.parametrize("name", ["swin", "t2t"])
def test_drop_path_grows_with_depth(name):
    by_block = [block[0] for block in rates(vicinal.create_model(name)) if block]
    assert by_block == pytest.approx(torch.linspace(0, 0.1, 12).tolist())


def test_t2t_positions_are_sinusoids_and_frozen():
    model = vicinal.create_model("t2t")
    assert "pos_embed" not in dict(model.named_parameters())
    for place in (0, 1, 17, 63):
        for channel in (0, 1, 100, 255):
            angle = place / 10000 ** (2 * (channel // 2) / 256)
            expected = math.cos(angle) if channel % 2 else math.sin(angle)
            assert float(model.pos_embed[0, place, channel]) == pytest.approx(expected, abs=1e-6)
