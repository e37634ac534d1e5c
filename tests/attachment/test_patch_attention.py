import itertools

import pytest
import timm
import torch
from timm.models.cait import Cait
from timm.models.swin_transformer import SwinTransformer
from torch import nn
from torchvision.models import SwinTransformer as TorchvisionSwin
from torchvision.models import VisionTransformer as TorchvisionVit

import vicinal
from small_models import SWIN, images, swin, swin_v2, vit
from test_token_orders import PLACES, Model
from vicinal import VicinalError
from vicinal.attachment import patch_attention
from vicinal.inspection.refusal import RefusalKind


def place_of(number, patch, size, window, shift):
    """Row and column in the image of a window's patch, or None if it is padding."""
    rows, columns = size
    down, right = -(-rows // window), -(-columns // window)
    row = number // right * window + patch // window
    column = number % right * window + patch % window
    if shift[1] == "rolls, then pads":
        return ((row + shift[0]) % rows, (column + shift[0]) % columns) if row < rows and column < columns else None
    row, column = (row + shift[0]) % (down * window), (column + shift[0]) % (right * window)
    return (row, column) if row < rows and column < columns else None


def seen_on_average(weights, size, window, shift):
    """What all patches of the image see of each, one patch after another, of `(n, windows, queries, keys)`."""
    image = torch.zeros(len(weights), *size)
    for number in range(weights.shape[1]):
        places = [place_of(number, patch, size, window, shift) for patch in range(window**2)]
        for query, key in itertools.product(range(window**2), repeat=2):
            if places[query] and places[key]:
                image[(slice(None), *places[key])] += weights[:, number, query, key] / (size[0] * size[1])
    return image


def torchvision_swin(window=4):
    return TorchvisionSwin([2, 2], 12, [2, 2], [2, 4], [window, window], num_classes=5, stochastic_depth_prob=0.0)


ROLLS, PADS = "rolls, then pads", "pads, then rolls"


@pytest.mark.parametrize(
    ("make", "size", "layer", "grid", "shift"),
    [
        (swin, (32, 32), 0, (16, 16), (0, ROLLS)),
        (swin, (32, 32), 1, (16, 16), (2, ROLLS)),
        (swin, (32, 32), -1, (8, 8), (2, ROLLS)),
        (swin_v2, (32, 32), None, (8, 8), (2, ROLLS)),
        (lambda: SwinTransformer(**SWIN | {"img_size": (32, 48)}), (32, 48), None, (8, 12), (2, ROLLS)),
        (lambda: SwinTransformer(**SWIN | {"img_size": (40, 56)}), (40, 56), -2, (10, 14), (0, ROLLS)),
        (lambda: SwinTransformer(**SWIN | {"img_size": (40, 56)}), (40, 56), None, (10, 14), (2, ROLLS)),
        (torchvision_swin, (40, 56), None, (10, 14), (2, PADS)),
        (torchvision_swin, (32, 32), -2, (8, 8), (0, PADS)),
        (lambda: torchvision_swin(7), (32, 32), None, (8, 8), (3, PADS)),  # most of the windows is padding
        (torchvision_swin, (12, 12), None, (3, 3), (0, PADS)),  # a single window, and less than that
        (lambda: torchvision_swin(7), (24, 16), None, (6, 4), (0, PADS)),
    ],
)
@torch.no_grad()
def test_windows_are_put_back_where_they_were_cut_from(make, size, layer, grid, shift):
    model = make().eval()
    x = torch.randn(3, 3, *size)
    with (
        patch_attention(model, layer, img_size=size) as attention,
        vicinal.tap(model, [-1 if layer is None else layer], img_size=size) as all_of_it,
    ):
        model(x)
    weights = all_of_it.last.mean(-3)  # over heads
    weights = weights if weights.dim() == 4 else weights[:, None]
    window = int(weights.shape[-1] ** 0.5)
    torch.testing.assert_close(attention.map, seen_on_average(weights, grid, window, shift))


@torch.no_grad()
def test_the_windows_of_a_dilated_grid_too():
    """MaxViT's last attention takes every second patch."""
    model = vicinal.create_model(
        "maxvit_rmlp_pico_rw_256", img_size=64, embed_dim=(32, 32), depths=(1, 1), stem_width=16
    ).eval()
    with patch_attention(model, img_size=64) as attention, vicinal.tap(model, img_size=64) as all_of_it:
        model(torch.randn(2, 3, 64, 64))
    weights, side = all_of_it.last.mean((2, 3)), attention.map.shape[-1]
    window = int(weights.shape[-1] ** 0.5)
    across = side // window
    assert across > 1
    for row in range(side):
        for column in range(side):
            number = row % across * across + column % across
            patch = row // across * window + column // across
            torch.testing.assert_close(attention.map[:, row, column], weights[:, number, patch] / across**2)


@torch.no_grad()
def test_whose_attention_it_is_is_chosen_by_the_model_and_can_be_overruled():
    def chosen(model, **options):
        """`class` or `mean`, by comparing with all weights."""
        x = torch.randn(2, 3, 32, 32)
        with patch_attention(model.eval(), img_size=32, **options) as attention, vicinal.tap(model, img_size=32) as t:
            model(x)
        weights = t.last.mean(1)
        prefix = weights.shape[-1] - 16
        got = attention.map.flatten(1)
        kinds = {"class": weights[:, 0, prefix:], "mean": weights[:, prefix:, prefix:].mean(1)}
        return [kind for kind, expected in kinds.items() if torch.allclose(got, expected, atol=1e-6)]

    assert chosen(vit()) == ["class"]
    assert chosen(vit(), queries="mean") == ["mean"]
    assert chosen(vit(global_pool="avg")) == ["mean"]
    assert chosen(vit(global_pool="avg"), queries="class") == ["class"]
    assert chosen(vit(global_pool="avg", class_token=False, reg_tokens=2)) == ["mean"]
    assert chosen(TorchvisionVit(32, 8, 2, 4, 24, 48, num_classes=5)) == ["class"]


@torch.no_grad()
@pytest.mark.parametrize(("mean_pooling", "row"), [(True, slice(1, None)), (False, slice(0, 1))])
def test_hugging_faces_mean_pooling_is_seen(mean_pooling, row):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.BeitConfig(**small, image_size=32, patch_size=8, use_mean_pooling=mean_pooling)
    model = transformers.BeitForImageClassification(config).eval()
    with patch_attention(model, img_size=32) as attention, vicinal.tap(model, img_size=32) as t:
        model(torch.randn(2, 3, 32, 32))
    torch.testing.assert_close(attention.map.flatten(1), t.last.mean(1)[:, row, 1:].mean(1))


def test_a_class_layer_is_not_read_where_patches_are_averaged():
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 4}
    assert patch_attention(Cait(**options), img_size=32).layer.name == "blocks_token_only.1.attn"
    assert patch_attention(Cait(**options, global_pool="avg"), img_size=32).layer.name == "blocks.1.attn"


