"""Where the tokens of timm's models sit, by regular expression of the site's name; written from the models' code.

Sizes are those of `models_by_name.TIMM`. A model with an empty table computes no softmax of a product.
"""

from cells_by_code import (
    NOWHERE,
    Table,
    both,
    dilated,
    halo,
    mask_units,
    plain_and_shifted,
    raster,
    shifted_windows,
    strided_patches,
    unrolled,
    windows,
)

UNSHIFTED = (0, 0)


def maxvit(rows: int, size: int) -> Table:
    """Four stages, each with attention in blocks and then over a grid of `size x size` cells across the whole map."""
    table = {}
    for stage in range(4):
        side = rows >> stage
        table[rf"stages\.{stage}\..*attn_block"] = both(windows(side, side, size, size))
        table[rf"stages\.{stage}\..*attn_grid"] = both(dilated(side, side, size, size))
    return table


def twins() -> Table:
    """Blocks in turn: windows of 7 x 7, padded, and all queries with keys pooled by a strided convolution."""
    table = {}
    for stage, pooling in enumerate((8, 4, 2, 1)):
        rows, columns = 32 >> stage, 48 >> stage
        pooled = raster(rows // pooling, columns // pooling)
        table[rf"blocks\.{stage}\.\d*[02468]\.attn"] = both(windows(rows, columns, 7, 7))
        table[rf"blocks\.{stage}\.\d*[13579]\.attn"] = (raster(rows, columns), pooled)
    return table


def davit() -> Table:
    """Windows of 7 x 7, then attention between channels, which have no place."""
    spatial = {rf"stages\.{s}\.blocks\.\d+\.0\.": both(windows(56 >> s, 56 >> s, 7, 7)) for s in range(4)}
    return spatial | {r"stages\.\d\.blocks\.\d+\.1\.": NOWHERE}


def gcvit() -> Table:
    """Even blocks attend inside windows; odd blocks with queries pooled from the whole image, the same in all windows.

    `WindowAttentionGlobal` repeats those queries as [image 0, image 1, ..., image 0, ...], beside windows ordered
    [image 0, image 0, ..., image 1, ...]. Where an image has several windows, queries meet keys of other images.
    """
    table = {}
    for stage, (rows, size) in enumerate([(56, 7), (28, 7), (14, 14), (7, 7)]):
        table[rf"stages\.{stage}\.blocks\.\d*[02468]\."] = both(windows(rows, rows, size, size))
        table[rf"stages\.{stage}\.blocks\.\d*[13579]\."] = NOWHERE if rows > size else both(raster(rows, rows))
    return table


BLOCK = r"layers\.{stage}\.blocks\.{block}\.attn"
# Strides 2, 4 and 8 are unrolled at the start; a stage's first block pools its queries inside the former stage's units.
UNITS_56, UNITS_28, UNITS_14, ALL_14 = mask_units(56, 3), mask_units(28, 2), mask_units(14, 1), unrolled(14, 1)

TIMM_TRUTH: dict[str, Table] = {
    "vit_tiny_patch16_224": {r"blocks\.": both(raster(4, 6, 1))},
    "vit_small_patch16_dinov3": {r"blocks\.": both(raster(4, 6, 5))},
    "vit_base_patch14_reg4_dinov2": {r"blocks\.": both(raster(4, 6, 5))},
    "deit3_small_patch16_224": {r"blocks\.": both(raster(4, 4, 1))},
    "beit_base_patch16_224": {r"blocks\.": both(raster(4, 6, 1))},
    "eva02_tiny_patch14_224": {r"blocks\.": both(raster(4, 6, 1))},
    "vit_dwee_patch16_reg1_gap_256": {r"blocks\.": both(raster(4, 6, 1))},
    "naflexvit_base_patch16_gap": {r"blocks\.": both(raster(4, 6, 4))},  # four registers, no class token
    "swinv2_tiny_window8_256": shifted_windows(
        [
            plain_and_shifted(32, 32, 8, (4, 4)),
            plain_and_shifted(16, 16, 8, (4, 4)),
            plain_and_shifted(8, 8, 8, UNSHIFTED),
            plain_and_shifted(4, 4, 4, UNSHIFTED),
        ],
        (2, 2, 6, 2),
        BLOCK,
    ),
    # Maps are padded when patches are merged, but windows are computed from the image: 28 x 42 // 8 = 3 x 5 at the end.
    # There is no shift along an axis that a window covers.
    "swin_tiny_patch4_window7_224": shifted_windows(
        [
            plain_and_shifted(28, 42, 7, (3, 3)),
            plain_and_shifted(14, 21, 7, (3, 3)),
            plain_and_shifted(7, 11, 7, (0, 3)),
            (windows(4, 6, 3, 5), windows(4, 6, 3, 5)),
        ],
        (2, 2, 6, 2),
        BLOCK,
    ),
    "maxvit_rmlp_pico_rw_256": maxvit(64, 8),
    "maxvit_tiny_tf_224": maxvit(56, 7),
    "coatnet_nano_rw_224": {r"stages\.2\.": both(raster(14, 14)), r"stages\.3\.": both(raster(7, 7))},
    "hiera_tiny_224": {
        r"blocks\.0\.": both(UNITS_56),
        r"blocks\.1\.": (UNITS_28, UNITS_56),
        r"blocks\.2\.": both(UNITS_28),
        r"blocks\.3\.": (UNITS_14, UNITS_28),
        r"blocks\.[4-9]\.": both(ALL_14),
        r"blocks\.10\.": (raster(7, 7), ALL_14),
        r"blocks\.11\.": both(raster(7, 7)),
    },
    # Keys are pooled by 4, 2, 1, 1; the first block of a stage pools queries, and keys from the former stage's map.
    "mvitv2_tiny": {
        r"stages\.0\.": (raster(32, 32), raster(8, 8)),
        r"stages\.1\.blocks\.0\.": both(raster(16, 16)),
        r"stages\.1\.blocks\.1\.": (raster(16, 16), raster(8, 8)),
        r"stages\.2\.blocks\.0\.": (raster(8, 8), raster(16, 16)),
        r"stages\.2\.blocks\.[1-9]\.": both(raster(8, 8)),
        r"stages\.3\.blocks\.0\.": (raster(4, 4), raster(8, 8)),
        r"stages\.3\.blocks\.1\.": both(raster(4, 4)),
    },
    "pvt_v2_b0": {rf"stages\.{s}\.": (raster(32 >> s, 48 >> s), raster(4, 6)) for s in range(4)},
    "twins_svt_small": twins(),
    "levit_128s": {
        r"stages\.0\.": both(raster(14, 14)),
        r"stages\.1\.downsample": (raster(7, 7), raster(14, 14)),
        r"stages\.1\.blocks": both(raster(7, 7)),
        r"stages\.2\.downsample": (raster(4, 4), raster(7, 7)),
        r"stages\.2\.blocks": both(raster(4, 4)),
    },
    "efficientformer_l1": {r"stages\.3\.": both(raster(7, 7))},
    "mobilevit_s": {
        r"stages\.2\.": both(strided_patches(32, 32)),
        r"stages\.3\.": both(strided_patches(16, 16)),
        r"stages\.4\.": both(strided_patches(8, 8)),
    },
    "edgenext_x_small": {r"stages\.": NOWHERE},  # between channels
    "nest_tiny": {rf"levels\.{n}\.": both(windows(56 >> n, 56 >> n, 14, 14)) for n in range(3)},
    # Outlook attention has no product of queries and keys; class attention has the class token for its only query.
    "volo_d1_224": {r"network\.": both(raster(14, 14)), r"post_network\.": (None, raster(14, 14, 1))},
    "cait_xxs24_224": {r"blocks\.": both(raster(4, 4)), r"blocks_token_only\.": (None, raster(4, 4, 1))},
    "xcit_nano_12_p16_224": {r"blocks\.": NOWHERE, r"cls_attn_blocks\.": (None, raster(4, 6, 1))},
    "davit_tiny": davit(),
    "gcvit_xxtiny": gcvit(),
    # stages.3.0 has stride 2: `q` is a strided convolution from 16 x 16 to 8 x 8, so blocks of 8 have 4 x 4 queries.
    "halonet26t": {
        r"stages\.2\.": halo(16, 8, 2),
        r"stages\.3\.0\.": halo(16, 8, 2, stride=2),
        r"stages\.3\.1\.": halo(8, 8, 2),
    },
    "convit_tiny": {r"blocks\.[0-9]\.": both(raster(4, 4)), r"blocks\.1[01]\.": both(raster(4, 4, 1))},
    # Branches have patches of 12 of 240 pixels and of 16 of an image scaled to 224. `CrossAttention` has the class
    # token of a branch, `x[:, 0:1]`, for its only query and the patches of the other branch for keys.
    "crossvit_tiny_240": {
        r"blocks\.\d\.blocks\.0\.": both(raster(20, 20, 1)),
        r"blocks\.\d\.blocks\.1\.": both(raster(14, 14, 1)),
        r"blocks\.\d\.fusion\.0\.": (None, raster(14, 14, 1)),
        r"blocks\.\d\.fusion\.1\.": (None, raster(20, 20, 1)),
    },
    "coat_lite_tiny": {},  # its softmax is over the keys alone
    "pit_ti_distilled_224": {
        rf"transformers\.{n}\.": both(raster(rows, rows, 2)) for n, rows in enumerate((27, 14, 7))
    },
    # `PixelEmbed` (legacy) unfolds a map with stride 4, 56 x 56, into 4 x 4 pixels for each of the 14 x 14 patches.
    "tnt_s_legacy_patch16_224": {
        r"blocks\.\d+\.attn_in": both(windows(56, 56, 4, 4)),
        r"blocks\.\d+\.attn_out": both(raster(14, 14, 1)),
    },
    "visformer_tiny": {r"stage2\.": both(raster(14, 14)), r"stage3\.": both(raster(7, 7))},
    # Stride 16, then `(resolution - 1) // 2 + 1`: 14, 7, 4; windows of 7 where the map is larger. Heads take turns.
    "efficientvit_m0": {
        r"stages\.0\.": both(windows(14, 14, 7, 7)),
        r"stages\.1\.": both(raster(7, 7)),
        r"stages\.2\.": both(raster(4, 4)),
    },
    "fastvit_sa12": {r"stages\.3\.": both(raster(8, 8))},
    "botnet26t_256": {  # a stride is an average pooling behind attention
        r"stages\.2\.": both(raster(16, 16)),
        r"stages\.3\.0\.": both(raster(16, 16)),
        r"stages\.3\.1\.": both(raster(8, 8)),
    },
    "sequencer2d_s": {},
    "vitamin_small_224": {r"": both(raster(14, 14))},
    "repvit_m0_9": {},
    # Blocks of stage 2 have `block_stride=2`, so their 14 x 14 map is attended as 7 x 7. The attention that leads to
    # stage 3 has queries of `LocalGlobalQuery`, stride 2, and keys of the map before.
    "efficientformerv2_s0": {
        r"stages\.2\.": both(raster(7, 7)),
        r"stages\.3\.downsample": (raster(7, 7), raster(14, 14)),
        r"stages\.3\.blocks": both(raster(7, 7)),
    },
    # Stride 16 and 32 of 256; `mqa_..._v2` in stage 2 has keys from a convolution with stride 2.
    "mobilenetv4_hybrid_medium": {
        r"blocks\.2\.": (raster(16, 16), raster(8, 8)),
        r"blocks\.3\.": both(raster(8, 8)),
    },
    "samvit_base_patch16": {r"blocks\.2\.": both(raster(16, 16)), r"blocks\.[013]\.": both(windows(16, 16, 14, 14))},
}
