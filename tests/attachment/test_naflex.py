"""Patches that were cut before the model was called (NaFlex): a prior is placed by their coordinates."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from torch.nn import functional as F

import vicinal
from by_hand import assert_same, attention_io, formula_by_hand, heads_by_hand, project
from small_models import lively
from vicinal import VicinalError

PRIOR = "gmm:init=spread+gab:amplitude=1.5,sigma=2"
PREFIX = 4  # register tokens
SHAPES = [(4, 6), (6, 4), (5, 3), (4, 6)]  # rows and columns; the first two have as many patches

MAKES = {
    "fast forward": {},
    "mask of keys": {"use_key_only_attn_mask": True},  # so that padding attends to patches
    "fused call": {"attn_type": "eva"},
    "product and softmax": {"attn_type": "eva", "fused_attn": False},
}


def naflex(fused_attn=True, **options):
    torch.manual_seed(0)
    options = {"depth": 2, "embed_dim": 48, "num_heads": 4, "num_classes": 5, "pos_embed_grid_size": (4, 4)} | options
    model = lively(timm.create_model("naflexvit_base_patch16_gap", **options)).double().eval()
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused_attn
    return model


def attached(prior=PRIOR, **options):
    model = naflex(**options)
    vicinal.attach(model, prior, img_size=96)
    return model.double()


def picture(rows, columns):
    generator = torch.Generator().manual_seed(10 * rows + columns)
    return torch.randn(3, 16 * rows, 16 * columns, generator=generator).double()


def cut(image, tokens=None, order=None):
    """Returns the patches of an image `(3, height, width)` as NaFlex takes them, a batch of one.

    Args:
        image: of whole patches.
        tokens: number of patches with padding behind them.
        order: which patch comes at each place; all of them row by row by default.
    """
    patches = image.unfold(1, 16, 16).unfold(2, 16, 16)
    places = torch.tensor(list(itertools.product(range(patches.shape[1]), range(patches.shape[2]))))
    patches = patches.permute(1, 2, 3, 4, 0).flatten(0, 1).flatten(1)
    if order is not None:
        patches, places = patches[order], places[order]
    padding = 0 if tokens is None else tokens - len(patches)
    return {
        "patches": F.pad(patches, (0, 0, 0, padding))[None],
        "patch_coord": F.pad(places, (0, 0, 0, padding))[None],
        "patch_valid": (torch.arange(len(patches) + padding) < len(patches))[None],
    }


def batch(*given):
    return {name: torch.cat([each[name] for each in given]) for name in given[0]}


def mixed(tokens=26):
    """Returns images of several shapes in one batch, with padding."""
    return batch(*(cut(picture(*shape), tokens) for shape in SHAPES))


def places_of(given):
    """Returns the places of all tokens of each image: None for registers and padding."""
    pairs = zip(given["patch_coord"].tolist(), given["patch_valid"].tolist(), strict=True)
    return [
        [None] * PREFIX + [tuple(place) if valid else None for place, valid in zip(*image, strict=True)]
        for image in pairs
    ]


def assert_right(module, given, run):
    """Compares the output of an attention module with the formula, image by image."""
    (x, *_), kwargs, out = attention_io(module, run)
    q, k, v = heads_by_hand(module, x)
    logits = q @ k.mT * q.shape[-1] ** -0.5
    for image, places in enumerate(places_of(given)):
        scale, bias = formula_by_hand(module.prior, places, places)
        logits[image] = scale * logits[image] + bias
    assert_same(out, project(module, (logits + kwargs["attn_mask"]).softmax(-1), v))


RUNS = {
    "forward": lambda model, given: model(given),
    "arguments": lambda model, given: model(given["patches"], given["patch_coord"], given["patch_valid"]),
    "forward_features": lambda model, given: model.forward_features(**given),
    "forward_intermediates": lambda model, given: model.forward_intermediates(given, output_fmt="NLC"),
}
BATCHES = {
    "one shape": lambda: batch(cut(picture(4, 6)), cut(picture(4, 6).flip(1))),
    "one shape with padding": lambda: batch(cut(picture(4, 6), 26), cut(picture(4, 6).flip(1), 26)),
    "mixed shapes": mixed,
    "permuted": lambda: batch(*(cut(picture(4, 6), 25, torch.randperm(24)) for _ in range(2))),
    "some patches": lambda: batch(*(cut(picture(4, 6), 12, torch.randperm(24)[:11]) for _ in range(2))),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("given", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("gradient", [False, True])
def test_patches_follow_the_formula_by_their_coordinates(make, given, gradient):
    model = attached(**make)
    torch.manual_seed(1)
    given = given()
    with torch.set_grad_enabled(gradient):
        for block in model.blocks:
            assert_right(block.attn, given, lambda: model(given))


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@torch.no_grad()
def test_every_way_to_run_the_model_is_served(run):
    model, given = attached(), mixed()
    assert_right(model.blocks[1].attn, given, lambda: run(model, given))


@pytest.mark.parametrize("spec", [PRIOR, "rpe:init=normal", "elm", "conv", "decay"])
@torch.no_grad()
def test_patches_of_an_image_give_what_the_image_gives(spec):
    model = attached(spec)
    for parameter in (x for block in model.blocks for x in block.attn.prior.parameters()):
        parameter.add_(0.3 * torch.randn_like(parameter))
    for shape in SHAPES:
        expected = model(picture(*shape)[None])
        torch.testing.assert_close(model(cut(picture(*shape))), expected, atol=1e-12, rtol=0)
        torch.testing.assert_close(model(cut(picture(*shape), 30)), expected, atol=1e-12, rtol=0)
    expected = torch.cat([model(picture(*shape)[None]) for shape in SHAPES])
    torch.testing.assert_close(model(mixed()), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_mixed_batch_gives_outputs_and_gradients_of_each_image_alone(make):
    # timm interpolates position embeddings in float32.
    model, given = attached(pos_embed="none", **make), mixed()

    def gradients(run):
        model.zero_grad()
        outputs = run()
        outputs.square().sum().backward()
        return {"outputs": outputs} | {name: parameter.grad for name, parameter in model.named_parameters()}

    images = [{name: x[i : i + 1] for name, x in given.items()} for i in range(len(SHAPES))]
    alone = gradients(lambda: torch.cat([model(image) for image in images]))
    assert all(alone[f"blocks.0.attn.prior.parts.{part}"].abs().sum() > 0 for part in ("0.flat_sigma", "1.flat_sigma"))
    for name, gradient in gradients(lambda: model(given)).items():
        torch.testing.assert_close(gradient, alone[name], atol=1e-11, rtol=1e-11, msg=name)


@torch.no_grad()
def test_some_patches_of_a_free_table_are_a_part_of_all():
    model = attached("rpe:init=normal")
    order = torch.cat([torch.arange(13), torch.tensor([23])])  # the last one, so that the grid is known
    x = torch.randn(1, PREFIX + 24, 48).double()
    attention, kept = model.blocks[0].attn, torch.cat([torch.arange(PREFIX), PREFIX + order])
    weights = {}
    for name, given, tokens in [("all", cut(picture(4, 6)), x), ("some", cut(picture(4, 6), None, order), x[:, kept])]:
        model(given)
        scale, bias = attention.place_prior(tokens, tokens.shape[1]).prior()
        weights[name] = bias
        assert scale is None
    torch.testing.assert_close(weights["some"], weights["all"][:, kept][:, :, kept], atol=1e-12, rtol=0)


def in_a_thread(function):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


BACKWARD = {"here": lambda loss: loss.backward(), "in a thread": lambda loss: in_a_thread(loss.backward)}


@pytest.mark.parametrize("backward", BACKWARD.values(), ids=BACKWARD)
def test_a_checkpointed_step_with_shapes_of_as_many_tokens(backward):
    model = attached().train()
    one = batch(cut(picture(4, 6)), cut(picture(6, 4)))
    inputs = [one, batch(cut(picture(6, 4)), cut(picture(6, 4).flip(2))), picture(4, 6)[None], mixed(), mixed(24)]

    def gradients():
        model.zero_grad()
        backward(sum(model(x).square().sum() for x in inputs))
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    plain = gradients()
    model.set_grad_checkpointing()
    for _ in range(2):
        for name, gradient in gradients().items():
            torch.testing.assert_close(gradient, plain[name], atol=1e-12, rtol=1e-12, msg=name)


def test_recomputation_that_could_be_of_two_shapes_raises():
    model = attached(pos_embed="none").train()
    model.set_grad_checkpointing()
    loss = sum(model(cut(torch.zeros(3, 16 * rows, 16 * columns).double())).sum() for rows, columns in SHAPES[:2])
    with pytest.raises(VicinalError, match=r"patches cut before.*which one is repeated"):
        loss.backward()


def test_indices_made_in_inference_serve_training():
    model, given = attached(), mixed(31)  # a number of tokens that no other test has, since indices are kept
    with torch.inference_mode():
        expected = model(given)
    output = model(given)
    output.sum().backward()
    torch.testing.assert_close(output, expected.clone(), atol=1e-12, rtol=0)


@torch.no_grad()
def test_a_tap_reads_weights_in_the_order_of_the_tokens():
    model, given = attached(), mixed()
    with vicinal.tap(model, layers="last", img_size=96) as tap:
        model(given)
    for image, places in enumerate(places_of(given)):
        alone = {name: x[image : image + 1] for name, x in given.items()}
        (x, *_), kwargs, _ = attention_io(model.blocks[1].attn, lambda alone=alone: model(alone))
        q, k, _ = heads_by_hand(model.blocks[1].attn, x)
        scale, bias = formula_by_hand(model.blocks[1].attn.prior, places, places)
        expected = (scale * (q @ k.mT * q.shape[-1] ** -0.5) + bias + kwargs["attn_mask"]).softmax(-1)
        torch.testing.assert_close(tap.last[image], expected[0], atol=1e-12, rtol=0)


@torch.no_grad()
def test_what_is_not_known_raises():
    model = attached("elm")
    with pytest.raises(VicinalError, match=r"blocks.0.attn has a free number.*do not fill one of 4 x 6"):
        model(cut(picture(4, 6), None, torch.tensor([0, 1, 23])))
    model = attached()
    given = mixed()
    with pytest.raises(VicinalError, match="has no valid patch"):
        model(given | {"patch_valid": given["patch_valid"] & False})
    with pytest.raises(VicinalError, match="negative"):
        model(given | {"patch_coord": given["patch_coord"] - 1})
    model.embeds.forward = lambda *_, **__: (torch.zeros(1, 28, 48).double(), None)
    with pytest.raises(VicinalError, match="neither images nor coordinates"):
        model.forward_features(torch.zeros(1, 24, 768).double())


def test_patches_dropped_in_the_model_raise():
    model = attached().train()
    model.patch_drop = timm.layers.PatchDropoutWithIndices(0.5, num_prefix_tokens=PREFIX)
    with pytest.raises(VicinalError, match=r"blocks.0.attn.*17 tokens"):
        model(mixed())


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@torch.no_grad()
def test_a_trace_raises_instead_of_keeping_the_coordinates_of_one_call():
    model, given = attached(), cut(picture(6, 6))
    with pytest.raises(VicinalError, match="takes images only"):
        torch.jit.trace(model, (given["patches"], given["patch_coord"], given["patch_valid"]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Dynamo, at a graph break in timm's embedding
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_compiled_model_follows_the_coordinates(make):
    model = attached(**make)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for given in (mixed(), batch(cut(picture(6, 4)), cut(picture(6, 4).flip(1))), mixed(), picture(4, 6)[None]):
        torch.testing.assert_close(compiled(given), model(given), atol=1e-12, rtol=0)
