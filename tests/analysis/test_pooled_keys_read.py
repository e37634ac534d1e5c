"""Taps and instruments on models whose keys or queries are pooled, against attention computed by hand in float64."""

import itertools
import math

import numpy as np
import pytest
import timm
import torch
from matplotlib.patches import Rectangle
from timm.models.hiera import Hiera

import vicinal
from vicinal import VicinalError
from vicinal.analysis.attention_maps import attention_maps, attention_statistics, draw_maps, draw_statistics, rollout
from vicinal.analysis.learned_tables import masks_of, tables_of
from vicinal.analysis.receptive_field import receptive_field
from vicinal.inspection import patch_attention
from vicinal.mixing.transmix import TransMix

PRIOR = "gmm:init=spread+gab:amplitude=1.5,sigma=2"
HEIGHT, WIDTH = 64, 96


def ready(model, size=(HEIGHT, WIDTH), prior=PRIOR):
    """Returns a model with a prior and weights of order 1, in float64."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "pos" not in name:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    model = model.double().eval()
    vicinal.attach(model, prior, img_size=size)
    return model.double()


def pvt(ratios=(4, 2), prior=PRIOR):
    """Keys of 4 x 6 in both layers: of 16 x 24 and of 8 x 12 queries."""
    model = timm.models.pvt_v2.PyramidVisionTransformerV2(
        depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 4), sr_ratios=ratios, mlp_ratios=(2, 2), num_classes=5
    )
    return ready(model, prior=prior)


def hiera():
    """Queries pooled in units of 4 x 4 places to 2 x 2, and over the image from 8 x 8 to 4 x 4."""
    model = Hiera(
        img_size=(64, 64), embed_dim=24, num_heads=2, stages=(1, 2, 1), q_pool=2, mask_unit_size=(4, 4),
        mask_unit_attn=(True, False, False), num_classes=5,
    )  # fmt: skip
    return ready(model, (64, 64))


def mvit():
    config = timm.models.mvitv2.MultiScaleVitCfg(
        depths=(1, 2), embed_dim=16, num_heads=2, stride_kv=((4, 4), (2, 2)), stride_q=((1, 1), (2, 2))
    )
    return ready(timm.models.mvitv2.MultiScaleVit(config, img_size=64, num_classes=5), (64, 64))


def images(size=(HEIGHT, WIDTH)):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0)).double()


def raster(rows, columns):
    return list(itertools.product(range(rows), range(columns)))


def pair_values(prior, query, key):
    """Returns scale and bias of one pair, `(heads,)` each, from the parameters of `gmm+gab`."""
    mixture, gaussian = prior.parts
    squared = (key[0] - query[0]) ** 2 + (key[1] - query[1]) ** 2
    scale = mixture.constant + (mixture.alpha * torch.exp(-squared / (2 * (mixture.sigma**2 + 1e-5)))).sum(0)
    bias = gaussian.amplitude**2 * torch.exp(-squared / (2 * (gaussian.sigma**2 + 1e-5)))
    return scale, bias.expand(prior.heads)


def under_prior(prior, logits, queries, keys):
    """Returns attention weights, `(..., heads, queries, keys)`, from logits of that shape and places in patches."""
    logits = logits.clone()
    for (i, query), (j, key) in itertools.product(enumerate(queries), enumerate(keys)):
        scale, bias = pair_values(prior, query, key)
        logits[..., i, j] = scale * logits[..., i, j] + bias
    return logits.softmax(-1)


@torch.no_grad()
def pvt_by_hand(model, layer):
    """Returns weights `(images, heads, queries, keys)` and the places of queries and keys in patches."""
    module, ratio = model.stages[layer].blocks[0].attn, (4, 2)[layer]
    rows, columns = HEIGHT // (4, 8)[layer], WIDTH // (4, 8)[layer]
    given = []
    hook = module.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    model(images())
    hook.remove()
    (x,) = given
    pooled = module.norm(module.sr(x.mT.unflatten(-1, (rows, columns))).flatten(2).mT)
    q, k = (
        y.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        for y in (module.q(x), module.kv(pooled).chunk(2, -1)[0])
    )
    keys = [(ratio * i + (ratio - 1) / 2, ratio * j + (ratio - 1) / 2) for i, j in raster(4, 6)]
    queries = raster(rows, columns)
    return under_prior(module.prior, q @ k.mT * q.shape[-1] ** -0.5, queries, keys), queries, keys


def distances_by_hand(weights, queries, keys):
    """Returns the mean attention distance of each head in patches, and that of uniform attention."""
    lengths = torch.tensor([[math.dist(query, key) for key in keys] for query in queries], dtype=torch.float64)
    return (weights * lengths).sum(-1).mean((0, 2)).tolist(), float(lengths.mean())


@pytest.mark.parametrize("layer", [0, 1])
@torch.no_grad()
def test_what_is_read_of_pooled_keys_is_the_formula(layer):
    model = pvt()
    weights, queries, keys = pvt_by_hand(model, layer)
    inspection = vicinal.inspect(model, img_size=(HEIGHT, WIDTH))
    with vicinal.tap(model, [layer], inspection=inspection) as tap:
        model(images())
    torch.testing.assert_close(tap.last, weights, atol=1e-12, rtol=0)
    with patch_attention(model, layer, inspection=inspection) as attention:
        model(images())
    expected = weights.mean((1, 2)).view(2, 4, 6)
    torch.testing.assert_close(attention.map, expected, atol=1e-12, rtol=0)

    mask = torch.zeros(2, HEIGHT, WIDTH, dtype=torch.bool)
    mask[0, :32, :48], mask[1, 16:, 80:] = True, True
    inside = [sum(expected[0, row, column] for row in range(2) for column in range(3))]
    inside.append(sum(expected[1, row, 5] for row in range(1, 4)))
    torch.testing.assert_close(TransMix()(attention.map, mask), torch.stack(inside), atol=1e-12, rtol=0)

    found = attention_statistics(model, images()).layers[layer]
    distance, uniform = distances_by_hand(weights, queries, keys)
    side = (4, 8)[layer]
    assert found.grid == (HEIGHT // side, WIDTH // side)
    assert found.keys == len(keys)
    assert found.distance_patches == pytest.approx(distance, rel=1e-12)
    assert found.distance_pixels == pytest.approx([side * each for each in distance], rel=1e-12)
    assert found.uniform_patches == pytest.approx(uniform, rel=1e-12)
    entropy = -(weights * weights.log()).sum(-1).mean((0, 2))
    assert found.entropy == pytest.approx(entropy.tolist(), rel=1e-12)
    assert found.relative_entropy == pytest.approx((entropy / math.log(24)).tolist(), rel=1e-12)

    (mean,) = attention_maps(model, images(), layers=[layer], query="mean")
    torch.testing.assert_close(mean.values, weights.mean(2).unflatten(-1, (4, 6)), atol=1e-12, rtol=0)
    (patch,) = attention_maps(model, images(), layers=[layer], query=(5, 7))
    row = queries.index((5, 7))
    torch.testing.assert_close(patch.values, weights[:, :, row].unflatten(-1, (4, 6)), atol=1e-12, rtol=0)


def test_a_patch_of_the_first_layer_is_found_in_the_others_and_marked_where_it_is():
    model = pvt()
    maps = attention_maps(model, images(), query=(5, 15), heads="mean")
    assert [each.query for each in maps] == [(5, 15), (2, 7)]
    assert [each.query_grid for each in maps] == [(16, 24), (8, 12)]
    with pytest.raises(VicinalError, match="16 x 24 patches"):
        attention_maps(model, images(), query=(16, 0))
    figure = draw_maps(maps, np.full((HEIGHT, WIDTH, 3), 0.5))
    marks = {patch.get_bbox().bounds for axes in figure.axes for patch in axes.patches if isinstance(patch, Rectangle)}
    assert (15 * 4, 5 * 4, 4, 4) in marks
    assert (7 * 8, 2 * 8, 8, 8) in marks
    draw_statistics(attention_statistics(model, images()))


@torch.no_grad()
def test_pooled_queries_of_units_and_of_the_image():
    model, pixels = hiera(), images((64, 64))
    with vicinal.tap(model, [1, 3], img_size=64) as tap:
        model(pixels)
    in_units, over_image = tap.weights.values()
    assert in_units.shape == (2, 16, 4, 4, 16)
    # Tokens of a unit: the innermost 2 x 2 first.
    keys = [(a + 2 * c, b + 2 * d) for a, b in raster(2, 2) for c, d in raster(2, 2)]
    queries = [(2 * c + 0.5, 2 * d + 0.5) for c, d in raster(2, 2)]
    inner = [(2 * row + 0.5, 2 * column + 0.5) for row, column in raster(4, 4)]
    found = attention_statistics(model, pixels).layers
    distance, uniform = distances_by_hand(in_units.transpose(1, 2).flatten(2, 3), queries * 16, keys)
    assert found[1].grid == (16, 16)
    assert found[1].distance_patches == pytest.approx(distance, rel=1e-12)
    assert found[1].uniform_patches == pytest.approx(uniform, rel=1e-12)
    layer = vicinal.inspect(model, img_size=64).sites[3]
    columns = [divmod(int(cell), 8) for cell in layer.keys.index[0]]
    rows = [inner[int(cell)] for cell in layer.queries.index[0]]
    distance, uniform = distances_by_hand(over_image, rows, columns)
    assert found[3].distance_patches == pytest.approx(distance, rel=1e-12)
    (unit,) = attention_maps(model, pixels, layers=[1], query=(3, 5))  # the second query down and across of a unit
    outside = torch.ones(16, 16, dtype=torch.bool)
    outside[4:8, 8:12] = False
    assert unit.values[..., outside].abs().max() == 0
    torch.testing.assert_close(unit.values.sum((2, 3)), torch.ones(2, 4).double())
    assert found[3].grid == (8, 8)


def test_a_rollout_does_not_go_through_pooled_keys():
    model = pvt(ratios=(4, 1))
    with pytest.raises(VicinalError, match=r"cannot follow stages.0.*4 x 6 and 16 x 24"):
        rollout(model, images())
    assert rollout(model, images(), layers=[1]).values.shape == (2, 1, 8, 12)


def test_tables_are_those_of_the_prior_and_own_biases_between_pooled_tokens_are_not_looked_into():
    model = mvit()
    assert [(table.role, table.values.shape) for table in tables_of(model, img_size=64)][:2] == [
        ("scale", (2, 31, 31)),
        ("bias", (2, 31, 31)),
    ]
    vicinal.detach(model)
    with pytest.raises(VicinalError, match=r"not read: stages.0.*its keys are not its queries"):
        tables_of(model, img_size=64)


def kernel_by_hand(prior, query, keys, patches):
    """Returns the softmax over keys at logit 1, with each key's weight spread over the patches nearest to it."""
    pairs = [pair_values(prior, query, key) for key in keys]
    weights = torch.stack([scale + bias for scale, bias in pairs], -1).softmax(-1)
    nearest = [min(range(len(keys)), key=lambda j: math.dist(keys[j], patch)) for patch in patches]
    return torch.stack([weights[:, j] / nearest.count(j) for j in nearest], -1).detach().numpy()


