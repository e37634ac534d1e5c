"""Keys in other places than queries take a prior: offsets are differences of centers, in patches of the finer side."""

import pytest
import timm
import torch
from timm.models.mvitv2 import cal_rel_pos_type, reshape_post_pool, reshape_pre_pool
from torch.nn import functional as F

import vicinal
from by_hand import assert_same, attention_io, formula_by_hand, project, raster
from small_models import lively
from test_new_layouts import hiera, unrolled

PRIOR = "gmm:init=spread+gab:amplitude=1.5,sigma=2"


def attached(model, size, prior=PRIOR):
    """Returns a model with a prior, in float64 and with weights of order 1."""
    model = lively(model).double()
    table = vicinal.attach(model, prior, img_size=size)
    assert table.left_alone == {}
    return model.double().eval()


def images(size):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0)).double()


def strided(rows, columns, ratio):
    """Returns the centers of kernels of `ratio x ratio` next to each other."""
    return [(ratio * (i + 0.5) - 0.5, ratio * (j + 0.5) - 0.5) for i, j in raster(rows, columns)]


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def attend_by_hand(prior, q, k, queries, keys, extra=0):
    scale, bias = formula_by_hand(prior, queries, keys)
    return (scale * (q @ k.mT * q.shape[-1] ** -0.5) + bias + extra).softmax(-1)


def reduced(module, x, size):
    """Returns tokens behind the strided convolution of PVT v2 and Twins."""
    pooled = module.sr(x.mT.unflatten(-1, size)).flatten(2).mT
    return module.norm(pooled)


@pytest.mark.parametrize("size", [(64, 64), (32, 128), (96, 64)])
@torch.no_grad()
def test_pvt_at_any_size(size):
    torch.manual_seed(0)
    model = timm.models.pvt_v2.PyramidVisionTransformerV2(
        depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 4), sr_ratios=(4, 2), mlp_ratios=(2, 2), num_classes=5
    )
    model = attached(model, (64, 64))
    for stage, (stride, ratio) in zip(model.stages, ((4, 4), (8, 2)), strict=True):
        module, rows, columns = stage.blocks[0].attn, size[0] // stride, size[1] // stride
        (x, *_), _, out = attention_io(module, lambda: model(images(size)))
        kv = module.kv(reduced(module, x, (rows, columns)))
        q, (k, v) = split(module.q(x), module.num_heads), (split(y, module.num_heads) for y in kv.chunk(2, -1))
        keys = strided(rows // ratio, columns // ratio, ratio)
        weights = attend_by_hand(module.prior, q, k, raster(rows, columns), keys)
        assert_same(out, project(module, weights, v))


@torch.no_grad()
def test_twins():
    torch.manual_seed(0)
    model = timm.models.twins.Twins(
        img_size=64, depths=(2, 2), embed_dims=(16, 32), num_heads=(2, 4), sr_ratios=(4, 2), wss=(4, 4),
        mlp_ratios=(2, 2), num_classes=5,
    )  # fmt: skip
    model = attached(model, (64, 64))
    module = model.blocks[0][1].attn
    (x, *_), _, out = attention_io(module, lambda: model(images((64, 64))))
    kv = module.kv(reduced(module, x, (16, 16)))
    q, (k, v) = split(module.q(x), 2), (split(y, 2) for y in kv.chunk(2, -1))
    assert_same(out, project(module, attend_by_hand(module.prior, q, k, raster(16, 16), strided(4, 4, 4)), v))


@torch.no_grad()
def test_segformer():
    transformers = pytest.importorskip("transformers")
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[4, 2], hidden_sizes=[16, 32], num_attention_heads=[2, 4],
        patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2],
    )  # fmt: skip
    model = attached(transformers.SegformerModel(config), (64, 96))
    module = next(module for module in model.modules() if hasattr(module, "prior_site"))
    args, kwargs, out = attention_io(module, lambda: model(images((64, 96))))
    x = args[0] if args else kwargs["hidden_states"]
    kv = module.sequence_reduction(x, 16, 24)
    q, k, v = (split(layer(y), 2) for layer, y in ((module.q_proj, x), (module.k_proj, kv), (module.v_proj, kv)))
    weights = attend_by_hand(module.prior, q, k, raster(16, 24), strided(4, 6, 4))
    assert_same(out[0], project(module, weights, v))


