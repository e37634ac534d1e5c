"""Attention under torch.compile and torch.export."""

import pytest
import torch

from attention_helpers import assert_all_close, gradients, inputs
from vicinal import Grid, attend, build_prior
from vicinal.attention import chunks
from vicinal.attention.compile_op import operator_arguments


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param("gmm:init=spread", marks=pytest.mark.slow),
        pytest.param("conv", marks=pytest.mark.slow),
        "gmm:init=spread+gab",
    ],
)
def test_compiles_in_one_graph_with_gradients(spec):
    grid = Grid(4, 4, prefix=1)
    prior = build_prior(spec, heads=2, grid=grid)
    q, k, v = inputs(grid)
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, prior=prior), fullgraph=True)
    out, expected = compiled(q, k, v), attend(q, k, v, prior=prior)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    tensors = [q, k, v, *prior.parameters()]
    assert_all_close(gradients(out, tensors), gradients(expected, tensors), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("logits_in_chunk", [2**19, 100])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_compiled_operator_keeps_what_it_promises(with_bias, logits_in_chunk, monkeypatch):
    monkeypatch.setattr(chunks, "CPU_CHUNK_LOGITS", logits_in_chunk)
    grid = Grid(2, 3, prefix=1)
    q, k, v = inputs(grid, v_dim=5)
    table = torch.rand(2, *grid.table_shape, requires_grad=True)
    bias = torch.randn(2, *grid.table_shape, requires_grad=True) if with_bias else None
    mask = torch.randn(3, 1, 7, 7) if with_bias else None
    settings = (grid.height, grid.width, grid.prefix, True, 0.5, 0.0, 0)
    torch.library.opcheck(torch.ops.vicinal.recomputed_attention.default, (q, k, v, table, bias, mask, *settings))


def test_a_compiled_model_keeps_no_logits_for_backward():
    grid = Grid(4, 4)
    q, k, v = inputs(grid, batch=16)
    prior = build_prior("gmm:init=spread", heads=2, grid=grid)
    sizes = []
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, prior=prior), fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        compiled(q, k, v)
    assert sizes
    assert max(sizes) <= q.numel() < 16 * 2 * grid.tokens**2


def test_exports():
    grid = Grid(4, 4)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.prior = build_prior("gmm:init=spread+conv", heads=2, grid=grid)

        def forward(self, q, k, v):
            return attend(q, k, v, prior=self.prior)

    model, (q, k, v) = Model().eval(), inputs(grid)
    exported = torch.export.export(model, (q, k, v)).module()
    torch.testing.assert_close(exported(q, k, v), model(q, k, v), atol=1e-5, rtol=1e-5)


def test_the_operators_arguments_are_named_as_in_its_schema():
    names = [argument.name for argument in torch.ops.vicinal.recomputed_attention.default._schema.arguments]
    call = operator_arguments(names)
    assert (*call._fields[:-1], *call.settings._fields) == tuple(names)
    assert (*call[:-1], *call.settings) == tuple(names)
