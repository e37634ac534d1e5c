import functools
import itertools
import weakref

import pytest
import torch
from timm.models.convit import ConVit
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import vicinal
from by_hand import assert_same, attention_io, logits_by_hand, raster
from small_models import beit, cait, images, lively, swin, swin_v2, vit
from vicinal import VicinalError


def vit_unfused():
    model = vit()
    for block in model.blocks:
        block.attn.fused_attn = False
    return model


@pytest.mark.parametrize("spec", [None, "gmm:init=spread", "gmm:init=spread+gab"])
@pytest.mark.parametrize("make", [vit, vit_unfused])
@torch.no_grad()
def test_weights_equal_the_formula_from_the_models_weights(make, spec):
    model = lively(make()).double()
    vicinal.attach(model, spec or "none")
    x = images(model).double()
    (tokens,), _, _ = attention_io(model.blocks[2].attn, lambda: model(x))
    logits, bias, _ = logits_by_hand(model.blocks[2].attn, tokens, model.blocks[2].attn.prior, raster(4, 4, 1))
    expected = (logits + bias).softmax(-1)
    if spec is None:
        vicinal.detach(model)
    plain = model(x)
    for queries, part in (("all", expected), ("class", expected[:, :, 0]), ("mean", expected[:, :, 1:].mean(2))):
        with vicinal.tap(model, queries=queries) as t:
            out = model(x)
        assert torch.equal(out, plain)
        assert list(t.weights) == ["blocks.2.attn"]
        assert_same(t.last, part)


@pytest.mark.parametrize("spec", [None, "gab"])
@torch.no_grad()
def test_windows_have_an_axis_and_rows_sum_to_one(spec):
    model = lively(swin()).double()
    if spec:
        vicinal.attach(model, spec)
    module = model.layers[0].blocks[1].attn
    x = images(model, 3).double()
    (tokens,), kwargs, _ = attention_io(module, lambda: model(x))
    with vicinal.tap(model, layers=[1]) as t:
        model(x)
    assert t.last.shape == (3, 16, 2, 16, 16)
    assert t.layers[0].windows == 16
    prior = module.prior if spec else vicinal.build_prior("none", heads=2, grid=vicinal.Grid(4, 4))
    logits, bias, _ = logits_by_hand(module, tokens, prior, raster(4, 4))
    logits = logits + bias + module._get_rel_pos_bias() + kwargs["mask"].double().repeat(3, 1, 1)[:, None]
    assert_same(t.last.flatten(0, 1), logits.softmax(-1))
    with vicinal.tap(model, queries="mean") as mean:
        model(x)
    assert mean.last.shape == (3, 4, 4, 16)
    torch.testing.assert_close(mean.last.sum(-1), torch.ones(3, 4, 4, dtype=torch.float64))


@torch.no_grad()
def test_several_softmaxes_are_read_as_the_sum_that_meets_the_values():
    """ConViT adds attention to places to attention to contents, and normalizes."""
    model = ConVit(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=4, local_up_to_layer=1).eval()
    used = {}
    for name, block in model.blocks.named_children():
        keep = functools.partial(lambda name, _, inputs: used.update({f"blocks.{name}.attn": inputs[0]}), name)
        block.attn.attn_drop.register_forward_pre_hook(keep)
    x = torch.randn(2, 3, 32, 32)
    with vicinal.tap(model, None, img_size=32) as t, vicinal.tap(model, [0], queries="mean", img_size=32) as mean:
        model(x)
    assert list(t.weights) == list(used)
    torch.testing.assert_close(t.weights, used)
    torch.testing.assert_close(mean.last, used["blocks.0.attn"].mean(-2))


@pytest.mark.parametrize("make", [vit, swin, swin_v2, cait, beit])
@pytest.mark.parametrize("spec", [None, "gmm:init=spread+gab"])
@torch.no_grad()
def test_every_layer_can_be_read(make, spec):
    model = make().eval()
    if spec:
        vicinal.attach(model, spec)
    x = images(model)
    plain = model(x)
    with vicinal.tap(model, layers=None) as t:
        torch.testing.assert_close(model(x), plain)
    assert len(t.weights) == len(t.layers) >= 2
    for weights in t.weights.values():
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_class_attention_is_the_last_layer_of_cait():
    model = cait().eval()
    with vicinal.tap(model, queries="class") as t:
        model(images(model, 3))
    assert list(t.weights) == ["blocks_token_only.1.attn"]
    assert t.last.shape == (3, 4, 17)


