"""Models with attention of unusual kinds that took no part in the design of the inspection.

Their cells were written from their code before the inspection ran on them.
"""

from collections.abc import Callable

from cells_by_code import NOWHERE, Table, both, dilated, halo, plain_and_shifted, raster, shifted_windows, windows
from models_by_name import timm_runner
from vicinal.attachment.coverage_transformers import ARCHITECTURES
from vicinal.attachment.small_decoders import SMALL_RESNET
from vicinal.attachment.small_encoders import PATCH, SAM_BODY, SMALL, SQUARE
from vicinal.attachment.small_model import Config, small
from vicinal.inspection.model_runner import ModelRunner

RECTANGLE = {"size": (64, 96), "img_size": (64, 96)}
NARROW = {"depth": 3, "embed_dim": 192, "num_heads": 3}


def sam() -> ModelRunner:
    heads = {"num_attention_heads": 4, "iou_head_hidden_dim": 32}
    return small(
        "SamModel",
        (3, 160, 160),
        vision_config=Config("SamVisionConfig", {**SAM_BODY, "num_pos_feats": 16}),
        prompt_encoder_config=Config(
            "SamPromptEncoderConfig", {"hidden_size": 32, "image_size": 160, "patch_size": 16}
        ),
        mask_decoder_config=Config("SamMaskDecoderConfig", {"hidden_size": 32, "mlp_dim": 64, **heads}),
    ).runner()


def dab_detr() -> ModelRunner:
    backbone = Config("ResNetConfig", {"out_features": ["stage4"], **SMALL_RESNET})
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    heads = {"hidden_size": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 80}
    return small("DabDetrModel", (3, 256, 320), backbone_config=backbone, **layers, **heads).runner()


def depth_pro() -> ModelRunner:
    encoder = {"model_type": "dinov2", "image_size": 64, "patch_size": 8, **SMALL | {"num_hidden_layers": 2}}
    return small(
        "DepthProModel",
        (3, 256, 256),
        patch_size=64,
        image_model_config=encoder,
        patch_model_config=dict(encoder),
        fov_model_config=dict(encoder),
        intermediate_hook_ids=[1, 0],
        intermediate_feature_dims=[16, 16],
        scaled_images_feature_dims=[16, 16, 16],
        fusion_hidden_size=16,
        merge_padding_value=1,
    ).runner()


def perceiver() -> ModelRunner:
    options = {"num_latents": 16, "d_latents": 32, "d_model": 512, "num_self_attends_per_block": 2, "image_size": 32}
    heads = {"num_self_attention_heads": 4, "num_cross_attention_heads": 1}
    model, config = "PerceiverForImageClassificationLearned", "PerceiverConfig"
    return small(model, (3, 32, 32), config, **options, **heads).runner()


