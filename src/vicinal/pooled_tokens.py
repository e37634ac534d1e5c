"""Pooling whose windows are not evenly spaced over a map, and where its results sit: at the mean of their patches."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["AdaptivePooling", "PooledTokens", "SequencePooling", "TokenPooling"]


@dataclass(frozen=True)
class AdaptivePooling:
    """Pools a map to `rows x columns`, whatever its size, as `F.adaptive_avg_pool2d` does."""

    rows: int
    columns: int

    def places(self, rows: int, columns: int) -> Tensor:
        """Returns the mean row and column of each window on a map of `rows x columns`, `(windows, 2)`.

        Window i of n covers `floor(i size / n)` up to, but not including, `ceil((i + 1) size / n)`.
        """
        axes = []
        for size, count in ((rows, self.rows), (columns, self.columns)):
            number = torch.arange(count)
            first = (number * size).div(count, rounding_mode="floor")
            last = -(-(number + 1) * size).div(count, rounding_mode="floor") - 1
            axes.append((first + last).double() / 2)
        return torch.cartesian_prod(*axes).view(-1, 2)

    def carry(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """Returns the mean of maps `(images, maps, rows, columns)` over each window, `(images, maps, *size)`."""
        return F.adaptive_avg_pool2d(x, size)


@dataclass(frozen=True)
class SequencePooling:
    """Pools `kernel` tokens that follow each other in the row-major sequence, across the ends of rows (NextViT)."""

    kernel: int
    stride: int

    def places(self, rows: int, columns: int) -> Tensor:
        """Returns the mean row and column of each window on a map of `rows x columns`, `(windows, 2)`."""
        patches = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).view(-1, 2).double()
        if len(patches) < self.kernel:
            return patches[:0]
        return patches.unfold(0, self.kernel, self.stride).mean(-1)

    def carry(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """Returns the mean of sequences `(images, maps, 1, tokens)` over each window, `(images, maps, *size)`."""
        return x.unfold(-1, self.kernel, self.stride).mean(-1)


TokenPooling = AdaptivePooling | SequencePooling


@dataclass(frozen=True)
class PooledTokens:
    """Tokens that pool the patches of a map, without any other tokens between them."""

    pooling: TokenPooling
    rows: int
    """Of the map."""
    columns: int

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.places)

    @property
    def places(self) -> Tensor:
        """Returns row and column of each token in patches of the map, `(tokens, 2)`."""
        return self.pooling.places(self.rows, self.columns)

    def __str__(self) -> str:
        if isinstance(self.pooling, AdaptivePooling):
            return f"{self.pooling.rows} x {self.pooling.columns}"
        return f"pooled to {self.tokens}"
