"""Models of transformers and torchvision that took no part in the design of the inspection.

Their cells were written from their code before the inspection ran on them.
"""

from collections.abc import Callable
from typing import Any

import torchvision

from cells_by_code import (
    NOWHERE,
    Table,
    both,
    dilated,
    one_window,
    plain_and_shifted,
    raster,
    shifted_windows,
    strided_patches,
    windows,
)
from vicinal.attachment.coverage_transformers import ARCHITECTURES
from vicinal.attachment.small_encoders import BODY, PATCH, SAM3_BODY, SMALL, SQUARE, VITPOSE_BODY
from vicinal.attachment.small_model import small
from vicinal.inspection.model_runner import ModelRunner


def torchvision_swin(size: tuple[int, int], window: int, block: Any = None, merging: Any = None) -> ModelRunner:
    swin = torchvision.models.swin_transformer
    model = swin.SwinTransformer(
        patch_size=[4, 4],
        embed_dim=24,
        depths=[2, 2, 2],
        num_heads=[1, 2, 4],
        window_size=[window, window],
        block=block,
        downsample_layer=merging or swin.PatchMerging,
    )
    return ModelRunner(model, (3, *size))


def torchvision_swin_v2() -> ModelRunner:
    swin = torchvision.models.swin_transformer
    return torchvision_swin((96, 96), 8, swin.SwinTransformerBlockV2, swin.PatchMergingV2)


def torchvision_vit() -> ModelRunner:
    model = torchvision.models.VisionTransformer(64, 16, num_layers=3, num_heads=4, hidden_dim=64, mlp_dim=128)
    return ModelRunner(model, SQUARE)


def torchvision_maxvit() -> ModelRunner:
    model = torchvision.models.MaxVit(
        input_size=(128, 128),
        stem_channels=16,
        partition_size=4,
        block_channels=[16, 32],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.0,
    )
    return ModelRunner(model, (3, 128, 128))


def in_every_frame(frames: int) -> Table:
    """Attention inside frames, which are windows over the same cells, and between frames, in one cell."""
    rows, columns, index = raster(4, 4, 1)
    spatial = rows, columns, index.expand(frames, -1)
    return {r".*layer\.\d\.attention\.": both(spatial), r".*layer\.\d\.temporal_attention\.": NOWHERE}


