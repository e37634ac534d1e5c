"""Tokens in another order than the grid's are refused, whatever the order; those in order are not."""

import pytest
import torch
from torch import nn

import vicinal
from vicinal import VicinalError

SIDE = 8


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.heads = heads

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Patches of a stem, put into an order, through two blocks; windows and prefix tokens where asked for."""

    def __init__(self, order=None, windows=None, prefix=0, last_is_class=False, stem=None, side=SIDE):
        super().__init__()
        torch.manual_seed(0)
        self.stem = stem or nn.Conv2d(3, 16, 4, 4)
        self.order = order if order is not None else torch.arange(side * side)
        self.windows, self.last_is_class = windows, last_is_class
        self.extra = nn.Parameter(torch.randn(1, prefix, 16))
        self.blocks = nn.Sequential(Block(16, 2), Block(16, 2))

    def forward(self, x):
        x = self.stem(x).flatten(2).mT[:, self.order]
        if self.windows:
            x = x.unflatten(1, (self.windows, -1)).flatten(0, 1)
        extra = self.extra.expand(len(x), -1, -1)
        return self.blocks(torch.cat([x, extra] if self.last_is_class else [extra, x], 1))


def by_chance(count, seed):
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


PLACES = torch.arange(SIDE * SIDE).view(SIDE, SIDE)
ORDERS = {
    "columns": PLACES.T,
    "backwards": PLACES.flip(0, 1),
    "mirrored": PLACES.flip(1),
    "by chance": by_chance(SIDE * SIDE, 0),
    "blocks of 2 x 2": PLACES.view(4, 2, 4, 2).permute(0, 2, 1, 3),
    "every second row": PLACES.view(4, 2, 8).permute(1, 0, 2),
    **{
        f"half of it by chance, {seed}": torch.cat([PLACES[:4].flatten(), PLACES[4:].flatten()[by_chance(32, seed)]])
        for seed in range(8)
    },
    "shifted by a row": PLACES.roll(1, 0),
    "shifted by three columns": PLACES.roll(3, 1),
}


@pytest.mark.parametrize("name", ORDERS)
def test_other_orders_are_refused(name):
    with pytest.raises(VicinalError, match=r"nothing to attach to. blocks.0: its tokens"):
        vicinal.attach(Model(ORDERS[name].flatten()), "gmm", img_size=4 * SIDE)


def test_columns_are_named():
    with pytest.raises(VicinalError, match="its tokens run down the columns of the image, not along its rows"):
        vicinal.attach(Model(PLACES.T.flatten()), "gmm", img_size=4 * SIDE)


def test_a_class_token_at_the_end_is_refused():
    assert len(vicinal.attach(Model(prefix=1), "gmm", img_size=4 * SIDE).layers) == 2
    with pytest.raises(VicinalError, match="its tokens are not in the places of the grid, but shifted"):
        vicinal.attach(Model(prefix=1, last_is_class=True), "gmm", img_size=4 * SIDE)


def tiles(order):
    """Windows of 4 x 4 from a map of 8 x 8."""
    return order.view(2, 4, 2, 4).permute(0, 2, 1, 3).flatten()


WINDOWS = {
    "tiles": tiles(PLACES),
    "shifted tiles": tiles(PLACES.roll((-2, -2), (0, 1))),
    "dilated": PLACES.view(4, 2, 4, 2).permute(1, 3, 0, 2).flatten(),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_served_in_every_usual_layout(name):
    table = vicinal.attach(Model(WINDOWS[name], windows=4), "gmm", img_size=4 * SIDE)
    assert [layer.place for layer in table.layers] == ["4 windows of 4 x 4"] * 2


@pytest.mark.parametrize(
    "inside", [torch.arange(16).view(4, 4).T, torch.arange(16).view(2, 2, 2, 2).permute(0, 2, 1, 3)]
)
def test_windows_of_another_order_inside_are_refused(inside):
    order = tiles(PLACES).view(4, 16)[:, inside.flatten()]
    with pytest.raises(VicinalError, match="its tokens"):
        vicinal.attach(Model(order.flatten(), windows=4), "gmm", img_size=4 * SIDE)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("side", [3, 4, 7, 16])
def test_any_size_is_seen_behind_convolutions(side, seed):
    torch.manual_seed(seed)
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.GELU(), nn.Conv2d(16, 16, 3, 2, 1))
    table = vicinal.attach(Model(stem=stem, side=side), "gmm", img_size=4 * side)
    assert [layer.place for layer in table.layers] == [f"{side} x {side}"] * 2
