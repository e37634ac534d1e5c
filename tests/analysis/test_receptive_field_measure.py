import math

import numpy as np
import pytest
import torch
from timm.models.eva import Eva
from timm.models.levit import Levit
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from torch import nn

import vicinal
from lively_models import lively, vit
from vicinal import VicinalError
from vicinal.analysis.receptive_field import receptive_field

SWIN = {"img_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2)}


def tokens(model, images):
    x = model._pos_embed(model.patch_embed(images))
    return model.blocks(model.norm_pre(x))


def by_differences(value, images, mode):
    """The field from every pixel of every image moved up and down: value gives a number an image."""
    step, total = 1e-5, np.zeros(images.shape[2:])
    for image in images:
        moves = step * torch.eye(image.numel(), dtype=image.dtype).view(-1, *image.shape)
        with torch.no_grad():
            slopes = (value(image + moves) - value(image - moves)) / (2 * step)
        slope = slopes.view(image.shape).mean(0).numpy()
        total += np.maximum(slope, 0) if mode == "clip" else np.abs(slope)
    return total / total.sum()


@pytest.mark.parametrize("mode", ["clip", "abs"])
@pytest.mark.parametrize(
    ("options", "token"),
    [
        ({}, 1 + 3),
        ({"class_token": False, "global_pool": "avg"}, 3),
        ({"reg_tokens": 4}, 5 + 3),
        ({"img_size": (8, 12)}, 1 + 4),
    ],
    ids=["class token", "no class token", "registers", "rectangle"],
)
def test_it_is_the_mean_slope_of_every_pixel_of_every_image(options, token, mode):
    model = vit(**options).double()
    images = torch.randn(3, 3, *model.patch_embed.img_size, dtype=torch.float64)
    expected = by_differences(lambda x: tokens(model, x)[:, token].mean(1), images, mode)
    found = receptive_field(model, images, mode=mode)
    np.testing.assert_allclose(found.field, expected, atol=1e-8)
    assert (found.layer, found.images, found.mode) == ("blocks.1", 3, mode)


def clipped(value, images):
    """The field from the gradient of a number an image, all images at once."""
    (gradient,) = torch.autograd.grad(value.sum(), images)
    expected = gradient.mean(1).clamp(min=0).sum(0)
    return expected / expected.sum()


def test_swin_is_read_from_its_feature_map():
    model = lively(SwinTransformer(**SWIN, num_classes=3)).double()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64, requires_grad=True)
    expected = clipped(model.layers(model.patch_embed(images))[:, 2, 2].mean(1), images)
    found = receptive_field(model, images)
    np.testing.assert_allclose(found.field, expected, atol=1e-12)
    assert (found.layer, found.grid, found.at, found.stem) == ("layers.1.blocks.1", (4, 4), (2, 2), (8, 8))


def test_hugging_face_models_are_read_from_their_hidden_states():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    small = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    vit = transformers.ViTForImageClassification(transformers.ViTConfig(**small, image_size=8, patch_size=4))
    settings = {key: value for key, value in SWIN.items() if key != "img_size"} | {"image_size": 16}
    swin = transformers.SwinForImageClassification(transformers.SwinConfig(**settings))
    # hidden states are those of embeddings, then of ViT's first block, or of Swin's first stage with its merging
    for model, layer, size, token in ((vit, 0, 8, 1 + 3), (swin, "swin.encoder.layers.0", 16, 2 * 4 + 2)):
        lively(model).double()
        images = torch.randn(2, 3, size, size, dtype=torch.float64, requires_grad=True)
        hidden = model(images, output_hidden_states=True).hidden_states[1]
        found = receptive_field(model, images, layer=layer)
        np.testing.assert_allclose(found.field, clipped(hidden[:, token].mean(1), images), atol=1e-12)
    assert receptive_field(swin, images).layer == "swin.encoder.layers.1.blocks.1"


