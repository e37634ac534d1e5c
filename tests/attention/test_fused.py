"""A bias without a gradient, handed to PyTorch's fused attention."""

import pytest
import torch

from attention_helpers import inputs
from vicinal import Grid, attend, build_prior
from vicinal.attention.recompute import RecomputedAttention


@pytest.mark.parametrize("spec", ["gab", "decay", "conv", "gab+decay"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_without_a_gradient_uses_the_fused_kernel(spec, dtype, monkeypatch):
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
