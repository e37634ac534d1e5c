"""Where the tokens of transformers' models, and of a model of torch, sit; written from the models' code.

Sizes are those of `transformers_by_name.OTHERS`.
"""

import torch
from torch.nn import functional as F

from cells_by_code import (
    NOWHERE,
    Cells,
    Table,
    both,
    mask_units,
    one_window,
    plain_and_shifted,
    raster,
    shifted_windows,
    unrolled,
    windows,
)

UNITS_56, UNITS_28, UNITS_14, ALL_14 = mask_units(56, 3), mask_units(28, 2), mask_units(14, 1), unrolled(14, 1)
BLOCK = r".*layers\.{stage}\.blocks\.{block}\."


def swin(sizes: list[tuple[int, int]], size: int) -> Table:
    """A Swin whose maps are all larger than its windows, or a backbone: `SwinBackbone` passes `always_partition=True`.

    Windows and shifts then stay as configured even where one window covers the map. Maps are padded before the roll.
    """
    shift = (size // 2, size // 2)
    stages = [plain_and_shifted(rows, columns, size, shift, pad_first=True) for rows, columns in sizes]
    return shifted_windows(stages, [2] * len(sizes), BLOCK)


def detr(rows: int, columns: int) -> Table:
    """Object queries have no place."""
    return {
        r"encoder\.": both(raster(rows, columns)),
        r"decoder\..*self_attn": NOWHERE,
        r"decoder\..*encoder_attn": (None, raster(rows, columns)),
    }


def mask2former(scales: list[int]) -> Table:
    """A Swin whose last stage is a single window, rolled in every second block; layers attend to one scale each."""
    return (
        swin([(32, 32), (16, 16), (8, 8), (4, 4)], 4)
        | {r"transformer_module\..*self_attn": NOWHERE}
        | {
            rf"transformer_module\..*layers\.{layer}\.cross_attn": (None, raster(rows, rows))
            for layer, rows in enumerate(scales)
        }
    )


def rf_detr(windowed: Cells) -> Table:
    """2 x 2 windows, each with a class token; a layer without windows has them all in one sequence."""
    return {
        r".*encoder\.layer\.2\.": both(one_window(windowed)),
        r".*encoder\.layer\.[013]\.": both(windowed),
    }


def rf_detr_rectangle() -> Cells:
    """`window_partition` views 8 x 12 patches as (2, 12 / 2, 2, 8 / 2), width first: windows are not rectangles."""
    index = torch.arange(96).view(2, 6, 2, 4).transpose(1, 2).reshape(4, 24)
    return 8, 12, F.pad(index, (1, 0), value=-1)


OTHERS_TRUTH: dict[str, Table] = {
    "vit": {r"": both(raster(4, 4, 1))},
    "vit_eager": {r"": both(raster(4, 4, 1))},
    "vit_rectangle": {r"": both(raster(4, 16, 1))},
    "dinov2_registers": {r"": both(raster(4, 6, 5))},
    "dinov3": {r"": both(raster(4, 6, 5))},
    "clip": {r"": both(raster(4, 4, 1))},
    "siglip": {r".*encoder\.": both(raster(4, 4)), r".*head\.": (None, raster(4, 4))},
    "yolos": {r"": both(raster(4, 6, 1, 100))},
    "detr": detr(8, 10),
    "detr_small": detr(4, 5),
    "detr_resnet50": detr(10, 12),
    # The decoder's self-attention has the highest-scoring tokens of three scales; cross-attention is deformable.
    "rt_detr": {r"encoder\.": both(raster(8, 10)), r"decoder\..*self_attn": NOWHERE},
    "d_fine": {r"encoder\.": both(raster(8, 10)), r"decoder\..*self_attn": NOWHERE},
    "rf_detr_backbone": rf_detr(windows(8, 8, 4, 4, prefix=1)),
    "rf_detr_backbone_rectangle": rf_detr(rf_detr_rectangle()),
    "rf_detr": rf_detr(windows(8, 8, 4, 4, prefix=1)) | {r"decoder\..*self_attn": NOWHERE},
    # Ten queries come in front of the class token and four registers for the last two layers.
    "eomt": {r"layers\.[01]\.": both(raster(4, 4, 5)), r"layers\.[23]\.": both(raster(4, 4, 15))},
    # The first block of a stage pools queries inside the former stage's windows, so these halve with the map.
    "sam2": {
        r".*blocks\.0\.": both(windows(64, 64, 8, 8)),
        r".*blocks\.1\.": (windows(32, 32, 4, 4), windows(64, 64, 8, 8)),
        r".*blocks\.2\.": both(windows(32, 32, 4, 4)),
        r".*blocks\.3\.": (windows(16, 16, 2, 2), windows(32, 32, 4, 4)),
        r".*blocks\.4\.": both(raster(16, 16)),
        r".*blocks\.5\.": both(windows(16, 16, 14, 14)),
        r".*blocks\.6\.": (windows(8, 8, 7, 7), windows(16, 16, 14, 14)),
        r".*blocks\.7\.": both(windows(8, 8, 7, 7)),
    },
    "segformer": {rf".*stages\.{s}\.": (raster(32 >> s, 48 >> s), raster(4, 6)) for s in range(4)},
    "mask2former": mask2former([4]),
    "mask2former_three_scales": mask2former([4, 8, 16]),
    # The last stage is 4 x 6, padded to one window of 7 x 7; `always_partition` keeps its shift of 3.
    "upernet": swin([(32, 48), (16, 24), (8, 12), (4, 6)], 7),
    "swin": swin([(32, 32), (16, 16), (8, 8)], 7),
    "hiera": {
        r".*stages\.0\.": both(UNITS_56),
        r".*stages\.1\.": (UNITS_28, UNITS_56),
        r".*stages\.2\.layers\.0\.": (UNITS_14, UNITS_28),
        r".*stages\.2\.layers\.1\.": both(ALL_14),
        r".*stages\.3\.": (raster(7, 7), ALL_14),
    },
    "videomae": {r"": NOWHERE},  # two tokens in each cell: 4 frames are 2 tubelets
    # `random_masking` keeps a quarter of the patches, chosen by random numbers for each image of the batch.
    "vit_mae": {r"": NOWHERE},
    "owlvit": {r"": both(raster(4, 4, 1))},
    "vitdet": {r".*layer\.2\.": both(raster(7, 7)), r".*layer\.[013]\.": both(windows(7, 7, 4, 4))},
    "sam": {r".*layers\.2\.": both(raster(10, 10)), r".*layers\.[013]\.": both(windows(10, 10, 4, 4))},
    "torch_decoder": {
        r"encoder\.": both(raster(6, 6)),
        r"decoder\..*self_attn": NOWHERE,
        r"decoder\..*multihead_attn": (None, raster(6, 6)),
    },
}
