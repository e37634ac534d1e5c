"""Half precision: dtypes, and errors against float64."""

import pytest
import torch

from attention_helpers import assert_all_close, gradients, inputs
from vicinal import Grid, attend, build_prior
from vicinal.attention import chunks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", ["gmm:init=spread", "gab", "gmm:init=spread+conv"])
@pytest.mark.usefixtures("chunk_sizes")
def test_half_precision_stays_within_its_rounding(spec, dtype):
    grid = Grid(3, 3)
    prior = build_prior(spec, heads=2, grid=grid)
    half = inputs(grid, batch=5, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in half]
    wide = build_prior(spec, heads=2, grid=grid).double()
    wide.load_state_dict(prior.state_dict())
    out, truth = attend(*half, prior=prior), attend(*exact, prior=wide, backend="plain")
    assert out.dtype == dtype
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), truth, atol=2 * step, rtol=2 * step)
    ours = gradients(out, [*half, *prior.parameters()])
    theirs = gradients(truth, [*exact, *wide.parameters()])
    for gradient, expected in zip(ours, theirs, strict=True):
        size = expected.abs().max().item()
        torch.testing.assert_close(gradient.double(), expected, atol=8 * step * size, rtol=0)


@pytest.mark.usefixtures("chunk_sizes")
def test_half_products_as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(chunks, "product_dtype", lambda q: q.dtype)
    grid = Grid(3, 3, prefix=1)
    prior = build_prior("gmm:init=spread+gab", heads=2, grid=grid)
    half = inputs(grid, batch=5, dtype=torch.bfloat16)
    full = [x.detach().float().requires_grad_() for x in half]
    mask = torch.randn(5, 1, 10, 10)
    out = attend(*half, prior=prior, mask=mask)
    expected = attend(*full, prior=prior, mask=mask, backend="plain")
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0.02)
    ours, theirs = (gradients(x, [*t, *prior.parameters()]) for x, t in ((out, half), (expected, full)))
    for gradient, truth in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient.float(), truth, atol=0.05 * truth.abs().max().item(), rtol=0)


def test_autocast_runs_in_half_and_keeps_tables_in_full_precision():
    grid = Grid(4, 4)
    prior = build_prior("gmm:init=spread+rpe-mlp:init=normal", heads=2, grid=grid)
    q, k, v = inputs(grid)
    expected = prior()
    with torch.autocast("cpu", torch.bfloat16):
        inside = prior()
        out = attend(q, k, v, prior=prior)
        plain = attend(q, k, v, prior=prior, backend="plain")
    assert all(values.dtype == torch.float32 for values in inside)
    assert_all_close(inside, expected, atol=0, rtol=0)
    assert out.dtype == plain.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), attend(q, k, v, prior=prior), atol=0.05, rtol=0.05)
    torch.testing.assert_close(out, plain, atol=0.05, rtol=0.05)


def test_a_model_cast_to_half_keeps_finite_tables():
    for spec in ("gmm:init=spread", "gab", "conv", "decay", "rpe-mlp:init=normal", "elm"):
        prior = build_prior(spec, heads=2, grid=Grid(8, 8))
        full = prior()
        half = prior.half()()
        for values, exact in zip(half, full, strict=True):
            if exact is not None:
                assert values.dtype == torch.float32
                torch.testing.assert_close(values, exact, atol=0.05, rtol=0.01)
