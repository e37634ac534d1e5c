"""Small models of Hugging Face transformers, with weights of order 1; a test that asks for one needs transformers."""

import pytest

from small_models import lively

SMALL = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
DETECTOR = {
    "encoder_hidden_dim": 64,
    "encoder_in_channels": [64, 96, 128],
    "decoder_in_channels": [64, 64, 64],
    "d_model": 64,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "decoder_layers": 2,
    "num_queries": 100,
}


def library():
    return pytest.importorskip("transformers", reason="transformers is not installed")


def image_classifier(name, **options):
    """Returns `{name}ForImageClassification`, for images of 32 x 32."""
    transformers = library()
    config = getattr(transformers, f"{name}Config")(**(SWIN if name.startswith("Swin") else SMALL) | options)
    return lively(getattr(transformers, f"{name}ForImageClassification")(config))


def yolos():
    """A class token, 4 x 6 patches of images of 32 x 48, and 7 detection tokens."""
    transformers = library()
    config = transformers.YolosConfig(**SMALL | {"image_size": [32, 48]}, num_detection_tokens=7)
    return lively(transformers.YolosModel(config))


def rf_detr_backbone():
    """8 x 8 patches in 2 x 2 windows, each with a class token; layer 2 of 4 attends to all windows."""
    transformers = library()
    config = transformers.RfDetrDinov2Config(
        **SMALL | {"num_hidden_layers": 4, "image_size": 64}, num_windows=2, out_indices=[2, 4]
    )
    return lively(transformers.RfDetrDinov2Backbone(config))


def eomt():
    """4 x 4 patches behind a class token and 4 registers, with 10 queries in front of these in the last 2 layers."""
    transformers = library()
    config = transformers.EomtConfig(
        **SMALL | {"num_hidden_layers": 4}, num_queries=10, num_blocks=2, num_register_tokens=4
    )
    return lively(transformers.EomtForUniversalSegmentation(config))


def detr():
    """A ResNet, an encoder over its 8 x 10 places for images of 256 x 320, and a decoder of 100 queries."""
    transformers = library()
    backbone = transformers.ResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64, 96, 128],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage4"],
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        backbone_config=backbone,
        backbone=None,
        use_pretrained_backbone=False,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_queries=100,
    )
    return transformers.DetrModel(config).eval()


def rt_detr():
    """A ResNet, an encoder layer over its 8 x 10 places for images of 256 x 320, and queries chosen by content."""
    transformers = library()
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64, 96, 128],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    config = transformers.RTDetrConfig(
        backbone_config=backbone, feat_strides=[8, 16, 32], anchor_image_size=None, **DETECTOR
    )
    return transformers.RTDetrModel(config).eval()


def d_fine():
    """As `rt_detr`, with another backbone."""
    transformers = library()
    backbone = transformers.HGNetV2Config(
        stem_channels=[3, 16, 16],
        embedding_size=32,
        hidden_sizes=[32, 64, 96, 128],
        depths=[1, 1, 1, 1],
        stage_in_channels=[16, 32, 64, 96],
        stage_mid_channels=[16, 16, 32, 32],
        stage_out_channels=[32, 64, 96, 128],
        stage_num_blocks=[1, 1, 1, 1],
        stage_numb_of_layers=[2, 2, 2, 2],
        out_features=["stage2", "stage3", "stage4"],
    )
    return transformers.DFineModel(transformers.DFineConfig(backbone_config=backbone, **DETECTOR)).eval()


def sam2():
    """A hierarchy of windows, one global layer, and a softmax in its necks that nobody uses; images of 256 x 256."""
    transformers = library()
    backbone = transformers.Sam2HieraDetConfig(
        hidden_size=32,
        num_attention_heads=1,
        blocks_per_stage=[1, 2, 3, 2],
        embed_dim_per_stage=[32, 64, 128, 256],
        num_attention_heads_per_stage=[1, 2, 4, 8],
        window_size_per_stage=[8, 4, 14, 7],
        global_attention_blocks=[4],
        image_size=[256, 256],
    )
    config = transformers.Sam2VisionConfig(
        backbone_config=backbone,
        backbone_channel_list=[256, 128, 64, 32],
        backbone_feature_sizes=[[64, 64], [32, 32], [16, 16]],
        fpn_hidden_size=64,
    )
    return transformers.Sam2VisionModel(config).eval()
