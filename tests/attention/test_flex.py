"""flex_attention against the formula."""

import pytest
import torch

from attention_helpers import inputs
from vicinal import Grid, VicinalError, attend, build_prior
from vicinal.attention.flex import _grid_lookup
from vicinal.priors.token_values import TokenPairs


def formula(q, k, v, prior, mask=None):
    """Returns attention by the plain formula in float64."""
    q, k, v = (x.detach().double() for x in (q, k, v))
    return attend(q, k, v, prior=prior, mask=mask, backend="plain")


@pytest.mark.parametrize("spec", ["gmm:init=spread+gab", pytest.param("conv", marks=pytest.mark.slow)])
def test_flex_equals_the_others_without_a_gradient(spec):
    grid = Grid(4, 4, prefix=1)
    q, k, v = (x.detach() for x in inputs(grid, dim=16))
    mask = torch.randn(3, 1, grid.tokens, grid.tokens)
    prior = build_prior(spec, heads=2, grid=grid)
    with torch.no_grad():
        out = attend(q, k, v, prior=prior, mask=mask, backend="flex")
        torch.testing.assert_close(out.double(), formula(q, k, v, prior, mask), atol=1e-5, rtol=1e-4)
    with pytest.raises(VicinalError, match=r"no backward on a CPU; use backend='auto', or torch.no_grad"):
        attend(q, k, v, prior=prior, backend="flex")
    with pytest.raises(VicinalError, match=r"has no dropout, given 0.1; use backend='auto'"):
        attend(q, k, v, prior=prior, backend="flex", dropout=0.1)


@pytest.mark.parametrize("spec", ["gmm:init=spread+gab", pytest.param("elm", marks=pytest.mark.slow)])
def test_a_compiled_module_has_flex_attention_in_its_one_graph(spec):
    grid = Grid(3, 5, prefix=2)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.prior = build_prior(spec, heads=2, grid=grid)

        def forward(self, q, k, v, mask):
            return attend(q + 1, k, v, prior=self.prior, mask=mask, backend="flex")

    model, (q, k, v) = Model(), inputs(grid, dim=16)
    mask = torch.rand(3, 1, 1, grid.tokens) > 0.2
    with torch.no_grad():
        out = torch.compile(model, fullgraph=True)(q, k, v, mask)
        torch.testing.assert_close(out.double(), formula(q + 1, k, v, model.prior, mask), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_flex_serves_queries_and_keys_with_positions_of_their_own():
    grid = Grid(2, 3)
    prior = build_prior("gmm:init=spread", heads=2, grid=grid)
    offsets = torch.randn(6, 4, 2)
    offsets[0] = torch.nan
    q, k, v = torch.randn(1, 2, 6, 16), torch.randn(1, 2, 4, 16), torch.randn(1, 2, 4, 16)
    placed = prior.between(TokenPairs(offsets))
    with torch.no_grad():
        out = attend(q, k, v, prior=placed, backend="flex")
        torch.testing.assert_close(out.double(), formula(q, k, v, placed), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("grid", [Grid(1, 1), Grid(3, 2), Grid(2, 5, prefix=3)])
@pytest.mark.parametrize("per_offset", [True, False])
def test_the_table_is_read_at_the_offset_and_prefix_tokens_are_neutral(grid, per_offset):
    shape = grid.table_shape if per_offset else (grid.patches, grid.patches)
    values = torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
    lookup = _grid_lookup(grid, per_offset)
    numbers = torch.arange(grid.tokens)
    found = lookup(values, torch.arange(2)[:, None, None], numbers[:, None], numbers[None], 7.0)
    expected = grid.add_prefix(grid.unfold(values) if per_offset else values, 7.0)
    assert torch.equal(found, expected)
    direction = torch.randn(found.shape, dtype=torch.float64)
    ours, wanted = (torch.autograd.grad(x, values, direction)[0] for x in (found, expected))
    torch.testing.assert_close(ours, wanted)