def shifted(sizes: list[tuple[int, int]], size: int, pattern: str, pad_first: bool) -> Table:
    """Windows that are shifted in every second block, whatever the size of the map."""
    shift = (size // 2, size // 2)
    stages = [plain_and_shifted(rows, columns, size, shift, pad_first) for rows, columns in sizes]
    return shifted_windows(stages, [2] * len(sizes), pattern)


UNSEEN_HARD_CASES: dict[str, tuple[Callable[[], ModelRunner], Table]] = {
    # Tokens are channels-last maps; the softmax's weights meet the values transposed.
    "levit_conv_128s": (
        lambda: timm_runner("levit_conv_128s", (224, 224)),
        {
            r"stages\.0\.": both(raster(14, 14)),
            r"stages\.1\.downsample": (raster(7, 7), raster(14, 14)),
            r"stages\.1\.blocks": both(raster(7, 7)),
            r"stages\.2\.downsample": (raster(4, 4), raster(7, 7)),
            r"stages\.2\.blocks": both(raster(4, 4)),
        },
    ),
    # Non-local blocks: attention with one head behind every bottleneck of a ResNet.
    "resnet26t_non_local": (
        lambda: timm_runner("resnet26t", (64, 96), block_args={"attn_layer": "nl"}, zero_init_last=False),
        {rf"layer{n + 1}\.": both(raster(16 >> n, 24 >> n)) for n in range(3)} | {r"layer4\.": both(raster(2, 3))},
    ),
    "gcresnet33ts": (lambda: timm_runner("gcresnet33ts", (128, 128)), {}),  # a softmax of a convolution
    "mobilevitv2_050": (lambda: timm_runner("mobilevitv2_050", (128, 128)), {}),  # the same
    "efficientvit_b0": (lambda: timm_runner("efficientvit_b0", (128, 128)), {}),  # ReLU, no softmax
    "twins_pcpvt_small": (
        lambda: timm_runner("twins_pcpvt_small", (128, 192), img_size=(128, 192)),
        {rf"blocks\.{s}\.": (raster(32 >> s, 48 >> s), raster(4, 6)) for s in range(4)},
    ),
    "maxxvitv2_nano_rw_256": (  # without attention in blocks
        lambda: timm_runner("maxxvitv2_nano_rw_256", (256, 256)),
        {rf"stages\.{s}\..*attn_grid": both(dilated(64 >> s, 64 >> s, 8, 8)) for s in range(4)},
    ),
    "eca_halonext26ts": (
        lambda: timm_runner("eca_halonext26ts", (256, 256)),
        {
            r"stages\.2\.1\.": halo(16, 8, 2),
            r"stages\.3\.0\.": halo(16, 8, 2, stride=2),
            r"stages\.3\.1\.": halo(8, 8, 2),
        },
    ),
    "vit_base_patch16_siglip_224": (
        lambda: timm_runner("vit_base_patch16_siglip_224", **RECTANGLE, **NARROW),
        {r"blocks\.": both(raster(4, 6)), r"attn_pool": (None, raster(4, 6))},
    ),
    "naflexvit_base_patch16_map": (  # a register, which is left out of the pooling
        lambda: timm_runner("naflexvit_base_patch16_map", (64, 96), **NARROW),
        {r"blocks\.": both(raster(4, 6, 1)), r"attn_pool": (None, raster(4, 6))},
    ),
    # Rolled even where one window covers the map, 3 x 4 at the end; padded after that.
    "swin_always_partition": (
        lambda: timm_runner(
            "swin_tiny_patch4_window7_224", (96, 128), img_size=(96, 128), depths=(2, 2, 2, 2), always_partition=True
        ),
        shifted([(24, 32), (12, 16), (6, 8), (3, 4)], 7, r"layers\.{stage}\.blocks\.{block}\.attn", pad_first=False),
    ),
    # The second branch has 14 x 14 patches of the 224 x 224 pixels in the middle of 240 x 240.
    "crossvit_9_dagger_240_crop": (
        lambda: timm_runner("crossvit_9_dagger_240", (240, 240), crop_scale=True),
        {
            r"blocks\.\d\.blocks\.0\.": both(raster(20, 20, 1)),
            r"blocks\.\d\.blocks\.1\.": both(raster(14, 14, 1)),
            r"blocks\.\d\.fusion\.0\.": (None, raster(14, 14, 1)),
            r"blocks\.\d\.fusion\.1\.": (None, raster(20, 20, 1)),
        },
    ),
    # A decoder between mask tokens and patches, both ways.
    "sam": (
        sam,
        {
            r"vision_encoder\.layers\.2\.": both(raster(10, 10)),
            r"vision_encoder\.layers\.[013]\.": both(windows(10, 10, 4, 4)),
            r"mask_decoder\..*self_attn": NOWHERE,
            r"mask_decoder\..*cross_attn_token_to_image": (None, raster(10, 10)),
            r"mask_decoder\..*cross_attn_image_to_token": (raster(10, 10), None),
            r"mask_decoder\..*final_attn_token_to_image": (None, raster(10, 10)),
        },
    ),
    # `MaskFormerSwinLayer` does not compare its window with the map: the last stage is one window, rolled.
    "maskformer": (
        ARCHITECTURES["maskformer"].runner,
        shifted([(32, 32), (16, 16), (8, 8), (4, 4)], 4, r".*layers\.{stage}\.blocks\.{block}\.", pad_first=True)
        | {r"transformer_module\..*self_attn": NOWHERE, r"transformer_module\..*encoder_attn": (None, raster(4, 4))},
    ),
    "dab_detr": (
        dab_detr,
        {
            r"encoder\.": both(raster(8, 10)),
            r"decoder\..*self_attn": NOWHERE,
            r"decoder\..*cross_attn": (None, raster(8, 10)),
        },
    ),
    # 25, 9 and 1 crops of the image at three scales are windows of one encoder.
    "depth_pro": (
        depth_pro,
        {r".*patch_encoder\.": NOWHERE, r".*image_encoder\.": both(raster(8, 8, 1))},
    ),
    # Learned latents attend to pixels.
    "perceiver": (
        perceiver,
        {
            r"perceiver\.encoder\.cross_attention": (None, raster(32, 32)),
            r"perceiver\.encoder\.self_attends": NOWHERE,
            r"perceiver\.decoder": NOWHERE,
        },
    ),
    "donut_swin": (
        small(
            "DonutSwinModel",
            (3, 160, 96),
            image_size=[160, 96],
            embed_dim=24,
            depths=[2, 2],
            num_heads=[1, 2],
            window_size=5,
        ).runner,
        shifted([(40, 24), (20, 12)], 5, r".*layers\.{stage}\.blocks\.{block}\.", pad_first=True),
    ),
    # Its heads for characters have a softmax of a convolution.
    "mgp_str": (
        small(
            "MgpstrForSceneTextRecognition",
            (3, 32, 128),
            "MgpstrConfig",
            num_character_labels=8,
            num_bpe_labels=8,
            num_wordpiece_labels=8,
            **SMALL,
        ).runner,
        {r".*blocks\.": both(raster(8, 32, 1))},
    ),
    "pixio": (small("PixioModel", SQUARE, **PATCH, **SMALL).runner, {r"": both(raster(4, 4, 8))}),
}
