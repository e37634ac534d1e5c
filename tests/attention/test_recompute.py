"""The path that recomputes: outputs, gradients and what it keeps for backward."""

import pytest
import torch

from attention_helpers import SPECS, assert_all_close, gradients, inputs
from vicinal import Grid, attend, build_prior
from vicinal.attention.recompute import RecomputedAttention


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.usefixtures("chunk_sizes")
def test_recomputing_equals_plain_in_outputs_and_all_gradients(spec):
    grid = Grid(3, 3, prefix=1)
    q, k, v = inputs(grid, batch=5, v_dim=6)
    prior = build_prior(spec, heads=2, grid=grid)
    tensors = [q, k, v, *prior.parameters()]
    plain, fast = (attend(q, k, v, prior=prior, backend=backend) for backend in ("plain", "recompute"))
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)
    assert_all_close(gradients(fast, tensors), gradients(plain, tensors), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shape", [(5, 2, 10, 10), (1, 1, 10, 10), (5, 1, 10, 10), (10, 10), (1, 2, 1, 10)])
@pytest.mark.usefixtures("chunk_sizes")
def test_masks_of_every_shape_and_their_gradients(shape):
    grid = Grid(3, 3, prefix=1)
    q, k, v = inputs(grid, batch=5)
    prior = build_prior("gmm:init=spread+gab", heads=2, grid=grid)
    mask = torch.randn(shape, requires_grad=True)
    tensors = [q, k, v, mask, *prior.parameters()]
    plain, fast = (attend(q, k, v, prior=prior, mask=mask, backend=backend) for backend in ("plain", "auto"))
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)
    assert_all_close(gradients(fast, tensors), gradients(plain, tensors), atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("chunk_sizes")
@pytest.mark.parametrize(("dropout", "per_offset"), [(0.0, True), (0.0, False), (0.4, True)])
def test_gradcheck_in_double(dropout, per_offset):
    grid = Grid(2, 3, prefix=1)
    q, k, v = inputs(grid, batch=2, dim=3, dtype=torch.float64)
    shape = (2, *grid.table_shape) if per_offset else (2, grid.patches, grid.patches)
    prior_scale, prior_bias = (torch.rand(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = torch.randn(2, 1, 7, 7, dtype=torch.float64, requires_grad=True)

    def function(*tensors):
        q, k, v, prior_scale, prior_bias, mask = tensors
        settings = (grid.height, grid.width, grid.prefix, per_offset, 0.5, dropout, 11)
        return RecomputedAttention.apply(q, k, v, prior_scale, prior_bias, mask, *settings)

    assert torch.autograd.gradcheck(function, (q, k, v, prior_scale, prior_bias, mask))


def test_dropout_follows_the_seed():
    q, k, v = inputs(Grid(4, 4))
    prior = build_prior("gmm", heads=2, grid=Grid(4, 4))
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(attend(q, k, v, prior=prior, dropout=0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_strided_views_of_one_qkv_array_work_as_they_are():
    grid = Grid(3, 3)
    qkv = torch.randn(4, grid.tokens, 3, 2, 8, requires_grad=True)
    prior = build_prior("gmm:init=spread", heads=2, grid=grid)
    fast, plain = (
        gradients(attend(*qkv.permute(2, 0, 3, 1, 4).unbind(0), prior=prior, backend=backend), [qkv])
        for backend in ("recompute", "plain")
    )
    assert_all_close(fast, plain, atol=1e-5, rtol=1e-4)


def test_only_q_k_v_and_tables_are_kept_for_backward():
    grid = Grid(8, 8)
    q, k, v = inputs(grid, batch=16, heads=4, dim=16)
    prior = build_prior("gmm:init=spread+gab", heads=4, grid=grid)
    sizes = []

    def saved(backend):
        sizes.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            attend(q, k, v, prior=prior, backend=backend)
        return sum(sizes)

    limit = 3 * q.numel() + 20 * 4 * 15 * 15  # and a few tables of 4 heads
    assert saved("recompute") <= limit
    assert saved("plain") > 3 * q.numel() + 2 * 16 * 4 * grid.tokens**2


def test_frozen_inputs_get_no_gradient():
    grid = Grid(2, 2)
    q, k, v = inputs(grid)
    prior = build_prior("gmm:init=spread+gab", heads=2, grid=grid)
    prior.parts[0].requires_grad_(False)
    attend(q, k.detach(), v, prior=prior).sum().backward()
    assert q.grad is not None
    assert prior.parts[0].flat_alpha.grad is None
    assert prior.parts[1].flat_sigma.grad is not None
