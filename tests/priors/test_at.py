"""`prior.at`, `prior.on` and `prior.between`: offsets that the prior's own grid does not have."""

import math

import pytest
import torch

import vicinal
from vicinal import Grid, VicinalError, build_prior
from vicinal.priors import Prior, register_prior
from vicinal.priors.token_values import MAX_CACHED_PLACES, TokenPairs

GRID = Grid(6, 4, prefix=1)
SPECS = [
    "gmm:init=spread",
    "gmm:init=paper,share_heads=true",
    "gab:share_heads=false",
    "decay",
    "conv",
    "rpe-mlp:init=normal",
]
FREE = ["rpe:init=normal", "rpe:init=normal,share_heads=true"]


def build(spec, heads=3, grid=GRID):
    torch.manual_seed(0)
    return build_prior(spec, heads=heads, grid=grid).double()


def by_hand(prior, head, row, column):
    """Scale and bias of one head at one offset, as plain numbers."""
    squared = row**2 + column**2
    match type(prior).__name__:
        case "GaussianMixture":
            sigma, alpha = prior.sigma[:, head].tolist(), prior.alpha[:, head].tolist()
            terms = [a * math.exp(-squared / (2 * (s**2 + 1e-5))) for s, a in zip(sigma, alpha, strict=True)]
            return prior.constant + sum(terms), None
        case "GaussianBias":
            sigma, amplitude = float(prior.sigma[head]), float(prior.amplitude[head])
            return None, amplitude**2 * math.exp(-squared / (2 * (sigma**2 + 1e-5)))
        case "Decay":
            return None, (abs(row) + abs(column)) * math.log(float(prior.gamma[head]))
        case "Convolution":
            mu, sigma = prior.mu[head].tolist(), float(prior.sigma[head])
            return None, -((row - mu[0]) ** 2 + (column - mu[1]) ** 2) / (2 * (sigma**2 + 1e-5))
        case "RelativeBiasMlp":
            spaced = torch.tensor(
                [math.copysign(math.log2(1 + abs(d)) / 3, d) for d in (row, column)], dtype=torch.float64
            )
            return None, float((prior.outer(torch.relu(prior.inner(spaced))))[head])
    raise AssertionError(prior)


@torch.no_grad()
@pytest.mark.parametrize("spec", SPECS)
def test_parametric_priors_follow_their_formula_at_any_offset(spec):
    prior = build(spec)
    offsets = torch.tensor([[[0.0, 0.0], [1.0, -2.0], [0.5, 2.25]], [[-7.5, 0.0], [3.0, 9.0], [-0.125, -3.5]]]).double()
    pair = prior.at(offsets)
    for head in range(3):
        for i in range(2):
            for j in range(3):
                expected = by_hand(prior, head, *offsets[i, j].tolist())
                for values, number in zip(pair, expected, strict=True):
                    assert (values is None) == (number is None)
                    if values is not None:
                        assert values.shape == (3, 2, 3)
                        assert float(values[head, i, j]) == pytest.approx(number, rel=1e-12, abs=1e-12)
    assert prior.grid == GRID


@pytest.mark.parametrize("spec", [*SPECS, *FREE])
def test_whole_offsets_give_the_table(spec):
    prior = build(spec)
    rows, columns = GRID.offsets(dtype=torch.float64)
    offsets = torch.stack(torch.broadcast_tensors(rows, columns), -1)
    for values, table in zip(prior.at(offsets), prior.table(), strict=True):
        assert (values is None) == (table is None)
        if values is not None:
            torch.testing.assert_close(values, table, rtol=0, atol=1e-14)


