"""`save_prior` and `load_prior`: a model that lost its priors gives bit-identical outputs with them again."""

import json

import pytest
import timm
import torch
from safetensors import safe_open
from torch import nn

import vicinal
from hugging_face_models import image_classifier, library, surveyed, yolos
from small_models import beit, cait, lively, swin, vit
from test_naflex import batch, cut, naflex, picture
from test_new_layouts import hiera
from test_position_inputs import vit_mae
from test_siglip2 import inputs as siglip2_inputs
from test_siglip2 import siglip2
from vicinal.attachment import get_priors
from vicinal.attachment.attached_priors import describe_sites


def shake(model):
    """Gives all priors of a model random values, as training does."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for prior in get_priors(model).values():
            for parameter in prior.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.5 * noise.to(parameter.dtype)
    return model


def tensors_of(output):
    """Returns the tensors of an output of any library."""
    if isinstance(output, torch.Tensor):
        return [output]
    values = output.values() if hasattr(output, "values") else output if isinstance(output, (list, tuple)) else ()
    return [tensor for value in values for tensor in tensors_of(value)]


@torch.no_grad()
def outputs(model, call):
    model.eval()
    return tensors_of(call(model))


def same(first, second):
    return len(first) == len(second) > 0 and all(map(torch.equal, first, second))


def assert_restored(model, again, file, call, **options):
    """Saves the priors of a model and loads them into a copy of it without any."""
    expected, plain = outputs(model, call), outputs(again, call)
    assert not same(expected, plain)
    vicinal.save_prior(model, file)
    table = vicinal.load_prior(again, file, **options)
    assert [layer.name for layer in table.layers] == list(get_priors(model))
    assert same(outputs(again, call), expected)
    assert describe_sites(again) == describe_sites(model)
    for prior, other in zip(get_priors(model).values(), get_priors(again).values(), strict=True):
        assert (prior.spec, prior.layer, prior.depth) == (other.spec, other.layer, other.depth)


def on_images(*size):
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    return lambda model: model(images.to(next(model.parameters()).dtype))


HUGGING_FACE = {
    "vit": (lambda: image_classifier("ViT"), (32, 32), "gmm:init=spread+gab"),
    "dinov2": (lambda: image_classifier("Dinov2"), (48, 32), "conv"),  # another size than its config's
    "swin": (lambda: image_classifier("Swin"), (32, 32), "rpe:init=normal"),
    "segformer": (lambda: surveyed("segformer"), (128, 192), "rpe-mlp:init=normal"),  # pooled keys
    "yolos": (yolos, (32, 48), "elm:init=paper"),  # tokens behind the patches
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_from_pretrained_and_load_prior_restore_a_model_of_transformers(name, tmp_path):
    library()
    make, size, prior = HUGGING_FACE[name]
    model = make()
    vicinal.attach(model, prior, img_size=size)
    shake(model)
    model.save_pretrained(tmp_path / "model")
    again = type(model).from_pretrained(tmp_path / "model")
    assert get_priors(again) == {}
    assert_restored(model, again, tmp_path / "prior.safetensors", on_images(*size))


TIMM = {
    "vit": (vit, (32, 32), "decay"),
    "cait": (cait, (32, 32), "elm:init=paper"),
    "swin": (swin, (32, 32), "gmm:kernels=3"),
    "beit": (beit, (32, 32), "gab:share_heads=false"),
    "hiera": (hiera, (64, 64), "rpe:init=normal"),  # mask units, pooled queries
    "naflex": (lambda: naflex().float(), (64, 96), "rpe:init=normal"),
    "linear pvt": (
        lambda: timm.create_model("pvt_v2_b2_li", depths=(1, 1, 1, 1), embed_dims=(8, 8, 20, 16), num_classes=3),
        (64, 96),
        "gmm:init=spread",
    ),
}


@pytest.mark.parametrize("name", TIMM)
def test_load_prior_restores_a_model_of_timm(name, tmp_path):
    make, size, prior = TIMM[name]
    model, again = lively(make()), lively(make())
    vicinal.attach(model, prior, img_size=size)
    assert_restored(shake(model), again, tmp_path / "prior.safetensors", on_images(*size))


def test_a_naflex_model_reads_patches_as_before(tmp_path):
    model, again = naflex(), naflex()
    vicinal.attach(model, "rpe:init=normal", img_size=96)
    given = batch(cut(picture(4, 6), 24), cut(picture(5, 3), 24))
    assert_restored(shake(model), again, tmp_path / "prior", lambda model: model(given))


def test_siglip2_takes_its_example_again(tmp_path):
    model, again = siglip2(), siglip2()
    _, given = siglip2_inputs([(4, 6), (5, 3)], 24)
    vicinal.attach(model, "gmm:init=spread", example=given)
    file = tmp_path / "prior"
    vicinal.save_prior(model, file)
    with pytest.raises(vicinal.VicinalError, match=r"does not run on images of 3 x 64 x 96.*an example="):
        vicinal.load_prior(again, file)
    _, other = siglip2_inputs([(6, 4)], 24)  # the size of the images is the file's, not this one's
    assert_restored(shake(model), again, file, lambda model: model(**given), example=other)


def test_inputs_that_place_tokens_are_asked_for_again(tmp_path):
    model, again, noise = vit_mae(), vit_mae(), torch.arange(16.0).flip(0)[None]
    images = torch.randn(1, 3, 64, 64)
    example = {"pixel_values": images, "noise": noise}
    vicinal.attach(model, "gab:amplitude=1.5,sigma=2", example=example)
    assert_restored(shake(model), again, tmp_path / "prior", lambda model: model(**example), example=example)
    with pytest.raises(vicinal.VicinalError, match="without noise"):
        again(images)


class OwnTransformer(nn.Module):
    """Patches of 4 x 4 and `nn.MultiheadAttention`; declares no image size."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.attention = nn.ModuleList(nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(3))

    def forward(self, images):
        tokens = self.patches(images).flatten(2).mT
        for attention in self.attention:
            tokens = tokens + attention(tokens, tokens, tokens)[0]
        return tokens


