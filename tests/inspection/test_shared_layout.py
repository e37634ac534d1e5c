"""`shared_layout` against every pair of tokens in every window."""

import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from token_layouts import TokenLayout, block_windows, cell_map, dilated_windows
from vicinal.cells import Cells, Layout
from vicinal.inspection.refusal import Refusal, RefusalKind
from vicinal.inspection.shared_layout import shared_layout


def to_cells(layout: TokenLayout) -> Cells:
    """Returns the layout as `decide` does."""
    return Cells(layout.rows, layout.columns, layout.index)


def grid_places(layout: Layout, tokens: int) -> Tensor:
    """Returns row and column of each token in the grid, `(tokens, 2)`; negative rows for tokens without a place."""
    order = torch.arange(tokens) if layout.order is None else layout.order
    places = torch.empty(tokens, 2, dtype=torch.long)
    for position, token in enumerate(order.tolist()):
        patch = position - layout.grid.prefix
        places[token] = torch.tensor(
            [patch // layout.grid.width, patch % layout.grid.width] if patch >= 0 else [-1, -1]
        )
    return places


def check_pairs(found: Layout, layout: TokenLayout, side: Tensor, step: tuple[int, int]) -> None:
    """Asserts that offsets in the grid are those of cells, for all pairs of tokens that no wrap separates.

    Args:
        found: grid and order.
        layout: the cells.
        side: `(windows, tokens)`, the same number for tokens on the same side of the edges.
        step: rows and columns from one cell of a window to the next.
    """
    tokens = layout.index.shape[1]
    assert found.grid.tokens == tokens
    places = grid_places(found, tokens)
    for window in range(layout.windows):
        placed = (layout.index[window] >= 0).nonzero()[:, 0]
        assert bool((places[placed] >= 0).all())
        cell = layout.index[window, placed]
        cells = torch.stack([cell // layout.columns, cell % layout.columns], -1)
        local = places[placed] * torch.tensor(step)
        together = side[window, placed, None] == side[window, placed]
        offsets = local[:, None] - local
        assert torch.equal(offsets[together], (cells[:, None] - cells)[together])


def window_layout(rng: random.Random, padding: bool) -> tuple[TokenLayout, Tensor, tuple[int, int]]:
    """Returns a layout of windows, which tokens are on which side of a wrap, and the step in a window."""
    height, width, down, right = 1, 1, 1, 1
    while height * width == 1 or down * right == 1:
        height, width, down, right = (rng.randint(1, 5) for _ in range(4))
    below, beside = (rng.randrange(height), rng.randrange(width)) if padding else (0, 0)
    cells = cell_map(height * down - below, width * right - beside)
    step, side = (1, 1), torch.zeros_like(cells)
    kind = rng.choice(("rolled, then padded", "padded, then rolled", *(() if padding else ("dilated",))))
    if kind == "dilated":
        index, step = dilated_windows(cells, height, width), (down, right)
        side = torch.zeros_like(index)
    else:
        pad, shift = (0, beside, 0, below), (rng.randrange(height), rng.randrange(width))
        moved = F.pad(cells, pad, value=-1) if kind == "padded, then rolled" else cells
        # Cells that a roll takes from the first rows and columns to the end are on the other side.
        row, column = torch.arange(moved.shape[0]) < shift[0], torch.arange(moved.shape[1]) < shift[1]
        side = 2 * row[:, None] + column[None, :].long()
        moved, side = (x.roll((-shift[0], -shift[1]), (0, 1)) for x in (moved, side))
        if kind == "rolled, then padded":
            moved, side = F.pad(moved, pad, value=-1), F.pad(side, pad)
        index, side = (block_windows(x, height, width) for x in (moved, side))
    if rng.random() < 0.3:
        order = torch.tensor(rng.sample(range(height * width), height * width)) if not padding else None
        index, side = (index, side) if order is None else (index[:, order], side[:, order])
    prefix = rng.choice((0, 0, 1, 3))
    index, side = F.pad(index, (prefix, 0), value=-1), F.pad(side, (prefix, 0))
    return TokenLayout(kind, *cells.shape, index), side, step


@pytest.mark.parametrize("seed", range(150))
def test_windows_share_the_offsets_of_their_cells(seed: int) -> None:
    layout, side, step = window_layout(random.Random(seed), padding=False)
    found = shared_layout(to_cells(layout))
    assert isinstance(found, Layout)
    check_pairs(found, layout, side, step)


def test_padded_windows_share_the_offsets_of_their_cells() -> None:
    """Where every window is wrapped or holds padding, a window's shape can be ambiguous: a refusal is right, too."""
    plain = 0
    for seed in range(300):
        layout, side, step = window_layout(random.Random(seed), padding=True)
        found = shared_layout(to_cells(layout))
        if isinstance(found, Layout):
            check_pairs(found, layout, side, step)
        somewhere = (layout.index >= 0).any(0)
        has_plain_window = int(somewhere.sum()) > 1 and any(
            bool((cells >= 0).all()) and len(group.unique()) == 1
            for cells, group in zip(layout.index[:, somewhere], side[:, somewhere], strict=True)
        )
        plain += has_plain_window
        assert isinstance(found, Layout) or not has_plain_window, f"case {seed}: {found.reason}"
    assert plain > 100


@pytest.mark.parametrize("seed", range(60))
def test_windows_with_other_orders_inside_are_refused(seed: int) -> None:
    rng = random.Random(seed)
    height, width = rng.choice(((1, 2), (2, 1), (2, 2), (1, 3), (3, 3), (2, 4)))
    down, right = rng.randint(2, 4), rng.randint(2, 4)
    cells = cell_map(height * down, width * right)
    index = block_windows(cells, height, width).clone()
    order = list(range(height * width))
    while order == sorted(order):
        rng.shuffle(order)
    window = rng.randrange(len(index))
    index[window] = index[window, order]
    found = shared_layout(Cells(*cells.shape, index))
    assert isinstance(found, Refusal)
    assert found.kind is RefusalKind.WINDOWS


@pytest.mark.parametrize("axis", [0, 1])
def test_mirrored_windows_are_refused(axis: int) -> None:
    cells = cell_map(4, 8)
    index = block_windows(cells, 2, 2)
    mirrored = index.view(-1, 2, 2).flip(axis + 1).reshape(-1, 4)
    found = shared_layout(Cells(4, 8, torch.where(torch.arange(len(index))[:, None] % 2 == 0, index, mirrored)))
    assert isinstance(found, Refusal)


def test_windows_of_different_shapes_are_refused() -> None:
    cells = cell_map(4, 8)
    index = torch.cat([block_windows(cells[:, :4], 2, 4), block_windows(cells[:, 4:], 4, 2)])
    found = shared_layout(Cells(4, 8, index))
    assert isinstance(found, Refusal)
    assert found.kind is RefusalKind.WINDOWS


def test_windows_of_single_patches_are_refused() -> None:
    found = shared_layout(Cells(2, 3, torch.arange(6)[:, None]))
    assert isinstance(found, Refusal)
    assert found.kind is RefusalKind.WINDOWS


@pytest.mark.parametrize("seed", range(30))
def test_global_attention_orders_tokens_by_their_cells(seed: int) -> None:
    rng = random.Random(seed)
    rows, columns, without = rng.randint(1, 6), rng.randint(2, 6), rng.randint(0, 4)
    tokens = torch.cat([torch.full((without,), -1), torch.arange(rows * columns)])
    tokens = tokens[torch.tensor(rng.sample(range(len(tokens)), len(tokens)))]
    layout = TokenLayout("", rows, columns, tokens[None])
    found = shared_layout(to_cells(layout))
    assert isinstance(found, Layout)
    assert (found.grid.height, found.grid.width, found.grid.prefix) == (rows, columns, without)
    check_pairs(found, layout, torch.zeros_like(layout.index), (1, 1))
    last = int((tokens >= 0).nonzero().max())
    assert found.suffix == len(tokens) - 1 - last
    assert found.prefix == without - found.suffix


def test_tokens_in_order_need_no_order() -> None:
    found = shared_layout(Cells(2, 3, torch.tensor([[-1, 0, 1, 2, 3, 4, 5]])))
    assert isinstance(found, Layout)
    assert found.order is None
    assert str(found) == "2 x 3 + 1 prefix"
