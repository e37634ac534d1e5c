"""`Grid`: the layout of tokens in a sequence.

A sequence has `prefix` tokens without a position (class, distillation, registers), then `height x width` patches in
row-major order. The offset between two patches is `d = key - query`, in patches, as (rows, columns). A quantity that
depends on the offset only is a table of `(2 height - 1) x (2 width - 1)` numbers with offset (0, 0) in its center.
"""

import math
import operator
from dataclasses import dataclass, fields
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.errors import VicinalError

__all__ = ["Grid", "same_size"]


@dataclass(frozen=True)
class Grid:
    """A rectangle of patches behind `prefix` tokens that have no position.

    >>> grid = Grid(2, 3, prefix=1)
    >>> grid.tokens, grid.table_shape
    (7, (3, 5))
    >>> grid.squared_distance()
    tensor([[5., 2., 1., 2., 5.],
            [4., 1., 0., 1., 4.],
            [5., 2., 1., 2., 5.]])
    """

    height: int
    width: int
    prefix: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            given, least = getattr(self, field.name), 0 if field.name == "prefix" else 1
            number = given
            if not isinstance(given, int | torch.SymInt):  # operator.index would make a symbolic size a constant
                try:
                    number = operator.index(given)
                except TypeError:
                    number = -1
                object.__setattr__(self, field.name, number)
            if number < least:
                raise VicinalError(f"Grid {field.name} must be a whole number >= {least}, got {given!r}")

    @classmethod
    def from_tokens(cls, tokens: int, *, prefix: int = 0, aspect: float = 1.0) -> "Grid":
        """Returns the grid of a sequence whose patches form a rectangle of height / width = `aspect`.

        >>> Grid.from_tokens(197, prefix=1)
        Grid(height=14, width=14, prefix=1)
        >>> Grid.from_tokens(32, aspect=0.5)
        Grid(height=4, width=8, prefix=0)

        Args:
            tokens: length of the sequence.
            prefix: number of tokens without a position.
            aspect: height / width of the rectangle.

        Raises:
            VicinalError: no rectangle of that aspect has as many patches.
        """
        patches = tokens - prefix
        if patches < 1:
            raise VicinalError(f"prefix must be below the {tokens} tokens of the sequence, got {prefix}")
        height = max(1, round((patches * aspect) ** 0.5))
        width = patches // height
        if height * width != patches or round(width * aspect) != height:
            raise VicinalError(
                f"{tokens} tokens minus {prefix} prefix tokens are {patches} patches, which do not form a grid of "
                f"height / width = {aspect:g}; use Grid(height, width, prefix)"
            )
        return cls(height, width, prefix)

    @property
    def patches(self) -> int:
        """Number of tokens that have a position."""
        return self.height * self.width

    @property
    def tokens(self) -> int:
        """Number of tokens, prefix included."""
        return self.prefix + self.patches

    @property
    def side(self) -> float:
        """Side of the square of the same area, in patches."""
        return math.sqrt(self.patches)

    @property
    def table_shape(self) -> tuple[int, int]:
        """Shape of a table over offsets."""
        return 2 * self.height - 1, 2 * self.width - 1

    def coordinates(self, device: torch.device | None = None) -> Tensor:
        """Returns (row, column) of each patch, `(patches, 2)`, in row-major order."""
        rows = torch.arange(self.height, device=device)
        columns = torch.arange(self.width, device=device)
        return torch.cartesian_prod(rows, columns).view(-1, 2)

    def offsets(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Returns the offsets along a table's axes, `(2 height - 1, 1)` and `(1, 2 width - 1)`, which broadcast."""
        rows = torch.arange(1 - self.height, self.height, device=device, dtype=dtype or torch.float32)
        columns = torch.arange(1 - self.width, self.width, device=device, dtype=dtype or torch.float32)
        return rows[:, None], columns[None, :]

    def squared_distance(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Returns |d|^2 for every offset, `(2 height - 1, 2 width - 1)`."""
        rows, columns = self.offsets(device, dtype)
        return rows.square() + columns.square()

    def manhattan_distance(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Returns |d|_1 for every offset, `(2 height - 1, 2 width - 1)`."""
        rows, columns = self.offsets(device, dtype)
        return rows.abs() + columns.abs()

    def index(self, device: torch.device | None = None) -> Tensor:
        """Returns the index of each (query, key) pair's offset in a flattened table, `(tokens, tokens)`.

        The index of a pair with a prefix token is the number of table entries.
        """
        rows, columns = self.coordinates(device).unbind(1)
        row = rows[None, :] - rows[:, None] + self.height - 1
        column = columns[None, :] - columns[:, None] + self.width - 1
        entries = self.table_shape[0] * self.table_shape[1]
        # F.pad takes no symbolic fill value: subtract the number of entries, pad with 0, add it again.
        return self.add_prefix(row * self.table_shape[1] + column - entries, 0) + entries

    def unfold(self, table: Tensor) -> Tensor:
        """Returns a table over offsets `(..., 2h-1, 2w-1)` as values per pair of patches, `(..., patches, patches)`.

        Equals a lookup by `index`, but takes sliding windows of the grid's size over the table: the position of the
        window, counted from the last corner, is the query, and its entries are the keys.
        """
        if torch.compiler.is_compiling():  # Inductor gets the gradient of overlapping windows wrong (torch 2.13)
            by_column = _slide(table, self.width).movedim(-3, -1)  # (..., width, width, 2 height - 1)
            pairs = _slide(by_column, self.height).movedim(-2, -4).movedim(-1, -2)
            return pairs.reshape(*table.shape[:-2], self.patches, self.patches)
        windows = table.unfold(-2, self.height, 1).unfold(-2, self.width, 1)  # (..., height, width, height, width)
        return windows.flip(-4, -3).reshape(*table.shape[:-2], self.patches, self.patches)

    def fold(self, pairs: Tensor) -> Tensor:
        """Returns the sums over pairs of the same offset, `(..., 2h-1, 2w-1)`, of `(..., patches, patches)`.

        This is the adjoint of `unfold`.
        """
        (rows, columns), batch = self.table_shape, pairs.shape[:-2]
        windows = pairs.reshape(*batch, self.height, self.width, self.height, self.width).flip(-4, -3)
        backward = torch.ops.aten.unfold_backward
        partial = backward(windows, [*batch, self.height, columns, self.height], len(batch) + 1, self.width, 1)
        return cast("Tensor", backward(partial, [*batch, rows, columns], len(batch), self.height, 1))

    def add_prefix(self, pairs: Tensor, neutral: float) -> Tensor:
        """Returns values per pair of patches as values per pair of tokens, `(..., tokens, tokens)`.

        Args:
            pairs: `(..., patches, patches)`.
            neutral: value of pairs with a prefix token.
        """
        return F.pad(pairs, (self.prefix, 0, self.prefix, 0), value=neutral) if self.prefix else pairs

    def drop_prefix(self, pairs: Tensor) -> Tensor:
        """Returns values per pair of tokens as values per pair of patches, `(..., patches, patches)`."""
        return pairs[..., self.prefix :, self.prefix :]

    def same_patches(self, other: "Grid") -> bool:
        """Returns whether two grids have the same rows and columns; False if they may have others under a compiler."""
        return same_size((self.height, self.width), (other.height, other.width))

    def __str__(self) -> str:
        return f"{self.height} x {self.width}" + (f" + {self.prefix} prefix" if self.prefix else "")


def same_size(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Returns whether two heights and widths are the same.

    A symbolic size of `torch.compile` or `torch.export` is the same only if it always is: comparing it would make it a
    constant of the graph.
    """
    if not torch.compiler.is_compiling():
        return one == other
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(one[0] == other[0]) and statically_known_true(one[1] == other[1])


def _slide(x: Tensor, count: int) -> Tensor:
    """Returns `(..., count, count)` from `(..., 2 count - 1)`: `out[i, j] = x[j - i + count - 1]`.

    Skewing, without overlapping windows: `x`, padded by one number and repeated, is reshaped to rows one number
    shorter, so that row i is `x` shifted right by i.
    """
    copies = F.pad(x, (0, 1)).unsqueeze(-2).expand(*x.shape[:-1], count, 2 * count)
    rows = copies.flatten(-2)[..., :-count].reshape(*x.shape[:-1], count, 2 * count - 1)
    return rows[..., count - 1 :]
