"""Tokens in any order are served, by their true places; those without fixed places are refused."""

import pytest
import torch
from torch import nn

import vicinal
from by_hand import assert_same, attention_io, prior_by_hand, raster
from vicinal import VicinalError
from vicinal.inspection.refusal import RefusalKind

SIDE = 8


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.heads, self.mask = heads, None

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None if self.mask is None else self.mask.repeat(len(x) // len(self.mask), 1, 1, 1)
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.proj(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Patches of a stem, put into an order, through two blocks; windows and prefix tokens where asked for.

    Args:
        order: cell of each token.
        windows: number of windows that the tokens are cut into.
        prefix: number of tokens without a place.
        last_is_class: put these behind the patches.
        stem: makes the map of patches.
        side: of that map.
        masked: keep patches of a window apart that come from opposite edges of the image.
    """

    def __init__(self, order=None, windows=None, prefix=0, last_is_class=False, stem=None, side=SIDE, masked=False):
        super().__init__()
        torch.manual_seed(0)
        self.stem = stem or nn.Conv2d(3, 16, 4, 4)
        self.order = order if order is not None else torch.arange(side * side)
        self.windows, self.last_is_class = windows, last_is_class
        self.extra = nn.Parameter(torch.randn(1, prefix, 16))
        self.blocks = nn.Sequential(Block(16, 2), Block(16, 2))
        if masked:
            cells = self.order.view(windows, -1)
            places = torch.stack([cells // side, cells % side], -1)
            far = (places[:, :, None] - places[:, None]).abs().amax(-1) > side // 2
            for block in self.blocks:
                block.mask = ~far[:, None]

    def tokens(self, x):
        """Returns tokens, `(batch, tokens, dim)`."""
        return self.stem(x).flatten(2).mT[:, self.order]

    def forward(self, x):
        x = self.tokens(x)
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


def check_formula(model, places, place):
    """Attaches a prior; each block must do what the formula says of tokens in `places`."""
    model = model.double().eval()
    for block in model.blocks:
        nn.init.normal_(block.qkv.weight, std=0.5)
    table = vicinal.attach(model, "gmm:init=spread+gab", img_size=4 * SIDE)
    assert [layer.place for layer in table.layers] == [place] * 2
    pixels = torch.randn(2, 3, 4 * SIDE, 4 * SIDE, dtype=torch.float64)
    for block in model.blocks:
        (x,), _, out = attention_io(block, lambda: model(pixels))
        q, k, v = block.qkv(block.norm(x)).unflatten(-1, (3, block.heads, -1)).permute(2, 0, 3, 1, 4)
        scale, bias = prior_by_hand(block.prior, places)
        logits = scale * (q @ k.mT * q.shape[-1] ** -0.5) + bias
        if block.mask is not None:
            logits = logits.masked_fill(~block.mask.repeat(2, 1, 1, 1), -torch.inf)
        assert_same(out, x + block.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("name", ORDERS)
@torch.no_grad()
def test_any_order_is_served_by_true_places(name):
    order = ORDERS[name].flatten()
    check_formula(Model(order), [divmod(int(cell), SIDE) for cell in order], "8 x 8")


def test_gradients_equal_those_of_the_formula():
    order = ORDERS["by chance"]
    model = Model(order, prefix=1, last_is_class=True).double()
    vicinal.attach(model, "gmm:init=spread+gab", img_size=4 * SIDE)
    x = torch.randn(2, 3, 4 * SIDE, 4 * SIDE, dtype=torch.float64)
    model(x).square().sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    y = torch.cat([model.tokens(x), model.extra.expand(2, -1, -1)], 1)
    position = torch.cat([order.argsort(), torch.tensor([SIDE * SIDE])])  # of each cell, then of the class token
    position = torch.cat([position[-1:], position[:-1]]).argsort()
    for block in model.blocks:
        q, k, v = block.qkv(block.norm(y)).unflatten(-1, (3, block.heads, -1)).permute(2, 0, 3, 1, 4)
        scale, bias = (values.double()[:, position][:, :, position] for values in block.prior())
        weights = (scale * (q @ k.mT * q.shape[-1] ** -0.5) + bias).softmax(-1)
        y = y + block.proj((weights @ v).transpose(1, 2).flatten(2))
    y.square().sum().backward()
    for name, parameter in model.named_parameters():
        of_prior = parameter.dtype == torch.float32
        close = (1e-6 if of_prior else 1e-12) * float(parameter.grad.abs().max())
        torch.testing.assert_close(gradients[name], parameter.grad, atol=close, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("last", "places", "place"),
    [(False, raster(8, 8, prefix=2), "8 x 8 + 2 prefix"), (True, raster(8, 8, suffix=2), "8 x 8 + 2 suffix")],
)
@torch.no_grad()
def test_tokens_without_a_place_can_stand_at_either_end(last, places, place):
    check_formula(Model(prefix=2, last_is_class=last), places, place)


def tiles(order):
    """Windows of 4 x 4 from a map of 8 x 8."""
    return order.view(2, 4, 2, 4).permute(0, 2, 1, 3).flatten()


SHIFTED = tiles(PLACES.roll((-2, -2), (0, 1)))
WINDOWS = {
    "tiles": (tiles(PLACES), lambda number: number % 4),
    "shifted tiles": (SHIFTED, lambda number: (number - 2) % SIDE % 4),
    "dilated": (PLACES.view(4, 2, 4, 2).permute(1, 3, 0, 2).flatten(), lambda number: number // 2),
}
INSIDE = {
    "rows": torch.arange(16),
    "columns": torch.arange(16).view(4, 4).T.flatten(),
    "blocks of 2 x 2": torch.arange(16).view(2, 2, 2, 2).permute(0, 2, 1, 3).flatten(),
    "by chance": by_chance(16, 1),
}


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("name", WINDOWS)
@torch.no_grad()
def test_windows_are_served_in_every_layout_and_order(name, inside):
    order, local = WINDOWS[name]
    order = order.view(4, 16)[:, INSIDE[inside]]
    places = [[tuple(local(number) for number in divmod(int(cell), SIDE)) for cell in window] for window in order]
    assert all(window == places[0] for window in places)
    masked = name == "shifted tiles"
    check_formula(Model(order.flatten(), windows=4, masked=masked), places[0], "4 windows of 4 x 4")


def test_a_wrap_around_the_edge_without_a_mask_is_refused():
    inspection = vicinal.inspect(Model(SHIFTED, windows=4), img_size=4 * SIDE)
    assert [site.refusal.kind for site in inspection.sites] == [RefusalKind.UNVERIFIED] * 2


class SortedByContent(Model):
    def tokens(self, x):
        x = super().tokens(x)
        return x.gather(1, x[..., :1].argsort(1).expand_as(x))


class TwoScales(Model):
    def tokens(self, x):
        fine = super().tokens(x)
        return torch.cat([fine, nn.functional.avg_pool2d(self.stem(x), 2).flatten(2).mT], 1)


class DroppedAtRandom(Model):
    def tokens(self, x):
        return super().tokens(x)[:, torch.randperm(SIDE * SIDE)[: SIDE * SIDE // 2]]


class DroppedPerImage(Model):
    def tokens(self, x):
        kept = torch.stack([torch.randperm(SIDE * SIDE)[: SIDE * SIDE // 4] for _ in x])
        x = super().tokens(x)
        return x.gather(1, kept[..., None].expand(-1, -1, x.shape[-1]))


class ShuffledAtRandom(Model):
    def tokens(self, x):
        return super().tokens(x)[:, torch.randperm(SIDE * SIDE)]


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        # A disturbance that swaps two tokens is heard the same under all ramps.
        (SortedByContent, {RefusalKind.CONTENT, RefusalKind.IRREGULAR, RefusalKind.SPREAD}),
        (TwoScales, {RefusalKind.IRREGULAR}),
        (DroppedAtRandom, {RefusalKind.CONTENT, RefusalKind.IRREGULAR}),
        (DroppedPerImage, {RefusalKind.UNREAD, RefusalKind.IRREGULAR}),
        (ShuffledAtRandom, {RefusalKind.CONTENT, RefusalKind.IRREGULAR, RefusalKind.SPREAD}),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_tokens_without_fixed_places_are_refused(make, kinds, seed):
    model = make()
    torch.manual_seed(seed)
    inspection = vicinal.inspect(model, img_size=4 * SIDE)
    assert len(inspection.sites) == 2
    assert {site.refusal.kind for site in inspection.refused} <= kinds
    assert inspection.served == []
    with pytest.raises(VicinalError, match=r"blocks\.0"):
        vicinal.attach(model, "gmm", inspection=inspection)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("side", [3, 4, 7, 16])
def test_any_size_is_found_behind_convolutions(side, seed):
    torch.manual_seed(seed)
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.GELU(), nn.Conv2d(16, 16, 3, 2, 1))
    inspection = vicinal.inspect(Model(stem=stem, side=side), img_size=4 * side)
    assert [site.place for site in inspection.sites] == [f"{side} x {side}"] * 2
    for site in inspection.sites:
        assert torch.equal(site.queries.index, torch.arange(side * side)[None])


@pytest.mark.parametrize("channels", [4, 8])
def test_a_narrow_model_is_served(channels):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, channels, 4, 4), nn.Flatten(2), Transposed(), Block(channels, 2))
    inspection = vicinal.inspect(model, img_size=64)
    assert [site.place for site in inspection.sites] == ["16 x 16"]


class Transposed(nn.Module):
    def forward(self, x):
        return x.mT
