"""A quadratic bias as channels of q and k, against the formula."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from attention_helpers import assert_all_close, gradients, inputs
from vicinal import Grid, VicinalError, attend, build_prior
from vicinal.attention.quadratic import bias_channels, quadratic_is_exact
from vicinal.priors.convolution import Convolution
from vicinal.priors.token_values import TokenPairs

HALF = [torch.bfloat16, torch.float16]


def moved(spec, grid, heads=2, **options):
    """Returns a prior in float64 whose windows are off the patches, so that every gradient counts."""
    prior = build_prior(spec, heads=heads, grid=grid, **options).double()
    with torch.no_grad():
        for parameter in prior.parameters():
            parameter.add_(torch.rand_like(parameter) / 3)
    return prior


def assert_equals_formula(prior, q, k, v, tolerance=1e-12, **options):
    """Compares outputs and gradients of q, k, v, the prior's parameters and a learned mask with the plain formula."""
    own = getattr(prior, "prior", prior)
    tensors = [q, k, v, *own.parameters(), *(x for x in options.values() if getattr(x, "requires_grad", False))]
    out = attend(q, k, v, prior=prior, backend="quadratic", **options)
    expected = attend(q, k, v, prior=prior, backend="plain", **options)
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    for ours, wanted in zip(gradients(out, tensors), gradients(expected, tensors), strict=True):
        assert (ours - wanted).abs().max() <= tolerance * max(1.0, float(wanted.abs().max()))


def error(ours, exact):
    """Returns the root mean square error over the root mean square."""
    ours, exact = ours.detach().double(), exact.detach()
    return float((ours - exact).square().mean().sqrt() / exact.square().mean().sqrt())


@settings(max_examples=40)
@given(
    st.builds(Grid, st.integers(1, 9), st.integers(1, 9), st.integers(0, 3)),
    st.sampled_from(["conv", "conv+conv:sigma=2", "conv:centers=zero"]),
    st.integers(1, 4),
    st.integers(1, 20),
    st.integers(1, 40),
    st.floats(0.05, 2.0),
)
def test_float64_equals_the_formula(grid, spec, heads, dim, v_dim, scale):
    torch.manual_seed(0)
    q, k, v = inputs(grid, batch=2, heads=heads, dim=dim, v_dim=v_dim, dtype=torch.float64)
    assert_equals_formula(moved(spec, grid, heads), q, k, v, scale=scale)


@pytest.mark.parametrize("grid", [Grid(14, 14, prefix=1), Grid(16, 16), Grid(20, 7, prefix=2)])
def test_float64_on_grids_of_models(grid):
    q, k, v = inputs(grid, dim=16, dtype=torch.float64)
    assert_equals_formula(moved("conv", grid), q, k, v)


@pytest.mark.parametrize("shape", [(3, 1, 13, 13), (2, 1, 1), (1, 13)])
@pytest.mark.parametrize("learned", [True, False])
def test_masks(shape, learned):
    grid = Grid(4, 3, prefix=1)
    q, k, v = inputs(grid, dtype=torch.float64)
    mask = torch.randn(shape, dtype=torch.float64)
    mask = mask.requires_grad_() if learned else mask > -1
    assert_equals_formula(moved("conv", grid), q, k, v, mask=mask)


def test_queries_that_see_no_key_give_zeros():
    grid = Grid(2, 3)
    q, k, v = inputs(grid)
    mask = torch.ones(grid.tokens, grid.tokens, dtype=torch.bool)
    mask[2] = False
    out = attend(q, k, v, prior=build_prior("conv", heads=2, grid=grid), mask=mask, backend="quadratic")
    assert (out[:, :, 2] == 0).all()


def test_dropout_drops_the_same_weights():
    grid = Grid(3, 3, prefix=1)
    q, k, v = inputs(grid, dtype=torch.float64)
    prior = moved("conv", grid)
    outputs = []
    for backend in ("quadratic", "plain"):
        torch.manual_seed(1)
        outputs.append(attend(q, k, v, prior=prior, dropout=0.5, backend=backend))
    torch.testing.assert_close(*outputs, atol=1e-12, rtol=1e-12)


