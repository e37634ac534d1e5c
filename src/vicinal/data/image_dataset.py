"""Pictures with labels: one split of a set, or part of it, and the set."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vicinal.data.catalog import Facts

__all__ = ["Indices", "Pictures", "Source"]

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Pictures:
    """Some of the pictures of one split, decoded when asked for.

    What is decoded is kept per whole split, so every part knows its place there.
    """

    labels: Indices
    """The class of each."""
    rows: Indices
    """Where each is in the whole split."""
    whole: int
    """Number of pictures in the whole split."""
    read: Callable[[int], Image.Image]
    """From a place in the whole split to the picture."""
    key: str
    """Names the whole split; changes whenever its pictures do."""

    @classmethod
    def of_split(cls, labels: Indices, read: Callable[[int], Image.Image], key: str) -> "Pictures":
        """All pictures of a split."""
        return cls(labels, np.arange(len(labels)), len(labels), read, key)

    def __len__(self) -> int:
        return len(self.labels)

    def picture(self, index: int) -> Image.Image:
        """One picture, RGB or grayscale."""
        return self.read(int(self.rows[index]))

    def take(self, indices: Indices) -> "Pictures":
        """Some of them."""
        return replace(self, labels=self.labels[indices], rows=self.rows[indices])


@dataclass(frozen=True)
class Source:
    """A set of pictures with labels, in two splits."""

    name: str
    train: Pictures
    test: Pictures
    class_names: list[str]
    facts: Facts
    channels: int = 3
