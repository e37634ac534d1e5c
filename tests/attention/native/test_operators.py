"""The native kernels in torch: autograd, projections in one piece, compiled graphs, dropout, and what falls back."""

import pytest
import torch
from torch.nn import functional as F

import vicinal
from formula import formula, over_tokens, random_call, settings
from vicinal import Grid, VicinalError, attend, build_prior
from vicinal.attention import attend_packed
from vicinal.attention.native import native_ready
from vicinal.attention.native.operators import NativeArguments, native_attention, native_attention_packed

pytestmark = pytest.mark.skipif(not vicinal.attention.native.prepare_native().path, reason="no native library here")
GRID = Grid(3, 4, prefix=1)


def arguments(call, **options):
    return NativeArguments(call.scale, call.bias, call.mask, call.order, settings(call, **options))


@pytest.mark.parametrize("options", [{}, {"per_offset": False}, {"mask": (2, 1, 13, 13)}, {"permuted": True}])
def test_gradcheck(options):
    call = random_call(GRID, dim=3, v_dim=2, **options)
    leaves = [x.requires_grad_() for x in call.leaves if x is not None]
    given = {name: getattr(call, name) for name in ("scale", "bias", "mask") if getattr(call, name) is not None}

    def run(q, k, v, *prior):
        return native_attention(q, k, v, arguments(call)._replace(**renamed(dict(zip(given, prior, strict=True)))))

    assert torch.autograd.gradcheck(run, leaves)


def renamed(values):
    """Returns tensors by the names of `NativeArguments`."""
    return {{"scale": "prior_scale", "bias": "prior_bias"}.get(name, name): x for name, x in values.items()}


@pytest.mark.parametrize("options", [{}, {"mask": (2, 2, 13, 13)}, {"scale": False, "bias": False}])
def test_a_projection_equals_its_views_and_gets_its_gradient_in_one_piece(options):
    call = random_call(GRID, dim=8, **options)
    qkv = torch.randn(2, 13, 3 * 16, dtype=torch.float64, requires_grad=True)
    out = native_attention_packed(qkv, 2, arguments(call))
    q, k, v = qkv.unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
    truth = formula(call, q, k, v, call.scale, call.bias, call.mask).transpose(1, 2).flatten(2)
    direction = torch.randn_like(out)
    torch.testing.assert_close(out, truth, atol=1e-12, rtol=0)
    found, expected = (torch.autograd.grad(x, qkv, direction)[0] for x in (out, truth))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert found.is_contiguous()
    assert out.is_contiguous()


def test_hooks_on_views_of_the_projection_see_their_gradients():
    """A saliency tool that keeps the gradient of q must not silently get None."""
    qkv = torch.randn(2, 13, 48, requires_grad=True)
    q, k, v = (qkv * 1).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
    q.retain_grad()
    attend(q, k, v, prior=build_prior("gmm:init=spread", heads=2, grid=GRID)).sum().backward()
    assert q.grad is not None
    assert q.grad.abs().sum() > 0


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed):
    call = random_call(GRID, dim=8, dtype=torch.float32, mask=(2, 1, 13, 13))
    prior = [x.requires_grad_() for x in (call.scale, call.bias, call.mask)]
    rest = (*prior, None, *settings(call), True)
    if packed:
        args = (torch.randn(2, 13, 48, requires_grad=True), 2, *rest)
        torch.library.opcheck(torch.ops.vicinal.native_attention_packed.default, args)
    else:
        q, k, v = (x.detach().requires_grad_() for x in (call.q, call.k, call.v))
        torch.library.opcheck(torch.ops.vicinal.native_attention.default, (q, k, v, *rest))


@pytest.mark.parametrize("spec", ["gmm:init=spread+gab", "elm", "none"])
def test_a_compiled_graph_calls_the_kernels(spec):
    prior = build_prior(spec, heads=2, grid=GRID)
    qkv = torch.randn(2, 13, 48, requires_grad=True)

    def run(x):
        return attend_packed(x * 1, heads=2, prior=prior).square().mean()

    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    tensors = [qkv, *prior.parameters()]
    expected = torch.autograd.grad(run(qkv), tensors)
    found = torch.autograd.grad(torch.compile(run, backend="aot_eager", fullgraph=True)(qkv), tensors)
    for mine, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, truth)
    torch.compile(run, backend=backend, fullgraph=True)(qkv)
    assert "native_attention_packed" in graphs[0].code


