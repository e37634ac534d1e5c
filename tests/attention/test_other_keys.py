"""Attention under a prior whose keys are other tokens than its queries, against the formula in float64."""

import pytest
import torch

from attention_helpers import assert_all_close, gradients
from vicinal import Grid, VicinalError, attend
from vicinal.attention import attention_weights, chunks
from vicinal.attention.compile_op import operator_arguments
from vicinal.attention.recompute import RecomputedAttention

QUERIES, KEYS = Grid(6, 4, prefix=1), Grid(3, 2, prefix=1)  # a key is the mean of 2 x 2 patches
HEADS = 2


class PooledPrior:
    """A Gaussian of the distance between patches and pooled keys, as scale, bias or both."""

    heads, grid, per_offset = HEADS, None, False
    queries, keys = QUERIES.tokens, KEYS.tokens

    def __init__(self, kind="both", dtype=torch.float64):
        self.kind = kind
        self.sigma = torch.tensor([1.5, 2.5], dtype=dtype, requires_grad=True)
        self.device = self.sigma.device

    def values(self):
        places, centers = QUERIES.coordinates(), 2 * KEYS.coordinates() + 0.5
        offsets = centers[None] - places[:, None].to(self.sigma.dtype)
        exponents = offsets.square().sum(-1) / (-2 * self.sigma[:, None, None].square())
        scale, bias = 1 + exponents.exp(), exponents
        pad = torch.nn.functional.pad
        return (
            pad(scale, (1, 0, 1, 0), value=1.0) if self.kind in ("scale", "both") else None,
            pad(bias, (1, 0, 1, 0), value=0.0) if self.kind in ("bias", "both") else None,
        )

    def __call__(self):
        return self.values()


def inputs(batch=3, dim=4, v_dim=5, dtype=torch.float64):
    sizes = ((QUERIES.tokens, dim), (KEYS.tokens, dim), (KEYS.tokens, v_dim))
    return [torch.randn(batch, HEADS, *size, dtype=dtype).requires_grad_() for size in sizes]


def formula(q, k, v, prior, mask=None, scale=0.5):
    """Returns weights and output of attention, head by head, written out."""
    factors, terms = prior.values()
    weights = []
    for head in range(HEADS):
        logits = scale * torch.einsum("bqd,bkd->bqk", q[:, head], k[:, head])
        logits = logits if factors is None else logits * factors[head]
        logits = logits if terms is None else logits + terms[head]
        if mask is not None:
            logits = logits + mask.expand(len(q), HEADS, *logits.shape[1:])[:, head]
        exponentials = (logits - logits.detach().amax(-1, keepdim=True)).exp()
        weights.append(exponentials / exponentials.sum(-1, keepdim=True))
    weights = torch.stack(weights, 1)
    return weights, torch.einsum("bhqk,bhkd->bhqd", weights, v)


@pytest.fixture(params=["all", "images", "heads", "rows"])
def small_chunks(request, monkeypatch):
    """Divides attention in each of the ways a large input would be; 2 heads of 25 x 7 tokens have 350 logits."""
    logits = {"all": 2**19, "images": 800, "heads": 349, "rows": 60}[request.param]
    monkeypatch.setattr(chunks, "CPU_CHUNK_LOGITS", logits)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", ["scale", "bias", "both", "neither"])
@pytest.mark.parametrize("backend", ["auto", "plain", "recompute"])
def test_equals_the_formula_with_all_gradients(backend, kind):
    prior, (q, k, v) = PooledPrior(kind), inputs()
    mask = torch.randn(3, 1, QUERIES.tokens, KEYS.tokens, dtype=torch.float64, requires_grad=True)
    tensors = [q, k, v, mask, prior.sigma]
    out, (_, truth) = attend(q, k, v, prior=prior, mask=mask, backend=backend), formula(q, k, v, prior, mask)
    assert out.shape == (3, HEADS, 25, 5)
    torch.testing.assert_close(out, truth, atol=1e-12, rtol=0)
    assert_all_close(gradients(out, tensors), gradients(truth, tensors), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["scale", "bias", "both"])
def test_inference_and_training_under_a_frozen_prior_equal_the_formula(kind):
    prior, (q, k, v) = PooledPrior(kind), inputs()
    prior.sigma.requires_grad_(False)
    _, truth = formula(q, k, v, prior)
    with torch.no_grad():
        torch.testing.assert_close(attend(q, k, v, prior=prior), truth, atol=1e-12, rtol=0)
    out = attend(q, k, v, prior=prior)
    torch.testing.assert_close(out, truth, atol=1e-12, rtol=0)
    assert_all_close(gradients(out, [q, k, v]), gradients(truth, [q, k, v]), atol=1e-12, rtol=0)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("shape", [(3, 2, 25, 7), (25, 7), (3, 1, 1, 7), (1, 2, 25, 1), (7,)])
def test_masks_of_every_shape_and_their_gradients(shape):
    prior, (q, k, v) = PooledPrior(), inputs()
    mask = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out, (_, truth) = attend(q, k, v, prior=prior, mask=mask), formula(q, k, v, prior, mask)
    torch.testing.assert_close(out, truth, atol=1e-12, rtol=0)
    assert_all_close(gradients(out, [mask, q]), gradients(truth, [mask, q]), atol=1e-12, rtol=0)