@pytest.mark.parametrize("seed", range(4))
def test_convolutions_before_windows_are_not_taken_for_a_shift(seed):
    """MobileViT's windows take every second patch, of a map that convolutions have smeared by a cell."""
    torch.manual_seed(seed)
    model = timm.create_model("mobilevit_xxs").eval()
    attention = patch_attention(model, 0, img_size=(128, 192))
    rows, columns = 16, 24
    assert attention.layer.place == "4 windows of 8 x 12"
    cells = torch.arange(rows * columns).view(rows // 2, 2, columns // 2, 2).permute(1, 3, 0, 2).reshape(4, -1)
    assert torch.equal(attention.layer.queries.index, cells)


@pytest.mark.parametrize("spec", [None, "gab"])
@pytest.mark.parametrize("order", [PLACES.flip(1), PLACES.view(4, 2, 4, 2).permute(0, 2, 1, 3)])
@torch.no_grad()
def test_tokens_in_another_order_are_put_in_their_places(order, spec):
    order = order.flatten()
    model = Model(order, prefix=1, last_is_class=True).eval()
    if spec:
        vicinal.attach(model, spec, img_size=32)
    with (
        patch_attention(model, queries="mean", img_size=32) as attention,
        vicinal.tap(model, img_size=32) as all_of_it,
    ):
        model(torch.randn(2, 3, 32, 32))
    weights, expected = all_of_it.last.mean(1), torch.zeros(2, 8, 8)
    for query, key in itertools.product(range(64), repeat=2):
        expected[(slice(None), *divmod(int(order[key]), 8))] += weights[:, query, key] / 64
    torch.testing.assert_close(attention.map, expected)


def test_training_goes_on_as_without_and_no_gradient_flows():
    model = vit()
    x, attention = images(model), patch_attention(model)
    model(x).square().sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with attention:
        out = model(x)
    out.square().sum().backward()
    assert all(torch.equal(p.grad, before) for p, before in zip(model.parameters(), plain, strict=True))
    assert not attention.map.requires_grad


def test_channels_have_no_map_so_the_layer_before_is_read():
    model = vicinal.create_model("davit_tiny", img_size=64, embed_dims=(32,), depths=(1,), num_heads=(4,)).eval()
    layers = vicinal.tap(model, None, img_size=64).layers
    assert layers[-1].refusal.kind in (RefusalKind.SPREAD, RefusalKind.IRREGULAR)
    attention = patch_attention(model, img_size=64)
    assert attention.layer.name == layers[-2].name
    with pytest.raises(VicinalError, match=layers[-1].name):
        patch_attention(model, -1, img_size=64)


def test_bad_input_says_what_to_do():
    model = vit()
    with pytest.raises(VicinalError, match=r"\b7\b.*\b3\b"):
        patch_attention(model, 7)
    with pytest.raises(VicinalError, match="Conv2d"):
        patch_attention(nn.Conv2d(3, 3, 1), img_size=8)
    with pytest.raises(VicinalError, match="with"):
        _ = patch_attention(model).map


@torch.no_grad()
def test_images_of_another_shape_with_as_many_tokens_have_a_map_of_their_own():
    model = vit(img_size=32, dynamic_img_size=True).eval()
    attention = patch_attention(model, img_size=32)
    with attention:
        model(torch.randn(1, 3, 16, 64))
    assert attention.map.shape == (1, 2, 8)  # its values: tests/inspection/test_other_image_size.py
    with attention:
        model(torch.randn(1, 3, 32, 32))
    assert attention.map.shape == (1, 4, 4)
    assert not any(module._forward_pre_hooks for module in model.modules())