def test_a_free_table_is_interpolated_and_keeps_its_edge():
    prior = build("rpe:init=normal")
    table = prior.bias()
    at = prior.at(torch.tensor([[0.25, -1.5], [20.0, 0.0], [-5.0, -30.0]]).double())[1]
    row, column = 5, 3  # of offset (0, 0)
    upper = (table[:, row, column - 2] + table[:, row, column - 1]) / 2
    lower = (table[:, row + 1, column - 2] + table[:, row + 1, column - 1]) / 2
    torch.testing.assert_close(at[:, 0], 0.75 * upper + 0.25 * lower, rtol=0, atol=1e-14)
    torch.testing.assert_close(at[:, 1:], torch.stack([table[:, 10, 3], table[:, 0, 0]], 1), rtol=0, atol=0)


@pytest.mark.parametrize("spec", [*SPECS, *FREE, "elm", "gmm:init=spread+rpe:init=normal", "gab+elm"])
@pytest.mark.parametrize("grid", [Grid(8, 8, 1), Grid(3, 8, 2), Grid(12, 2), Grid(6, 4)])
def test_another_grid_is_what_resize_gives(spec, grid):
    prior = build(spec)
    resized = prior.resize(grid)
    for values, expected in zip(prior.on(grid)(), resized(), strict=True):
        assert (values is None) == (expected is None)
        if values is not None:
            torch.testing.assert_close(values, expected, rtol=0, atol=1e-12)
    assert prior.grid == GRID


def test_gradients_reach_the_parameters_from_another_grid():
    prior = build("rpe:init=normal")
    prior.on(Grid(5, 5))()[1].square().sum().backward()
    other = build("gmm:init=spread")
    other.between(TokenPairs(torch.rand(3, 2, 2)))()[0].sum().backward()
    assert prior.flat_bias.grad.abs().sum() > 0
    assert other.flat_sigma.grad.abs().min() > 0


def test_composition_combines_its_parts_at_offsets():
    prior, offsets = build("gmm:init=spread+gab+rpe:init=normal"), torch.rand(5, 2).double() * 4
    scale, bias = prior.at(offsets)
    mixture, gab, table = prior.parts
    torch.testing.assert_close(scale, mixture.at(offsets)[0])
    torch.testing.assert_close(bias, gab.at(offsets)[1] + table.at(offsets)[1])


def test_elm_refuses_offsets_with_the_reason():
    with pytest.raises(VicinalError, match="every pair of patches"):
        build("elm").at(torch.zeros(3, 2))
    with pytest.raises(VicinalError, match="every pair of patches"):
        build("gab+elm").at(torch.zeros(3, 2))


def test_offsets_have_two_columns():
    with pytest.raises(VicinalError, match=r"\(\*shape, 2\).*\(3,\)"):
        build("gab").at(torch.zeros(3))


@pytest.fixture(autouse=True)
def priors_of_users(_own_priors):
    """Registers the `ring` of the `Prior` docstring, and priors of other kinds, for one test."""

    @register_prior("ring-at")
    class Ring(Prior):
        "A preferred distance."

        def __init__(self, heads, grid, layer=0, depth=1, *, radius: float = 2.0):
            super().__init__(heads, grid, layer, depth)
            self.radius = torch.nn.Parameter(torch.full((heads,), radius))

        def bias(self):
            return -(self.grid.squared_distance().sqrt() - self.radius[:, None, None]).square()

    @register_prior("own-table")
    class OwnTable(Prior):
        "A free table, without any word on other grids."

        def __init__(self, heads, grid, layer=0, depth=1):
            super().__init__(heads, grid, layer, depth)
            self.flat = torch.nn.Parameter(torch.randn(heads * math.prod(grid.table_shape)))

        def scale(self):
            return self.flat.view(self.heads, *self.grid.table_shape)

    @register_prior("own-size")
    class OwnSize(Prior):
        "Counts its offsets itself, from the size of its grid."

        def bias(self):
            rows = torch.arange(1 - self.grid.height, self.grid.height).float()
            columns = torch.arange(1 - self.grid.width, self.grid.width).float()
            return (rows[:, None] * 2 + columns)[None]


