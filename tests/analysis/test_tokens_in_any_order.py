"""Attention whose tokens are not row by row behind a prefix, against loops over pairs of tokens."""

import math

import pytest
import torch
from timm.models.hiera import Hiera
from torch import nn

from vicinal import VicinalError
from vicinal.analysis.attention_maps import attention_maps, attention_statistics, rollout

ROWS, COLUMNS = 4, 6
ORDER = torch.randperm(ROWS * COLUMNS, generator=torch.Generator().manual_seed(5))
CELLS = [None, *ORDER[:10].tolist(), None, *ORDER[10:].tolist(), None]  # cell of each token


class Attention(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.qkv, self.norm = nn.Linear(width, 3 * width, bias=False), nn.LayerNorm(width)
        nn.init.normal_(self.qkv.weight, std=0.5)
        self.weights = None

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        self.weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return x + (self.weights @ v).transpose(1, 2).flatten(2)


class Mixed(nn.Module):
    """A class token, patches in a random order with a register among them, and another register behind."""

    def __init__(self):
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 16, 8, 8), nn.Parameter(torch.randn(3, 16))
        self.blocks = nn.Sequential(Attention(), Attention())

    def forward(self, x):
        x = self.patches(x).flatten(2).mT[:, ORDER]
        own = self.token.expand(len(x), 3, 16)
        return self.blocks(torch.cat([own[:, :1], x[:, :10], own[:, 1:2], x[:, 10:], own[:, 2:]], 1))


def close(got, expected):
    torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=1e-4)


def distances(weights, cells, columns):
    """Mean attention distance of each head, of weights `(windows, heads, tokens, tokens)`, one pair after another."""
    found = []
    for head in range(weights.shape[1]):
        sums = queries = 0.0
        for window, at in enumerate(cells):
            for q, here in enumerate(at):
                if here is None:
                    continue
                far = total = 0.0
                for k, there in enumerate(at):
                    if there is not None:
                        weight = float(weights[window, head, q, k])
                        far += weight * math.dist(divmod(here, columns), divmod(there, columns))
                        total += weight
                sums, queries = sums + far / total, queries + 1
        found.append(sums / queries)
    return torch.tensor(found, dtype=torch.float64)


def on_map(rows_of_weights):
    """Weights of keys, `(heads, tokens)`, as a map `(heads, rows, columns)`."""
    expected = torch.zeros(len(rows_of_weights), ROWS * COLUMNS, dtype=torch.float64)
    for key, cell in enumerate(CELLS):
        if cell is not None:
            expected[:, cell] = rows_of_weights[:, key].double()
    return expected.view(-1, ROWS, COLUMNS)


@pytest.fixture
def mixed():
    model, image = Mixed().eval(), torch.randn(1, 3, 32, 48)
    with torch.no_grad():
        model(image)
    return model, image, [block.weights[0] for block in model.blocks]


def test_statistics_find_every_patch(mixed):
    model, image, weights = mixed
    for layer, each in zip(attention_statistics(model, image).layers, weights, strict=True):
        assert (layer.grid, layer.windows, layer.keys) == ((4, 6), 1, 27)
        close(torch.tensor(layer.distance_patches), distances(each[None], [CELLS], COLUMNS))
        patches = [token for token, cell in enumerate(CELLS) if cell is not None]
        entropy = -(each.double() * each.double().log()).sum(-1)[:, patches].mean(-1)
        close(torch.tensor(layer.entropy), entropy)
        close(torch.tensor(layer.relative_entropy), entropy / math.log(27))


def test_maps_find_every_patch(mixed):
    model, image, weights = mixed
    patches = [token for token, cell in enumerate(CELLS) if cell is not None]
    rows = {"class": [0], "mean": patches, (2, 5): [CELLS.index(2 * 6 + 5)], (0, 0): [CELLS.index(0)]}
    for query, tokens in rows.items():
        for found, each in zip(attention_maps(model, image, query=query), weights, strict=True):
            close(found.values[0], on_map(each[:, tokens].mean(1)))


def test_rollout_finds_every_patch(mixed):
    model, image, weights = mixed
    product = torch.eye(27, dtype=torch.float64)
    for each in weights:
        product = (each.double().mean(0) + torch.eye(27)) / 2 @ product
    patches = [token for token, cell in enumerate(CELLS) if cell is not None]
    for query, tokens in {"class": [0], "mean": patches, (3, 1): [CELLS.index(3 * 6 + 1)]}.items():
        close(rollout(model, image, query=query).values[0], on_map(product[tokens].mean(0)[None]))


