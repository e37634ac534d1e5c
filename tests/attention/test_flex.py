"""flex_attention against the formula."""

import pytest
import torch

from attention_helpers import inputs
from vicinal import Grid, VicinalError, attend, build_prior


def test_flex_equals_the_others_without_a_gradient():
    grid = Grid(4, 4, prefix=1)
    q, k, v = (x.detach() for x in inputs(grid, dim=16))
    mask = torch.randn(3, 1, grid.tokens, grid.tokens)
    for spec in ("gmm:init=spread+gab", "conv"):
        prior = build_prior(spec, heads=2, grid=grid)
        with torch.no_grad():
            out = attend(q, k, v, prior=prior, mask=mask, backend="flex")
            torch.testing.assert_close(
                out, attend(q, k, v, prior=prior, mask=mask, backend="plain"), atol=1e-5, rtol=1e-4
            )
    with pytest.raises(VicinalError, match=r"no backward on a CPU; use backend='auto', or torch.no_grad"):
        attend(q, k, v, prior=prior, backend="flex")
    with pytest.raises(VicinalError, match=r"has no dropout, given 0.1; use backend='auto'"):
        attend(q, k, v, prior=prior, backend="flex", dropout=0.1)
