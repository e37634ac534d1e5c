"""One small model of every family of timm that has attention, and what of it takes a prior."""

from collections import Counter

import pytest
import timm
import torch

import vicinal

# name, size of the images (None: what the model says), modules served by class and place, modules left alone
FAMILIES = [
    ("beitv2_base_patch16_224", 64, {"Attention, 4 x 4 + 1 prefix": 2}, 0),
    ("botnet26t_256", 128, {"BottleneckAttn, 8 x 8": 2, "BottleneckAttn, 4 x 4": 1}, 0),
    ("caformer_s18", None, {"Attention, 14 x 14": 9, "Attention, 7 x 7": 3}, 0),
    ("cait_xxs24_224", 64, {"TalkingHeadAttn, 4 x 4": 2}, 2),
    ("coatnet_pico_rw_224", 64, {"Attention2d, 4 x 4": 5, "Attention2d, 2 x 2": 2}, 0),
    ("convit_tiny", 64, {"GPSA, 4 x 4": 10, "MHSA, 4 x 4 + 1 prefix": 2}, 0),
    ("crossvit_tiny_240", None, {"Attention, 20 x 20 + 1 prefix": 2, "Attention, 14 x 14 + 1 prefix": 3}, 4),
    ("csatv2", 256, {"Attention, 8 x 8": 2, "Attention, 4 x 4": 2}, 0),
    (
        "davit_tiny",
        None,
        {
            "WindowAttention, 64 windows of 7 x 7": 1,
            "WindowAttention, 16 windows of 7 x 7": 1,
            "WindowAttention, 4 windows of 7 x 7": 1,
            "WindowAttention, 7 x 7": 1,
        },
        4,
    ),
    ("deit_tiny_distilled_patch16_224", 64, {"Attention, 4 x 4 + 2 prefix": 2}, 0),
    ("efficientformer_l1", None, {"Attention, 7 x 7": 1}, 0),
    ("efficientformerv2_s0", None, {"Attention2d, 7 x 7": 4, "Attention2dDownsample, 7 x 7, keys 14 x 14": 1}, 0),
    (
        "efficientvit_m0",
        None,
        {
            "CascadedGroupAttention, 4 windows of 7 x 7": 1,
            "CascadedGroupAttention, 7 x 7": 2,
            "CascadedGroupAttention, 4 x 4": 3,
        },
        0,
    ),
    ("eva02_tiny_patch14_224", 56, {"EvaAttention, 4 x 4 + 1 prefix": 2}, 0),
    ("fastvit_sa12", None, {"Attention, 8 x 8": 1}, 0),
    (
        "gcvit_xxtiny",
        None,
        {
            "WindowAttentionGlobal, 64 windows of 7 x 7": 1,
            "WindowAttentionGlobal, 16 windows of 7 x 7": 1,
            "WindowAttentionGlobal, 14 x 14": 6,
            "WindowAttentionGlobal, 7 x 7": 2,
        },
        2,  # global queries next to windows of other images: every second block of the stages with several windows
    ),
    (
        "hiera_tiny_224",
        None,
        {
            "MaskUnitAttention, 49 windows of 8 x 8": 1,
            "MaskUnitAttention, 49 windows of 16 queries, 64 keys": 1,
            "MaskUnitAttention, 49 windows of 4 x 4": 1,
            "MaskUnitAttention, 49 windows of 4 queries, 16 keys": 1,
            "MaskUnitAttention, 14 x 14": 1,
            "MaskUnitAttention, 7 x 7, keys 14 x 14": 1,
            "MaskUnitAttention, 7 x 7": 1,
        },
        0,
    ),
    (
        "levit_128s",
        None,
        {
            "Attention, 14 x 14": 2,
            "AttentionDownsample, 7 x 7, keys 14 x 14": 1,
            "Attention, 7 x 7": 3,
            "AttentionDownsample, 4 x 4, keys 7 x 7": 1,
            "Attention, 4 x 4": 4,
        },
        0,
    ),
    ("lowformer_b0", 128, {"ConvAttention, 4 x 4": 7}, 0),
    (
        "maxvit_pico_rw_256",
        128,
        {
            "AttentionCl, 64 windows of 4 x 4": 2,
            "AttentionCl, 16 windows of 4 x 4": 2,
            "AttentionCl, 4 windows of 4 x 4": 2,
            "AttentionCl, 4 x 4": 2,
        },
        0,
    ),
    (
        "mobilenetv4_hybrid_medium",
        128,
        {"MultiQueryAttention2d, 8 x 8, keys 4 x 4": 4, "MultiQueryAttention2d, 4 x 4": 4},
        0,
    ),
    (
        "mobilevit_xxs",
        None,
        {
            "Attention, 4 windows of 16 x 16": 2,
            "Attention, 4 windows of 8 x 8": 4,
            "Attention, 4 windows of 4 x 4": 3,
        },
        0,
    ),
    (
        "mvitv2_tiny",
        64,
        {
            "MultiScaleAttention, 16 x 16, keys 4 x 4": 1,
            "MultiScaleAttention, 8 x 8": 1,
            "MultiScaleAttention, 8 x 8, keys 4 x 4": 1,
            "MultiScaleAttention, 4 x 4, keys 8 x 8": 1,
            "MultiScaleAttention, 4 x 4": 4,
            "MultiScaleAttention, 2 x 2, keys 4 x 4": 1,
            "MultiScaleAttention, 2 x 2": 1,
        },
        0,
    ),
    (
        "nest_tiny",
        None,
        {"Attention, 16 windows of 14 x 14": 2, "Attention, 4 windows of 14 x 14": 2, "Attention, 14 x 14": 8},
        0,
    ),
    (
        "nextvit_small",
        None,
        {
            "EfficientAttention, 28 x 28, keys pooled to 49": 1,
            "EfficientAttention, 14 x 14, keys pooled to 49": 2,
            "EfficientAttention, 7 x 7": 1,
        },
        0,
    ),
    (
        "pit_ti_224",
        64,
        {"Attention, 7 x 7 + 1 prefix": 2, "Attention, 4 x 4 + 1 prefix": 6, "Attention, 2 x 2 + 1 prefix": 4},
        0,
    ),
    (
        "pvt_v2_b0",
        None,
        {
            "Attention, 56 x 56, keys 7 x 7": 1,
            "Attention, 28 x 28, keys 7 x 7": 1,
            "Attention, 14 x 14, keys 7 x 7": 1,
            "Attention, 7 x 7": 1,
        },
        0,
    ),
    ("samvit_base_patch16_224", None, {"Attention, 14 x 14": 2}, 0),
    ("shvit_s1", None, {"SHSA, 7 x 7": 4, "SHSA, 4 x 4": 5}, 0),
    (
        "swinv2_cr_tiny_ns_224",
        64,
        {
            "WindowMultiHeadAttention, 64 windows of 2 x 2": 2,
            "WindowMultiHeadAttention, 16 windows of 2 x 2": 2,
            "WindowMultiHeadAttention, 4 windows of 2 x 2": 6,
            "WindowMultiHeadAttention, 2 x 2": 2,
        },
        0,
    ),
    ("test_vit3", None, {"Attention, 10 x 10 + 1 prefix": 9}, 1),
    (
        "tiny_vit_5m_224",
        None,
        {"Attention, 16 windows of 7 x 7": 1, "Attention, 14 x 14": 2, "Attention, 7 x 7": 1},
        0,
    ),
    ("tnt_s_patch16_224", 64, {"Attention, 16 windows of 4 x 4": 2, "Attention, 4 x 4 + 1 prefix": 2}, 0),
    (
        "twins_svt_small",
        None,
        {
            "LocallyGroupedAttn, 64 windows of 7 x 7": 1,
            "LocallyGroupedAttn, 16 windows of 7 x 7": 1,
            "LocallyGroupedAttn, 4 windows of 7 x 7": 1,
            "LocallyGroupedAttn, 7 x 7": 1,
            "GlobalSubSampleAttn, 56 x 56, keys 7 x 7": 1,
            "GlobalSubSampleAttn, 28 x 28, keys 7 x 7": 1,
            "GlobalSubSampleAttn, 14 x 14, keys 7 x 7": 1,
            "GlobalSubSampleAttn, 7 x 7": 1,
        },
        0,
    ),
    ("visformer_tiny", 64, {"Attention, 4 x 4": 1, "Attention, 2 x 2": 1}, 0),
    ("vit_pwee_patch16_reg1_gap_256", 64, {"ParallelScalingBlock, 4 x 4 + 1 prefix": 2}, 0),
    ("vit_relpos_small_patch16_224", 64, {"RelPosAttention, 4 x 4": 2}, 0),
    ("vit_small_patch16_18x2_224", 64, {"Attention, 4 x 4 + 1 prefix": 4}, 0),
    ("vit_small_patch16_rope_224", 64, {"AttentionRope, 4 x 4 + 1 prefix": 2}, 0),
    ("vit_tiny_r_s16_p8_224", 64, {"Attention, 2 x 2 + 1 prefix": 2}, 0),
    ("vitamin_small_224", 64, {"Attention, 4 x 4": 14}, 0),
    ("volo_d1_224", 64, {"Attention, 4 x 4": 14}, 2),  # outlook attention has no product of queries and keys
]

