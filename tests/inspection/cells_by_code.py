"""Cells of tokens as a model's code lays them out: numbers of cells that are cut, rolled and padded as the code does.

Cells are `(rows, columns, index)` with an index `(windows, tokens)`, -1 for a token without a place; None where no
token of a side has a place. Nothing here knows of the inspection.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Cells = tuple[int, int, Tensor]
Sides = tuple[Cells | None, Cells | None]
"""Queries and keys."""
Table = dict[str, Sides]
"""Sides by regular expression of a site's name; every name matches exactly one."""

NOWHERE: Sides = (None, None)


def both(cells: Cells) -> Sides:
    return cells, cells


def raster(rows: int, columns: int, prefix: int = 0, suffix: int = 0) -> Cells:
    """One window, row by row, between tokens without a place."""
    return rows, columns, F.pad(torch.arange(rows * columns)[None], (prefix, suffix), value=-1)


def windows(
    rows: int,
    columns: int,
    height: int,
    width: int,
    shift: tuple[int, int] = (0, 0),
    pad_first: bool = False,
    prefix: int = 0,
) -> Cells:
    """Rectangles next to each other, of a map that is rolled by `shift` and padded at the bottom and at the right."""
    cells = torch.arange(rows * columns).view(rows, columns)
    padding, back = (0, -columns % width, 0, -rows % height), (-shift[0], -shift[1])
    if pad_first:
        cells = F.pad(cells, padding, value=-1).roll(back, (0, 1))
    else:
        cells = F.pad(cells.roll(back, (0, 1)), padding, value=-1)
    index = cells.unflatten(0, (-1, height)).unflatten(2, (-1, width)).transpose(1, 2).reshape(-1, height * width)
    return rows, columns, F.pad(index, (prefix, 0), value=-1)


def dilated(rows: int, columns: int, height: int, width: int) -> Cells:
    """Windows of `height x width` cells that are `rows / height` rows and `columns / width` columns apart."""
    cells = torch.arange(rows * columns).view(height, rows // height, width, columns // width)
    return rows, columns, cells.permute(1, 3, 0, 2).reshape(-1, height * width)


def halo(rows: int, block: int, margin: int, stride: int = 1) -> Sides:
    """Queries in blocks of a square map, every `stride`-th one, and keys in the same blocks with a margin."""
    cells = F.pad(torch.arange(rows * rows).view(rows, rows), (margin,) * 4, value=-1)
    side = block + 2 * margin
    keys = cells.unfold(0, side, block).unfold(1, side, block).reshape(-1, side * side)
    return windows(rows // stride, rows // stride, block // stride, block // stride), (rows, rows, keys)


def one_window(cells: Cells) -> Cells:
    """All windows of an image as one, in their order."""
    rows, columns, index = cells
    return rows, columns, index.reshape(1, -1)


def mask_units(rows: int, levels: int) -> Cells:
    """Hiera's order: 2 x 2 neighbors are unrolled to the front `levels` times, so a window's tokens are strided."""
    cells = torch.arange(rows * rows).view(1, rows, rows)
    for _ in range(levels):
        halved = cells.unflatten(1, (-1, 2)).unflatten(3, (-1, 2))  # (unrolled, row, 2, column, 2)
        cells = halved.permute(0, 2, 4, 1, 3).flatten(0, 2)
    return rows, rows, cells.flatten(1).T


def unrolled(rows: int, levels: int) -> Cells:
    """Hiera's order where attention is global: tokens of a unit first, units last."""
    _, _, index = mask_units(rows, levels)
    return rows, rows, index.T.reshape(1, -1)


def strided_patches(rows: int, columns: int, patch: int = 2) -> Cells:
    """MobileViT: tokens at the same place of every `patch x patch` square attend to each other."""
    return dilated(rows, columns, rows // patch, columns // patch)


def shifted_windows(stages: Sequence[tuple[Cells, Cells]], depths: Sequence[int], pattern: str) -> Table:
    """Blocks of a Swin in turn: the first cells of a stage, then its second; `pattern` has {stage} and {block}."""
    return {
        pattern.format(stage=stage, block=block): both(cells[block % 2])
        for stage, (cells, depth) in enumerate(zip(stages, depths, strict=True))
        for block in range(depth)
    }


def plain_and_shifted(
    rows: int, columns: int, size: int, shift: tuple[int, int], pad_first: bool = False
) -> tuple[Cells, Cells]:
    """Windows of `size x size` as they are, and shifted."""
    return (
        windows(rows, columns, size, size, (0, 0), pad_first),
        windows(rows, columns, size, size, shift, pad_first),
    )