def test_torchvision_models_are_read_too():
    from torchvision.models import VisionTransformer as TorchvisionVit

    model = TorchvisionVit(image_size=8, patch_size=4, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16)
    model = lively(model).double()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    x = torch.cat([model.class_token.expand(2, -1, -1), model._process_input(images)], 1) + model.encoder.pos_embedding
    found = receptive_field(model, images)
    np.testing.assert_allclose(found.field, clipped(model.encoder.layers(x)[:, 1 + 3].mean(1), images), atol=1e-12)
    assert found.layer == "encoder.layers.encoder_layer_1"


@pytest.mark.parametrize("depth", [1, 3])
def test_a_stack_of_convolutions_has_its_theoretical_field(depth):
    model = nn.Sequential(*(nn.Conv2d(1, 1, 3, padding=1, bias=False) for _ in range(depth)))
    for layer in model:
        nn.init.ones_(layer.weight)
    found = receptive_field(model, torch.randn(2, 1, 15, 21))
    row = np.array([1.0])
    for _ in range(depth):
        row = np.convolve(row, [1, 1, 1])
    expected = np.zeros((15, 21))
    expected[7 - depth : 8 + depth, 10 - depth : 11 + depth] = np.outer(row, row) / row.sum() ** 2
    np.testing.assert_allclose(found.field, expected, atol=1e-7)
    assert (found.at, found.patch, found.square(1)) == ((7, 10), (1, 1), 2 * depth + 1)
    if depth > 1:
        assert found.fit.sigma_x == pytest.approx(math.sqrt(depth * 2 / 3), rel=0.1)


def test_a_prior_that_sees_neighbours_only_has_a_field_within_its_depth():
    narrow = [{"prior": "conv", "options": {"sigma": [0.1] * 9}}]
    settings = {"img_size": 28, "embed_dim": 36, "num_heads": 9, "global_pool": "avg", "patch_size": 4}
    for depth in (1, 2):
        model = lively(vicinal.create_model("vit-micro", prior=narrow, depth=depth, **settings))
        by_patch = receptive_field(model, torch.randn(8, 3, 28, 28), mode="abs").by_patch
        inside = by_patch[3 - depth : 4 + depth, 3 - depth : 4 + depth]
        assert inside.sum() == pytest.approx(1, abs=1e-9)
        assert (inside[[0, 0, -1, -1], [0, -1, 0, -1]] > 1e-6).all()
    plain = lively(vicinal.create_model("vit-micro", depth=1, **settings))
    assert receptive_field(plain, torch.randn(8, 3, 28, 28)).by_patch[0, 0] > 1e-4


def levit():
    """BatchNorm, and tokens behind it."""
    settings = {"embed_dim": (16, 16), "key_dim": 4, "depth": (1, 1), "num_heads": (2, 2), "num_classes": 3}
    model = lively(Levit(img_size=64, **settings))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model


@pytest.mark.parametrize(("make", "size"), [(lambda: vit(img_size=16), 16), (levit, 64)], ids=["ViT", "LeViT"])
def test_the_batch_size_does_not_matter(make, size):
    model, images = make(), torch.randn(7, 3, size, size)
    fields = [receptive_field(model, images, batch_size=size).field for size in (1, 3, 32)]
    fields.append(receptive_field(model, ((part, torch.zeros(len(part))) for part in images.split(2))).field)
    for field in fields[1:]:
        np.testing.assert_allclose(field, fields[0], atol=1e-5 * fields[0].max())
        assert field.dtype == np.float64


def test_the_model_is_left_as_it_was():
    model = vicinal.create_model("vit-micro", prior="gmm:init=paper", depth=2, global_pool="token").train()
    model.head.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    random = torch.get_rng_state()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        receptive_field(model, images.clone(), positions="random")
    with pytest.raises(VicinalError):
        receptive_field(model, images, layer="blocks.7", positions="zero")
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == trained
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(module.training for module in model.modules())
    assert not model.blocks[1]._forward_hooks
    assert not images.requires_grad


def test_rounding_is_no_field():
    model = SwinTransformerV2(**SWIN, num_classes=3).eval()
    for dtype in (torch.float32, torch.float64):
        images = torch.randn(2, 3, 16, 16, dtype=dtype)
        with pytest.raises(VicinalError, match=r"mean channel of layers.0.blocks.0 is the same .* behind a norm"):
            receptive_field(model.to(dtype), images, layer=0)
    nn.init.normal_(model.patch_embed.norm.weight)
    assert receptive_field(model, images, layer=0).field.sum() == pytest.approx(1)