# Options that make a model smaller; every class of attention and every kind of place is left. Convolutional models take
# none, and run on smaller images.
SMALLER = {
    "beitv2_base_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 96, "num_heads": 3},
    "cait_xxs24_224": {"img_size": 64, "depth": 2},
    "crossvit_tiny_240": {"depth": ((1, 1, 0), (1, 2, 0))},
    "csatv2": {},
    "davit_tiny": {"depths": (1, 1, 1, 1), "embed_dims": (24, 48, 96, 192)},
    "deit_tiny_distilled_patch16_224": {"img_size": 64, "depth": 2},
    "efficientformer_l1": {"depths": (1, 1, 1, 2)},
    "efficientformerv2_s0": {"depths": (1, 1, 2, 2)},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 2},
    "fastvit_sa12": {"layers": (1, 1, 1, 1)},
    "hiera_tiny_224": {"stages": (1, 2, 2, 2), "embed_dim": 24},
    "lowformer_b0": {},
    "maxvit_pico_rw_256": {"img_size": 128, "depths": (1, 1, 1, 1)},
    "mobilenetv4_hybrid_medium": {},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1)},
    "samvit_base_patch16_224": {"depth": 2, "embed_dim": 96, "num_heads": 3},
    "tiny_vit_5m_224": {"depths": (1, 1, 2, 1)},
    "tnt_s_patch16_224": {"img_size": 64, "depth": 2},
    "twins_svt_small": {"depths": (2, 2, 2, 2), "embed_dims": (16, 32, 64, 128)},
    "visformer_tiny": {"img_size": 64, "depth": (1, 1, 1)},
    "vit_pwee_patch16_reg1_gap_256": {"img_size": 64, "depth": 2},
    "vit_relpos_small_patch16_224": {"img_size": 64, "depth": 2},
    "vit_small_patch16_18x2_224": {"img_size": 64, "depth": 2},
    "vit_small_patch16_rope_224": {"img_size": 64, "depth": 2},
    "vit_tiny_r_s16_p8_224": {"img_size": 64, "depth": 2},
}


