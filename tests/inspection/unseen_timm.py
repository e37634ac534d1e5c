"""Models of timm that took no part in the design of the inspection, and their cells, written before it ran on them."""

from collections.abc import Callable

from cells_by_code import (
    Table,
    both,
    halo,
    mask_units,
    plain_and_shifted,
    raster,
    shifted_windows,
    strided_patches,
    unrolled,
    windows,
)
from models_by_name import timm_runner
from vicinal.inspection.model_runner import ModelRunner

UNITS_64, UNITS_32, UNITS_16, ALL_16 = mask_units(64, 3), mask_units(32, 2), mask_units(16, 1), unrolled(16, 1)
RECTANGLE = {"size": (64, 96), "img_size": (64, 96)}


def swin_cr_stage(rows: int, columns: int, shift: tuple[int, int]) -> tuple[tuple, tuple]:
    return windows(rows, columns, 4, 6), windows(rows, columns, 4, 6, shift)


UNSEEN_TIMM: dict[str, tuple[Callable[[], ModelRunner], Table]] = {
    "swin_s3_tiny_224": (
        lambda: timm_runner("swin_s3_tiny_224", (224, 224)),
        shifted_windows(
            [
                plain_and_shifted(56, 56, 7, (3, 3)),
                plain_and_shifted(28, 28, 7, (3, 3)),
                plain_and_shifted(14, 14, 14, (0, 0)),
                plain_and_shifted(7, 7, 7, (0, 0)),
            ],
            (2, 2, 6, 2),
            r"layers\.{stage}\.blocks\.{block}\.attn",
        ),
    ),
    # A window is an eighth of the first map: 4 x 6 of 32 x 48.
    "swinv2_cr_small_ns_224": (
        lambda: timm_runner("swinv2_cr_small_ns_224", (128, 192), img_size=(128, 192), depths=(2, 2, 2, 2)),
        shifted_windows(
            [
                swin_cr_stage(32, 48, (2, 3)),
                swin_cr_stage(16, 24, (2, 3)),
                swin_cr_stage(8, 12, (2, 3)),
                swin_cr_stage(4, 6, (0, 0)),
            ],
            (2, 2, 2, 2),
            r"stages\.{stage}\.blocks\.{block}\.attn",
        ),
    ),
    "hiera_small_abswin_256": (
        lambda: timm_runner("hiera_small_abswin_256", (256, 256)),
        {
            r"blocks\.0\.": both(UNITS_64),
            r"blocks\.1\.": (UNITS_32, UNITS_64),
            r"blocks\.2\.": both(UNITS_32),
            r"blocks\.3\.": (UNITS_16, UNITS_32),
            r"blocks\.([4-9]|1[0-3])\.": both(ALL_16),
            r"blocks\.14\.": (raster(8, 8), ALL_16),
            r"blocks\.15\.": both(raster(8, 8)),
        },
    ),
    # Windows of 8, 4, 16 and 8, those of the former stage in a stage's first block, whose queries are pooled by 2.
    "hieradet_small": (
        lambda: timm_runner("hieradet_small", (128, 192)),
        {
            r"blocks\.0\.": both(windows(32, 48, 8, 8)),
            r"blocks\.1\.": (windows(16, 24, 4, 4), windows(32, 48, 8, 8)),
            r"blocks\.2\.": both(windows(16, 24, 4, 4)),
            r"blocks\.3\.": (windows(8, 12, 2, 2), windows(16, 24, 4, 4)),
            r"blocks\.([45689]|1[12])\.": both(windows(8, 12, 16, 16)),
            r"blocks\.(7|10|13)\.": both(raster(8, 12)),
            r"blocks\.14\.": (windows(4, 6, 8, 8), windows(8, 12, 16, 16)),
            r"blocks\.15\.": both(windows(4, 6, 8, 8)),
        },
    ),
    # Lambda layers have no product of queries and keys. Blocks with attention come second, behind the stride.
    "lamhalobotnet50ts_256": (
        lambda: timm_runner("lamhalobotnet50ts_256", (256, 256)),
        {r"stages\.2\.[135]\.": halo(16, 8, 3), r"stages\.3\.1\.": both(raster(8, 8))},
    ),
    # Keys are averages of 16 and of 4 tokens of the sequence, half rows of 32 and quarters of rows of 16.
    "nextvit_small": (
        lambda: timm_runner("nextvit_small", (256, 256)),
        {
            r"stages\.1\.": (raster(32, 32), raster(32, 2)),
            r"stages\.2\.": (raster(16, 16), raster(16, 4)),
            r"stages\.3\.": both(raster(8, 8)),
        },
    ),
    "vit_base_mci_224": (
        lambda: timm_runner("vit_base_mci_224", depth=2, **RECTANGLE),
        {r"blocks\.": both(raster(4, 6, 1))},
    ),
    "flexivit_small": (
        lambda: timm_runner("flexivit_small", (96, 64), img_size=(96, 64), depth=3),
        {r"blocks\.": both(raster(6, 4, 1))},
    ),
    "caformer_s18": (
        lambda: timm_runner("caformer_s18", (192, 256)),
        {r"stages\.2\.": both(raster(12, 16)), r"stages\.3\.": both(raster(6, 8))},
    ),
    # The last map is 5 x 7 and is resized to a multiple of 2, 6 x 8.
    "mobilevit_xs": (
        lambda: timm_runner("mobilevit_xs", (160, 224)),
        {
            r"stages\.2\.": both(strided_patches(20, 28)),
            r"stages\.3\.": both(strided_patches(10, 14)),
            r"stages\.4\.": both(strided_patches(6, 8)),
        },
    ),
    "efficientvit_m1": (
        lambda: timm_runner("efficientvit_m1", (256, 256), img_size=256),
        {
            r"stages\.0\.": both(windows(16, 16, 7, 7)),
            r"stages\.1\.": both(windows(8, 8, 7, 7)),
            r"stages\.2\.": both(raster(4, 4)),
        },
    ),
    "tiny_vit_11m_224": (
        lambda: timm_runner("tiny_vit_11m_224", (160, 192)),
        {
            r"stages\.1\.": both(windows(20, 24, 7, 7)),
            r"stages\.2\.": both(windows(10, 12, 14, 14)),
            r"stages\.3\.": both(windows(5, 6, 7, 7)),
        },
    ),
    # Stride 16, then a convolution with stride 2 inside attention; stride 32.
    "cpubone_nano": (
        lambda: timm_runner("cpubone_nano", (256, 320)),
        {r"stages\.2\.": both(raster(8, 10)), r"stages\.3\.": both(raster(8, 10))},
    ),
    "iformer_t": (
        lambda: timm_runner("iformer_t", (192, 256)),
        {r"stages\.2\.": both(raster(12, 16)), r"stages\.3\.": both(raster(6, 8))},
    ),
    "shvit_s2": (
        lambda: timm_runner("shvit_s2", (224, 288)),
        {r"stages\.1\.": both(raster(7, 9)), r"stages\.2\.": both(raster(4, 5))},
    ),
    # The pooling latent attends to all tokens, the class token included.
    "vit_pe_core_tiny_patch16_384": (
        lambda: timm_runner("vit_pe_core_tiny_patch16_384", depth=3, **RECTANGLE),
        {r"blocks\.": both(raster(4, 6, 1)), r"attn_pool": (None, raster(4, 6, 1))},
    ),
    "fastvit_mci0": (
        lambda: timm_runner("fastvit_mci0", (256, 320)),
        {r"stages\.3\.": both(raster(8, 10))},
    ),
    "swiftformer_xs": (lambda: timm_runner("swiftformer_xs", (224, 224)), {}),  # additive attention
    "vit_small_r26_s32_224": (
        lambda: timm_runner("vit_small_r26_s32_224", (128, 192), img_size=(128, 192), depth=3),
        {r"blocks\.": both(raster(4, 6, 1))},
    ),
    "beit3_base_patch16_224": (
        lambda: timm_runner("beit3_base_patch16_224", depth=3, embed_dim=192, num_heads=3, **RECTANGLE),
        {r"blocks\.": both(raster(4, 6, 1))},
    ),
    # Keys are pooled to 7 x 7 in every stage. The last map has 4 x 6, so pooling windows overlap there, and their
    # centers are unevenly spaced; test_uneven_keys has their offsets.
    "pvt_v2_b2_li": (
        lambda: timm_runner("pvt_v2_b2_li", (128, 192), depths=(1, 1, 1, 1)),
        {rf"stages\.{s}\.": (raster(32 >> s, 48 >> s), raster(7, 7)) for s in range(4)},
    ),
}
