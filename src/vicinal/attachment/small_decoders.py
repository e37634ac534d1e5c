"""Detectors, segmentation and depth models of transformers with small configurations."""

from typing import Any

from vicinal.attachment.small_encoders import BODY, PATCH, SMALL, SQUARE
from vicinal.attachment.small_model import Config, Options, SmallModel, small

__all__ = ["DECODERS"]

ALL_STAGES = ["stage1", "stage2", "stage3", "stage4"]
BASIC_RESNET: Options = {"embedding_size": 32, "hidden_sizes": [32, 64, 96, 128], "layer_type": "basic"}
SMALL_RESNET: Options = {**BASIC_RESNET, "depths": [1, 1, 1, 1]}
SWIN_STAGES: Options = {"embed_dim": 24, "depths": [2, 2, 2, 2], "num_heads": [1, 2, 4, 8], "out_features": ALL_STAGES}
LAYERS: Options = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}
DETECTOR: Options = {
    "encoder_in_channels": [64, 96, 128],
    "encoder_hidden_dim": 64,
    "d_model": 64,
    "decoder_in_channels": [64, 64, 64],
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "decoder_layers": 2,
    "num_queries": 100,
}
HGNET: Options = {
    "stem_channels": [3, 16, 16],
    "embedding_size": 32,
    "hidden_sizes": [32, 64, 96, 128],
    "depths": [1, 1, 1, 1],
    "stage_in_channels": [16, 32, 64, 96],
    "stage_mid_channels": [16, 16, 32, 32],
    "stage_out_channels": [32, 64, 96, 128],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [2, 2, 2, 2],
    "out_features": ALL_STAGES[1:],
}
RFDETR_BODY: Options = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 112,
    "patch_size": 14,
    "num_windows": 2,
    "out_indices": [2, 4],
}


def detr(size: tuple[int, int], width: int = 64, **resnet: Any) -> SmallModel:
    """Returns DETR with 100 queries over the last map of a ResNet."""
    return small(
        "DetrModel",
        (3, *size),
        use_timm_backbone=False,
        backbone_config=Config("ResNetConfig", {"out_features": ["stage4"], **resnet}),
        backbone=None,
        use_pretrained_backbone=False,
        num_queries=100,
        **LAYERS | {"d_model": width},
    )


def resnet_detector(model: str, stages: list[str]) -> SmallModel:
    """Returns a detector over maps of a ResNet, with as many object queries as the last map has places."""
    backbone = Config("ResNetConfig", {"out_features": stages, **SMALL_RESNET})
    return small(model, (3, 256, 320), backbone_config=backbone, num_queries=80, **LAYERS)


def mask2former(scales: int = 1) -> SmallModel:
    """Returns Mask2Former over a Swin, whose decoder attends to that many scales in turn."""
    return small(
        "Mask2FormerModel",
        (3, 128, 128),
        backbone_config=Config("SwinConfig", {"image_size": 128, "window_size": 4, **SWIN_STAGES}),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=64,
        encoder_layers=1,
        decoder_layers=scales + 1,  # counts the prediction before the first layer
        num_attention_heads=4,
        dim_feedforward=64,
        num_queries=36,
    )


DECODERS: dict[str, SmallModel] = {
    "dpt": small("DPTModel", SQUARE, **PATCH, **BODY),
    "depth_anything": small(
        "DepthAnythingForDepthEstimation",
        (3, 56, 56),
        "DepthAnythingConfig",
        backbone_config=Config(
            "Dinov2Config",
            {
                **SMALL,
                "num_hidden_layers": 4,
                "image_size": 56,
                "patch_size": 14,
                "out_features": ALL_STAGES,
                "reshape_hidden_states": False,
            },
        ),
        neck_hidden_sizes=[8, 16, 32, 32],
        fusion_hidden_size=16,
        reassemble_hidden_size=64,
    ),
    "upernet": small(
        "UperNetForSemanticSegmentation",
        (3, 128, 192),
        "UperNetConfig",
        backbone_config=Config("SwinConfig", {"image_size": 128, "window_size": 7, **SWIN_STAGES}),
        hidden_size=32,
        auxiliary_in_channels=96,
    ),
    "mask2former": mask2former(),
    "maskformer": small(
        "MaskFormerModel",
        (3, 128, 128),
        backbone_config=Config("SwinConfig", {"image_size": 128, "window_size": 4, **SWIN_STAGES}),
        # as many object queries as patches
        decoder_config=Config(
            "DetrConfig", {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "num_queries": 16}
        ),
        fpn_feature_size=32,
        mask_feature_size=32,
    ),
    "eomt": small(
        "EomtForUniversalSegmentation",
        SQUARE,
        "EomtConfig",
        num_queries=10,
        num_blocks=2,
        num_register_tokens=4,
        **PATCH,
        **SMALL | {"num_hidden_layers": 4},
    ),
    "detr": detr((256, 320), **BASIC_RESNET, depths=[2, 2, 2, 2]),
    "conditional_detr": resnet_detector("ConditionalDetrModel", ["stage4"]),
    "deformable_detr": resnet_detector("DeformableDetrModel", ALL_STAGES[1:]),
    "rt_detr": small(
        "RTDetrModel",
        (3, 256, 320),
        backbone_config=Config("RTDetrResNetConfig", {"out_features": ALL_STAGES[1:], **SMALL_RESNET}),
        feat_strides=[8, 16, 32],
        anchor_image_size=None,
        **DETECTOR,
    ),
    "d_fine": small("DFineModel", (3, 256, 320), backbone_config=Config("HGNetV2Config", HGNET), **DETECTOR),
    "yolos": small("YolosModel", (3, 64, 96), image_size=[64, 96], patch_size=16, num_detection_tokens=100, **BODY),
    "rf_detr": small(
        "RfDetrModel",
        (3, 112, 112),
        backbone_config=Config("RfDetrDinov2Config", RFDETR_BODY),
        d_model=64,
        decoder_layers=2,
        num_queries=36,
        decoder_ffn_dim=64,
        group_detr=1,
        decoder_self_attention_heads=4,
        decoder_cross_attention_heads=4,
    ),
}