class Halves(nn.Module):
    """Two windows of 4 x 3 patches, each behind a class token of its own."""

    def __init__(self):
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 16, 8, 8), nn.Parameter(torch.randn(1, 1, 16))
        self.blocks = nn.Sequential(Attention())

    def forward(self, x):
        halves = self.patches(x).unflatten(-1, (2, 3)).permute(0, 3, 2, 4, 1).flatten(2, 3).flatten(0, 1)
        return self.blocks(torch.cat([self.token.expand(len(halves), 1, 16), halves], 1))


def test_windows_that_have_a_class_token_each_are_read():
    model, image = Halves().eval(), torch.randn(1, 3, 32, 48)
    with torch.no_grad():
        model(image)
    weights = model.blocks[0].weights  # (windows, heads, tokens, tokens)
    cells = [[None, *(6 * row + 3 * half + column for row in range(4) for column in range(3))] for half in (0, 1)]
    (layer,) = attention_statistics(model, image).layers
    assert (layer.grid, layer.windows, layer.keys) == ((4, 6), 2, 13)
    close(torch.tensor(layer.distance_patches), distances(weights, cells, COLUMNS))
    entropy = -(weights.double() * weights.double().log()).sum(-1)[:, :, 1:].mean((0, 2))
    close(torch.tensor(layer.relative_entropy), entropy / math.log(13))
    for query, tokens in {"class": [0], "mean": range(1, 13)}.items():
        (found,) = attention_maps(model, image, query=query)
        expected = torch.zeros(2, ROWS * COLUMNS, dtype=torch.float64)
        for half, own in enumerate(cells):
            expected[:, own[1:]] = weights[half][:, tokens, 1:].double().mean(1) / 2
        close(found.values[0], expected.view(-1, ROWS, COLUMNS))
    with pytest.raises(VicinalError, match=r"blocks.0: its windows have tokens of their own"):
        rollout(model, image)


@pytest.fixture
def hiera():
    """Hiera, the weights of its first two layers, and the cells of their windows, as its `Unroll` orders them."""
    stages = {"stages": (2, 1), "q_pool": 1, "mask_unit_attn": (True, False)}
    apart = {"patch_kernel": (4, 4), "patch_padding": (0, 0)}
    model = Hiera(img_size=(64, 96), mask_unit_size=(4, 4), embed_dim=16, num_heads=2, num_classes=3, **stages, **apart)
    weights = []
    for block in model.blocks[:2]:
        nn.init.normal_(block.attn.qkv.weight, std=0.5)

        def keep(_, given, qkv, attention=block.attn):
            windows = qkv.shape[1] // attention.window_size
            q, k, _ = qkv[0].reshape(-1, windows, 3, 2, attention.head_dim).permute(2, 1, 3, 0, 4)
            weights.append((q @ k.mT * attention.scale).softmax(-1))

        block.attn.qkv.register_forward_hook(keep)
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        model.eval()(image)
    cells = model.unroll(torch.arange(16 * 24.0).view(1, -1, 1)).long().flatten()
    cells = cells.view(-1, len(weights[0])).T.tolist()  # (windows, tokens)
    return model, image, [each.double() for each in weights[:2]], cells


def test_windows_of_unrolled_tokens_are_read(hiera):
    model, image, weights, cells = hiera
    found = attention_statistics(model, image).layers
    for layer, each in zip(found, weights, strict=False):
        assert (layer.grid, layer.windows) == ((16, 24), len(cells))
        close(torch.tensor(layer.distance_patches), distances(each, cells, 24))
    row, column = 13, 9
    (window,) = [number for number, own in enumerate(cells) if row * 24 + column in own]
    for found, each in zip(attention_maps(model, image, layers=[0, 1], query=(row, column)), weights, strict=True):
        expected = torch.zeros(2, 16 * 24, dtype=torch.float64)
        expected[:, cells[window]] = each[window, :, cells[window].index(row * 24 + column)]
        close(found.values[0], expected.view(2, 16, 24))


def test_windows_of_unrolled_tokens_are_rolled_out(hiera):
    model, image, weights, cells = hiera
    product = torch.eye(16 * 24, dtype=torch.float64)
    for each in weights:
        step = torch.eye(16 * 24, dtype=torch.float64) / 2
        for own, window in zip(cells, each.mean(1), strict=True):
            for q, here in enumerate(own):
                step[here, own] += window[q] / 2
        product = step @ product
    close(rollout(model, image, layers=[0, 1], query=(13, 9)).map[0].flatten(), product[13 * 24 + 9])