def test_positions_make_a_difference():
    model = lively(vicinal.create_model("vit-micro", prior="gab", depth=2, global_pool="token"))
    images = torch.randn(4, 3, 32, 32)
    fields = {how: receptive_field(model, images, positions=how) for how in ("trained", "random", "zero")}
    assert [field.positions for field in fields.values()] == ["trained", "random", "zero"]
    assert len({field.field[16, 16] for field in fields.values()}) == 3
    names = ("pos_embed", "blocks.0.attn.prior", "blocks.1.attn.prior")
    assert [field.changed for field in fields.values()] == [(), names, names]
    assert fields["zero"].as_dict()["changed"] == list(names)
    assert not fields["zero"].rotary_stay
    again = receptive_field(model, images, positions="random", seed=1)
    assert not np.allclose(again.field, fields["random"].field)


def test_rotary_positions_that_stay_are_told():
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    model = Eva(**small, use_rot_pos_emb=True)
    told = {how: receptive_field(model, torch.randn(2, 3, 32, 32), positions=how) for how in ("trained", "zero")}
    assert told["zero"].changed == ("pos_embed",)
    assert {how: each.as_dict()["rotary_stay"] for how, each in told.items()} == {"trained": False, "zero": True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer": 2}, "has no layer 2: it has 2 blocks, blocks.0, blocks.1; give an index from 0 to 1"),
        ({"layer": "block.1"}, "unknown layer 'block.1'; did you mean 'blocks.1'?"),
        ({"layer": "head"}, "head of VisionTransformer gives no map of the image's patches; blocks that do: blocks.0"),
        ({"at": (2, 0)}, "blocks.1 has a grid of 2 x 2 patches; at must be a row from 0 to 1"),
        ({"at": (-1, 0)}, "got -1 0"),
        ({"at": 3}, r"two whole numbers such as \(3, 4\), got 3"),
        ({"at": (1, 0, 1)}, "two whole numbers"),
        ({"at": (0.5, 1)}, "two whole numbers"),
        ({"mode": "relu"}, "unknown mode 'relu'"),
        ({"positions": "none"}, "unknown positions 'none'"),
        ({"batch_size": 0}, "batch_size .* got 0"),
        ({"batch_size": 2.5}, "batch_size .* got 2.5"),
        ({"images": None}, "images must be .* got NoneType"),
        ({"images": torch.zeros(0, 3, 8, 8)}, "there are no images"),
        ({"images": []}, "there are no images"),
        ({"images": torch.zeros(3, 8, 8)}, r"images must be .* \(n, channels, height, width\)"),
        ({"images": torch.zeros(1, 3, 8, 8, dtype=torch.uint8)}, "got torch.uint8"),
        ({"images": ["a.png"]}, "got str"),
        ({"images": [torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 8, 9)]}, "3 x 8 x 8 and 3 x 8 x 9"),
        ({"images": torch.zeros(1, 3, 9, 9)}, "does not run on images of 3 x 9 x 9"),
        ({"images": torch.full((1, 3, 8, 8), torch.nan)}, "not finite"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(arguments, message):
    images = arguments.pop("images", torch.randn(1, 3, 8, 8))
    with pytest.raises(VicinalError, match=message):
        receptive_field(vit(), images, **arguments)


def test_a_field_of_nothing_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 1, 1))
    nn.init.constant_(model[0].weight, -1)
    with pytest.raises(VicinalError, match=r"no pixel .* on 0 at 2 2; .*abs"):
        receptive_field(model, torch.randn(1, 3, 4, 4))
    with pytest.raises(VicinalError, match="has no position embeddings"):
        receptive_field(model, torch.randn(1, 3, 4, 4), positions="zero")
    with pytest.raises(VicinalError, match="no block of Linear gives a map"):
        receptive_field(nn.Linear(4, 4), torch.randn(1, 3, 4, 4))
    with pytest.raises(VicinalError, match=r"model must be .* got str"):
        receptive_field("vit", torch.randn(1, 3, 4, 4))
