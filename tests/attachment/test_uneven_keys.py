"""Keys and queries that are not on evenly spaced lines take a prior: each token is at the mean of what it pools."""

import math

import pytest
import timm
import torch
from timm.layers.halo_attn import HaloAttn
from timm.models.nextvit import EfficientAttention
from torch import nn

import vicinal
from by_hand import assert_same, attention_io, project, raster
from test_pooled_keys import attached, attend_by_hand, images, split
from vicinal.errors import VicinalError
from vicinal.inspection.refusal import RefusalKind


class OneAttention(nn.Module):
    """Patches of 4 x 4 pixels, and an attention with a residual path on their sequence or map."""

    def __init__(self, attention, sequence):
        super().__init__()
        self.embed, self.sequence = nn.Conv2d(3, 16, 4, 4), sequence
        self.attn, self.head = attention, nn.Linear(16, 5)

    def forward(self, x):
        x = self.embed(x)
        if self.sequence:
            tokens = x.flatten(2).mT
            return self.head((tokens + self.attn(tokens)).mean(1))
        out = self.attn(x)
        return self.head(out.flatten(2).mean(-1) + x.flatten(2).mean(-1))


def nextvit(ratio):
    torch.manual_seed(0)
    return OneAttention(EfficientAttention(16, head_dim=8, sr_ratio=ratio), sequence=True)


def means_of_sequence(rows, columns, count):
    """Returns the mean row and column of every `count` patches that follow each other, row by row."""
    patches = raster(rows, columns)
    chunks = [patches[i : i + count] for i in range(0, len(patches) - count + 1, count)]
    return [(sum(row for row, _ in chunk) / count, sum(column for _, column in chunk) / count) for chunk in chunks]


def means_of_bins(rows, columns, count):
    """Returns the centers of the windows that `nn.AdaptiveAvgPool2d(count)` averages."""
    bins = [
        [(i * size // count + math.ceil((i + 1) * size / count) - 1) / 2 for i in range(count)]
        for size in (rows, columns)
    ]
    return [(row, column) for row in bins[0] for column in bins[1]]


# 10 x 7 patches leave two behind the last key; 12 x 8 have keys of whole rows; 7 x 12 and 9 x 9 are other sizes
@pytest.mark.parametrize("size", [(40, 28), (48, 32), (28, 48), (36, 36)])
@pytest.mark.parametrize("ratio", [2, 3])
@torch.no_grad()
def test_nextvit_whose_keys_span_rows(ratio, size):
    model = attached(nextvit(ratio), (40, 28))
    module, rows, columns = model.attn, size[0] // 4, size[1] // 4
    (x,), _, out = attention_io(module, lambda: model(images(size)))
    pooled = module.norm(module.sr(x.mT)).mT
    q, k, v = (split(y, 2) for y in (module.q(x), module.k(pooled), module.v(pooled)))
    weights = attend_by_hand(module.prior, q, k, raster(rows, columns), means_of_sequence(rows, columns, ratio * ratio))
    assert_same(out, project(module, weights, v))


# Maps of 16 and 8, of 13 x 25 and 7 x 13, of 5 x 12 and 3 x 6: uneven windows, and fewer patches than keys
@pytest.mark.parametrize("size", [(64, 64), (52, 100), (20, 48)])
@pytest.mark.parametrize("attached_for", [(64, 64), (52, 100)])
@torch.no_grad()
def test_linear_pvt_whose_keys_are_pooled_to_7_x_7(attached_for, size):
    torch.manual_seed(0)
    model = timm.models.pvt_v2.PyramidVisionTransformerV2(
        depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 4), sr_ratios=(4, 2), mlp_ratios=(2, 2), num_classes=5,
        linear=True,
    )  # fmt: skip
    model = attached(model, attached_for)
    for stage, stride in zip(model.stages, (4, 8), strict=True):
        module, rows, columns = stage.blocks[0].attn, math.ceil(size[0] / stride), math.ceil(size[1] / stride)
        (x, *_), _, out = attention_io(module, lambda: model(images(size)))
        pooled = module.act(module.norm(module.sr(module.pool(x.mT.unflatten(-1, (rows, columns)))).flatten(2).mT))
        q, (k, v) = (
            split(module.q(x), module.num_heads),
            (split(y, module.num_heads) for y in module.kv(pooled).chunk(2, -1)),
        )
        weights = attend_by_hand(module.prior, q, k, raster(rows, columns), means_of_bins(rows, columns, 7))
        assert_same(out, project(module, weights, v))


def every_second(rows, columns):
    return [(2 * i, 2 * j) for i, j in raster(math.ceil(rows / 2), math.ceil(columns / 2))]


@torch.no_grad()
def test_efficientformer_whose_queries_are_every_second_patch():
    torch.manual_seed(0)
    side = 10
    model = timm.models.efficientformer_v2.EfficientFormerV2(
        depths=(1, 1, 1, 1), img_size=16 * side, embed_dims=(8, 16, 16, 24), num_vit=1, num_classes=5,
        mlp_ratios=(2, 2, 2, 2),
    )  # fmt: skip
    model = attached(model, (16 * side, 16 * side))
    module = next(module for module in model.modules() if type(module).__name__ == "Attention2dDownsampleWithPrior")
    (x,), _, out = attention_io(module, lambda: model(images((16 * side, 16 * side))))
    q, k, v = (y.unflatten(1, (module.num_heads, -1)).flatten(3).mT for y in (module.q(x), module.k(x), module.v(x)))
    own = module.attention_biases[:, module.attention_bias_idxs]
    weights = attend_by_hand(module.prior, q, k, every_second(side, side), raster(side, side), own)
    attended = (weights @ v).mT.flatten(1, 2).unflatten(-1, module.resolution2)
    assert_same(out, module.proj(module.act(attended + module.v_local(module.v(x)))))


@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("pool", [False, True])
@torch.no_grad()
def test_levit_whose_queries_are_every_second_patch(conv, pool):
    torch.manual_seed(0)
    model = timm.models.levit.Levit(
        img_size=112, embed_dim=(16, 32), key_dim=8, depth=(1, 1), num_heads=(2, 4), num_classes=5, use_conv=conv,
        down_op="avg_pool" if pool else "subsample",
    )  # fmt: skip
    model = attached(model, (112, 112))
    module = next(module for module in model.modules() if type(module).__name__ == "AttentionDownsampleWithPrior")
    (x,), _, out = attention_io(module, lambda: model(images((112, 112))))
    kv, q = module.kv(x), module.q(x)
    if conv:
        kv, q = kv.flatten(2).mT, q.flatten(2).mT
    q = split(q, module.num_heads)
    k, v = split(kv, module.num_heads).split([module.key_dim, module.val_dim], -1)
    own = module.attention_biases[:, module.attention_bias_idxs]
    weights = attend_by_hand(module.prior, q, k, every_second(7, 7), raster(7, 7), own)
    attended = (weights @ v).transpose(1, 2).flatten(2)
    assert_same(out, module.proj(attended.mT.unflatten(-1, (4, 4)) if conv else attended))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(32, 48), (64, 32)])
