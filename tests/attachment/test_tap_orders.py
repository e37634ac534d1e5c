"""A tap reads weights in the model's own token order, whatever order its prior works in."""

import pytest
import torch

import vicinal
from by_hand import assert_same, attention_io, heads_by_hand, prior_by_hand, raster
from hugging_face_models import yolos
from test_new_layouts import differential_vit, hiera, noise, unrolled
from test_token_orders import ORDERS, SIDE, Model

SPECS = [None, "gmm:init=spread", "gmm:init=spread+gab"]


def weights_by_hand(module, q, k, places):
    """Returns `(..., heads, queries, keys)`, under the module's prior if it has one."""
    logits = q @ k.mT * q.shape[-1] ** -0.5
    if hasattr(module, "prior"):
        scale, bias = prior_by_hand(module.prior, places)
        logits = scale * logits + bias
    return logits.softmax(-1)


def check_tap(model, name, run, expected, patches, classes=True):
    """Weights of a layer, those of the class token and the mean over patches must be as `expected`."""
    layer = [site.name for site in vicinal.tap(model, None, img_size=run.size).layers].index(name)
    parts = {"all": expected, "mean": expected[..., patches, :].mean(-2)}
    if classes:
        parts["class"] = expected[..., 0, :]
    plain = run(model)
    for queries, part in parts.items():
        with vicinal.tap(model, [layer], queries=queries, img_size=run.size) as t:
            assert torch.equal(run(model), plain)
        torch.testing.assert_close(t.last, part, atol=1e-12, rtol=0)  # weights are below 1


class Run:
    """Runs a model on the same noise."""

    def __init__(self, *size):
        self.size, self.pixels = size, noise(2, 3, *size)

    def __call__(self, model):
        out = model(self.pixels)
        return out.last_hidden_state if hasattr(out, "last_hidden_state") else out


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_yolos(spec):
    model, run = yolos().double(), Run(32, 48)
    if spec:
        vicinal.attach(model, spec, img_size=(32, 48))
    name, module = next((n, m) for n, m in model.named_modules() if type(m).__name__.startswith("YolosSelfAttention"))
    (x,), _, _ = attention_io(module, lambda: run(model))
    q, k, _ = heads_by_hand(module, x)
    places = raster(4, 6, prefix=1, suffix=7)
    check_tap(model, name, run, weights_by_hand(module, q, k, places), slice(1, 25))


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_hiera_in_mask_units_and_in_its_permuted_global_stage(spec):
    model, run = hiera(), Run(64, 64)
    if spec:
        vicinal.attach(model, spec, img_size=64)
    module = model.blocks[0].attn  # tokens (16 in a unit, 16 units)
    (x,), _, _ = attention_io(module, lambda: run(model))
    q, k, _ = (y.unflatten(2, (16, 16)).permute(0, 3, 1, 2, 4) for y in heads_by_hand(module, x))
    places = [(row % 4, column % 4) for row, column in unrolled(16, 2)[::16]]
    expected = weights_by_hand(module, q, k, places)
    assert expected.shape == (2, 16, 2, 16, 16)  # images, windows, heads, queries, keys
    check_tap(model, "blocks.0.attn", run, expected, slice(None), classes=False)
    module = model.blocks[2].attn
    (x,), _, _ = attention_io(module, lambda: run(model))
    q, k, _ = heads_by_hand(module, x)
    expected = weights_by_hand(module, q, k, unrolled(8, 1))
    check_tap(model, "blocks.2.attn", run, expected, slice(None), classes=False)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_patches_by_chance_beside_a_class_token_at_either_end(spec, last):
    order = ORDERS["by chance"]
    model, run = Model(order, prefix=1, last_is_class=last).double().eval(), Run(32, 32)
    if spec:
        vicinal.attach(model, spec, img_size=32)
    module = model.blocks[1]
    (x,), _, _ = attention_io(module, lambda: run(model))
    q, k, _ = module.qkv(module.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    places = [divmod(int(cell), SIDE) for cell in order]
    places = [*places, None] if last else [None, *places]
    patches = slice(0, 64) if last else slice(1, 65)
    check_tap(model, "blocks.1", run, weights_by_hand(module, q, k, places), patches, classes=not last)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_differential_attention_is_read_as_the_maps_or_as_what_meets_the_values(spec, fused):
    model, run = differential_vit(fused), Run(32, 32)
    if spec:
        vicinal.attach(model, spec)
    module = model.blocks[2].attn
    (x,), _, _ = attention_io(module, lambda: run(model))
    q, k = (
        (x @ part.T + bias).unflatten(-1, (4, 2, -1)).permute(3, 0, 2, 1, 4)
        for part, bias in zip(module.qkv.weight.chunk(3)[:2], module.qkv.bias.chunk(3)[:2], strict=True)
    )
    first, second = weights_by_hand(module, q, k, raster(4, 4, 1))  # (batch, heads, tokens, tokens) each
    with vicinal.tap(model, [2]) as t:
        run(model)
    if fused:
        assert_same(t.last, torch.cat([first, second], 1))
    else:
        assert_same(t.last, torch.stack([first, second], 2).flatten(1, 2))
