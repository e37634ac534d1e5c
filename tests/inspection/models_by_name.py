"""How the models of the truth tables are made: timm's names with options, and small configurations of transformers."""

from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import nn

from vicinal.inspection.model_runner import ModelRunner

# name: height and width of the images, options
TIMM: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "vit_tiny_patch16_224": ((64, 96), {"img_size": (64, 96)}),
    "vit_small_patch16_dinov3": ((64, 96), {"img_size": (64, 96), "depth": 4}),
    "vit_base_patch14_reg4_dinov2": (
        (56, 84),
        {"img_size": (56, 84), "depth": 4, "embed_dim": 192, "num_heads": 3},
    ),
    "deit3_small_patch16_224": ((64, 64), {"img_size": 64, "depth": 4}),
    "swinv2_tiny_window8_256": ((128, 128), {"img_size": 128}),
    "swin_tiny_patch4_window7_224": ((112, 168), {"img_size": (112, 168)}),
    "maxvit_rmlp_pico_rw_256": ((256, 256), {}),
    "maxvit_tiny_tf_224": ((224, 224), {}),
    "coatnet_nano_rw_224": ((224, 224), {}),
    "hiera_tiny_224": ((224, 224), {}),
    "mvitv2_tiny": ((128, 128), {"img_size": 128}),
    "pvt_v2_b0": ((128, 192), {}),
    "twins_svt_small": ((128, 192), {"img_size": (128, 192)}),
    "levit_128s": ((224, 224), {}),
    "efficientformer_l1": ((224, 224), {}),
    "mobilevit_s": ((256, 256), {}),
    "edgenext_x_small": ((256, 256), {}),
    "nest_tiny": ((224, 224), {}),
    "volo_d1_224": ((224, 224), {}),
    "cait_xxs24_224": ((64, 64), {"img_size": 64, "depth": 4}),
    "xcit_nano_12_p16_224": ((64, 96), {"img_size": (64, 96)}),
    "davit_tiny": ((224, 224), {}),
    "gcvit_xxtiny": ((224, 224), {}),
    "beit_base_patch16_224": ((64, 96), {"img_size": (64, 96), "depth": 3, "embed_dim": 192, "num_heads": 3}),
    "eva02_tiny_patch14_224": ((56, 84), {"img_size": (56, 84), "depth": 3}),
    "halonet26t": ((256, 256), {}),
    "vit_dwee_patch16_reg1_gap_256": ((64, 96), {"img_size": (64, 96), "depth": 3}),
    "naflexvit_base_patch16_gap": ((64, 96), {"depth": 3, "embed_dim": 192, "num_heads": 3}),
    "convit_tiny": ((64, 64), {"img_size": 64}),
    "crossvit_tiny_240": ((240, 240), {}),
    "coat_lite_tiny": ((224, 224), {}),
    "pit_ti_distilled_224": ((224, 224), {}),
    "tnt_s_legacy_patch16_224": ((224, 224), {}),
    "visformer_tiny": ((224, 224), {}),
    "efficientvit_m0": ((224, 224), {}),
    "fastvit_sa12": ((256, 256), {}),
    "botnet26t_256": ((256, 256), {}),
    "sequencer2d_s": ((224, 224), {}),
    "vitamin_small_224": ((224, 224), {}),
    "repvit_m0_9": ((224, 224), {}),
    "efficientformerv2_s0": ((224, 224), {}),
    "mobilenetv4_hybrid_medium": ((256, 256), {}),
    "samvit_base_patch16": ((256, 256), {"img_size": 256, "depth": 4, "embed_dim": 192, "num_heads": 3}),
}
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


def timm_runner(name: str, size: tuple[int, int] | None = None, **options: Any) -> ModelRunner:
    """A model of timm with random weights, as in `TIMM` if no size is given."""
    if size is None:
        size, options = TIMM[name]
    return ModelRunner(timm.create_model(name, num_classes=10, **options), (3, *size))


def hugging_face(model: str, shape: tuple[int, ...], config: str | None = None, **options: Any) -> ModelRunner:
    """A model of transformers with random weights; `config` is its configuration's class, by default with its name."""
    import transformers

    made = getattr(transformers, config or model.removesuffix("Model") + "Config")(**options)
    return ModelRunner(getattr(transformers, model)(made), shape)


def config_of(kind: str, **options: Any) -> Any:
    import transformers

    return getattr(transformers, kind)(**options)


def eager_vit() -> ModelRunner:
    runner = hugging_face("ViTModel", (3, 64, 64), image_size=64, patch_size=16, **BODY)
    runner.model.set_attn_implementation("eager")
    return runner


def detr(size: tuple[int, int], width: int, **options: Any) -> ModelRunner:
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


def mask2former() -> ModelRunner:
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
        decoder_layers=4,  # three, one for each scale: the number counts the first prediction too
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
    "detr": lambda: detr((256, 320), 64, depths=[2, 2, 2, 2], **BASIC_RESNET),
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
