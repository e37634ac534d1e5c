import numpy as np
import pytest
import torch
from PIL import Image

import vicinal
from vicinal.analysis.attention_maps import attention_map, draw_overlay


def inputs_of(module, run):
    """What a module is given while the model runs."""
    given = []
    hook = module.register_forward_pre_hook(lambda _, arguments: given.extend(arguments))
    with torch.no_grad():
        run()
    hook.remove()
    return given


def by_hand(attention, x, prior=None):
    """Attention weights of timm's attention in float64, (images, heads, tokens, tokens)."""
    qkv = (x.double() @ attention.qkv.weight.double().T).unflatten(-1, (3, attention.num_heads, -1))
    q, k, _ = qkv.permute(2, 0, 3, 1, 4)
    logits = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return (logits * prior.double() if prior is not None else logits).softmax(-1).detach()


def test_a_vit_with_a_class_token_shows_what_the_token_sees():
    options = {"img_size": (32, 48), "depth": 2, "global_pool": "token"}
    model = vicinal.create_model("vit-micro", prior="gmm:init=spread", **options).eval()
    images = torch.randn(3, 3, 32, 48)
    last = model.blocks[-1].attn
    (x,) = inputs_of(last, lambda: model(images))
    expected = by_hand(last, x, last.prior()[0]).mean(1)[:, 0, 1:].view(3, 8, 12)
    torch.testing.assert_close(attention_map(model, images), expected.float())


def test_without_a_class_token_it_is_the_mean_over_patches():
    model = vicinal.create_model("vit-micro", img_size=32, depth=2, global_pool="avg").eval()
    images = torch.randn(2, 3, 32, 32)
    (x,) = inputs_of(model.blocks[-1].attn, lambda: model(images))
    expected = by_hand(model.blocks[-1].attn, x).mean((1, 2)).view(2, 8, 8)
    got = attention_map(model, images)
    torch.testing.assert_close(got, expected.float())
    torch.testing.assert_close(got.sum((1, 2)), torch.ones(2))


def test_cait_shows_its_last_class_layer():
    model = vicinal.create_model("cait", prior="gab", img_size=(16, 32), depth=1, depth_token_only=2).eval()
    images = torch.randn(2, 3, 16, 32)
    layer = model.blocks_token_only[-1].attn
    token, patches = (each.double() for each in inputs_of(layer, lambda: model(images)))
    q = (token @ layer.q.weight.double().T).unflatten(-1, (4, 64))
    k = (patches @ layer.kv.weight.double().T)[..., :256].unflatten(-1, (4, 64))
    logits = torch.einsum("nqhd,nkhd->nhqk", q, k) / 8
    mixed = torch.einsum("nhqk,hg->ngqk", logits, layer.mix_logits.double())
    expected = mixed.softmax(-1).mean(1).view(2, 4, 8).detach()
    torch.testing.assert_close(attention_map(model, images), expected.float())


@pytest.mark.parametrize(
    ("name", "options", "grid", "total"),
    [
        ("swin", {"depths": (1, 1, 1)}, (4, 4), 1),
        ("swin", {"depths": (1, 1, 1), "img_size": 64, "patch_size": 2}, (8, 8), 1),  # four windows
        ("pit", {"depths": (1, 1, 1), "global_pool": "avg"}, (4, 4), 1),
        ("pit", {"depths": (1, 1, 1)}, (4, 4), None),  # the rest is the class token's
        ("t2t", {"depth": 1}, (8, 8), 1),
        ("cait_xxs24_224", {"depth": 1, "img_size": 64}, (4, 4), None),  # its class token sees itself too
        ("vit_tiny_patch16_224", {"depth": 1, "img_size": (64, 96), "global_pool": "map"}, (4, 6), None),
    ],
)
def test_other_models_have_a_map_of_the_grid_of_their_last_layer(name, options, grid, total):
    model = vicinal.create_model(name, **{"img_size": 32, **options}).eval()
    size = options.get("img_size", 32)
    images = torch.randn(2, 3, *((size, size) if isinstance(size, int) else size))
    got = attention_map(model, images)
    assert got.shape == (2, *grid)
    assert (got >= 0).all()
    sums = got.sum((1, 2))
    assert (sums <= 1 + 1e-5).all()
    assert (sums > 0.5).all()
    if total:
        torch.testing.assert_close(sums, torch.ones(2))


@pytest.mark.parametrize("channels", [1, 3])
def test_the_map_is_drawn_next_to_the_picture_and_leaves_it_alone(tmp_path, channels):
    picture = np.random.default_rng(0).random((32, 32, channels), dtype=np.float32)
    drawn = []
    for row, column in ((0, 3), (3, 0)):
        attention = torch.full((4, 4), 0.01)
        attention[row, column] = 0.85
        figure = draw_overlay(picture, attention, "a cat of $5, 93.1%")
        figure.savefig(tmp_path / "x.png", dpi=130)
        with Image.open(tmp_path / "x.png") as image:
            drawn.append(np.asarray(image.convert("RGB")).astype(int))
    assert figure.get_suptitle() == "a cat of $5, 93.1%"
    assert [axes.get_title() for axes in figure.axes[:2]] == ["image", "attention, last layer"]
    np.testing.assert_allclose(figure.axes[1].get_images()[1].get_array(), attention / attention.mean(), rtol=1e-6)
    first, second = drawn
    assert first.shape == second.shape
    rows, columns = np.nonzero(np.abs(first - second).sum(2))
    assert columns.min() > 0.4 * first.shape[1]  # the picture itself is on the left
    row, column = (rows.min() + rows.max()) // 2, (columns.min() + columns.max()) // 2
    yellow = first[..., :2].mean(2) - first[..., 2]
    top_left, top_right = yellow[:row, columns.min() : column], yellow[:row, column : columns.max()]
    assert top_right.max() > top_left.max() + 50
