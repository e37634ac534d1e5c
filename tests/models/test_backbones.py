import pytest
import timm
import torch
from torch import nn

import vicinal
from small_backbones import LAYERS, SMALL, small
from vicinal.attachment import get_priors
from vicinal.models import BACKBONES

PAPER = {"vit": "vit", "swin": "swin", "cait": "cait-tiny", "pit": "pit", "t2t": "t2t"}
UNUSED = {"t2t": 1408}  # parameters that the reference carries and never uses: a class token and a norm


def count(model):
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("name", PAPER)
def test_parameters_are_those_of_the_reference(name, golden):
    reference = golden["models_32px_10_classes"][PAPER[name]]
    plain = vicinal.create_model(name, img_size=32, num_classes=10)
    assert count(plain) == reference["plain"]["trainable_params_10_classes"] - UNUSED.get(name, 0)
    masked = vicinal.create_model(name, prior="gmm:kernels=5", img_size=32, num_classes=10)
    assert count(masked) - count(plain) == reference["gmm_params_k5"]


def test_mean_pooled_vit_is_the_references_masked_vit(golden):
    reference = golden["models_32px_10_classes"]["vit"]["gmm"]["trainable_params_10_classes"]
    assert count(vicinal.create_model("vit", prior="gmm:kernels=5", global_pool="avg")) == reference


@pytest.mark.parametrize(
    ("name", "dim", "depth", "patch_32", "patch_64"),
    [
        ("vit-base", 256, 8, 2, 8),
        ("vit-heat", 192, 8, 2, 4),
        ("vit-d6", 252, 6, 4, 8),
        ("vit-d15", 144, 15, 4, 8),
        ("vit-d30", 72, 30, 4, 8),
        ("vit-d30-108", 108, 30, 4, 8),
        ("vit-d30-192", 192, 30, 4, 8),
        ("vit-d60", 72, 60, 4, 8),
        ("vit-mini", 96, 6, 4, 8),
    ],
)
def test_further_vits_have_the_parameters_of_their_shape(name, dim, depth, patch_32, patch_64):
    for pixels, patch in ((32, patch_32), (64, patch_64)):
        block = 4 * dim + 3 * dim**2 + dim**2 + dim + 2 * dim * 2 * dim + 3 * dim  # norms, qkv, projection, MLP
        patches = 3 * patch**2 * dim + dim + dim * ((pixels // patch) ** 2 + 2)  # embedding, positions, class token
        model = vicinal.create_model(name, img_size=pixels, global_pool="token")
        assert count(model) == depth * block + patches + 2 * dim + 10 * dim + 10


def test_the_wide_cait_differs_in_width_only():
    narrow, wide = (vicinal.create_model(name) for name in ("cait", "cait-192"))
    assert (narrow.embed_dim, wide.embed_dim) == (108, 192)
    assert [type(module) for module in narrow.modules()] == [type(module) for module in wide.modules()]


def test_old_and_timm_names_mean_the_same_model():
    assert count(vicinal.create_model("cait-tiny")) == count(vicinal.create_model("cait"))
    assert count(vicinal.create_model("vicinal_vit_d30_108")) == count(vicinal.create_model("vit-d30-108"))


@pytest.mark.parametrize("name", BACKBONES)
def test_patches_grow_at_64_pixels(name):
    at_32, at_64 = (vicinal.create_model(name, img_size=pixels) for pixels in (32, 64))
    expected = {"swin": (2, 4), "pit": (2, 4), "vit-base": (2, 8), "vit-heat": (2, 4)}.get(name, (4, 8))
    assert (at_32.patch_embed.patch_size[0], at_64.patch_embed.patch_size[0]) == expected
    assert at_64.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 10)


@pytest.mark.parametrize("size", [(20, 36), (12, 44), (44, 32)])
@pytest.mark.parametrize("name", SMALL)
def test_any_rectangle_of_patches_takes_a_prior_in_every_layer(name, size):
    model = small(name, prior="gmm", img_size=size).eval()
    assert len(get_priors(model)) == LAYERS[name]
    assert model(torch.randn(2, 3, *size)).shape == (2, 10)


def test_channels_and_classes():
    for name in PAPER:
        model = small(name, prior="gab", in_chans=1, num_classes=3).eval()
        assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 3)
        assert model.pretrained_cfg["input_size"] == (1, 32, 32)
        assert len(model.pretrained_cfg["mean"]) == 1


