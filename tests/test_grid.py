import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vicinal import Grid, VicinalError

grids = st.builds(Grid, st.integers(1, 5), st.integers(1, 5), st.integers(0, 3))


@given(grids)
def test_tokens_are_prefix_then_patches_row_by_row(grid):
    assert grid.tokens == grid.prefix + grid.height * grid.width
    expected = list(itertools.product(range(grid.height), range(grid.width)))
    assert [tuple(place) for place in grid.coordinates().tolist()] == expected


@given(grids)
def test_index_and_unfold_equal_a_loop_over_pairs(grid):
    table = torch.randn(2, *grid.table_shape)
    full = grid.add_prefix(grid.unfold(table), 7.0)
    assert full.shape == (2, grid.tokens, grid.tokens)
    flat = torch.cat([table.flatten(1), torch.full((2, 1), 7.0)], dim=1)
    assert torch.equal(full, flat[:, grid.index()])
    assert torch.equal(grid.drop_prefix(full), grid.unfold(table))
    places = list(itertools.product(range(grid.height), range(grid.width)))
    for query, key in itertools.product(range(grid.tokens), repeat=2):
        if query < grid.prefix or key < grid.prefix:
            assert (full[:, query, key] == 7).all()
            continue
        (row, column), (key_row, key_column) = places[query - grid.prefix], places[key - grid.prefix]
        expected = table[:, key_row - row + grid.height - 1, key_column - column + grid.width - 1]
        assert torch.equal(full[:, query, key], expected)


@given(grids)
def test_fold_is_the_adjoint_of_unfold(grid):
    for batch in ((), (3,)):
        table = torch.randn(*batch, *grid.table_shape, dtype=torch.float64)
        pairs = torch.randn(*batch, grid.patches, grid.patches, dtype=torch.float64)
        assert grid.fold(pairs).shape == table.shape
        torch.testing.assert_close((grid.unfold(table) * pairs).sum(), (table * grid.fold(pairs)).sum())


@given(grids)
def test_distances_equal_those_between_coordinates(grid):
    places = grid.coordinates().double()
    squared, manhattan = grid.unfold(grid.squared_distance()), grid.unfold(grid.manhattan_distance())
    torch.testing.assert_close(squared.double(), torch.cdist(places, places).square())
    torch.testing.assert_close(manhattan.double(), torch.cdist(places, places, p=1))


@pytest.mark.parametrize(
    ("tokens", "prefix", "aspect", "expected"),
    [(197, 1, 1.0, Grid(14, 14, 1)), (64, 0, 1.0, Grid(8, 8)), (36, 4, 2.0, Grid(8, 4, 4)), (2, 1, 1.0, Grid(1, 1, 1))],
)
def test_from_tokens_finds_the_grid(tokens, prefix, aspect, expected):
    assert Grid.from_tokens(tokens, prefix=prefix, aspect=aspect) == expected


@pytest.mark.parametrize(
    "grid", [Grid(3, 9), *(pytest.param(grid, marks=pytest.mark.slow) for grid in (Grid(8, 8), Grid(1, 4)))]
)
def test_unfolding_gives_the_same_when_compiled_and_so_do_its_gradients(grid):
    table = torch.randn(2, *grid.table_shape, requires_grad=True)
    weights = torch.randn(2, grid.patches, grid.patches)
    torch.compiler.reset()
    (grid.unfold(table) * weights).sum().backward()
    expected, table.grad = table.grad, None
    unfolded = torch.compile(grid.unfold, fullgraph=True)(table)
    (unfolded * weights).sum().backward()
    assert torch.equal(unfolded, grid.unfold(table))
    torch.testing.assert_close(table.grad, expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grid(0, 8), "height must be a whole number >= 1, got 0"),
        (lambda: Grid(8, -1), "width must be a whole number >= 1, got -1"),
        (lambda: Grid(8, 2.5), "width must be a whole number >= 1, got 2.5"),
        (lambda: Grid(8, 8, -1), "prefix must be a whole number >= 0, got -1"),
        (lambda: Grid.from_tokens(4, prefix=5), "below the 4 tokens .* got 5"),
        (lambda: Grid.from_tokens(50), "50 patches, .* height / width = 1"),
    ],
)
def test_bad_grids_say_what_was_expected_and_given(make, message):
    with pytest.raises(VicinalError, match=message):
        make()


def test_prints_as_a_person_would_write_it():
    assert str(Grid(14, 14, 1)) == "14 x 14 + 1 prefix"
    assert str(Grid(8, 4)) == "8 x 4"