def test_sizes_can_change_in_one_compiled_graph():
    compiled = torch.compile(lambda q, k, v: attend(q, k, v), backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (5, 9, 12):
        q, k, v = torch.randn(3, 2, 3, tokens, 8)
        torch.testing.assert_close(compiled(q, k, v), F.scaled_dot_product_attention(q, k, v))


def test_vmap_falls_back_to_the_formula():
    prior = build_prior("gmm:init=spread", heads=2, grid=GRID)
    q, k, v = torch.randn(3, 4, 2, 2, 13, 8)
    out = torch.vmap(lambda *qkv: attend(*qkv, prior=prior))(q, k, v)
    for index in range(4):
        torch.testing.assert_close(out[index], attend(q[index], k[index], v[index], prior=prior))


def test_switched_off_it_is_an_error_to_ask_for_it(monkeypatch):
    q, k, v = torch.randn(3, 2, 2, 13, 8)
    prior = build_prior("gmm", heads=2, grid=GRID)
    assert native_ready()
    assert attend(q, k, v, prior=prior, backend="native").shape == (2, 2, 13, 8)
    monkeypatch.setattr(vicinal.attention.native.library, "_ready", False)
    with pytest.raises(VicinalError, match="vicinal doctor"):
        attend(q, k, v, prior=prior, backend="native")
    torch.testing.assert_close(attend(q, k, v, prior=prior), attend(q, k, v, prior=prior, backend="plain"))


def dropped_weights(call, dropout, seed):
    """Returns the weights after dropout, `(batch, heads, queries, keys)`: values are the unit vectors."""
    call.v = torch.eye(call.k.shape[2]).expand(*call.k.shape[:2], -1, -1)
    return native_attention(call.q, call.k, call.v, arguments(call, dropout=dropout, seed=seed))


def test_dropout_drops_its_share_and_keeps_the_sum():
    call = random_call(Grid(12, 12), batch=4, scale=False, bias=False, dtype=torch.float32)
    whole = dropped_weights(call, 0.0, 0)
    found = dropped_weights(call, 0.25, 5)
    kept = found != 0
    torch.testing.assert_close(found[kept], whole[kept] / 0.75)
    count = kept.numel()
    assert abs(kept.double().mean() - 0.75) < 5 * (0.25 * 0.75 / count) ** 0.5
    for axis in range(4):  # neighbors along every axis are independent
        one, two = kept.narrow(axis, 0, kept.shape[axis] - 1), kept.narrow(axis, 1, kept.shape[axis] - 1)
        both = (one & two).double().mean()
        assert abs(both - 0.75**2) < 5 * (0.75**2 * (1 - 0.75**2) / one.numel()) ** 0.5
    other = dropped_weights(call, 0.25, 6) != 0
    assert abs((kept & other).double().mean() - 0.75**2) < 0.01


@pytest.mark.parametrize("mask", [None, (2, 1, 13, 13)])
def test_dropout_in_backward_is_that_of_forward_for_any_number_of_threads(mask):
    call = random_call(GRID, dim=6, v_dim=13, mask=mask)
    factors = dropped_weights(call, 0.4, 3) / dropped_weights(call, 0.0, 3)
    call.v = torch.randn(2, 2, 13, 13, dtype=torch.float64)
    leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
    q, k, v = leaves
    logits = q @ k.mT * 6**-0.5 * over_tokens(call, call.scale, 1.0) + over_tokens(call, call.bias, 0.0)
    logits = logits if mask is None else logits + call.mask
    truth = (logits.softmax(-1) * factors) @ v
    expected = torch.autograd.grad(truth, leaves, call.direction)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            out = native_attention(q, k, v, arguments(call, dropout=0.4, seed=3))
            torch.testing.assert_close(out, truth, atol=1e-12, rtol=0)
            for mine, exact in zip(torch.autograd.grad(out, leaves, call.direction), expected, strict=True):
                torch.testing.assert_close(mine, exact, atol=1e-12, rtol=0)
    finally:
        torch.set_num_threads(before)


def test_dropout_follows_the_generator_of_torch():
    q, k, v = torch.randn(3, 2, 2, 13, 8)
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(attend(q, k, v, dropout=0.5, backend="native"))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 4}, "the prior is for 2 heads, given 4"),
        ({"prior": build_prior("gmm", heads=2, grid=Grid(3, 3))}, "the prior is for 9 tokens"),
        ({"prior": build_prior("gmm", heads=2, grid=GRID).to("meta")}, "prior meta"),
        ({"dropout": 1.0}, "dropout is a probability"),
        ({"mask": torch.zeros(5, 13)}, "mask must broadcast"),
    ],
)
def test_a_projection_that_does_not_fit_is_refused(options, message):
    given = {"heads": 2, "prior": build_prior("gmm", heads=2, grid=GRID), **options}
    with pytest.raises(VicinalError, match=message):
        attend_packed(torch.randn(1, 13, 48), **given)
