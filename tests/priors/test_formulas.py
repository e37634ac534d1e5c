"""Each prior against its formula, written a second time in float64, and against golden values."""

import copy
import math

import pytest
import torch

from vicinal import Grid, build_prior
from vicinal.priors import gaussian_mixture


def offsets(grid):
    """Offset of every pair of patches, `(patches, patches, 2)`, float64: brute force."""
    places = [(row, column) for row in range(grid.height) for column in range(grid.width)]
    return torch.tensor([[[k[0] - q[0], k[1] - q[1]] for k in places] for q in places], dtype=torch.float64)


@pytest.mark.parametrize(("name", "grid"), [("gmm_8x8", Grid(8, 8)), ("gmm_6x10", Grid(6, 10))])
def test_gmm_reproduces_golden_rows(golden, name, grid):
    sigma, alpha = golden["gmm_8x8"]["sigma"], golden["gmm_8x8"]["alpha"]
    scale, bias = build_prior("gmm:kernels=3", heads=2, grid=grid, sigma=sigma, alpha=alpha)()
    assert bias is None
    for query, rows in golden[name]["rows"].items():
        torch.testing.assert_close(scale[:, int(query)], torch.tensor(rows), atol=1e-5, rtol=0)


def test_gab_reproduces_golden_rows(golden):
    values = golden["gab_14x14"]
    grid = Grid(14, 14)
    scale, bias = build_prior("gab", heads=3, grid=grid, sigma=values["sigma"], amplitude=values["amplitude"])()
    assert scale is None
    for query, row in values["rows"].items():
        torch.testing.assert_close(bias[:, int(query)], torch.tensor(row).expand(3, -1), atol=1e-5, rtol=0)


def test_gmm_is_right_at_the_far_corner_of_a_large_grid():
    grid = Grid(64, 64)
    (scale, _) = build_prior("gmm:kernels=1,sigma=60,alpha=1", heads=1, grid=grid).table()
    expected = math.exp(-2 * 63**2 / (2 * (60**2 + 1e-5)))  # d^2 = 7938: exp(-d^2) alone underflows
    assert scale[0, 0, 0].item() == pytest.approx(expected, abs=1e-5)
    assert scale[0, -1, 0].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("init", ["paper", "spread", "identity"])
def test_gmm_equals_its_formula(init):
    grid = Grid(5, 7)
    prior = build_prior("gmm", heads=3, grid=grid, kernels=4, init=init)
    squared = offsets(grid).square().sum(-1)
    expected = torch.full((3, *squared.shape), float(init == "identity"), dtype=torch.float64)
    for kernel in range(4):
        for head in range(3):
            sigma, alpha = prior.sigma[kernel, head].double(), prior.alpha[kernel, head].double()
            expected[head] += alpha * torch.exp(-squared / (2 * (sigma**2 + 1e-5)))
    torch.testing.assert_close(prior()[0].double(), expected, atol=1e-5, rtol=1e-5)


def test_gmm_starting_values_follow_their_init():
    grid = Grid(8, 16)
    identity = build_prior("gmm:kernels=4", heads=6, grid=grid)
    assert (identity.alpha == 0).all()
    widths = identity.sigma[:, 0]
    torch.testing.assert_close(widths[[0, -1]], torch.tensor([0.5, 16.0]))
    torch.testing.assert_close(widths[1:] / widths[:-1], (widths[1] / widths[0]).expand(3))
    paper = build_prior("gmm:init=paper,kernels=200", heads=50, grid=grid)
    assert paper.sigma.mean().item() == pytest.approx(10, abs=0.5)
    assert paper.sigma.std().item() == pytest.approx(10, abs=0.5)
    assert paper.alpha.mean().item() == pytest.approx(0, abs=0.1)
    assert paper.alpha.std().item() == pytest.approx(2, abs=0.1)
    spread = build_prior("gmm:init=spread,kernels=200", heads=50, grid=grid)
    assert spread.alpha.mean().item() == pytest.approx(1, abs=0.05)
    assert spread.alpha.std().item() == pytest.approx(0.5, abs=0.05)
    assert [prior.constant for prior in (identity, paper, spread)] == [1, 0, 0]


def test_gab_equals_its_formula_and_starts_where_table_1_lies():
    grid = Grid(14, 14)
    prior = build_prior("gab:share_heads=false", heads=4, grid=grid)
    torch.testing.assert_close(prior.sigma, torch.full((4,), 0.35 * 14))
    expected = torch.exp(-offsets(grid).square().sum(-1) / (2 * (0.35 * 14) ** 2))
    torch.testing.assert_close(prior()[1].double(), expected.expand(4, -1, -1), atol=1e-5, rtol=1e-5)


def test_decay_equals_a_power_of_the_manhattan_distance():
    grid = Grid(4, 6)
    prior = build_prior("decay", heads=5, grid=grid)
    gamma = torch.tensor([1 - 2.0 ** (-5 - head) for head in range(5)], dtype=torch.float64)
    torch.testing.assert_close(prior.gamma.double(), gamma, atol=1e-7, rtol=0)
    attention = gamma[:, None, None] ** offsets(grid).abs().sum(-1)
    torch.testing.assert_close(prior()[1].double().exp(), attention, atol=1e-6, rtol=1e-6)


