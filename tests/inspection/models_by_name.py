"""How models are made by their names in timm, with random weights."""

from typing import Any

import timm

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


def timm_runner(name: str, size: tuple[int, int] | None = None, **options: Any) -> ModelRunner:
    """A model of timm with random weights, as in `TIMM` if no size is given."""
    if size is None:
        size, options = TIMM[name]
    return ModelRunner(timm.create_model(name, num_classes=10, **options), (3, *size))