SLOW = {"nextvit_small", "caformer_s18", "nest_tiny"}  # their depths cannot be changed
# Others have tokens in the same places: efficientformerv2 and visformer, mobilevit, maxvit, twins.
SLOW |= {"efficientformer_l1", "fastvit_sa12", "csatv2", "vitamin_small_224", "tiny_vit_5m_224", "pvt_v2_b0"}


@pytest.mark.parametrize(
    ("name", "size", "served", "left"),
    [pytest.param(*family, id=family[0], marks=[pytest.mark.slow] if family[0] in SLOW else []) for family in FAMILIES],
)
@pytest.mark.filterwarnings("ignore")  # timm's own
def test_every_family_takes_what_it_can(name, size, served, left):
    model = timm.create_model(name, **SMALLER.get(name, {"img_size": size} if size else {})).eval()
    pixels = size or model.pretrained_cfg["input_size"][1]
    channels = model.pretrained_cfg["input_size"][0]
    image = torch.randn(1, channels, pixels, pixels)
    with torch.no_grad():
        before = model(image)
        table = vicinal.attach(model, "gmm", img_size=size)
        torch.testing.assert_close(model(image), before, atol=1e-4, rtol=1e-3)
    assert Counter(f"{layer.kind}, {layer.place}" for layer in table.layers) == served
    assert len(table.left_alone) == left