def test_a_users_formula_serves_any_offset_and_any_grid():
    prior = build("ring-at", heads=4)
    offsets = torch.tensor([[0.0, 0.0], [1.5, 2.0], [-9.0, 0.25]]).double()
    expected = -(offsets.norm(dim=-1) - 2).square().expand(4, 3)
    torch.testing.assert_close(prior.at(offsets)[1], expected, rtol=1e-6, atol=0)  # squared_distance() is in fp32
    for grid in (Grid(9, 2, 1), Grid(2, 2)):
        torch.testing.assert_close(prior.on(grid)()[1], prior.resize(grid)()[1])
    assert prior.grid == GRID


@pytest.mark.parametrize("grid", [GRID, Grid(1, 4), Grid(4, 1)])  # (n, 1) is the shape of one of their tables
def test_a_users_table_is_interpolated_at_offsets_and_refused_on_other_grids(grid):
    prior = build("own-table", grid=grid)
    table, rows = prior.scale(), 2 * grid.height - 1
    offsets = torch.stack([torch.arange(rows) - (grid.height - 1), torch.zeros(rows)], -1)
    torch.testing.assert_close(prior.at(offsets)[0], table[:, :, grid.width - 1])
    if grid.width > 1:
        half = prior.at(torch.tensor([[0.0, 0.5]]))[0][:, 0]
        center = table[:, grid.height - 1, grid.width - 1 : grid.width + 1]
        torch.testing.assert_close(half, center.mean(-1))
    with pytest.raises(VicinalError, match=r"scale_at\(rows, columns\)"):
        prior.on(Grid(5, 5))()


def test_a_users_prior_that_counts_rows_itself_is_right_everywhere():
    prior = build("own-size")
    bias = prior.at(torch.tensor([[1.0, 0.5], [-2.0, 3.0]]).double())[1]
    torch.testing.assert_close(bias, torch.tensor([2.5, -1.0]).double().expand(3, 2), check_dtype=False)
    torch.testing.assert_close(prior.on(Grid(2, 7))()[1], prior.resize(Grid(2, 7))()[1])


@pytest.mark.parametrize("spec", [*SPECS, *FREE])
def test_pairs_without_a_place_are_neutral(spec):
    prior = build(spec)
    offsets = torch.rand(5, 3, 2).double() * 4 - 2
    offsets[0], offsets[:, 2, 1] = torch.nan, torch.nan
    placed = prior.between(TokenPairs(offsets))
    for values, neutral, expected in zip(placed(), (1.0, 0.0), prior.at(offsets.nan_to_num()), strict=True):
        if values is not None:
            assert values.shape == (3, 5, 3)
            assert bool((values[:, 0] == neutral).all())
            assert bool((values[:, :, 2] == neutral).all())
            torch.testing.assert_close(values[:, 1:, :2], expected[:, 1:, :2], rtol=0, atol=1e-4)


def test_regular_offsets_are_stored_once():
    grid = vicinal.Grid(8, 8)
    queries = grid.coordinates().double()
    keys = 4 * (vicinal.Grid(2, 2).coordinates() + 0.5) - 0.5
    pairs = TokenPairs(keys[None] - queries[:, None])
    assert pairs.index.shape == (64, 4)
    assert len(pairs.offsets) == (8 + 4) ** 2
    torch.testing.assert_close(pairs.offsets[pairs.index], keys[None] - queries[:, None], rtol=0, atol=0)


def test_inference_keeps_values_of_a_bounded_number_of_grids():
    prior = build("gmm:init=spread")
    with torch.no_grad():
        kept = prior.on(Grid(3, 3))()[0]
        assert prior.on(Grid(3, 3))()[0] is kept
        for height in range(4, 4 + MAX_CACHED_PLACES):
            prior.on(Grid(height, 3))()
        assert prior.on(Grid(3, 3))()[0] is not kept
        assert len(prior._cache._values) == MAX_CACHED_PLACES