@pytest.mark.parametrize("name", PAPER)
def test_a_prior_changes_neither_pooling_nor_starting_weights(name):
    torch.manual_seed(5)
    plain = small(name)
    torch.manual_seed(5)
    masked = small(name, prior="gmm:init=paper")
    assert masked.global_pool == plain.global_pool == BACKBONES[name].pools[0]
    weights = masked.state_dict()
    assert all(torch.equal(values, weights[key]) for key, values in plain.state_dict().items())


def test_the_default_pooling_is_that_of_the_plain_reference():
    expected = {"vit": "token", "swin": "avg", "cait": "token", "pit": "token", "t2t": "avg"}
    assert {name: BACKBONES[name].pools[0] for name in expected} == expected


@pytest.mark.parametrize("name", ["vit", "pit"])
def test_a_prior_leaves_the_class_token_alone(name):
    model = vicinal.create_model(name, prior="gmm:init=paper+gab")
    priors = [module for module in model.modules() if isinstance(module, vicinal.Prior) and module.spec]
    assert priors
    for prior in priors:
        scale, bias = prior()
        assert prior.grid.prefix == 1
        assert (scale[:, 0] == 1).all()
        assert (scale[:, :, 0] == 1).all()
        assert (bias[:, 0] == 0).all()
        assert (bias[:, :, 0] == 0).all()
        assert (scale[:, 1:, 1:] != 1).any()


@pytest.mark.parametrize(("name", "pool"), [("vit", "avg"), ("pit", "avg"), ("vit-relpos", "avg")])
def test_mean_pooling_has_no_class_token(name, pool):
    model = vicinal.create_model(name, global_pool=pool)
    assert model.cls_token is None
    assert model.num_prefix_tokens == 0


@pytest.mark.parametrize(("name", "pool"), [("t2t", "token"), ("vit-relpos", "token")])
def test_token_pooling_has_a_class_token_that_is_read(name, pool):
    model = vicinal.create_model(name, global_pool=pool, prior="gmm").eval()
    images = torch.randn(2, 3, 32, 32)
    before = model(images)
    with torch.no_grad():
        model.cls_token += torch.randn_like(model.cls_token)  # not a constant, which norms would take out
    assert not torch.allclose(model(images), before)


def test_without_pooling_features_come_out():
    for name in PAPER:
        model = timm.create_model(BACKBONES[name].timm_name, num_classes=0, global_pool="").eval()
        out = model(torch.zeros(1, 3, 32, 32))
        assert out.dim() in (3, 4)
        assert out.shape[-1] == model.num_features


@pytest.mark.parametrize("name", PAPER)
def test_evaluation_does_not_depend_on_what_else_is_in_the_batch(name):
    model = small(name, prior="gmm:init=paper").double().eval()
    images = torch.randn(5, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        together, alone = model(images), torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)


def unreached(model, steps=2):
    """Names of parameters that get no gradient in the first steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    left = {name for name, _ in model.named_parameters()}
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.arange(8)).backward()
        left -= {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        optimizer.step()
    return left


@pytest.mark.parametrize("name", ["vit", "swin", "pit", "t2t", "vit-relpos"])
def test_with_mean_pooling_gradients_reach_every_parameter(name):
    assert not unreached(vicinal.create_model(name, prior="gmm", global_pool="avg", drop_path_rate=0))


def test_with_class_layers_gradients_reach_every_parameter():
    assert not unreached(vicinal.create_model("cait", prior="gmm", drop_path_rate=0))


@pytest.mark.parametrize(
    "prior", ["elm", "gab", "rpe", "rpe-mlp", "decay:learnable=true", "conv", "gmm:init=spread+gab"]
)
def test_gradients_reach_every_prior(prior):
    assert not unreached(vicinal.create_model("vit-mini", prior=prior, global_pool="avg", drop_path_rate=0))
