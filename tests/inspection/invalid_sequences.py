"""Sequences whose tokens have no cells: object queries, channels, chosen tokens, incomplete lattices and the like.

Each function returns where the tokens of one side hear in each probe: `(windows, tokens, 2)`, or
`(windows, tokens, several, 2)`, as parts of the image; NaN where a token hears nothing.
"""

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from simulated_evidence import PROBES, centers_of
from token_layouts import TokenLayout, block_windows, cell_map

__all__ = ["INVALID_SEQUENCES", "lattice", "swapped_between_probes"]

GRID_SIZES = (9, 12, 16, 24, 25, 36, 49, 64, 100)


def lattice(rng: random.Random, least: int = 3, most: int = 8) -> TokenLayout:
    """Returns a lattice of `least` to `most` rows and columns, in one window or cut into several."""
    rows, columns = rng.randint(least, most), rng.randint(least, most)
    cells = cell_map(rows, columns)
    heights, widths = ([n for n in range(1, size + 1) if size % n == 0] for size in (rows, columns))
    height, width = (rng.choice(heights), rng.choice(widths)) if rng.random() < 0.5 else (rows, columns)
    if height * width < 2:
        height, width = rows, columns
    return TokenLayout("lattice", rows, columns, block_windows(cells, height, width))


def _uniform(rng: random.Random, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def _silent_queries(rng: random.Random) -> list[Tensor]:
    return [torch.full((1, rng.choice(GRID_SIZES), 2), torch.nan, dtype=torch.float64)] * PROBES


def _queries_that_hear_several_places(rng: random.Random) -> list[Tensor]:
    return [_uniform(rng, 1, rng.choice(GRID_SIZES), rng.randint(2, 6), 2)] * PROBES


def _queries_that_hear_other_places_each_time(rng: random.Random) -> list[Tensor]:
    shape = 1, rng.choice(GRID_SIZES), rng.randint(1, 4), 2
    return [_uniform(rng, *shape) for _ in range(PROBES)]


def _queries_that_hear_everything(rng: random.Random) -> list[Tensor]:
    share = rng.uniform(0.05, 0.3)  # of the response that comes from a place
    return [0.5 + share * (_uniform(rng, 1, rng.choice(GRID_SIZES), 2) - 0.5)] * PROBES


def _channels(rng: random.Random) -> list[Tensor]:
    return [torch.full((1, rng.choice((16, 24, 32, 48, 64)), 2), 0.5, dtype=torch.float64)] * PROBES


def _random_places(rng: random.Random) -> list[Tensor]:
    return [_uniform(rng, 1, rng.randint(6, 120), 2)] * PROBES


def _decoy(rng: random.Random) -> list[Tensor]:
    windows = rng.choice((1, 1, 2, 4))
    return [_uniform(rng, windows, rng.choice(GRID_SIZES), 2)] * PROBES


def _sorted_by_content(rng: random.Random) -> list[Tensor]:
    layout = lattice(rng)
    places = centers_of(layout).flatten(0, 1)
    orders = [torch.tensor(rng.sample(range(len(places)), len(places))) for _ in range(PROBES)]
    return [places[order].view(*layout.index.shape, 2) for order in orders]


def _few_move(rng: random.Random) -> list[Tensor]:
    """A few tokens change places with others, in the second probe."""
    layout = lattice(rng)
    places = centers_of(layout).flatten(0, 1)
    moving = rng.sample(range(len(places)), rng.randint(2, max(2, len(places) // 6)))
    other = places.clone()
    other[moving] = places[moving[1:] + moving[:1]]
    return [one.view(*layout.index.shape, 2) for one in (places, other)]


def swapped_between_probes(rng: random.Random) -> list[Tensor]:
    """Returns places of a lattice of which two neighbors are swapped in the second probe."""
    layout = lattice(rng, 3, 14)
    places = centers_of(layout).flatten(0, 1)
    token = layout.index.flatten().argsort()  # token in each cell
    row, column = rng.randrange(layout.rows - 1), rng.randrange(layout.columns - 1)
    below, beside = rng.choice(((0, 1), (1, 0), (1, 1)))
    pair = [row * layout.columns + column, (row + below) * layout.columns + column + beside]
    other = places.clone()
    other[token[pair]] = places[token[pair[::-1]]]
    return [one.view(*layout.index.shape, 2) for one in (places, other)]


def _two_scales(rng: random.Random) -> list[Tensor]:
    rows, columns = rng.randint(2, 5), rng.randint(2, 5)
    sizes = [(rows, columns), (2 * rows, 2 * columns)] + [(4 * rows, 4 * columns)] * rng.randint(0, 1)
    if rng.random() < 0.3:
        sizes = [(1, 1), *sizes]
    parts = [centers_of(TokenLayout("", *size, cell_map(*size).view(1, -1))) for size in sizes]
    return [torch.cat(parts, 1)] * PROBES


def _video(rng: random.Random) -> list[Tensor]:
    layout = lattice(rng)
    frames = rng.randint(2, 3)
    places = centers_of(layout)
    return [places.repeat(1, frames, 1) if rng.random() < 0.5 else places.repeat_interleave(frames, 1)] * PROBES


def _one_missing(rng: random.Random) -> list[Tensor]:
    places = centers_of(lattice(rng)).clone()
    places[rng.randrange(len(places)), rng.randrange(places.shape[1])] = torch.nan
    return [places] * PROBES


def _one_cut_off(rng: random.Random) -> list[Tensor]:
    """35 tokens where 36 fit: the sequence is one token short."""
    size = rng.randint(3, 9)
    places = centers_of(TokenLayout("", size, size, cell_map(size, size).view(1, -1)))
    gone = rng.randrange(size * size)
    return [torch.cat([places[:, :gone], places[:, gone + 1 :]], 1)] * PROBES


def _one_doubled(rng: random.Random) -> list[Tensor]:
    """37 tokens where 36 fit: two in one cell."""
    size = rng.randint(3, 9)
    places = centers_of(TokenLayout("", size, size, cell_map(size, size).view(1, -1)))
    return [torch.cat([places, places[:, rng.randrange(size * size)][:, None]], 1)] * PROBES


def _one_in_anothers_cell(rng: random.Random) -> list[Tensor]:
    """As many tokens as cells, but two of a window are in one cell, and another cell is empty."""
    places = centers_of(lattice(rng)).clone()
    one, other = rng.sample(range(places.shape[1]), 2)
    window = rng.randrange(len(places))
    places[window, one] = places[window, other]
    return [places] * PROBES


def _one_in_another_window(rng: random.Random) -> list[Tensor]:
    """As many tokens as cells, but one token has moved to a cell of another window."""
    layout = lattice(rng)
    while layout.windows < 2:
        layout = lattice(rng)
    places = centers_of(layout).clone()
    one, other = rng.sample(range(layout.windows), 2)
    places[one, rng.randrange(places.shape[1])] = places[other, rng.randrange(places.shape[1])]
    return [places] * PROBES


def _row_missing(rng: random.Random) -> list[Tensor]:
    """Rows 0, 1, 3 and 4, for example; or columns."""
    rows, columns = rng.randint(4, 10), rng.randint(1, 10)
    gone = rng.randint(1, rows - 2)
    kept = torch.tensor([row for row in range(rows) if row != gone])
    cells = cell_map(rows, columns)[kept].view(1, -1)
    places = centers_of(TokenLayout("", rows, columns, cells))
    return [places if rng.random() < 0.5 else places.flip(-1)] * PROBES


def _one_astray(rng: random.Random) -> list[Tensor]:
    """One token lies between its cell and the next, so that it could belong to either."""
    layout = lattice(rng, 4, 14)
    places = centers_of(layout).clone()
    angle, far = rng.uniform(0, 2 * math.pi), rng.uniform(0.7, 3)
    pitch = torch.tensor([1 / layout.rows, 1 / layout.columns], dtype=torch.float64)
    away = torch.tensor([math.sin(angle), math.cos(angle)], dtype=torch.float64).sign() * far * pitch
    window, token = rng.randrange(len(places)), rng.randrange(places.shape[1])
    moved = places[window, token] + away
    places[window, token] = torch.where((moved < 0) | (moved > 1), places[window, token] - away, moved).clamp(0, 1)
    return [places] * PROBES


INVALID_SEQUENCES: tuple[Callable[[random.Random], list[Tensor]], ...] = (
    _silent_queries,
    _queries_that_hear_several_places,
    _queries_that_hear_other_places_each_time,
    _queries_that_hear_everything,
    _channels,
    _random_places,
    _decoy,
    _sorted_by_content,
    _few_move,
    swapped_between_probes,
    _two_scales,
    _video,
    _one_missing,
    _one_cut_off,
    _one_doubled,
    _one_in_anothers_cell,
    _one_in_another_window,
    _row_missing,
    _one_astray,
)