@torch.no_grad()
def test_mvit_whose_padded_kernels_stand_on_every_second_patch():
    torch.manual_seed(0)
    config = timm.models.mvitv2.MultiScaleVitCfg(
        depths=(1, 2), embed_dim=16, num_heads=2, stride_kv=((4, 4), (2, 2)), stride_q=((1, 1), (2, 2))
    )
    model = attached(timm.models.mvitv2.MultiScaleVit(config, img_size=64, num_classes=5), (64, 64))
    for block, side, query_step, key_step in (
        (model.stages[0].blocks[0], 16, 1, 4),
        (model.stages[1].blocks[0], 16, 2, 2),
    ):
        module = block.attn
        (x, *_), _, (out, _) = attention_io(module, lambda: model(images((64, 64))))
        q, k, v = (split(y, module.num_heads) for y in module.qkv(x).chunk(3, -1))
        pooled = []
        for y, pool, norm in ((q, "pool_q", "norm_q"), (k, "pool_k", "norm_k"), (v, "pool_v", "norm_v")):
            pool, norm, shape = getattr(module, pool), getattr(module, norm), (side, side)
            if pool is not None:
                y, token = reshape_pre_pool(y, shape, module.has_cls_token)
                y, shape = reshape_post_pool(pool(y), module.num_heads, token)
            pooled.append((y if norm is None else norm(y), shape))
        (q, q_size), (k, k_size), (v, _) = pooled
        prefix = [None] * module.has_cls_token
        unit = min(query_step, key_step)
        queries, keys = (
            prefix + [(i * step / unit, j * step / unit) for i, j in raster(*shape)]
            for step, shape in ((query_step, q_size), (key_step, k_size))
        )
        own = cal_rel_pos_type(
            torch.zeros(q.shape[0], q.shape[1], q.shape[2], k.shape[2]).double(),
            q, module.has_cls_token, q_size, k_size, module.rel_pos_h, module.rel_pos_w,
        )  # fmt: skip
        weights = attend_by_hand(module.prior, q, k, queries, keys, own)
        attended = weights @ v + (q if module.residual_pooling else 0)
        assert_same(out, module.proj(attended.transpose(1, 2).flatten(2)))


@torch.no_grad()
def test_hiera_whose_queries_are_pooled_in_their_mask_units():
    model = hiera()
    vicinal.attach(model, PRIOR, img_size=64)
    model.double()
    module = model.blocks[1].attn  # from 16 x 16 places in units of 4 x 4 to 2 x 2 queries in a unit
    (x,), _, out = attention_io(module, lambda: model(images((64, 64))))
    qkv = module.qkv(x).reshape(2, -1, 16, 3, module.heads, module.head_dim).permute(3, 0, 4, 2, 1, 5)
    q, k, v = qkv
    q = q.view(2, module.heads, 16, 4, -1, module.head_dim).amax(3)
    keys = [(row % 4, column % 4) for row, column in unrolled(16, 2)[::16]]
    queries = [(2 * row + 0.5, 2 * column + 0.5) for row, column in [(r % 2, c % 2) for r, c in unrolled(8, 1)[::16]]]
    scale, bias = (y[:, None] for y in formula_by_hand(module.prior, queries, keys))
    attended = (scale * (q @ k.mT * q.shape[-1] ** -0.5) + bias).softmax(-1) @ v
    expected = attended.transpose(1, 3).reshape(2, -1, module.dim_out)
    assert_same(out, F.linear(expected, module.proj.weight, module.proj.bias))


def test_every_stage_of_pvt_is_served():
    transformers = pytest.importorskip("transformers")
    config = transformers.PvtV2Config(
        image_size=64, hidden_sizes=[16, 16, 20, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4]
    )
    inspection = vicinal.inspect(transformers.PvtV2ForImageClassification(config))
    assert [site.place for site in inspection.served] == [
        "16 x 16, keys 2 x 2",
        "8 x 8, keys 2 x 2",
        "4 x 4, keys 2 x 2",
        "2 x 2",
    ]
    assert inspection.refused == []


def small_pvt():
    torch.manual_seed(0)
    return timm.models.pvt_v2.PyramidVisionTransformerV2(
        depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 4), sr_ratios=(4, 1), mlp_ratios=(2, 2), num_classes=5
    ).eval()


def test_elm_leaves_pooled_keys_alone():
    table = vicinal.attach(small_pvt(), "elm", img_size=64)
    assert [layer.name for layer in table.layers] == ["stages.1.blocks.0.attn"]
    assert "every pair of patches" in table.left_alone["stages.0.blocks.0.attn"]


@torch.no_grad()
def test_tap_and_map_read_pooled_keys():
    model = small_pvt()
    vicinal.attach(model, PRIOR, img_size=64)
    with vicinal.tap(model, layers=[0], img_size=64) as tap:
        model(images((64, 64)).float())
    assert tap.last.shape == (2, 2, 256, 16)
    torch.testing.assert_close(tap.last.sum(-1), torch.ones(2, 2, 256))
    with vicinal.inspection.patch_attention(model, 0, img_size=64) as attention:
        model(images((64, 64)).float())
    torch.testing.assert_close(attention.map, tap.last.mean((1, 2)).view(2, 4, 4))


def test_training_reaches_the_prior_and_a_saved_state_loads(tmp_path):
    model, other = small_pvt(), small_pvt()
    for each in (model, other):
        vicinal.attach(each, PRIOR, img_size=64)
    model.train()
    model(images((64, 64)).float()).square().sum().backward()
    prior = model.stages[0].blocks[0].attn.prior
    assert all(parameter.grad.abs().sum() > 0 for parameter in prior.parameters())
    other.load_state_dict(model.state_dict())
    compiled = torch.compile(other.eval(), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        x = images((64, 64)).float()
        torch.testing.assert_close(compiled(x), other(x), atol=1e-5, rtol=1e-4)


def test_offsets_made_in_inference_serve_training():
    model = timm.models.pvt_v2.PyramidVisionTransformerV2(
        depths=(1,), embed_dims=(16,), num_heads=(2,), sr_ratios=(4,), mlp_ratios=(2,), num_classes=5
    )
    model, x = attached(model, (64, 64)), images((32, 160))  # a size that no other test has, since offsets are kept
    with torch.inference_mode():
        model(x)
    model(x).sum().backward()
    assert model.stages[0].blocks[0].attn.prior.parts[0].flat_sigma.grad.abs().sum() > 0
