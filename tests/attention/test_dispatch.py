import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from attention_helpers import assert_all_close, gradients, inputs
from vicinal import Grid, VicinalError, attend, build_prior
from vicinal.attention import chunks
from vicinal.attention.recompute import RecomputedAttention

SPECS = ["gmm:init=spread", "gab", "gmm:init=paper+gab", "elm", "conv", "decay", "rpe:init=normal", "elm+gab", "none"]


def by_hand(q, k, v, prior, mask=None, scale=None):
    """Attention as a loop over images, heads, queries and keys, in float64."""
    q, k, v = (x.detach().double() for x in (q, k, v))
    prior_scale, prior_bias = (None if values is None else values.detach() for values in prior())
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.zeros_like(v)
    for image, head, query in itertools.product(*map(range, q.shape[:3])):
        logits = []
        for key in range(k.shape[2]):
            logit = scale * float(q[image, head, query] @ k[image, head, key])
            logit *= 1.0 if prior_scale is None else float(prior_scale[head, query, key])
            logit += 0.0 if prior_bias is None else float(prior_bias[head, query, key])
            logits.append(logit if mask is None else logit + float(mask[image, head, query, key]))
        weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
        out[image, head, query] = weights @ v[image, head]
    return out


@pytest.fixture(params=["all", "images", "heads", "rows"])
def pieces(request, monkeypatch):
    """Cut attention in each of the ways a large input would be."""
    room = {"all": 2**19, "images": 300, "heads": 150, "rows": 35}[request.param]  # logits; 2 heads have 200
    monkeypatch.setattr(chunks, "CPU_CHUNK_LOGITS", room)


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


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.usefixtures("pieces")
def test_recomputing_equals_plain_in_outputs_and_all_gradients(spec):
    grid = Grid(3, 3, prefix=1)
    q, k, v = inputs(grid, batch=5, v_dim=6)
    prior = build_prior(spec, heads=2, grid=grid)
    tensors = [q, k, v, *prior.parameters()]
    plain, fast = (attend(q, k, v, prior=prior, backend=backend) for backend in ("plain", "recompute"))
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)
    assert_all_close(gradients(fast, tensors), gradients(plain, tensors), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shape", [(5, 2, 10, 10), (1, 1, 10, 10), (5, 1, 10, 10), (10, 10), (1, 2, 1, 10)])
@pytest.mark.usefixtures("pieces")
def test_masks_of_every_shape_and_their_gradients(shape):
    grid = Grid(3, 3, prefix=1)
    q, k, v = inputs(grid, batch=5)
    prior = build_prior("gmm:init=spread+gab", heads=2, grid=grid)
    mask = torch.randn(shape, requires_grad=True)
    tensors = [q, k, v, mask, *prior.parameters()]
    plain, fast = (attend(q, k, v, prior=prior, mask=mask, backend=backend) for backend in ("plain", "auto"))
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)
    assert_all_close(gradients(fast, tensors), gradients(plain, tensors), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", ["auto", "plain", "recompute"])
@pytest.mark.parametrize("spec", ["gmm", "gab:amplitude=0", "none"])
def test_identity_prior_and_boolean_mask_equal_plain_sdpa_even_for_blind_queries(spec, backend):
    grid = Grid(2, 3)
    q, k, v = inputs(grid)
    seen = torch.rand(3, 1, 6, 6) > 0.3
    seen[1, 0, 2] = False  # a query that may see no key
    prior = build_prior(spec, heads=2, grid=grid)
    ours = attend(q, k, v, prior=prior, mask=seen, backend=backend)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert (ours[1, :, 2] == 0).all()
    assert_all_close(gradients(ours, (q, k, v)), gradients(theirs, (q, k, v)), atol=1e-5, rtol=1e-4)


def test_no_prior_is_sdpa():
    q, k, v = inputs(Grid(2, 2))
    assert torch.equal(attend(q, k, v, scale=0.3), F.scaled_dot_product_attention(q, k, v, scale=0.3))


@pytest.mark.usefixtures("pieces")
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", ["gmm:init=spread", "gab", "gmm:init=spread+conv"])
@pytest.mark.usefixtures("pieces")
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


@pytest.mark.usefixtures("pieces")
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


@pytest.mark.parametrize("spec", ["gab", "decay", "conv", "gab+decay"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_rides_the_fused_kernel_when_nothing_flows_into_it(spec, dtype, monkeypatch):
    grid = Grid(3, 4, prefix=1)
    q, k, v = (x.detach() for x in inputs(grid, dtype=dtype))
    prior = build_prior(spec, heads=2, grid=grid)
    mask = torch.randn(3, 1, 13, 13)
    expected = attend(q, k, v, prior=prior, mask=mask, backend="recompute")
    monkeypatch.setattr(RecomputedAttention, "apply", lambda *_: pytest.fail("recomputed"))
    with torch.no_grad():
        torch.testing.assert_close(attend(q, k, v, prior=prior, mask=mask), expected, atol=0.02, rtol=0.02)
    prior.requires_grad_(False)
    q.requires_grad_()  # training under a frozen bias
    attend(q, k, v, prior=prior, mask=mask).sum().backward()
    assert q.grad is not None


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


def test_dropout_keeps_the_mean_and_drops_the_right_share():
    grid = Grid(4, 4)
    q, k, _ = inputs(grid, batch=64)
    v = torch.eye(16).expand(64, 2, 16, 16)  # the output is the attention weights
    prior = build_prior("gmm", heads=2, grid=grid)
    full = attend(q, k, v, prior=prior)
    for backend in ("recompute", "plain"):
        dropped = attend(q, k, v, prior=prior, dropout=0.25, backend=backend)
        assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
        torch.testing.assert_close(dropped[dropped > 0], full[dropped > 0] / 0.75)


def test_dropout_follows_the_seed():
    q, k, v = inputs(Grid(4, 4))
    prior = build_prior("gmm", heads=2, grid=Grid(4, 4))
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(attend(q, k, v, prior=prior, dropout=0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@settings(max_examples=20, deadline=None)
@given(batch=st.integers(1, 5), heads=st.integers(1, 3), room=st.integers(1, 700), height=st.integers(1, 3))
def test_any_size_of_pieces_gives_the_same(batch, heads, room, height):
    grid = Grid(height, 2, prefix=1)
    q, k, v = inputs(grid, batch=batch, heads=heads)
    prior = build_prior("gmm:init=spread+gab", heads=heads, grid=grid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CPU_CHUNK_LOGITS", room)
        out = attend(q, k, v, prior=prior)
        ours = gradients(out, [q, k, v, *prior.parameters()])
    plain = attend(q, k, v, prior=prior, backend="plain")
    torch.testing.assert_close(out, plain, atol=1e-5, rtol=1e-5)
    assert_all_close(ours, gradients(plain, [q, k, v, *prior.parameters()]), atol=1e-5, rtol=1e-4)


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
