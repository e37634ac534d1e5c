"""Windows, and the map that they were cut from: which cell of it each patch of a window is."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.attachment.placing import Site

__all__ = ["LAYOUTS", "Cut", "Map", "Places", "enlarged", "map_of"]

LAYOUTS = ("blocks", "dilated", "columns")


@dataclass(frozen=True)
class Map:
    """What windows tile."""

    size: tuple[int, int]
    """Rows and columns, padding included."""
    cells: tuple[int, int]
    """Rows and columns that are the image; models pad what does not divide, below and to the right."""
    side: int | None = None
    """Pixels a cell, if the last ones stick out of the image; else they divide it."""

    @property
    def padded(self) -> bool:
        """Whether some of it is none of the image."""
        return self.size != self.cells


@dataclass(frozen=True)
class Cut:
    """How a map is cut into windows."""

    layout: str
    """`blocks`; `dilated`, where a window takes every n-th row and column; or `columns`, blocks read downwards."""
    padded_first: bool = False
    """Whether a map is padded before it is rolled; else after."""

    def index(self, site: Site, size: tuple[int, int]) -> Tensor:
        """Where in a map, row by row, the patches of each window are: `(windows, patches)`."""
        (height, width), places = (site.grid.height, site.grid.width), torch.arange(size[0] * size[1])
        down, right = size[0] // height, size[1] // width
        if self.layout == "dilated":
            tiles = places.view(height, down, width, right).permute(1, 3, 0, 2)
        else:
            tiles = places.view(down, height, right, width).permute(0, 2, 1, 3)
            tiles = tiles.mT if self.layout == "columns" else tiles
        return tiles.reshape(site.windows, site.grid.patches)


@dataclass(frozen=True, eq=False)
class Places:
    """Where the patches of a layer are in the image."""

    size: tuple[int, int]
    """Rows and columns of cells."""
    cells: Tensor
    """Cell of each patch, row by row, `(windows, patches)`; one past the last for padding."""

    @classmethod
    def of_cut(cls, site: Site, map: Map, cut: Cut, shift: tuple[int, int]) -> "Places":
        """Of windows that were cut from a map, which was rolled by `shift` rows and columns."""
        rows, columns = map.cells
        cells = torch.arange(rows * columns).view(map.cells)
        padding = (0, map.size[1] - columns, 0, map.size[0] - rows)
        if cut.padded_first:
            cells = F.pad(cells, padding, value=rows * columns).roll(shift, (0, 1))
        else:
            cells = F.pad(cells.roll(shift, (0, 1)), padding, value=rows * columns)
        return cls(map.cells, cells.flatten()[cut.index(site, map.size)])

    @property
    def padding(self) -> Tensor:
        """Which patches are none of the image: `(windows, patches)`."""
        return self.cells == self.size[0] * self.size[1]

    def laid(self, values: Tensor) -> Tensor:
        """Values of each patch, `(..., windows, patches)`, on the map: `(..., rows, columns)`, without the padding."""
        count = self.size[0] * self.size[1]
        laid = values.new_zeros(*values.shape[:-2], count + 1)
        laid[..., self.cells.flatten()] = values.flatten(-2)
        return laid[..., :count].view(*values.shape[:-2], *self.size)

    def taken(self, maps: Tensor) -> Tensor:
        """The way back, with 0 for padding: `(..., rows, columns)` to `(..., windows, patches)`."""
        return F.pad(maps.flatten(-2), (0, 1))[..., self.cells]


def enlarged(patterns: Tensor, image: tuple[int, int], side: int | None = None) -> Tensor:
    """Patterns `(images, rows, columns)` over the pixels of an image.

    With a `side`, cells are so many pixels wide and high, and the last ones may stick out; else they divide the image.
    """
    for axis, pixels in enumerate(image, start=1):
        places = torch.arange(pixels)
        cells = places * patterns.shape[axis] // pixels if side is None else places // side
        patterns = patterns.index_select(axis, cells)
    return patterns


def map_of(site: Site, image: tuple[int, int]) -> Map | None:
    """The map that a site's windows tile: the likeliest of those that have as much padding as was seen."""
    maps = list(_maps(site, image))
    if site.padding is not None:
        real = int((~site.padding).sum())
        maps = [each for each in maps if each.cells[0] * each.cells[1] == real] or maps
    return next(iter(maps), None)


def _maps(site: Site, image: tuple[int, int]) -> Iterator[Map]:
    """Maps that a site's windows may tile, likeliest first."""
    window = (site.grid.height, site.grid.width)
    if site.windows == 1:
        yield Map(window, window)
    sizes = [(tiles[0] * window[0], tiles[1] * window[1]) for tiles in _rectangles(site.windows)]
    for size in sizes:
        dividing = [
            [n for n in range(full, full - side, -1) if pixels % n == 0]
            for full, side, pixels in zip(size, window, image, strict=True)
        ]
        for rows, columns in itertools.product(*dividing):
            if rows * image[1] == columns * image[0]:
                yield Map(size, (rows, columns))
    # Cells that stick out: a map of an odd number of them was padded before it was halved.
    for size in sizes:
        for side in (2**power for power in range(1, 8)):
            cells = -(-image[0] // side), -(-image[1] // side)
            if all(0 <= full - n < most for full, n, most in zip(size, cells, window, strict=True)):
                yield Map(size, cells, side)
    # No whole number of pixels a cell: such a map comes from convolutions that round.
    for size in sizes:
        if round(size[1] * image[0] / image[1]) == size[0]:
            yield Map(size, size)


def _rectangles(count: int) -> Iterator[tuple[int, int]]:
    """Rows and columns of `count` tiles, squarest first."""
    rows = [n for n in range(1, count + 1) if count % n == 0]
    for n in sorted(rows, key=lambda n: abs(n - count / n)):
        yield n, count // n