def test_conv_equals_a_window_around_its_center():
    grid = Grid(5, 4)
    prior = build_prior("conv", heads=7, grid=grid)
    mu, sigma = prior.mu.double(), prior.sigma.double()
    squared = (offsets(grid) - mu[:, None, None]).square().sum(-1)
    expected = -squared / (2 * (sigma**2 + 1e-5))[:, None, None]
    torch.testing.assert_close(prior()[1].double(), expected, atol=1e-5, rtol=1e-5)


def test_conv_centers_start_on_the_neighborhood_nearest_first():
    centers = build_prior("conv", heads=8, grid=Grid(8, 8)).mu.tolist()
    assert centers[:5] == [[0, 0], [0, 1], [0, -1], [1, 0], [-1, 0]]
    assert sorted(centers[5:7]) == [[1, -1], [1, 1]]  # diagonals
    many = build_prior("conv", heads=30, grid=Grid(8, 8))
    wide = [head for head in range(30) if many.sigma[head] == 8]
    assert wide == [8, 17, 26, 29]  # every ninth, and the last
    assert (many.mu[wide] == 0).all()
    rest = [tuple(center) for head, center in enumerate(many.mu.tolist()) if head not in wide]
    assert len(set(rest[:25])) == 25
    assert all(max(abs(row), abs(column)) <= 1 for row, column in rest[:9])
    assert all(max(abs(row), abs(column)) == 2 for row, column in rest[9:25])
    assert rest[25] == (0, 0)


def test_conv_looks_to_the_right_where_its_center_is_right_of_the_query():
    bias = build_prior("conv", heads=6, grid=Grid(3, 3))()[1]
    assert bias[1, 4].argmax() == 5  # head 2 has center (0, 1); 4 is the middle patch
    assert bias[3, 4].argmax() == 7  # head 4 has center (1, 0): the row below


def test_conv_grows_with_its_layer():
    first, later = (build_prior("conv:growth=0.4", heads=6, grid=Grid(8, 8), layer=layer, depth=6) for layer in (0, 5))
    torch.testing.assert_close(later.sigma[:5], 3.0 * first.sigma[:5])
    torch.testing.assert_close(later.mu, 2.0 * first.mu)
    assert later.sigma[5] == first.sigma[5] == 8  # the wide head is wide already
    zero = build_prior("conv:centers=zero", heads=6, grid=Grid(8, 8))
    assert (zero.mu == 0).all()
    alone = build_prior("conv", heads=1, grid=Grid(8, 8))
    assert alone.sigma.item() == first.sigma[0].item()


def test_rpe_mlp_is_its_network_of_the_offset():
    grid = Grid(3, 5)
    prior = build_prior("rpe-mlp:hidden=16,init=normal", heads=2, grid=grid)
    spaced = offsets(grid).sign() * torch.log2(1 + offsets(grid).abs()) / 3
    inner, outer = copy.deepcopy(prior.inner).double(), copy.deepcopy(prior.outer).double()
    expected = outer(torch.relu(inner(spaced))).permute(2, 0, 1)
    torch.testing.assert_close(prior()[1].double(), expected, atol=1e-6, rtol=1e-5)


def test_rpe_reads_its_table_by_offset():
    grid = Grid(3, 4)
    prior = build_prior("rpe:init=normal", heads=2, grid=grid)
    table = prior.flat_bias.view(2, 5, 7)
    row, column = (offsets(grid) + torch.tensor([2.0, 3.0])).long().unbind(-1)
    assert torch.equal(prior()[1], table[:, row, column])


@pytest.mark.parametrize("share", [True, False])
def test_elm_is_free_per_pair_of_patches(share):
    grid = Grid(2, 3, prefix=1)
    prior = build_prior("elm", heads=4, grid=grid, share_heads=share)
    assert prior.flat_mask.numel() == (1 if share else 4) * 36
    torch.nn.init.normal_(prior.flat_mask)
    expected = prior.flat_mask.view(-1, 6, 6).expand(4, -1, -1)
    scale, bias = prior()
    assert bias is None
    assert torch.equal(scale[:, 1:, 1:], expected)
    assert torch.equal(prior.mask, expected)
    assert (build_prior("elm:init=paper", heads=4, grid=grid).mask == 0).all()


def test_none_changes_nothing():
    assert build_prior("none", heads=2, grid=Grid(2, 2))() == (None, None)


def test_gmm_has_the_same_values_and_gradients_for_small_and_large_tables(monkeypatch):
    prior = build_prior("gmm:init=spread", heads=3, grid=Grid(5, 7)).double()
    found = []
    for limit in (0, 10**9):
        monkeypatch.setattr(gaussian_mixture, "MAX_TABLE", limit)
        table, _ = prior.table()
        loss = (table * torch.linspace(-1, 1, table.numel(), dtype=torch.float64).view_as(table)).sum()
        found.append((table, *torch.autograd.grad(loss, list(prior.parameters()))))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)
