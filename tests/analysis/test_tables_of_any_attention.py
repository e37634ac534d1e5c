"""Biases in attention that is written in unusual ways, and what is not a table."""

import numpy as np
import pytest
import torch
from torch import nn

import vicinal
from vicinal.analysis.learned_tables import tables_of


class Odd(nn.Module):
    """Attention over 4 x 4 patches with a bias that is no table."""

    def __init__(self, kind):
        super().__init__()
        self.patches, self.qk, self.kind = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 16), kind
        self.table = nn.Parameter(torch.randn(2, 16, 16))
        self.num_heads, self.image_size = 2, 16

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        q, k = self.qk(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        logits = q @ k.mT
        if self.kind == "of the image":
            logits = logits + x.mean((1, 2))[:, None, None, None] * torch.eye(16)
        elif self.kind == "free":
            logits = logits + self.table
        elif self.kind == "constant":
            logits = logits + self.table[:, :1, :1]
        return logits.softmax(-1) @ x[:, None]


@pytest.mark.parametrize("kind", ["none", "of the image", "free", "constant"])
def test_what_is_no_table_is_left_out(kind):
    with pytest.raises(vicinal.VicinalError, match="Odd has no table"):
        tables_of(Odd(kind))


@pytest.mark.parametrize("name", ["vit-micro", "cait"])  # talking heads change logits by a constant
def test_a_model_without_tables_is_told_so(name):
    with pytest.raises(vicinal.VicinalError, match="has no table"):
        tables_of(vicinal.create_model(name, img_size=16, depth=1))


def bias_by_offset(table, heads, places):
    """The first numbers of a parameter as a bias over pairs of tokens, `(heads, tokens, tokens)`."""
    row, column = (places[None] - places[:, None]).unbind(-1)  # key - query
    return table.flatten()[: heads * 49].view(heads, 49)[:, (row + 3) * 7 + column + 3]


def check_table(model, heads):
    (table,) = tables_of(model)
    expected = model.table.detach().flatten()[: heads * 49].view(heads, 7, 7).numpy()
    np.testing.assert_allclose(table.values, expected, rtol=1e-6)


PLACES = torch.cartesian_prod(torch.arange(4), torch.arange(4))


class TwoHeadAxes(Odd):
    """Attention whose heads are on two axes, with a bias that differs by offset."""

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        q, k = self.qk(x).unflatten(-1, (2, 2, 2, 2)).permute(2, 0, 3, 4, 1, 5)
        bias = bias_by_offset(self.table, 4, PLACES).unflatten(0, (2, 2))
        return ((q @ k.mT) + bias).softmax(-1) @ x[:, None, None]


def test_heads_on_two_axes_give_their_tables():
    check_table(TwoHeadAxes("by offset"), heads=4)


class InAnyOrder(Odd):
    """Attention over patches in a random order, between a class token and a register, with a bias by offset."""

    def forward(self, x):
        order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
        x = self.patches(x).flatten(2).mT[:, order]
        x = torch.nn.functional.pad(x, (0, 0, 1, 1))
        q, k = self.qk(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        bias = bias_by_offset(self.table, 2, PLACES[order])
        logits = q @ k.mT + torch.nn.functional.pad(bias, (1, 1, 1, 1), value=-1.0)
        return logits.softmax(-1) @ x[:, None]


def test_tokens_in_any_order_give_their_table():
    check_table(InAnyOrder("by offset"), heads=2)


class Added(Odd):
    """A bias that `baddbmm` adds, with images and heads on one axis."""

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        q, k = self.qk(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4).flatten(1, 2)
        bias = bias_by_offset(self.table, 2, PLACES)
        logits = torch.baddbmm(bias.repeat(len(x), 1, 1), q, k.mT, alpha=0.5)
        return (logits.softmax(-1) @ x.repeat_interleave(2, 0)).unflatten(0, (-1, 2))


def test_a_bias_inside_of_a_product_is_read():
    check_table(Added("by offset"), heads=2)


def test_layers_that_were_not_read_are_named_with_the_reason():
    model = vicinal.create_model("cait", img_size=16, depth=1, depth_token_only=2)
    first, second = vicinal.inspect(model).refused
    with pytest.raises(vicinal.VicinalError, match="differs by offset; not read: ") as raised:
        tables_of(model)
    assert f"{first.name} and 1 more ({first.reason})" in str(raised.value)
    assert second.reason == first.reason
    with pytest.raises(vicinal.VicinalError, match=r"differs by offset\. "):
        tables_of(Odd("none"))
