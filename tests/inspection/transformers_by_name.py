"""Small configurations of transformers' models, and a decoder of torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from models_by_name import config_of, hugging_face
from vicinal.inspection.model_runner import ModelRunner

BODY = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
BASIC_RESNET = {"embedding_size": 32, "hidden_sizes": [32, 64, 96, 128], "layer_type": "basic"}
SWIN_STAGES = {"embed_dim": 24, "depths": [2, 2, 2, 2], "num_heads": [1, 2, 4, 8]}
ALL_STAGES = ["stage1", "stage2", "stage3", "stage4"]
DETECTOR = {
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
RFDETR_BODY = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 112,
    "patch_size": 14,
    "num_windows": 2,
    "out_indices": [2, 4],
}


def eager_vit() -> ModelRunner:
    runner = hugging_face("ViTModel", (3, 64, 64), image_size=64, patch_size=16, **BODY)
    runner.model.set_attn_implementation("eager")
    return runner


def detr(size: tuple[int, int], width: int = 64, **options: Any) -> ModelRunner:
    backbone = config_of("ResNetConfig", out_features=["stage4"], **options)
    return hugging_face(
        "DetrModel",
        (3, *size),
        use_timm_backbone=False,
        backbone_config=backbone,
        backbone=None,
        use_pretrained_backbone=False,
        d_model=width,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_queries=100,
    )


def rt_detr() -> ModelRunner:
    backbone = config_of("RTDetrResNetConfig", depths=[1, 1, 1, 1], out_features=ALL_STAGES[1:], **BASIC_RESNET)
    options = {"feat_strides": [8, 16, 32], "anchor_image_size": None, **DETECTOR}
    return hugging_face("RTDetrModel", (3, 256, 320), backbone_config=backbone, **options)


def d_fine() -> ModelRunner:
    backbone = config_of(
        "HGNetV2Config",
        stem_channels=[3, 16, 16],
        embedding_size=32,
        hidden_sizes=[32, 64, 96, 128],
        depths=[1, 1, 1, 1],
        stage_in_channels=[16, 32, 64, 96],
        stage_mid_channels=[16, 16, 32, 32],
        stage_out_channels=[32, 64, 96, 128],
        stage_num_blocks=[1, 1, 1, 1],
        stage_numb_of_layers=[2, 2, 2, 2],
        out_features=ALL_STAGES[1:],
    )
    return hugging_face("DFineModel", (3, 256, 320), backbone_config=backbone, **DETECTOR)


def rf_detr_backbone(size: tuple[int, int]) -> ModelRunner:
    return hugging_face("RfDetrDinov2Backbone", (3, *size), "RfDetrDinov2Config", **RFDETR_BODY)


def rf_detr() -> ModelRunner:
    options = {"d_model": 64, "decoder_layers": 2, "num_queries": 36, "decoder_ffn_dim": 64, "group_detr": 1}
    heads = {"decoder_self_attention_heads": 4, "decoder_cross_attention_heads": 4}
    backbone = config_of("RfDetrDinov2Config", **RFDETR_BODY)
    return hugging_face("RfDetrModel", (3, 112, 112), backbone_config=backbone, **options, **heads)


def sam2() -> ModelRunner:
    backbone = config_of(
        "Sam2HieraDetConfig",
        hidden_size=32,
        num_attention_heads=1,
        blocks_per_stage=[1, 2, 3, 2],
        embed_dim_per_stage=[32, 64, 128, 256],
        num_attention_heads_per_stage=[1, 2, 4, 8],
        window_size_per_stage=[8, 4, 14, 7],
        global_attention_blocks=[4],
        image_size=[256, 256],
    )
    sizes = {"backbone_channel_list": [256, 128, 64, 32], "backbone_feature_sizes": [[64, 64], [32, 32], [16, 16]]}
    return hugging_face("Sam2VisionModel", (3, 256, 256), backbone_config=backbone, fpn_hidden_size=64, **sizes)


def mask2former(scales: int = 1) -> ModelRunner:
    backbone = config_of("SwinConfig", image_size=128, window_size=4, out_features=ALL_STAGES, **SWIN_STAGES)
    return hugging_face(
        "Mask2FormerModel",
        (3, 128, 128),
        backbone_config=backbone,
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


def upernet() -> ModelRunner:
    backbone = config_of("SwinConfig", image_size=128, window_size=7, out_features=ALL_STAGES, **SWIN_STAGES)
    options = {"backbone_config": backbone, "hidden_size": 32, "auxiliary_in_channels": 96}
    return hugging_face("UperNetForSemanticSegmentation", (3, 128, 192), "UperNetConfig", **options)


class TorchDecoder(nn.Module):
    """torch's encoder and decoder; 36 queries attend to 36 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 64, 16, 16)
        self.queries = nn.Parameter(torch.randn(36, 64))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(64, 4, 128, batch_first=True), 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.encoder(self.embed(x).flatten(2).mT)
        return self.decoder(self.queries.expand(len(x), -1, -1), patches)


