"""Half precision: dtypes, and errors against float64."""

import copy

import pytest
import torch
from torch.nn import functional as F

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


def relative_error(x, truth):
    return ((x.double() - truth).square().mean() / truth.square().mean()).sqrt().item()


def errors(attention, draws, prior):
    """Returns relative root mean square errors of the output, and of gradients of q, k, v and the prior's parameters.

    The truth is the formula in float64, computed from the same half-precision inputs. All draws count together: the
    gradient of one parameter is a single number, which one draw can bring near 0.

    Args:
        attention: called with q, k and v.
        draws: several of q, k, v and the gradient of the output.
        prior: of the attention.
    """
    wide, both = copy.deepcopy(prior).double(), []
    for *qkv, direction in draws:
        half, exact = ([x.detach().to(dtype).requires_grad_() for x in qkv] for dtype in (qkv[0].dtype, torch.float64))
        scale, bias = wide()
        logits = exact[0] @ exact[1].mT * exact[0].shape[-1] ** -0.5
        logits = logits if scale is None else logits * scale
        truth = (logits if bias is None else logits + bias).softmax(-1) @ exact[2]
        out = attention(*half)
        expected = torch.autograd.grad(truth, [*exact, *wide.parameters()], direction.double())
        found = torch.autograd.grad(out, [*half, *prior.parameters()], direction)
        both.append(((out, *found), (truth, *expected)))
    found, truths = ([torch.stack(each) for each in zip(*side, strict=True)] for side in zip(*both, strict=True))
    return [relative_error(a, b) for a, b in zip(found, truths, strict=True)]


@pytest.mark.parametrize("spec", ["none", "gab", "conv", "gmm:init=spread", "gmm:init=spread+gab"])
@pytest.mark.parametrize("dim", [16, 32, 48, 64, 80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_at_most_as_much_as_sdpa(dtype, dim, spec):
    grid = Grid(8, 8, prefix=1)
    torch.manual_seed(0)
    draws = torch.randn(3, 4, 4, 4, grid.tokens, dim).to(dtype)
    *qkv, _ = draws[0]
    plain = errors(F.scaled_dot_product_attention, draws, build_prior("none", heads=4, grid=grid))
    prior = build_prior(spec, heads=4, grid=grid)
    # A sum over all pairs, the gradient of a parameter is compared to the gradients of queries.
    limits = [*plain, *(plain[1] for _ in prior.parameters())]
    for backend in ("auto", "recompute", "plain"):
        found = errors(lambda q, k, v, b=backend: attend(q, k, v, prior=prior, backend=b), draws, prior)
        assert all(error <= 1.1 * limit for error, limit in zip(found, limits, strict=True)), (backend, found, limits)
        with torch.no_grad():
            out = attend(*qkv, prior=prior, backend=backend)
            truth = attend(*(x.double() for x in qkv), prior=copy.deepcopy(prior).double(), backend="plain")
        assert relative_error(out, truth) <= 1.1 * plain[0], backend
