"""`attend` by every backend against the formula, and what it refuses."""

import pytest
import torch
from torch.nn import functional as F

from attention_helpers import SPECS, by_hand, gradients, inputs
from vicinal import Grid, VicinalError, attend, build_prior


@pytest.mark.parametrize("backend", ["auto", "plain", "recompute"])
@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_equals_the_formula_by_hand(spec, gradient, backend):
    grid = Grid(2, 3, prefix=1)
    q, k, v = inputs(grid, v_dim=5)
    prior = build_prior(spec, heads=2, grid=grid)
    mask = torch.randn(3, 2, grid.tokens, grid.tokens)
    for options in ({}, {"mask": mask}, {"scale": 0.7}):
        with torch.set_grad_enabled(gradient):
            out = attend(q, k, v, prior=prior, backend=backend, **options)
        torch.testing.assert_close(out.double(), by_hand(q, k, v, prior, **options), atol=1e-5, rtol=1e-5)


def test_no_prior_is_attention_of_torch():
    q, k, v = inputs(Grid(2, 2), dtype=torch.float64)
    truth = F.scaled_dot_product_attention(q, k, v, scale=0.3)
    torch.testing.assert_close(attend(q, k, v, scale=0.3), truth, atol=1e-14, rtol=0)


def test_no_prior_on_shapes_of_sdpa_alone():
    q, k, v = torch.randn(5, 4), torch.randn(7, 4), torch.randn(7, 3)
    torch.testing.assert_close(attend(q, k, v), F.scaled_dot_product_attention(q, k, v))


def test_an_empty_batch_gives_an_empty_result():
    grid = Grid(2, 2)
    q, k, v = inputs(grid, batch=0)
    prior = build_prior("gmm:init=spread", heads=2, grid=grid)
    out = attend(q, k, v, prior=prior)
    assert out.shape == (0, 2, 4, 4)
    assert all((gradient == 0).all() for gradient in gradients(out, list(prior.parameters())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("gmm", {"sigma": 0.0, "alpha": 1.0}),
        ("gmm", {"sigma": 1e-8, "alpha": -3.0}),
        ("gmm", {"sigma": 1e8, "alpha": 1.0}),
        ("gmm", {"sigma": 2.0, "alpha": 1e6}),
        ("gmm", {"sigma": 2.0, "alpha": -1e6}),
        ("gab", {"sigma": 0.0}),
        ("gab", {"amplitude": 1e4}),
        ("conv", {"sigma": 0.0}),
        ("conv", {"sigma": [0.0] * 8}),
        ("decay", {"gamma": 1e-30, "learnable": True}),
        ("decay", {"gamma": 1.0, "learnable": True}),
    ],
)
def test_extreme_priors_give_finite_values_and_gradients(spec, options, dtype):
    grid = Grid(6, 6, prefix=1)
    prior = build_prior(spec, heads=8, grid=grid, **options)
    q, k, v = inputs(grid, heads=8, dim=16, dtype=dtype)
    for backend in ("recompute", "plain"):
        out = attend(q, k, v, prior=prior, backend=backend)
        assert out.isfinite().all()
        assert all(gradient.isfinite().all() for gradient in gradients(out, [q, k, v, *prior.parameters()]))
    with torch.no_grad():
        assert attend(q, k, v, prior=prior).isfinite().all()


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


@pytest.mark.parametrize("spec", ["none", "gmm", "gab", "gmm+elm", "decay"])
@pytest.mark.parametrize("gradient", [True, False])
def test_shapes_can_be_computed_on_the_meta_device(spec, gradient):
    q = torch.zeros(3, 2, 4, 5, device="meta", requires_grad=True)
    prior = build_prior(spec, heads=2, grid=Grid(2, 2)).to("meta")
    with torch.set_grad_enabled(gradient):
        out = attend(q, q, q, prior=prior)
    assert out.device.type == "meta"
    assert out.shape == q.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q": (2, 3, 9, 4)},
            r"q, k and v as \(batch, heads, tokens, dim\) alike, given q \(2, 3, 9, 4\), k \(2, 2, 9, 4\)",
        ),
        ({"q": (2, 9, 4), "k": (2, 9, 4), "v": (2, 9, 4)}, "alike, given"),
        ({"q": (2, 3, 9, 4), "k": (2, 3, 9, 4), "v": (2, 3, 9, 4)}, "the prior is for 2 heads, given 3"),
        ({"q": (2, 2, 16, 4), "k": (2, 2, 16, 4), "v": (2, 2, 16, 4)}, r"for 9 tokens \(2 x 4 \+ 1 prefix\), given 16"),
        ({"q": (2, 2, 1, 4), "k": (2, 2, 1, 4), "v": (2, 2, 1, 4)}, "1 prefix tokens leave no patch in 1 tokens"),
        ({"mask": torch.zeros(3, 1, 9, 9)}, r"must broadcast to .* = \(2, 2, 9, 9\), given \(3, 1, 9, 9\)"),
        ({"mask": torch.zeros(1, 1, 1, 9, 9)}, "must broadcast to"),
        ({"dropout": 1.5}, r"dropout is a probability in \[0, 1\), given 1.5"),
        ({"backend": "fast"}, "unknown backend 'fast'"),
        ({"backend": "plane"}, "unknown backend 'plane'; did you mean 'plain'"),
    ],
)
def test_bad_input_says_expected_and_given(change, message):
    arguments = {name: torch.zeros(2, 2, 9, 4) for name in "qkv"}
    arguments |= {key: torch.zeros(value) if isinstance(value, tuple) else value for key, value in change.items()}
    with pytest.raises(VicinalError, match=message):
        attend(**arguments, prior=build_prior("gmm", heads=2, grid=Grid(2, 4, 1)))


def test_integers_and_other_devices_are_refused():
    prior = build_prior("gmm", heads=2, grid=Grid(2, 2))
    q = torch.zeros(1, 2, 4, 3)
    with pytest.raises(VicinalError, match=r"floating-point numbers on one device, given torch.int64"):
        attend(q.long(), q.long(), q.long(), prior=prior)
    with pytest.raises(VicinalError, match="prior meta"):
        attend(q, q, q, prior=prior.to("meta"))
