"""The positions of an attention layer's tokens: the cell of every token in a lattice over the image.

`Cells` holds the measured cells of every window. `Layout` holds what a prior needs: the grid that all windows share,
and the order of the tokens in it.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.grid import Grid
from vicinal.pooled_tokens import PooledTokens

__all__ = ["Cells", "Layout", "PairLayout", "TokenLines", "raster_order"]


@dataclass(frozen=True, eq=False)
class Cells:
    """The cell of every token, in a lattice of `rows x columns` over the image."""

    rows: int
    columns: int
    index: Tensor
    """`(windows, tokens)`: row-major cell; -1 for a token without a place: class token, register, query, padding."""
    origin: tuple[float, float] | None = None
    """Measured center of the first cell, as parts of the image's height and width; None for `0.5 / (rows, columns)`."""
    pitch: tuple[float, float] | None = None
    """Measured distance of neighboring centers, as parts of the image; None for `1 / (rows, columns)`."""

    @property
    def windows(self) -> int:
        """Number of windows that an image is cut into; 1 where attention is global."""
        return self.index.shape[0]

    @property
    def tokens(self) -> int:
        """Number of tokens in a window."""
        return self.index.shape[1]

    @property
    def coordinates(self) -> Tensor:
        """Returns row and column of each token, `(windows, tokens, 2)`; -1 without a place."""
        row, column = self.index.div(self.columns, rounding_mode="floor"), self.index % self.columns
        return torch.stack([row, column], -1).masked_fill(self.index[..., None] < 0, -1)

    @property
    def distance(self) -> Tensor:
        """Returns the distance of neighboring centers as parts of the image's height and width, `(2,)`."""
        return torch.tensor(self.pitch or (1 / self.rows, 1 / self.columns), dtype=torch.float64)

    @property
    def centers(self) -> Tensor:
        """Returns each token's center as parts of the image, `(windows, tokens, 2)`; NaN without a place."""
        origin = torch.tensor(self.origin or (0.5 / self.rows, 0.5 / self.columns), dtype=torch.float64)
        return (origin + self.distance * self.coordinates).masked_fill(self.index[..., None] < 0, torch.nan)

    def same_as(self, other: "Cells") -> bool:
        """Returns whether every token sits in the same cell of the same lattice."""
        return (self.rows, self.columns) == (other.rows, other.columns) and torch.equal(self.index, other.index)

    def to_map(self, values: Tensor) -> Tensor:
        """Sums values per token, `(..., windows, tokens)`, over the tokens of each cell: `(..., rows, columns)`.

        Tokens without a place are left out.
        """
        count = self.rows * self.columns
        index = torch.where(self.index < 0, count, self.index).flatten().to(values.device)
        total = values.new_zeros(*values.shape[:-2], count + 1).index_add(-1, index, values.flatten(-2))
        return total[..., :count].view(*values.shape[:-2], self.rows, self.columns)

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns}" + (f" in {self.windows} windows" if self.windows > 1 else "")


@dataclass(frozen=True, eq=False)
class Layout:
    """The grid that a prior is built for, and which token sits where in it; the same in all windows."""

    grid: Grid
    """Rows and columns of a window, behind the tokens that have no place in any window."""
    order: Tensor | None = None
    """Token at each position of the grid's sequence, `(tokens,)`: tokens without a place first, then row by row. None
    where tokens are in that order already."""
    suffix: int = 0
    """Number of tokens without a place after the last patch."""

    @property
    def prefix(self) -> int:
        """Number of tokens without a place before the first patch or between patches."""
        return self.grid.prefix - self.suffix

    @property
    def is_raster(self) -> bool:
        """Whether patches are in row-major order, with all other tokens before or after them."""
        wanted = raster_order(self.grid, self.suffix)
        return wanted is None if self.order is None else wanted is not None and torch.equal(self.order, wanted)

    @property
    def position(self) -> Tensor | None:
        """Returns the position of each token in the grid's sequence, `(tokens,)`, the inverse of `order`; or None."""
        return None if self.order is None else self.order.argsort()

    def raster_position(self, tokens: int) -> Tensor:
        """Returns `position` for another number of patches, row by row between the same other tokens: `(tokens,)`."""
        order = raster_order(Grid(1, tokens - self.grid.prefix, self.grid.prefix), self.suffix)
        return torch.arange(tokens) if order is None else order.argsort()

    def __str__(self) -> str:
        text = f"{self.grid.height} x {self.grid.width}"
        text += f" + {self.prefix} prefix" if self.prefix else ""
        return text + (f" + {self.suffix} suffix" if self.suffix else "")


@dataclass(frozen=True)
class TokenLines:
    """Tokens row by row on evenly spaced lines, between tokens without a place."""

    rows: int
    columns: int
    first: tuple[float, float]
    """Row and column of the first one, in patches."""
    step: tuple[int, int]
    """Distance of neighbors along rows and columns, in patches."""
    prefix: int = 0
    suffix: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens, those without a place included."""
        return self.prefix + self.rows * self.columns + self.suffix

    @property
    def places(self) -> Tensor:
        """Returns row and column of each token in patches, `(tokens, 2)`; NaN without a place."""
        down = self.first[0] + self.step[0] * torch.arange(self.rows, dtype=torch.float64)
        across = self.first[1] + self.step[1] * torch.arange(self.columns, dtype=torch.float64)
        return F.pad(torch.cartesian_prod(down, across).view(-1, 2), (0, 0, self.prefix, self.suffix), value=torch.nan)


@dataclass(frozen=True, eq=False)
class PairLayout(Layout):
    """The offsets between queries and keys that have cells of their own; the same in all windows."""

    offsets: Tensor = field(default_factory=lambda: torch.empty(0, 0, 2))
    """From query to key, in patches of the finer side: `(queries, keys, 2)`; NaN for a pair without a place."""
    lines: tuple[TokenLines | PooledTokens, TokenLines | PooledTokens] | None = None
    """Queries and keys, if both are in row-major order over the whole image, or pool the patches of such a map."""
    text: str = ""

    @property
    def is_raster(self) -> bool:
        """False: queries and keys are not the same patches."""
        return False

    def __str__(self) -> str:
        return self.text


def raster_order(grid: Grid, suffix: int) -> Tensor | None:
    """Returns the token at each position of a grid, `(tokens,)`, for patches in row-major order; None without suffix.

    Args:
        grid: the grid, whose prefix counts all tokens without a place.
        suffix: number of these tokens after the last patch.
    """
    if not suffix:
        return None
    tokens = torch.arange(grid.tokens)
    front = grid.prefix - suffix
    return torch.cat([tokens[:front], tokens[grid.tokens - suffix :], tokens[front : grid.tokens - suffix]])
