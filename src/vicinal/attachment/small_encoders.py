"""Encoders of transformers with small configurations: plain ViTs, windows and pyramids."""

import torch

from vicinal.attachment.small_model import Config, Options, SmallModel, small

__all__ = ["ENCODERS"]

SQUARE = (3, 64, 64)
PATCH: Options = {"image_size": 64, "patch_size": 16}
SMALL: Options = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
BODY: Options = {**SMALL, "intermediate_size": 128}
WINDOWED: Options = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "patch_size": 16,
    "window_size": 4,
}
PYRAMID: Options = {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 8]}
VITPOSE_BODY: Options = {"image_size": (64, 96), "patch_size": (16, 16), **SMALL}
SAM3_BODY: Options = {
    "image_size": 160,
    "patch_size": 16,
    "window_size": 4,
    "global_attn_indexes": [1],
    "pretrain_image_size": 64,
    **BODY,
}
# The default initializer_range of 1e-10 leaves nothing of the image in the tokens, and so nothing to measure.
SAM_BODY: Options = {
    "image_size": 160,
    "global_attn_indexes": [2],
    "output_channels": 32,
    "mlp_dim": 128,
    "initializer_range": 0.02,
    **WINDOWED,
}
SAM2_BODY: Options = {
    "hidden_size": 32,
    "num_attention_heads": 1,
    "blocks_per_stage": [1, 2, 3, 2],
    "embed_dim_per_stage": [32, 64, 128, 256],
    "num_attention_heads_per_stage": [1, 2, 4, 8],
    "window_size_per_stage": [8, 4, 14, 7],
    "global_attention_blocks": [4],
    "image_size": [256, 256],
}

ENCODERS: dict[str, SmallModel] = {
    "vit": small("ViTModel", SQUARE, **PATCH, **BODY),
    "deit": small("DeiTModel", SQUARE, **PATCH, **BODY),
    "beit": small("BeitModel", SQUARE, use_relative_position_bias=True, **PATCH, **BODY),
    "data2vec_vision": small("Data2VecVisionModel", SQUARE, use_relative_position_bias=True, **PATCH, **BODY),
    "dinov2": small("Dinov2Model", (3, 56, 84), image_size=56, patch_size=14, **SMALL),
    "dinov2_registers": small(
        "Dinov2WithRegistersModel", (3, 56, 84), image_size=56, patch_size=14, num_register_tokens=4, **SMALL
    ),
    "dinov3": small("DINOv3ViTModel", (3, 64, 96), num_register_tokens=4, **PATCH, **BODY),
    "clip": small("CLIPVisionModel", SQUARE, **PATCH, **BODY),
    "siglip": small("SiglipVisionModel", SQUARE, **PATCH, **BODY),
    "siglip2": small("Siglip2VisionModel", (3, 64, 96), patch=16, patch_size=16, num_patches=16, **BODY),
    # Noise that rises from patch to patch keeps all of them in order: random noise would shuffle them.
    "vit_mae": small(
        "ViTMAEModel", SQUARE, inputs={"noise": torch.arange(16.0)[None]}, mask_ratio=0.0, **PATCH, **BODY
    ),
    "timm_wrapper": small(
        "TimmWrapperModel",
        (3, 64, 96),
        architecture="vit_tiny_patch16_224",
        model_args={"img_size": (64, 96), "depth": 3},
    ),
    "swin": small(
        "SwinModel", (3, 128, 128), image_size=128, embed_dim=24, depths=[2, 2, 2], num_heads=[1, 2, 4], window_size=7
    ),
    "swinv2": small(
        "Swinv2Model", (3, 96, 96), image_size=96, embed_dim=24, depths=[2, 2, 2], num_heads=[1, 2, 4], window_size=8
    ),
    "swin2sr": small(
        "Swin2SRModel",
        (3, 24, 32),
        image_size=(24, 32),
        patch_size=1,
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=8,
    ),
    "hiera": small(
        "HieraModel", (3, 224, 224), embed_dim=24, image_size=[224, 224], depths=[1, 1, 2, 1], num_heads=[1, 2, 4, 8]
    ),
    "pvt": small("PvtModel", (3, 128, 128), image_size=128, **PYRAMID),
    "pvt_v2": small("PvtV2Model", (3, 128, 192), image_size=[128, 192], **PYRAMID),
    "segformer": small(
        "SegformerForSemanticSegmentation", (3, 128, 192), "SegformerConfig", decoder_hidden_size=32, **PYRAMID
    ),
    "glpn": small("GLPNModel", (3, 128, 192), **PYRAMID),
    # The default initializer_range of 0.02, of batch norms too, leaves 1e-32 of the image in the first tokens.
    "mobilevit": small(
        "MobileViTModel", (3, 192, 256), hidden_sizes=[48, 64, 80], image_size=256, initializer_range=0.3
    ),
    "vitpose": small(
        "VitPoseForPoseEstimation",
        (3, 64, 96),
        "VitPoseConfig",
        backbone_config=Config("VitPoseBackboneConfig", {**VITPOSE_BODY, "out_indices": [3]}),
    ),
    "vitdet": small(
        "VitDetModel",
        (3, 112, 112),
        image_size=112,
        window_block_indices=[0, 1, 3],
        use_relative_position_embeddings=True,
        **WINDOWED,
    ),
    "sam": small("SamVisionModel", (3, 160, 160), **SAM_BODY),
    "sam2": small(
        "Sam2VisionModel",
        (3, 256, 256),
        backbone_config=Config("Sam2HieraDetConfig", SAM2_BODY),
        fpn_hidden_size=64,
        backbone_channel_list=[256, 128, 64, 32],
        backbone_feature_sizes=[[64, 64], [32, 32], [16, 16]],
    ),
    "sam3": small(
        "Sam3VisionModel",
        (3, 160, 160),
        backbone_config=Config("Sam3ViTConfig", SAM3_BODY),
        fpn_hidden_size=32,
        backbone_feature_sizes=[[40, 40], [20, 20], [10, 10]],
    ),
}
