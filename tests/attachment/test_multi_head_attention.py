"""`nn.MultiheadAttention` on its own, in all its ways of being called."""

import copy

import pytest
import torch
from torch import nn

import vicinal
from by_hand import assert_same, attention_io, logits_by_hand, project
from small_models import lively
from vicinal import Grid
from vicinal.attachment.subclass import PriorSite, add_prior
from vicinal.cells import Layout
from vicinal.inspection.attention_mode import Operation, Step
from vicinal.inspection.head_layout import Factor, HeadLayout

PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


LAYOUT = HeadLayout((((Factor.IMAGES, 1),), ((Factor.HEADS, 2),)))
SITE = PriorSite("attention", LAYOUT, (Step(Operation.MULTI_HEAD, 0),))


class Model(nn.Module):
    def __init__(self, call, order=None, **options):
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 8, 8)
        self.attention = nn.MultiheadAttention(24, 2, **options)
        self.call, self.batch_first = call, options.get("batch_first", False)
        self.order = slice(None) if order is None else order

    def forward(self, x):
        x = self.patches(x).flatten(2).mT[:, self.order]
        x = x if self.batch_first else x.transpose(0, 1)
        return self.attention(x, x, x, **self.call)[0]


@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"bias": False}, {"kdim": 24, "vdim": 24}])
@pytest.mark.parametrize(
    "call",
    [
        {"need_weights": False},
        {"need_weights": True},
        {"need_weights": False, "attn_mask": torch.eye(16).bool()},
        {"need_weights": True, "attn_mask": torch.randn(16, 16)},
        {"need_weights": False, "attn_mask": torch.randn(4, 16, 16)},
        {"need_weights": False, "key_padding_mask": torch.arange(32).view(2, 16) % 5 == 0},
    ],
)
@torch.no_grad()
def test_identity_changes_nothing_however_it_is_called(options, call):
    model = Model(call, **options).eval()
    before = model(PIXELS)
    add_prior(model.attention, vicinal.Prior(2, Grid(4, 4)), SITE, Layout(Grid(4, 4)))
    torch.testing.assert_close(model(PIXELS), before, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("need_weights", [True, False])
def test_another_image_size_is_that_of_its_own_grid(need_weights):
    model = lively(Model({"need_weights": need_weights}))
    other = copy.deepcopy(model)
    vicinal.attach(model, "gab:sigma=1,amplitude=3", img_size=32)
    vicinal.attach(other, "gab:sigma=1,amplitude=3", img_size=(64, 16))  # as many patches
    x = torch.randn(2, 3, 64, 16)
    assert torch.equal(model(x), other(x))
    vicinal.detach(other)
    assert not torch.allclose(model(x), other(x), atol=1e-3)


def test_an_encoder_layer_does_not_bypass_the_prior():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(3, 24, 8, 8)
            self.layer = nn.TransformerEncoderLayer(24, 2, 48, batch_first=True)

        def forward(self, x):
            return self.layer(self.patches(x).flatten(2).mT)

    model = lively(Encoder())
    vicinal.attach(model, "gab:amplitude=3", img_size=32)
    with torch.no_grad():
        quick = model(PIXELS)
    torch.testing.assert_close(quick, model(PIXELS), atol=1e-5, rtol=1e-4)
    vicinal.detach(model)
    assert (model(PIXELS) - quick).abs().max() > 0.01


CALLS = [
    {"need_weights": False},
    {"need_weights": True},
    {"need_weights": False, "attn_mask": torch.eye(16).bool()},
    {"need_weights": True, "attn_mask": torch.randn(16, 16, dtype=torch.float64)},
]


@pytest.mark.parametrize("order", [torch.arange(16), torch.arange(16).view(4, 4).T.flatten()])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("call", CALLS)
@torch.no_grad()
def test_equal_to_the_formula_however_it_is_called(call, batch_first, order):
    model = lively(Model(call, order, batch_first=batch_first)).double()
    vicinal.attach(model, "gmm:init=spread+gab", img_size=32)
    (x, *_), _, (out, weights) = attention_io(model.attention, lambda: model(PIXELS.double()))
    x, out = (y if batch_first else y.transpose(0, 1) for y in (x, out))
    places = [divmod(int(cell), 4) for cell in order]
    logits, bias, v = logits_by_hand(model.attention, x, model.attention.prior, places)
    mask = call.get("attn_mask", torch.zeros(16, 16, dtype=torch.float64))
    logits = logits + bias
    logits = logits.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    expected = logits.softmax(-1)
    assert_same(out, project(model.attention, expected, v))
    if call["need_weights"]:
        assert_same(weights, expected.mean(1))