def test_another_grid():
    grid = Grid(5, 2, prefix=1)
    q, k, v = inputs(grid, dtype=torch.float64)
    assert_equals_formula(moved("conv", Grid(8, 8)).on(grid), q, k, v)


def test_autocast_gives_bf16():
    grid = Grid(4, 4, prefix=1)
    q, k, v = inputs(grid, dim=16)
    prior = build_prior("conv", heads=2, grid=grid)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(q, k, v, prior=prior, backend="quadratic")
    assert out.dtype == torch.bfloat16
    assert error(out, attend(*(x.detach().double() for x in (q, k, v)), prior=prior, backend="plain")) < 0.01


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("grid", "sigma"),
    [
        (grid, sigma)
        for grid in (Grid(8, 8, prefix=1), Grid(14, 14, prefix=1), Grid(24, 24))
        for sigma in (0.3, 1.0, 5.0)
    ]
    + [(Grid(64, 64), 0.3)],
)
def test_half_precision_is_as_exact_as_the_kernel_itself(grid, sigma, dtype):
    """Errors of outputs next to those without a bias; of gradients next to those with the exact bias as a mask."""
    torch.manual_seed(0)
    heads = 1 if grid.tokens > 1000 else 2
    prior = moved("conv", grid, heads, sigma=[sigma] * heads)
    q, k, v, direction = torch.randn(4, 1, heads, grid.tokens, 32).to(dtype)

    def errors(attention, formula):
        results = []
        for run, its_dtype in ((attention, dtype), (formula, torch.float64)):
            leaves = [x.to(its_dtype).detach().requires_grad_() for x in (q, k, v)]
            with torch.set_grad_enabled(grid.tokens < 1000):  # float64 takes half a minute on larger grids
                out = run(*leaves)
            found = torch.autograd.grad(out, leaves, direction.to(its_dtype)) if out.requires_grad else ()
            results.append([out, *found])
        return [error(*pair) for pair in zip(*results, strict=True)]

    def masked(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=prior()[1].detach().to(torch.float32)[None])

    def plain(q, k, v):
        return attend(q, k, v, prior=prior, backend="plain")

    sdpa = F.scaled_dot_product_attention
    ours = errors(lambda q, k, v: attend(q, k, v, prior=prior, backend="quadratic"), plain)
    bare, under_mask = errors(sdpa, sdpa), errors(masked, plain)
    assert ours[0] <= 1.05 * bare[0]
    assert all(x <= max(1.05 * y, 1.2 * z) for x, y, z in zip(ours, bare, under_mask, strict=True)), (ours, under_mask)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("grid", [Grid(14, 14), Grid(14, 14, prefix=1)])