def test_boolean_masks_and_queries_without_a_key():
    prior, (q, k, v) = PooledPrior(), inputs()
    seen = torch.rand(3, 1, 25, 7) > 0.3
    seen[..., 0] = True
    _, truth = formula(q, k, v, prior, torch.zeros(3, 1, 25, 7).double().masked_fill(~seen, -torch.inf))
    for backend in ("auto", "plain"):
        torch.testing.assert_close(attend(q, k, v, prior=prior, mask=seen, backend=backend), truth, atol=1e-12, rtol=0)
    seen[1, 0, 4] = False
    assert (attend(q, k, v, prior=prior, mask=seen)[1, :, 4] == 0).all()


def test_weights_equal_the_formula():
    prior, (q, k, v) = PooledPrior(), inputs()
    weights, _ = formula(q, k, v, prior, scale=0.7)
    for queries in (slice(None), slice(1), slice(3, 9)):
        found = attention_weights(q, k, prior=prior, scale=0.7, queries=queries)
        torch.testing.assert_close(found, weights[:, :, queries], atol=1e-12, rtol=0)


@pytest.mark.parametrize("chunk_logits", [2**19, 29, 7])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradcheck(dropout, chunk_logits, monkeypatch):
    monkeypatch.setattr(chunks, "CPU_CHUNK_LOGITS", chunk_logits)  # 2 heads of 5 x 3 tokens have 30
    q, k, v = (torch.randn(2, 2, *size, dtype=torch.float64, requires_grad=True) for size in ((5, 3), (3, 3), (3, 2)))
    scale, bias = (torch.rand(2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = torch.randn(2, 1, 5, 3, dtype=torch.float64, requires_grad=True)
    settings = (0, 0, 0, False, 0.5, dropout, 11)
    tensors = (q, k, v, scale, bias, mask)
    assert torch.autograd.gradcheck(lambda *given: RecomputedAttention.apply(*given, *settings), tensors)


def test_dropout_keeps_the_mean_and_drops_the_right_share():
    prior = PooledPrior(dtype=torch.float32)
    q, k, _ = inputs(batch=64, dtype=torch.float32)
    v = torch.eye(7).expand(64, 2, 7, 7)  # the output is the attention weights
    full = attend(q, k, v, prior=prior)
    for backend in ("recompute", "plain"):
        dropped = attend(q, k, v, prior=prior, dropout=0.25, backend=backend)
        assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
        torch.testing.assert_close(dropped[dropped > 0], full[dropped > 0] / 0.75)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16_stays_within_its_rounding(autocast):
    prior, exact = PooledPrior(dtype=torch.float32), PooledPrior()
    half = inputs(dtype=torch.bfloat16)
    wide = [x.detach().double().requires_grad_() for x in half]
    given = [x.detach().float().requires_grad_() for x in half] if autocast else half
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = attend(*given, prior=prior)
    _, truth = formula(*wide, exact)
    step = torch.finfo(torch.bfloat16).eps
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), truth, atol=2 * step, rtol=2 * step)
    ours, theirs = gradients(out, [*given, prior.sigma]), gradients(truth, [*wide, exact.sigma])
    for gradient, expected in zip(ours, theirs, strict=True):
        size = expected.abs().max().item()
        torch.testing.assert_close(gradient.double(), expected, atol=8 * step * size, rtol=0)


@pytest.mark.usefixtures("small_chunks")
def test_the_compiled_operator_keeps_what_it_promises():
    prior = PooledPrior(dtype=torch.float32)
    q, k, v = inputs(dtype=torch.float32)
    scale, bias = (values.detach().requires_grad_() for values in prior())
    mask = torch.randn(3, 1, 25, 7)
    arguments = (q, k, v, scale, bias, mask, 0, 0, 0, False, 0.5, 0.0, 0)
    assert operator_arguments(arguments).settings.grid is None
    torch.library.opcheck(torch.ops.vicinal.recomputed_attention.default, arguments)


def test_compiles_in_one_graph_with_gradients():
    prior, (q, k, v) = PooledPrior(), inputs()
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, prior=prior), fullgraph=True, backend="aot_eager")
    out, (_, truth), tensors = compiled(q, k, v), formula(q, k, v, prior), [q, k, v, prior.sigma]
    torch.testing.assert_close(out, truth, atol=1e-12, rtol=0)
    assert_all_close(gradients(out, tensors), gradients(truth, tensors), atol=1e-12, rtol=0)


@pytest.mark.slow
def test_flex_equals_the_formula():
    prior = PooledPrior(dtype=torch.float32)
    q, k, v = (x.detach() for x in inputs(dim=16, v_dim=16, dtype=torch.float32))
    mask = torch.randn(3, 1, 25, 7)
    with torch.no_grad():
        _, truth = formula(q, k, v, prior, mask, scale=0.25)
        torch.testing.assert_close(attend(q, k, v, prior=prior, mask=mask, backend="flex"), truth, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (3, 2, 24, 4)}, r"the prior is for 25 queries, given 24; q \(3, 2, 24, 4\), k \(3, 2, 7, 4\)"),
        ({"k": (3, 2, 6, 4), "v": (3, 2, 6, 5)}, "the prior is for 7 keys, given 6; q"),
        ({"v": (3, 2, 25, 5)}, "v must have the batch, heads and tokens of k, given q"),
        ({"k": (3, 2, 7, 3)}, "alike, given q"),
        ({"mask": (3, 1, 25, 25)}, r"\(batch, heads, queries, keys\) = \(3, 2, 25, 7\), given \(3, 1, 25, 25\)"),
    ],
)
def test_bad_input_says_which_side_is_wrong(change, message):
    shapes = {"q": (3, 2, 25, 4), "k": (3, 2, 7, 4), "v": (3, 2, 7, 5)} | change
    with pytest.raises(VicinalError, match=message):
        attend(**{name: torch.zeros(shape) for name, shape in shapes.items()}, prior=PooledPrior())
