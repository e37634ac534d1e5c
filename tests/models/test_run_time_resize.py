"""`resize` and `load` without rescaling give what the same prior gives at a size that the model meets at run time."""

import copy

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed

import vicinal
from small_backbones import small
from vicinal.attachment import get_priors

SPECS = ["gmm:init=spread", "gab:amplitude=1.5,sigma=2", "rpe:init=normal", "elm", "decay:learnable=true", "conv"]
# Size of the model, and others: one of as many patches, and one that is not square.
SIZES = {"vit": (32, [(16, 64), (48, 32)]), "swin": (128, [(64, 256), (192, 128)])}


def stir(model):
    """Moves the parameters of all priors away from where they start."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for prior in get_priors(model).values():
            for parameter in prior.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.double().eval()


def backbone(name, spec):
    torch.manual_seed(0)
    return stir(small(name, prior=spec, img_size=SIZES[name][0]))


def dynamic_vit(spec):
    torch.manual_seed(0)
    options = {"img_size": 64, "dynamic_img_size": True, "num_classes": 5, "depth": 2}
    model = vicinal.create_model("vit_tiny_patch16_224", prior=spec, **options)
    return stir(model)


def images(size):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(sum(size))).double()


@torch.no_grad()
def run(model, size):
    """Returns the model's output, and scale and bias of each layer as its attention took them, by name."""
    taken, hooks = {}, []
    for name, module in model.named_modules():
        if hasattr(module, "prior_site"):

            def note(module, args, output, name=name):
                tokens = args[0].shape[1]
                taken[name] = module.place_prior(args[0], tokens).prior()

            hooks.append(module.register_forward_hook(note))
    out = model(images(size))
    for hook in hooks:
        hook.remove()
    return out, taken


def assert_close(found, expected):
    (out, taken), (expected_out, expected_taken) = found, expected
    assert taken.keys() == expected_taken.keys()
    for name, pair in taken.items():
        for value, wanted in zip(pair, expected_taken[name], strict=True):
            assert (value is None) == (wanted is None)
            if value is not None:
                torch.testing.assert_close(value, wanted, atol=1e-12, rtol=0)
    torch.testing.assert_close(out, expected_out, atol=1e-12, rtol=0)


FEW = {"vit": SPECS[:3], "swin": SPECS[:1]}  # the model of timm below has all of them


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        pytest.param(name, spec, marks=[] if spec in FEW[name] else [pytest.mark.slow])
        for name in SIZES
        for spec in SPECS
    ],
)
def test_a_backbone_resized_or_loaded_is_that_of_the_run_time_size(name, spec, tmp_path):
    model = backbone(name, spec)
    folder = vicinal.save(model, tmp_path / "model")
    before, _ = run(model, (SIZES[name][0],) * 2)
    for size in SIZES[name][1]:
        resized = copy.deepcopy(model)
        vicinal.resize(resized, size, rescale=False)
        at_run_time = copy.deepcopy(model)
        at_run_time.set_input_size(size)
        if name == "vit":  # timm leaves the positions as they are, if there are as many
            at_run_time.pos_embed = resized.pos_embed
        assert {prior.grid for prior in get_priors(at_run_time).values()} == {
            prior.grid for prior in get_priors(model).values()
        }
        expected = run(at_run_time, size)
        assert_close(run(resized, size), expected)
        assert_close(run(vicinal.load(folder, img_size=size, rescale=False), size), expected)
    assert torch.equal(run(model, (SIZES[name][0],) * 2)[0], before)


@pytest.mark.parametrize("spec", SPECS)
def test_a_vit_of_timm_is_that_of_the_run_time_size(spec, tmp_path):
    model = dynamic_vit(spec)
    folder = vicinal.save(model, tmp_path / "model")
    for size in ((32, 128), (96, 64)):  # the first has as many patches
        expected = run(model, size)
        resized = copy.deepcopy(model)
        vicinal.resize(resized, size, rescale=False)
        assert_close(run(resized, size), expected)
        assert_close(run(vicinal.load(folder, img_size=size, rescale=False), size), expected)


def test_positions_are_interpolated_where_there_are_as_many_patches():
    for model in (timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1), small("vit", img_size=64)):
        before, (rows, columns) = model.pos_embed.detach().clone(), model.patch_embed.grid_size
        vicinal.resize(model, (32, 128))
        expected = resample_abs_pos_embed(before, (rows // 2, 2 * columns), (rows, columns), num_prefix_tokens=1)
        assert torch.equal(model.pos_embed, expected)
        assert model.pos_embed.requires_grad
        assert not torch.equal(model.pos_embed, before)


def test_the_size_that_a_model_of_timm_was_made_for_counts_and_not_the_one_that_timm_declares():
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, num_classes=5)
    vicinal.attach(model, "gab", img_size=64)
    vicinal.resize(model, 224)
    assert model(torch.zeros(1, 3, 224, 224)).shape == (1, 5)
    assert {prior.grid for prior in get_priors(model).values()} == {vicinal.Grid(14, 14, prefix=1)}
