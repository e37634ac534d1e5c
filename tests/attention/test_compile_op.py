"""Attention under torch.compile, torch.export, torch.func, flex_attention and on the meta device."""

import pytest
import torch

from attention_helpers import assert_all_close, gradients, inputs
from vicinal import Grid, VicinalError, attend, build_prior
from vicinal.attention import chunks


def test_function_transforms_work():
    grid = Grid(2, 2)
    q, k, v = (x.detach() for x in inputs(grid))
    prior = build_prior("gmm:init=spread+gab", heads=2, grid=grid)
    per_image = torch.func.vmap(
        torch.func.grad(lambda q, k, v: attend(q[None], k[None], v[None], prior=prior).square().sum()), in_dims=0
    )(q, k, v)
    q.requires_grad_()
    (expected,) = torch.autograd.grad(attend(q, k, v, prior=prior).square().sum(), q)
    torch.testing.assert_close(per_image, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("spec", ["gmm:init=spread", "conv", "gmm:init=spread+gab"])
def test_compiles_in_one_graph_with_gradients(spec):
    grid = Grid(4, 4, prefix=1)
    prior = build_prior(spec, heads=2, grid=grid)
    q, k, v = inputs(grid)
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, prior=prior), fullgraph=True)
    out, expected = compiled(q, k, v), attend(q, k, v, prior=prior)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    tensors = [q, k, v, *prior.parameters()]
    assert_all_close(gradients(out, tensors), gradients(expected, tensors), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tokens_in_piece", [2**19, 100])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_compiled_operator_keeps_what_it_promises(with_bias, tokens_in_piece, monkeypatch):
    monkeypatch.setattr(chunks, "CPU_CHUNK_LOGITS", tokens_in_piece)
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


def test_flex_equals_the_others_without_a_gradient():
    grid = Grid(4, 4, prefix=1)
    q, k, v = (x.detach() for x in inputs(grid, dim=16))
    mask = torch.randn(3, 1, grid.tokens, grid.tokens)
    for spec in ("gmm:init=spread+gab", "conv"):
        prior = build_prior(spec, heads=2, grid=grid)
        with torch.no_grad():
            out = attend(q, k, v, prior=prior, mask=mask, backend="flex")
            torch.testing.assert_close(
                out, attend(q, k, v, prior=prior, mask=mask, backend="plain"), atol=1e-5, rtol=1e-4
            )
    with pytest.raises(VicinalError, match=r"no backward on a CPU; use backend='auto', or torch.no_grad"):
        attend(q, k, v, prior=prior, backend="flex")
    with pytest.raises(VicinalError, match=r"has no dropout, given 0.1; use backend='auto'"):
        attend(q, k, v, prior=prior, backend="flex", dropout=0.1)


@pytest.mark.parametrize("spec", ["none", "gmm", "gab", "gmm+elm", "decay"])
@pytest.mark.parametrize("gradient", [True, False])
def test_shapes_can_be_computed_on_the_meta_device(spec, gradient):
    q = torch.zeros(3, 2, 4, 5, device="meta", requires_grad=True)
    prior = build_prior(spec, heads=2, grid=Grid(2, 2)).to("meta")
    with torch.set_grad_enabled(gradient):
        out = attend(q, q, q, prior=prior)
    assert out.device.type == "meta"
    assert out.shape == q.shape