class Shapes(TorchDispatchMode):
    """Every shape that is computed inside."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen |= {
            tuple(x.shape) for x in (result if isinstance(result, tuple) else (result,)) if hasattr(x, "shape")
        }
        return result


@pytest.mark.parametrize("spec", [None, "gmm:init=spread"])
def test_the_class_tokens_row_is_all_that_is_computed(spec):
    model = vit().requires_grad_(False).eval()
    if spec:
        vicinal.attach(model, spec, layers=[0])
    t = vicinal.tap(model, queries="class")
    with t, Shapes() as shapes:
        model(images(model))
    assert (2, 4, 1, 17) in shapes.seen
    if spec is None:
        assert not any(shape[-2:] == (17, 17) for shape in shapes.seen)
    assert t.last.untyped_storage().nbytes() == 2 * 4 * 17 * 4


def test_what_a_layer_keeps_is_no_larger_than_what_was_asked_for():
    model = vit_unfused().eval()
    with vicinal.tap(model, queries="class") as t:
        model(images(model))
    assert t.last.untyped_storage().nbytes() == 2 * 4 * 17 * 4


@pytest.mark.parametrize("make", [vit, vit_unfused, swin, cait])
@torch.no_grad()
def test_weights_are_reduced_as_soon_as_a_layer_has_run_and_then_dropped(make):
    model = make().eval()
    x, given = images(model), []
    with vicinal.tap(model, None) as whole:
        model(x)

    def reduce(layer, weights):
        assert all(earlier() is None for _, earlier in given)  # one layer at a time
        given.append((layer, weakref.ref(weights)))
        return weights.amax(-1)

    t = vicinal.tap(model, None, reduce=reduce)
    with t:
        model(x)
    assert [layer for layer, _ in given] == t.layers
    assert list(t.weights) == list(whole.weights)
    for name, weights in whole.weights.items():
        torch.testing.assert_close(t.weights[name], weights.amax(-1))


@pytest.mark.parametrize("spec", [None, "gmm:init=spread"])
def test_training_is_not_disturbed_and_weights_carry_gradients_only_if_asked(spec):
    torch.manual_seed(0)
    model = vit()
    if spec:
        vicinal.attach(model, spec)
    x = images(model)

    def gradients(around):
        model.zero_grad()
        with around:
            loss = model(x).square().sum()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    t = vicinal.tap(model)
    plain = gradients(torch.enable_grad())
    for a, b in zip(gradients(t), plain, strict=True):
        assert torch.equal(a, b)
    assert not t.last.requires_grad
    with vicinal.tap(model, gradient=True) as live:
        model(x)
    live.last[..., 0].square().sum().backward()
    assert model.blocks[2].attn.qkv.weight.grad.abs().sum() > 0


def test_a_tap_works_again_and_after_an_error():
    model = vit().eval()
    t = vicinal.tap(model)
    with t:
        model(images(model, 2))
    last = model.blocks[2].attn.proj
    model.blocks[2].attn.proj = nn.Linear(1, 1)  # fails in the middle of the layer that is read
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), t:
        model(images(model))
    model.blocks[2].attn.proj = last
    assert torch.overrides._get_current_function_mode() is None
    with t:
        model(images(model, 5))
    assert t.last.shape == (5, 4, 17, 17)
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())


def test_the_model_is_as_it_was_when_a_tap_is_made():
    model = nn.Sequential(nn.BatchNorm2d(3), vit()).train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    vicinal.tap(model, img_size=32)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())


def test_multihead_attention_is_read():
    class Small(nn.Module):
        def __init__(self, need_weights):
            super().__init__()
            self.patches = nn.Conv2d(3, 8, 8, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.need_weights = need_weights

        def forward(self, x):
            x = self.patches(x).flatten(2).mT
            out, self.seen = self.attention(x, x, x, need_weights=self.need_weights, average_attn_weights=False)
            return out

    for spec, need_weights in itertools.product([None, "gab"], [True, False]):
        model = Small(need_weights).eval()
        if spec:
            vicinal.attach(model, spec, img_size=32)
        with torch.no_grad(), vicinal.tap(model, img_size=32) as t:
            model(torch.randn(3, 3, 32, 32))
        assert t.last.shape == (3, 2, 16, 16)
        if need_weights:
            torch.testing.assert_close(t.last, model.seen)


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda: vicinal.tap("vit"), "str"),
        (lambda: vicinal.tap(vit(), queries="clas"), "'clas'"),
        (lambda: vicinal.tap(vit(), layers=[5]), r"\b5\b.*\b3\b"),
        (lambda: vicinal.tap(swin(), queries="class"), "queries='mean'"),
        (
            lambda: vicinal.tap(vit(class_token=False, reg_tokens=2, global_pool="avg"), queries="class"),
            "queries='mean'",
        ),
        (lambda: vicinal.tap(nn.Conv2d(3, 3, 1), img_size=8), "Conv2d"),
        (lambda: vicinal.tap(vit()).last, "with"),
    ],
)
def test_bad_input_is_named(make, value):
    with pytest.raises(VicinalError, match=value):
        make()


def test_taps_of_one_layer_do_not_disturb_each_other():
    model = vit().eval()
    with vicinal.tap(model) as one, vicinal.tap(model, queries="class") as other:
        model(images(model))
    torch.testing.assert_close(one.last[:, :, 0], other.last)
    assert "forward" not in vars(model.blocks[2].attn)


def test_a_tap_that_reads_nothing_says_so():
    model = vit()
    with (
        pytest.raises(VicinalError, match=r"blocks\.2\.attn"),
        vicinal.tap(model),
    ):
        pass


def test_a_tap_opens_once():
    model = vit()
    with vicinal.tap(model) as t:
        model(images(model))
        with pytest.raises(VicinalError, match="open already"):
            t.__enter__()