def test_kernels_of_masks_are_over_the_pooled_keys():
    model = pvt()
    masks = masks_of(model)
    prior = model.stages[0].blocks[0].attn.prior
    keys = [(4 * i + 1.5, 4 * j + 1.5) for i, j in raster(4, 6)]
    expected = kernel_by_hand(prior, (8, 12), keys, raster(16, 24))
    kernel = masks.layers[0].convolution
    np.testing.assert_allclose(kernel.reshape(2, -1), expected, atol=1e-12)
    np.testing.assert_allclose(kernel.sum((1, 2)), 1)
    assert masks.layers[0].scale.shape == (2, 31, 47)

    levit = timm.models.levit.Levit(
        img_size=128, embed_dim=(16, 32), key_dim=8, depth=(1, 1), num_heads=(2, 4), num_classes=5
    )
    model = ready(levit, (128, 128))
    layer = masks_of(model).layers[1]
    prior = model.stages[1].downsample.attn_downsample.prior
    expected = kernel_by_hand(prior, (4, 4), raster(8, 8), raster(8, 8))  # queries in every second row and column
    np.testing.assert_allclose(layer.convolution.reshape(2, -1), expected, atol=1e-12)


@pytest.mark.parametrize("make", [pvt, mvit, hiera])
def test_receptive_fields_are_those_of_the_layers_output(make):
    model = make()
    pixels = images((64, 64) if make is not pvt else (HEIGHT, WIDTH))
    found = receptive_field(model, pixels, layer=0)
    assert found.grid == (16, 24 if make is pvt else 16)
    assert found.field.sum() == pytest.approx(1)