def test_half_precision_learns_windows(grid, dtype):
    """The loss is the distance to attention with wider windows elsewhere: gradients have a direction."""
    torch.manual_seed(0)
    prior, other = moved("conv", grid), moved("conv", grid, sigma=1.5)
    q, k, v = torch.randn(3, 4, 2, grid.tokens, 32).to(dtype)
    wide = [x.double() for x in (q, k, v)]
    direction = (attend(*wide, prior=prior) - attend(*wide, prior=other)).detach()
    exact = torch.autograd.grad(attend(*wide, prior=prior, backend="plain"), list(prior.parameters()), direction)
    out = attend(q, k, v, prior=prior, backend="quadratic")
    found = torch.autograd.grad(out, list(prior.parameters()), direction.to(dtype))
    assert all(error(*pair) < 0.03 for pair in zip(found, exact, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("sigma", [0.0, 1e-4, 1e6, 1e30])
def test_extreme_windows_are_finite(sigma, prefix, dtype):
    grid = Grid(7, 7, prefix=prefix)
    prior = build_prior("conv", heads=4, grid=grid, sigma=[sigma] * 4)
    with torch.no_grad():
        prior.flat_mu[0] = 300.0
    q, k, v = inputs(grid, heads=4, dim=16, dtype=dtype)
    out = attend(q, k, v, prior=prior, backend="quadratic")
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(out, [q, k, v, *prior.parameters()]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
@pytest.mark.parametrize("prefix", [0, 2])
def test_channels_multiply_to_the_bias(prefix, dtype):
    grid = Grid(6, 4, prefix=prefix)
    prior = build_prior("conv", heads=3, grid=grid, sigma=[0.5, 1.0, 2.0])
    with torch.no_grad():
        more_q, more_k = (x.double() for x in bias_channels(prior.quadratic_bias(), grid, dtype, 0.25))
        found, bias = 0.25 * more_q @ more_k.mT, prior()[1].double()
    channels = (11 if prefix else 8) if dtype in HALF else (4 if prefix else 3)
    assert more_q.shape == more_k.shape == (3, grid.tokens, channels)
    if not prefix:  # up to a constant for each query
        found, bias = found - found[..., :1], bias - bias[..., :1]
    tolerance = {torch.float64: 1e-6, torch.bfloat16: 2.0**-14}.get(dtype, 1e-5)  # parameters are fp32
    assert (found - bias).abs().max() <= tolerance * bias.abs().max()


def test_what_is_not_exact_is_refused():
    assert quadratic_is_exact(Grid(64, 64), torch.bfloat16, 0.1, learned=True)
    assert quadratic_is_exact(Grid(64, 64, prefix=1), torch.float16, 0.1, learned=False)
    for grid, dtype, scale, learned in (
        (Grid(64, 64), torch.float32, 0.1, False),  # fp32 promises smaller errors
        (Grid(1, 200), torch.bfloat16, 0.1, False),
        (Grid(32, 32, prefix=1), torch.bfloat16, 0.1, True),
        (Grid(4, 4), torch.float16, 1e-9, False),  # overflows
        (Grid(4, 4), torch.float32, 0.0, False),
        (Grid(4, 4), torch.float32, -1.0, False),
    ):
        assert not quadratic_is_exact(grid, dtype, scale, learned)
    q = torch.zeros(1, 2, 4096, 4)
    with pytest.raises(VicinalError, match=r"not exact on a grid of 64 x 64 in torch.float32"):
        attend(q, q, q, prior=build_prior("conv", heads=2, grid=Grid(64, 64)), backend="quadratic")


@pytest.mark.parametrize("spec", ["gmm", "gab", "conv+gab", "gmm+conv", "none", "rpe"])
def test_other_priors_are_refused(spec):
    grid = Grid(2, 2)
    q, k, v = inputs(grid)
    with pytest.raises(VicinalError, match=r"must have a prior that is a quadratic bias on a grid"):
        attend(q, k, v, prior=build_prior(spec, heads=2, grid=grid), backend="quadratic")


def test_positions_of_their_own_are_refused():
    prior = build_prior("conv", heads=2, grid=Grid(2, 2))
    q, k, v = inputs(Grid(2, 2))
    with pytest.raises(VicinalError, match=r"quadratic bias on a grid"):
        attend(q, k, v, prior=prior.between(TokenPairs(torch.zeros(4, 4, 2))), backend="quadratic")


def test_a_subclass_with_another_formula_is_not_quadratic():
    class Steeper(Convolution):
        def bias_at(self, rows, columns):
            return 2 * super().bias_at(rows, columns)

    class Twice:
        def bias(self):
            return 2 * super().bias()

    class Mixed(Twice, Convolution):
        pass

    class Renamed(Convolution):
        @property
        def sigma(self):
            return super().sigma + 1

    grid = Grid(2, 2)
    assert Steeper(2, grid).quadratic_bias() is None
    assert Mixed(2, grid).quadratic_bias() is None
    renamed = Renamed(2, grid).double()
    q, k, v = inputs(grid, dtype=torch.float64)
    assert_equals_formula(renamed, q, k, v)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_in_one_graph(compiler):
    grid = Grid(4, 3, prefix=1)
    prior = build_prior("conv+conv", heads=2, grid=grid)
    q, k, v = inputs(grid)

    def run(q, k, v):
        return attend(q, k, v, prior=prior, backend="quadratic")

    compiled = torch.compile(run, fullgraph=True, backend=compiler)
    tensors = [q, k, v, *prior.parameters()]
    out, expected = compiled(q, k, v), attend(q, k, v, prior=prior, backend="plain")
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert_all_close(gradients(out, tensors), gradients(expected, tensors), atol=1e-4, rtol=1e-4)