def test_different_priors_in_layers_of_an_own_module(tmp_path):
    model, again = OwnTransformer(), OwnTransformer()
    vicinal.attach(model, "gmm", img_size=(16, 24), layers="first", sigma=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    vicinal.attach(model, "gab:sigma=2+rpe:init=normal", img_size=(16, 24), layers=[2])
    assert_restored(shake(model), again, tmp_path / "prior", on_images(16, 24))
    assert list(get_priors(again)) == ["attention.0", "attention.2"]
    assert same(outputs(again, on_images(24, 16)), outputs(model, on_images(24, 16)))


def test_layers_that_were_attached_for_different_image_sizes(tmp_path):
    model, again = OwnTransformer(), OwnTransformer()
    vicinal.attach(model, "rpe:init=normal", img_size=16, layers=[0])
    vicinal.attach(model, "elm:init=paper", img_size=(16, 32), layers=[1])
    call = on_images(16, 32)
    assert_restored(shake(model), again, tmp_path / "prior", call, example=torch.zeros(1, 3, 16, 16))
    assert [prior.grid.width for prior in get_priors(again).values()] == [4, 8]


def test_a_resized_model_keeps_its_new_size(tmp_path):
    model, again = (vicinal.create_model("vit-micro", img_size=32).eval() for _ in range(2))
    again.load_state_dict(model.state_dict())
    vicinal.attach(model, "gmm:init=spread+rpe-mlp:init=normal")
    shake(model)
    for each in (model, again):
        vicinal.resize(each, 48)
    assert_restored(model, again, tmp_path / "prior", on_images(48, 48))


def test_an_attention_that_is_the_whole_model(tmp_path):
    class Whole(nn.Module):
        def forward(self, x):
            q = x.flatten(2).mT
            return (q @ q.mT).softmax(-1) @ q

    model, again = Whole(), Whole()
    vicinal.attach(model, "gab", img_size=(4, 5))
    images = torch.randn(1, 3, 4, 5)
    vicinal.save_prior(model, tmp_path / "prior")
    vicinal.load_prior(again, tmp_path / "prior")
    assert torch.equal(again(images), model(images))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_values_keep_their_dtype(dtype, tmp_path):
    model, again = lively(vit()).to(dtype), lively(vit()).to(dtype)
    vicinal.attach(model, "gmm:init=spread")
    shake(model.to(dtype))
    assert_restored(model, again, tmp_path / "prior", on_images(32, 32))
    assert {parameter.dtype for parameter in again.parameters()} == {dtype}


def test_a_float32_prior_in_a_half_precision_model_stays_float32(tmp_path):
    model, again = lively(vit()).bfloat16(), lively(vit()).bfloat16()
    vicinal.attach(model, "gmm:init=spread")
    assert_restored(shake(model), again, tmp_path / "prior", on_images(32, 32))
    assert {x.dtype for prior in get_priors(again).values() for x in prior.parameters()} == {torch.float32}


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_a_wrapped_model_is_saved_and_loaded_as_the_model_inside(wrap, tmp_path):
    model, again = lively(vit()), lively(vit())
    vicinal.attach(model, "gmm")
    vicinal.save_prior(wrap(shake(model)), tmp_path / "wrapped")
    vicinal.load_prior(wrap(again), tmp_path / "wrapped")
    assert list(get_priors(again)) == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
    assert same(outputs(again, on_images(32, 32)), outputs(model, on_images(32, 32)))


def test_a_prior_of_ones_own_is_restored(tmp_path):
    @vicinal.register_prior("slope")
    class Slope(vicinal.Prior):
        def __init__(self, heads, grid, layer=0, depth=1, *, start: float = 1.0):
            super().__init__(heads, grid, layer, depth)
            self.slope = nn.Parameter(torch.full((heads,), start * (layer + 1)))
            self.register_buffer("seen", torch.tensor(layer))

        def bias_at(self, rows, columns):
            return -self.slope[:, None, None] * (rows.abs() + columns.abs())

    model, again = lively(vit()), lively(vit())
    vicinal.attach(model, "slope:start=0.5", layers="last 2")
    assert_restored(shake(model), again, tmp_path / "prior", on_images(32, 32))
    assert [prior.seen.item() for prior in get_priors(again).values()] == [1, 2]


def test_loading_leaves_random_numbers_and_modes_and_trains_on(tmp_path):
    model, again = lively(vit()).train(), lively(vit()).train()
    vicinal.attach(model, "rpe:init=normal")
    vicinal.save_prior(model, tmp_path / "prior")
    before = torch.get_rng_state()
    vicinal.load_prior(again, tmp_path / "prior")
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in again.modules())
    for each in (model, again):
        on_images(32, 32)(each).square().sum().backward()
    for parameter, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


def test_the_header_is_json_that_names_priors_sizes_and_layers(tmp_path):
    model = vit()
    vicinal.attach(model, "gmm:kernels=2", layers=[1], sigma=[2.0, 3.0])
    assert vicinal.save_prior(model, str(tmp_path / "prior")) == tmp_path / "prior"
    with safe_open(tmp_path / "prior", "pt") as content:
        header = json.loads(content.metadata()["state"])
        assert sorted(content.keys()) == ["blocks.1.attn.flat_alpha", "blocks.1.attn.flat_sigma"]
    site = {"heads": 4, "rows": 4, "columns": 4, "prefix": 1, "suffix": 0}
    entry = {"prior": "gmm:kernels=2", "options": {"sigma": [2.0, 3.0]}, "layer": 1, "depth": 3, "image": [32, 32]}
    assert header["layers"] == {"blocks.1.attn": entry | {"site": site}}
