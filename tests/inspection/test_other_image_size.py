"""Attention that is read on images of another size than inspected, against attention computed by hand in float64."""

import pytest
import timm
import torch

import vicinal
from vicinal import VicinalError
from vicinal.inspection import patch_attention

PRIOR = "gab:amplitude=1.5,sigma=2"
SIZES = [(64, 64), (32, 128), (96, 48), (64, 64)]  # the second has as many patches as the first


def lively(model):
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "pos" not in name:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model.double().eval()


def vit(**options):
    options = {"img_size": 64, "dynamic_img_size": True, "patch_size": 8, "depth": 2, "num_classes": 5} | options
    return lively(timm.create_model("vit_tiny_patch16_224", **options))


def images(size):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(sum(size))).double()


def given(module, run):
    """Returns the first argument of a module."""
    seen = []
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run()
    hook.remove()
    return seen[0]


def gaussian(prior, queries, keys):
    """Returns the bias of `gab`, `(heads, queries, keys)`, from its parameters; 0 for a token without a place."""
    bias = torch.zeros(prior.heads, len(queries), len(keys)).double()
    for i, query in enumerate(queries):
        for j, key in enumerate(keys):
            if query is not None and key is not None:
                squared = (key[0] - query[0]) ** 2 + (key[1] - query[1]) ** 2
                bias[:, i, j] = prior.amplitude**2 * torch.exp(-squared / (2 * (prior.sigma**2 + 1e-5)))
    return bias


def raster(rows, columns, step=1, first=0.0):
    return [(first + step * row, first + step * column) for row in range(rows) for column in range(columns)]


def vit_by_hand(model, size, prefix):
    """Returns the attention of the last layer, `(images, heads, tokens, tokens)`."""
    module = model.blocks[-1].attn
    x = given(module, lambda: model(images(size)))
    q, k, _ = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
    places = [None] * prefix + raster(size[0] // 8, size[1] // 8)
    bias = gaussian(module.prior, places, places) if hasattr(module, "prior") else 0
    return (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1)


@pytest.mark.parametrize("queries", ["class", "mean"])
@pytest.mark.parametrize("prior", [True, False])
@torch.no_grad()
def test_a_vit_is_read_at_every_size(prior, queries):
    model = vit()
    if prior:
        vicinal.attach(model, PRIOR, img_size=64)
        model.double()
    reader = patch_attention(model, queries=queries, img_size=64)
    tap = vicinal.tap(model, queries=queries, img_size=64)
    for size in SIZES:
        weights = vit_by_hand(model, size, prefix=1)
        row = weights[:, :, 0] if queries == "class" else weights[:, :, 1:].mean(2)
        with reader:
            model(images(size))
        expected = row.mean(1)[:, 1:].view(2, size[0] // 8, size[1] // 8)
        torch.testing.assert_close(reader.map, expected, atol=1e-12, rtol=0)
        with tap:
            model(images(size))
        torch.testing.assert_close(tap.last, row, atol=1e-12, rtol=0)


@torch.no_grad()
def test_a_verified_inspection_serves_as_well():
    model = vit(reg_tokens=3, class_token=False, global_pool="avg")
    inspection = vicinal.inspect(model, img_size=64)
    reader = patch_attention(model, inspection=inspection)
    for size in SIZES[1:]:
        with reader:
            model(images(size))
        expected = vit_by_hand(model, size, prefix=3)[:, :, 3:, 3:].mean((1, 2))
        torch.testing.assert_close(reader.map, expected.view(2, size[0] // 8, size[1] // 8), atol=1e-12, rtol=0)


@torch.no_grad()
def test_a_size_set_later_is_followed():
    model = vit(dynamic_img_size=False)
    reader = patch_attention(model, queries="mean", img_size=64)
    model.set_input_size((32, 96))
    with reader:
        model(images((32, 96)))
    expected = vit_by_hand(model, (32, 96), prefix=1)[:, :, 1:, 1:].mean((1, 2)).view(2, 4, 12)
    torch.testing.assert_close(reader.map, expected, atol=1e-12, rtol=0)


@torch.no_grad()
def test_pooled_keys_are_read_at_every_size():
    model = lively(
        timm.models.pvt_v2.PyramidVisionTransformerV2(
            depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 4), sr_ratios=(4, 2), mlp_ratios=(2, 2), num_classes=5
        )
    )
    vicinal.attach(model, PRIOR, img_size=64)
    model.double()
    reader = patch_attention(model, img_size=64)
    module = model.stages[1].blocks[0].attn
    for size in [(64, 64), (32, 128), (96, 64)]:
        rows, columns = size[0] // 8, size[1] // 8
        x = given(module, lambda size=size: model(images(size)))
        pooled = module.norm(module.sr(x.mT.unflatten(-1, (rows, columns))).flatten(2).mT)
        both = module.q(x), module.kv(pooled).chunk(2, -1)[0]
        q, k = (y.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for y in both)
        bias = gaussian(module.prior, raster(rows, columns), raster(rows // 2, columns // 2, 2, 0.5))
        weights = (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1)
        with reader:
            model(images(size))
        expected = weights.mean((1, 2)).view(2, rows // 2, columns // 2)
        torch.testing.assert_close(reader.map, expected, atol=1e-12, rtol=0)


@torch.no_grad()
def test_windows_of_another_size_of_image_raise():
    model = timm.models.swin_transformer.SwinTransformer(
        img_size=64, strict_img_size=False, depths=(1, 1), embed_dim=24, num_heads=(2, 4), window_size=4, num_classes=5
    )
    model = lively(model)
    reader = patch_attention(model, 0, img_size=64)
    tap = vicinal.tap(model, [0], img_size=64)
    for each in (reader, tap):
        with pytest.raises(VicinalError, match=r"inspected on images of 64 x 64, got 32 x 96.*layers.0"), each:
            model(images((32, 96)))
        with each:
            model(images((64, 64)))
    assert reader.map.shape == (2, 16, 16)
    assert tap.last.shape == (2, 16, 2, 16, 16)


@torch.no_grad()
def test_a_query_that_reads_the_image_raises():
    model = lively(timm.create_model("cait_xxs24_224", img_size=64, depth=1, num_classes=5))
    reader = patch_attention(model, img_size=64)
    model.patch_embed.strict_img_size = False
    with reader:
        model(images((32, 128)))  # as many patches
    with pytest.raises(VicinalError, match=r"inspected on images of 64 x 64, got 32 x 128"):
        _ = reader.map