@torch.no_grad()
def test_halonet_whose_keys_reach_over_the_edges_of_windows_and_of_the_image(stride, size):
    torch.manual_seed(0)
    block, halo, heads = 4, 1, 2
    attention = HaloAttn(16, stride=stride, num_heads=heads, block_size=block, halo_size=halo)
    model = attached(OneAttention(attention, sequence=False), (32, 48))
    module, down, across = model.attn, size[0] // 16, size[1] // 16
    (x,), _, out = attention_io(module, lambda: model(images(size)))
    queries = [(stride * i, stride * j) for i, j in raster(block // stride, block // stride)]
    keys = [(i - halo, j - halo) for i, j in raster(block + 2 * halo, block + 2 * halo)]
    q, kv = module.q(x), nn.functional.pad(module.kv(x), [halo] * 4)
    expected = torch.zeros_like(out)
    inner, outer = block // stride, block + 2 * halo
    for row, column in raster(down, across):  # windows, most of them at the border of the image
        piece = q[:, :, row * inner : (row + 1) * inner, column * inner : (column + 1) * inner]
        around = kv[:, :, row * block : row * block + outer, column * block : column * block + outer]
        piece, around = (y.flatten(2).unflatten(1, (heads, -1)).mT for y in (piece, around))
        k, v = around.split([module.dim_head_qk, module.dim_head_v], -1)
        own = module.pos_embed(piece.flatten(0, 1).unsqueeze(1)).view(2, heads, len(queries), len(keys))
        weights = attend_by_hand(module.prior, piece, k, queries, keys, own)
        result = (weights @ v).mT.flatten(1, 2).unflatten(-1, (inner, inner))
        expected[:, :, row * inner : (row + 1) * inner, column * inner : (column + 1) * inner] = result
    assert_same(out, expected)


def test_a_pooling_that_changed_since_is_an_error_that_names_the_layer():
    model = nextvit(2).eval()
    vicinal.attach(model, "gab", img_size=(40, 28))
    model.attn.sr = nn.AvgPool1d(5, 5)
    with pytest.raises(VicinalError, match="attn"):
        model(images((48, 32)).float())


def test_training_reaches_the_prior_of_uneven_keys():
    model = nextvit(2).eval()
    vicinal.attach(model, "gmm:init=spread+gab:amplitude=1.5,sigma=2", img_size=(40, 28))
    model(images((40, 28)).float()).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.attn.prior.parameters())


class Reversed(nn.Module):
    def forward(self, x):
        return x.flip(-1)


@pytest.mark.parametrize(
    "pool", [nn.AvgPool1d(4, 4, padding=1), nn.Sequential(nn.AvgPool1d(4, 4), Reversed())], ids=["padded", "reversed"]
)
def test_keys_that_no_pooling_explains_are_refused(pool):
    model = nextvit(2).eval()
    model.attn.sr = pool
    inspection = vicinal.inspect(model, img_size=(40, 28))
    assert inspection.served == []
    assert inspection.refused[0].reason


def test_windows_that_look_almost_even_are_not_taken_for_even_ones():
    # 13 patches to 7 keys: windows at 0.5, 2, 4, ..., 10, 11.5; reversed, so that the pooling does not explain them
    model = timm.models.pvt_v2.PyramidVisionTransformerV2(
        depths=(1,), embed_dims=(16,), num_heads=(2,), sr_ratios=(2,), mlp_ratios=(2,), num_classes=5, linear=True
    ).eval()
    attention = model.stages[0].blocks[0].attn
    attention.pool = nn.Sequential(attention.pool, nn.Flatten(2), Reversed(), nn.Unflatten(-1, (7, 7)))
    inspection = vicinal.inspect(model, img_size=(52, 52))
    assert [site.refusal.kind for site in inspection.refused] == [RefusalKind.POOLED]
