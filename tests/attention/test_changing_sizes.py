"""Attention on images of changing sizes: one compiled graph, one exported program."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from attention_helpers import assert_all_close, gradients
from vicinal import Grid, attend

SIZES = [(4, 4), (3, 5), (6, 2)]  # rows and columns of patches; the first is square
HEADS, DIM = 2, 8


class OffsetPrior:
    """A Gaussian of the offset as scale and as bias, over any grid."""

    heads, per_offset = HEADS, True

    def __init__(self, grid, sigma):
        self.grid, self.sigma = grid, sigma
        self.queries = self.keys = grid.tokens
        self.device = sigma.device

    def values(self):
        rows, columns = self.grid.offsets(dtype=self.sigma.dtype)
        exponents = (rows.square() + 2 * columns.square()) / (-2 * self.sigma[:, None, None].square())
        return 1 + exponents.exp(), exponents

    def __call__(self):
        scale, bias = (self.grid.unfold(table) for table in self.values())
        return self.grid.add_prefix(scale, 1.0), self.grid.add_prefix(bias, 0.0)


class MapAttention(nn.Module):
    """Attention on a feature map `(batch, DIM, height, width)` of any size, with a class token."""

    def __init__(self, backend="auto"):
        super().__init__()
        self.backend = backend
        self.class_token = nn.Parameter(torch.randn(1, 1, DIM))
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.sigma = nn.Parameter(torch.tensor([1.5, 2.5]))

    def forward(self, x):
        grid = Grid(x.shape[2], x.shape[3], prefix=1)
        tokens = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x.flatten(2).mT], 1)
        qkv = self.qkv(tokens).view(x.shape[0], grid.tokens, 3, HEADS, DIM // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        prior = OffsetPrior(grid, self.sigma)
        return attend(q, k, v, prior=prior, backend=self.backend).transpose(1, 2).flatten(2)


class PooledPrior:
    """A Gaussian of the distance between patches and pooled keys as bias, over pairs of tokens."""

    heads, grid, per_offset = HEADS, None, False

    def __init__(self, queries, keys, sigma):
        self.places, self.sigma = (queries.coordinates(), 2 * keys.coordinates() + 0.5), sigma
        self.queries, self.keys = queries.tokens, keys.tokens
        self.device = sigma.device

    def values(self):
        places, centers = self.places
        squared = (centers[None] - places[:, None]).square().sum(-1)
        return None, squared / (-2 * self.sigma[:, None, None].square())

    def __call__(self):
        return self.values()


class PooledAttention(MapAttention):
    """Attention of a map to its 2 x 2 pooled map, under a mask."""

    def forward(self, x):
        pooled = nn.functional.avg_pool2d(x, 2)
        prior = PooledPrior(Grid(*x.shape[2:]), Grid(*pooled.shape[2:]), self.sigma)
        q, k, v = (
            part.view(part.shape[0], -1, HEADS, DIM // HEADS).transpose(1, 2)
            for part in (x.flatten(2).mT, *self.qkv(pooled.flatten(2).mT)[..., DIM:].chunk(2, -1))
        )
        mask = (torch.arange(prior.keys) / 10).expand(1, 1, prior.queries, -1)
        return attend(q, k, v, prior=prior, mask=mask, backend=self.backend).transpose(1, 2).flatten(2)


def maps(sizes):
    batch = 7  # another number than the sizes: Dynamo takes equal numbers for one symbol
    return [torch.randn(batch, DIM, *size, requires_grad=True) for size in sizes]


@pytest.mark.parametrize(
    ("backend", "sizes"), [("auto", SIZES), pytest.param("plain", SIZES[1:], marks=pytest.mark.slow)]
)
def test_one_compiled_graph_trains_on_all_sizes(backend, sizes):
    torch.compiler.reset()
    model, counter = MapAttention(backend), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for x in maps(sizes):
        out, expected, tensors = compiled(x), model(x), [x, *model.parameters()]
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        assert_all_close(gradients(out, tensors), gradients(expected, tensors), atol=1e-5, rtol=1e-4)
    assert counter.frame_count == (2 if SIZES[0] in sizes else 1)  # equal sizes are one symbol


def test_one_compiled_graph_serves_sizes_on_both_sides_of_a_chunk():
    torch.compiler.reset()
    model, counter = MapAttention(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    with pytest.MonkeyPatch.context() as patch:
        # 2 heads of 16, 7 and 29 tokens have 512, 98 and 1682 logits.
        patch.setattr("vicinal.attention.chunks.CPU_CHUNK_LOGITS", 300)
        for x in maps([(5, 3), (2, 3), (4, 7)]):
            out, expected, tensors = compiled(x), model(x), [x, *model.parameters()]
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
            assert_all_close(gradients(out, tensors), gradients(expected, tensors), atol=1e-5, rtol=1e-4)
    assert counter.frame_count == 1


def test_one_compiled_graph_trains_with_pooled_keys():
    torch.compiler.reset()
    model, counter = PooledAttention(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for x in maps([(4, 6), (10, 4), (9, 11)]):
        out, expected, tensors = compiled(x), model(x), [x, model.qkv.weight, model.sigma]
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        assert_all_close(gradients(out, tensors), gradients(expected, tensors), atol=1e-5, rtol=1e-4)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["auto", pytest.param("recompute", marks=pytest.mark.slow)])
def test_one_exported_program_serves_all_sizes(backend):
    model = MapAttention(backend).eval()
    sizes = {2: torch.export.Dim("height", min=2, max=64), 3: torch.export.Dim("width", min=2, max=64)}
    program = torch.export.export(model, (maps([(4, 6)])[0].detach(),), dynamic_shapes=(sizes,)).module()
    for x in maps([(4, 6), (7, 3), (2, 9)]):
        torch.testing.assert_close(program(x.detach()), model(x.detach()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prefix", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_grid_keeps_symbolic_sizes(prefix):
    torch.compiler.reset()

    def places(x):
        grid = Grid(x.shape[0], x.shape[1], prefix)
        return grid.index(), grid.coordinates(), grid.squared_distance(), grid.unfold(grid.manhattan_distance())

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(places, fullgraph=True, dynamic=True, backend=counter)
    for size in ((4, 4), (3, 5), (6, 2)):
        assert_all_close(compiled(torch.empty(size)), places(torch.empty(size)), atol=0, rtol=0)
    assert counter.frame_count <= 2
