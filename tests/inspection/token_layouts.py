"""Layouts of tokens as models have them, written down cell by cell: the truth that `decide` is compared with."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["VALID_LAYOUTS", "TokenLayout", "block_windows", "cell_map", "dilated_windows", "random_layout"]


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Cells of the tokens of one attention side."""

    name: str
    rows: int
    columns: int
    index: Tensor
    """`(windows, tokens)`: row-major cell, -1 for a token without a place."""

    @property
    def windows(self) -> int:
        """Number of windows."""
        return len(self.index)

    def with_index(self, index: Tensor) -> "TokenLayout":
        """Returns the same lattice with other tokens."""
        return TokenLayout(self.name, self.rows, self.columns, index)


def cell_map(rows: int, columns: int) -> Tensor:
    """Returns the numbers of the cells, `(rows, columns)`."""
    return torch.arange(rows * columns).view(rows, columns)


def block_windows(cells: Tensor, height: int, width: int) -> Tensor:
    """Returns a map `(rows, columns)` cut into neighboring cells, `(windows, height * width)`, as Swin does."""
    return cells.unfold(0, height, height).unfold(1, width, width).reshape(-1, height * width)


def dilated_windows(cells: Tensor, height: int, width: int) -> Tensor:
    """Returns a map cut into windows of every n-th cell, `(windows, height * width)`, as in MaxViT's grid attention."""
    steps = cells.shape[0] // height, cells.shape[1] // width
    parts = [
        cells[row :: steps[0], column :: steps[1]].flatten() for row in range(steps[0]) for column in range(steps[1])
    ]
    return torch.stack(parts)


def mask_units(cells: Tensor, levels: int) -> Tensor:
    """Returns a map in the order of Hiera's mask units, `(4 ** levels, units)`: every 2nd row and column, repeated."""
    parts = [cells]
    for _ in range(levels):
        parts = [part[row::2, column::2] for part in parts for row in (0, 1) for column in (0, 1)]
    return torch.stack([part.flatten() for part in parts])


def insert(index: Tensor, at: int, count: int) -> Tensor:
    """Returns tokens with `count` tokens without a place in front of token `at` of every window."""
    return torch.cat([index[:, :at], index.new_full((len(index), count), -1), index[:, at:]], 1)


def _plain(rng: random.Random) -> TokenLayout:
    rows, columns = rng.randint(1, 14), rng.randint(1, 14)
    columns += rows * columns == 1
    return TokenLayout("rectangle", rows, columns, cell_map(rows, columns).view(1, -1))


def _line(rng: random.Random) -> TokenLayout:
    rows, columns = rng.choice([(1, rng.randint(2, 24)), (rng.randint(2, 24), 1)])
    return TokenLayout("line", rows, columns, torch.arange(rows * columns)[None])


def _prefixed(rng: random.Random) -> TokenLayout:
    layout = _plain(rng)
    index = insert(layout.index, 0, rng.randint(0, 5))
    index = insert(index, index.shape[1], rng.randint(0, 5))
    index = insert(index, rng.randrange(index.shape[1]), rng.randint(0, 2))
    return TokenLayout("prefix, suffix or tokens in the middle", layout.rows, layout.columns, index)


def _permuted(rng: random.Random) -> TokenLayout:
    layout = _prefixed(rng)
    order = torch.tensor(rng.sample(range(layout.index.shape[1]), layout.index.shape[1]))
    return TokenLayout("permutation", layout.rows, layout.columns, layout.index[:, order])


def _window(rng: random.Random) -> tuple[int, int, int, int]:
    """Returns height and width of a window, and windows per column and row: two tokens or more, and two windows."""
    while True:
        height, width, down, right = rng.randint(1, 7), rng.randint(1, 7), rng.randint(1, 4), rng.randint(1, 4)
        if height * width > 1 and down * right > 1 and height * width * down * right <= 400:
            return height, width, down, right


def _blocks(rng: random.Random) -> TokenLayout:
    height, width, down, right = _window(rng)
    cells = cell_map(height * down, width * right)
    return TokenLayout("block windows", *cells.shape, block_windows(cells, height, width))


def _dilated(rng: random.Random) -> TokenLayout:
    height, width, down, right = _window(rng)
    cells = cell_map(height * down, width * right)
    return TokenLayout("dilated windows", *cells.shape, dilated_windows(cells, height, width))


def _class_in_windows(rng: random.Random) -> TokenLayout:
    layout = rng.choice([_blocks, _dilated])(rng)
    return TokenLayout("class token in every window", layout.rows, layout.columns, insert(layout.index, 0, 1))


def _permuted_windows(rng: random.Random) -> TokenLayout:
    layout = rng.choice([_blocks, _dilated])(rng)
    order = torch.tensor(rng.sample(range(layout.index.shape[1]), layout.index.shape[1]))
    return TokenLayout("permutation in windows", layout.rows, layout.columns, layout.index[:, order])


def _shifted(rng: random.Random) -> TokenLayout:
    height, width, down, right = _window(rng)
    cells = cell_map(height * down, width * right)
    shift = rng.randrange(height), rng.randrange(width)
    return TokenLayout("rolled windows", *cells.shape, block_windows(cells.roll(shift, (0, 1)), height, width))


def _padded(rng: random.Random) -> TokenLayout:
    height, width, down, right = _window(rng)
    below, beside = rng.randrange(height), rng.randrange(width)
    cells = cell_map(height * down - below, width * right - beside)
    shift, pad = (-rng.randrange(height), -rng.randrange(width)), (0, beside, 0, below)
    if rng.random() < 0.5:
        name, moved = "padded, then rolled", F.pad(cells, pad, value=-1).roll(shift, (0, 1))
    else:
        name, moved = "rolled, then padded", F.pad(cells.roll(shift, (0, 1)), pad, value=-1)
    return TokenLayout(name, *cells.shape, block_windows(moved, height, width))


def _units(rng: random.Random) -> TokenLayout:
    levels = rng.randint(1, 3)
    most = {1: 7, 2: 4, 3: 2}[levels]
    cells = cell_map(2**levels * rng.randint(1, most), 2**levels * rng.randint(1, most))
    units = mask_units(cells, levels)
    in_windows = units.shape[1] > 1 and rng.random() < 0.5
    return TokenLayout("mask units", *cells.shape, units.T if in_windows else units.reshape(1, -1))


def _overlapping(rng: random.Random) -> TokenLayout:
    block, halo, down, right = rng.randint(2, 5), rng.randint(1, 2), rng.randint(2, 4), rng.randint(2, 4)
    cells = cell_map(block * down, block * right)
    around, side = F.pad(cells, (halo,) * 4, value=-1), block + 2 * halo
    index = around.unfold(0, side, block).unfold(1, side, block).reshape(-1, side * side)
    return TokenLayout("overlapping windows", *cells.shape, index)


VALID_LAYOUTS: tuple[Callable[[random.Random], TokenLayout], ...] = (
    _plain,
    _line,
    _prefixed,
    _permuted,
    _blocks,
    _dilated,
    _class_in_windows,
    _permuted_windows,
    _shifted,
    _padded,
    _units,
    _overlapping,
)


def random_layout(rng: random.Random) -> TokenLayout:
    """Returns a layout of a random kind and size."""
    return rng.choice(VALID_LAYOUTS)(rng)