UNSEEN_OTHERS: dict[str, tuple[Callable[[], ModelRunner], Table]] = {
    "data2vec_vision": (
        ARCHITECTURES["data2vec_vision"].runner,
        {r"": both(raster(4, 4, 1))},
    ),
    "vit_msn": (small("ViTMSNModel", SQUARE, **PATCH, **BODY).runner, {r"": both(raster(4, 4, 1))}),
    # 24, 12 and 6 rows: fitting windows, padded ones, and one that covers the map, which is not shifted.
    "swinv2": (
        ARCHITECTURES["swinv2"].runner,
        shifted_windows(
            [
                plain_and_shifted(24, 24, 8, (4, 4), pad_first=True),
                plain_and_shifted(12, 12, 8, (4, 4), pad_first=True),
                plain_and_shifted(6, 6, 6, (0, 0), pad_first=True),
            ],
            (2, 2, 2),
            r"encoder\.layers\.{stage}\.blocks\.{block}\.",
        ),
    ),
    "swin2sr": (
        ARCHITECTURES["swin2sr"].runner,
        shifted_windows([plain_and_shifted(24, 32, 8, (4, 4))] * 2, (2, 2), r".*stages\.{stage}\.layers\.{block}\."),
    ),
    "glpn": (
        ARCHITECTURES["glpn"].runner,
        {rf".*block\.{s}\.": (raster(32 >> s, 48 >> s), raster(4, 6)) for s in range(4)},
    ),
    # A class token in the last stage only.
    "pvt": (
        ARCHITECTURES["pvt"].runner,
        {rf".*block\.{s}\.": (raster(32 >> s, 32 >> s), raster(4, 4)) for s in range(3)}
        | {r".*block\.3\.": both(raster(4, 4, 1))},
    ),
    "dpt": (ARCHITECTURES["dpt"].runner, {r"": both(raster(4, 4, 1))}),
    "depth_anything": (ARCHITECTURES["depth_anything"].runner, {r"": both(raster(4, 4, 1))}),
    "dinov2_backbone": (
        small("Dinov2Backbone", (3, 56, 84), "Dinov2Config", image_size=56, patch_size=14, **SMALL).runner,
        {r"": both(raster(4, 6, 1))},
    ),
    # Patches of 16 of an image padded by 2.
    "vitpose_backbone": (
        small("VitPoseBackbone", (3, 64, 96), "VitPoseBackboneConfig", **VITPOSE_BODY).runner,
        {r"": both(raster(4, 6))},
    ),
    # Its einsum has operands in a list. Keys are projected with stride 2; the class token is left out of that.
    "cvt": (
        small(
            "CvtModel",
            (3, 64, 96),
            embed_dim=[16, 48, 96],
            depth=[1, 2, 3],
            num_heads=[1, 3, 6],
            drop_path_rate=[0.0] * 3,
        ).runner,
        {
            r".*stages\.0\.": (raster(16, 24), raster(8, 12)),
            r".*stages\.1\.": (raster(8, 12), raster(4, 6)),
            r".*stages\.2\.": (raster(4, 6, 1), raster(2, 3, 1)),
        },
    ),
    # Attention between stages takes every second row and column for queries, and has no residual path.
    "levit": (
        small(
            "LevitModel",
            (3, 160, 160),
            image_size=160,
            hidden_sizes=[32, 64, 96],
            num_attention_heads=[2, 4, 6],
            depths=[2, 2, 2],
        ).runner,
        {
            r".*stages\.0\.layers\.[02]\.": both(raster(10, 10)),
            r".*stages\.0\.layers\.4": (raster(5, 5), raster(10, 10)),
            r".*stages\.1\.layers\.[02]\.": both(raster(5, 5)),
            r".*stages\.1\.layers\.4": (raster(3, 3), raster(5, 5)),
            r".*stages\.2\.": both(raster(3, 3)),
        },
    ),
    "mobilevit": (
        ARCHITECTURES["mobilevit"].runner,
        {
            r".*encoder\.layer\.2\.": both(strided_patches(24, 32)),
            r".*encoder\.layer\.3\.": both(strided_patches(12, 16)),
            r".*encoder\.layer\.4\.": both(strided_patches(6, 8)),
        },
    ),
    # As many object queries as patches.
    "conditional_detr": (
        ARCHITECTURES["conditional_detr"].runner,
        {
            r"encoder\.": both(raster(8, 10)),
            r"decoder\..*self_attn": NOWHERE,
            r"decoder\..*encoder_attn": (None, raster(8, 10)),
        },
    ),
    # Deformable attention has no product of queries and keys.
    "deformable_detr": (
        ARCHITECTURES["deformable_detr"].runner,
        {r"decoder\..*self_attn": NOWHERE},
    ),
    "sam3_vit": (
        small("Sam3ViTModel", (3, 160, 160), **SAM3_BODY).runner,
        {r"layers\.[02]\.": both(windows(10, 10, 4, 4)), r"layers\.1\.": both(raster(10, 10))},
    ),
    "lw_detr_backbone": (
        small(
            "LwDetrViTBackbone",
            (3, 128, 192),
            "LwDetrViTConfig",
            num_windows=4,
            window_block_indices=[0, 2],
            patch_size=16,
            **SMALL,
        ).runner,
        {
            r".*layer\.[02]\.": both(windows(8, 12, 4, 6)),
            r".*layer\.1\.": both(one_window(windows(8, 12, 4, 6))),
        },
    ),
    "timm_wrapper": (
        ARCHITECTURES["timm_wrapper"].runner,
        {r"": both(raster(4, 6, 1))},
    ),
    "aimv2": (
        small("Aimv2VisionModel", SQUARE, **PATCH, **BODY).runner,
        {r".*encoder\.": both(raster(4, 4)), r".*head": (None, raster(4, 4))},
    ),
    "ijepa": (small("IJepaModel", SQUARE, **PATCH, **BODY).runner, {r"": both(raster(4, 4))}),
    "idefics3_vision": (
        small("Idefics3VisionTransformer", (3, 64, 96), "Idefics3VisionConfig", **PATCH, **BODY).runner,
        {r"": both(raster(4, 6))},
    ),
    # All images of a batch are one sequence, so no axis counts images.
    "pixtral_vision": (
        small("PixtralVisionModel", SQUARE, **PATCH, **BODY | {"hidden_size": 96, "num_attention_heads": 6}).runner,
        {r"": NOWHERE},
    ),
    "timesformer": (
        small("TimesformerModel", (2, *SQUARE), num_frames=2, **PATCH, **BODY).runner,
        in_every_frame(2),
    ),
    "torchvision_vit": (torchvision_vit, {r"": both(raster(4, 4, 1))}),
    # Padded first; no shift along an axis that one window covers: 6 of 7 rows, but 8 of 14 columns.
    "torchvision_swin": (
        lambda: torchvision_swin((96, 128), 7),
        shifted_windows([plain_and_shifted(24, 32, 7, (3, 3), pad_first=True)], [2], r"features\.1\.{block}\.")
        | shifted_windows([plain_and_shifted(12, 16, 7, (3, 3), pad_first=True)], [2], r"features\.3\.{block}\.")
        | shifted_windows([plain_and_shifted(6, 8, 7, (0, 3), pad_first=True)], [2], r"features\.5\.{block}\."),
    ),
    "torchvision_swin_v2": (
        torchvision_swin_v2,
        shifted_windows([plain_and_shifted(24, 24, 8, (4, 4), pad_first=True)], [2], r"features\.1\.{block}\.")
        | shifted_windows([plain_and_shifted(12, 12, 8, (4, 4), pad_first=True)], [2], r"features\.3\.{block}\.")
        | shifted_windows([plain_and_shifted(6, 6, 8, (0, 0), pad_first=True)], [2], r"features\.5\.{block}\."),
    ),
    "torchvision_maxvit": (
        torchvision_maxvit,
        {rf"blocks\.{n}\..*window_attention": both(windows(32 >> n, 32 >> n, 4, 4)) for n in range(2)}
        | {rf"blocks\.{n}\..*grid_attention": both(dilated(32 >> n, 32 >> n, 4, 4)) for n in range(2)},
    ),
}