SQUARE, PATCH = (3, 64, 64), {"image_size": 64, "patch_size": 16}
WINDOWED = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "patch_size": 16, "window_size": 4}
SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
OTHERS: dict[str, Callable[[], ModelRunner]] = {
    "vit": lambda: hugging_face("ViTModel", SQUARE, **PATCH, **BODY),
    "vit_eager": eager_vit,
    "vit_rectangle": lambda: hugging_face("ViTModel", (3, 64, 256), image_size=(64, 256), patch_size=16, **BODY),
    "dinov2_registers": lambda: hugging_face(
        "Dinov2WithRegistersModel", (3, 56, 84), image_size=56, patch_size=14, num_register_tokens=4, **SMALL
    ),
    "dinov3": lambda: hugging_face("DINOv3ViTModel", (3, 64, 96), num_register_tokens=4, **PATCH, **BODY),
    "clip": lambda: hugging_face("CLIPVisionModel", SQUARE, **PATCH, **BODY),
    "siglip": lambda: hugging_face("SiglipVisionModel", SQUARE, **PATCH, **BODY),
    "yolos": lambda: hugging_face(
        "YolosModel", (3, 64, 96), image_size=[64, 96], patch_size=16, num_detection_tokens=100, **BODY
    ),
    "detr": lambda: detr((256, 320), depths=[2, 2, 2, 2], **BASIC_RESNET),
    "detr_small": lambda: detr((128, 160), depths=[1, 1, 1, 1], **BASIC_RESNET),
    "detr_resnet50": lambda: detr((320, 384), 256),
    "rt_detr": rt_detr,
    "d_fine": d_fine,
    "rf_detr_backbone": lambda: rf_detr_backbone((112, 112)),
    "rf_detr_backbone_rectangle": lambda: rf_detr_backbone((112, 168)),
    "rf_detr": rf_detr,
    "eomt": lambda: hugging_face(
        "EomtForUniversalSegmentation",
        SQUARE,
        "EomtConfig",
        num_queries=10,
        num_blocks=2,
        num_register_tokens=4,
        **PATCH,
        **SMALL | {"num_hidden_layers": 4},
    ),
    "sam2": sam2,
    "segformer": lambda: hugging_face(
        "SegformerForSemanticSegmentation",
        (3, 128, 192),
        "SegformerConfig",
        hidden_sizes=[16, 32, 64, 128],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 4, 8],
        decoder_hidden_size=32,
    ),
    "mask2former": mask2former,
    "mask2former_three_scales": lambda: mask2former(3),
    "upernet": upernet,
    "swin": lambda: hugging_face(
        "SwinModel", (3, 128, 128), image_size=128, embed_dim=24, depths=[2, 2, 2], num_heads=[1, 2, 4], window_size=7
    ),
    "hiera": lambda: hugging_face(
        "HieraModel", (3, 224, 224), embed_dim=24, image_size=[224, 224], depths=[1, 1, 2, 1], num_heads=[1, 2, 4, 8]
    ),
    "videomae": lambda: hugging_face("VideoMAEModel", (4, *SQUARE), num_frames=4, **PATCH, **BODY),
    "vit_mae": lambda: hugging_face("ViTMAEModel", SQUARE, **PATCH, **BODY),
    "owlvit": lambda: hugging_face("OwlViTVisionModel", SQUARE, **PATCH, **BODY),
    "vitdet": lambda: hugging_face(
        "VitDetModel",
        (3, 112, 112),
        image_size=112,
        window_block_indices=[0, 1, 3],
        use_relative_position_embeddings=True,
        **WINDOWED,
    ),
    # The default initializer_range of 1e-10 leaves nothing of the image in the tokens.
    "sam": lambda: hugging_face(
        "SamVisionModel",
        (3, 160, 160),
        image_size=160,
        global_attn_indexes=[2],
        output_channels=32,
        mlp_dim=128,
        initializer_range=0.02,
        **WINDOWED,
    ),
    "torch_decoder": lambda: ModelRunner(TorchDecoder(), (3, 96, 96)),
}
