"""The plain formula and its weights against PyTorch and float64."""

import pytest
import torch
from torch.nn import functional as F

from attention_helpers import SPECS, assert_all_close, by_hand, gradients, inputs
from vicinal import Grid, attend, build_prior
from vicinal.attention import attention_weights


@pytest.mark.parametrize("backend", ["auto", "plain", "recompute"])
@pytest.mark.parametrize("spec", ["gmm", "gab:amplitude=0", "none"])
def test_identity_prior_and_boolean_mask_equal_plain_sdpa_even_for_fully_masked_queries(spec, backend):
    grid = Grid(2, 3)
    q, k, v = inputs(grid)
    seen = torch.rand(3, 1, 6, 6) > 0.3
    seen[1, 0, 2] = False  # a query without a key
    prior = build_prior(spec, heads=2, grid=grid)
    ours = attend(q, k, v, prior=prior, mask=seen, backend=backend)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert (ours[1, :, 2] == 0).all()
    assert_all_close(gradients(ours, (q, k, v)), gradients(theirs, (q, k, v)), atol=1e-5, rtol=1e-4)


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


@pytest.mark.parametrize("spec", SPECS)
def test_weights_equal_the_formula_by_hand(spec):
    grid = Grid(2, 3, prefix=1)
    q, k, _ = inputs(grid)
    identity = torch.eye(grid.tokens).expand(3, 2, -1, -1)  # as values, it gives the weights
    prior = build_prior(spec, heads=2, grid=grid)
    mask = torch.randn(3, 2, grid.tokens, grid.tokens)
    expected = by_hand(q, k, identity, prior, mask=mask, scale=0.7)
    for queries in (slice(None), slice(1), slice(2, 5)):
        weights = attention_weights(q, k, prior=prior, mask=mask, scale=0.7, queries=queries)
        torch.testing.assert_close(weights.double(), expected[:, :, queries], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("spec", ["gmm:init=spread+gab", "conv", "elm"])
def test_float64_is_exact(spec):
    grid = Grid(4, 4, prefix=1)
    q, k, v = inputs(grid, dtype=torch.float64)
    prior = build_prior(spec, heads=2, grid=grid).double()
    scale, bias = (None if values is None else values.detach() for values in prior())
    logits = q @ k.mT / 2 * (1.0 if scale is None else scale) + (0.0 if bias is None else bias)
    expected = logits.softmax(-1) @ v
    expected_gradients = gradients(expected, (q, k, v))
    for backend in ("plain", "recompute"):
        out = attend(q, k, v, prior=prior, backend=backend)
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
        assert_all_close(gradients(out, (q, k, v)), expected_gradients, atol=1e-12, rtol=0)
