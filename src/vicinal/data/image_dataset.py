"""Labeled images: a split of a dataset or a part of it, and the dataset."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vicinal.data.catalog import DatasetInfo
from vicinal.deprecation import warn_renamed

__all__ = ["ImageDataset", "ImageSplit", "Indices"]

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class ImageSplit:
    """A split of a dataset, or a part of it. Images are decoded on access.

    The decode cache holds whole splits, so a part knows the rows of its images in the whole split.
    """

    labels: Indices
    """Class index of each image, `(images,)`."""
    rows: Indices
    """Row of each image in the whole split, `(images,)`."""
    split_size: int
    """Number of images in the whole split."""
    read: Callable[[int], Image.Image]
    """Returns the image at a row of the whole split."""
    key: str
    """Identifies the whole split; changes whenever its images change."""

    @classmethod
    def of_split(cls, labels: Indices, read: Callable[[int], Image.Image], key: str) -> "ImageSplit":
        """Returns a whole split.

        Args:
            labels: class index of each image, `(images,)`.
            read: returns the image at a row.
            key: identifies the split; must change whenever its images change.
        """
        return cls(labels, np.arange(len(labels)), len(labels), read, key)

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """Returns one image, RGB or grayscale."""
        return self.read(int(self.rows[index]))

    def take(self, indices: Indices) -> "ImageSplit":
        """Returns the part with the images at these indices."""
        return replace(self, labels=self.labels[indices], rows=self.rows[indices])

    def picture(self, index: int) -> Image.Image:
        """Deprecated name of `image`."""
        warn_renamed("ImageSplit.picture", "ImageSplit.image")
        return self.image(index)

    @property
    def whole(self) -> int:
        """Deprecated name of `split_size`."""
        warn_renamed("ImageSplit.whole", "ImageSplit.split_size")
        return self.split_size


@dataclass(frozen=True)
class ImageDataset:
    """A dataset of labeled images with a training and a test split."""

    name: str
    """Name that `open_dataset` opened."""
    train: ImageSplit
    test: ImageSplit
    class_names: list[str]
    """Name of each class, by class index."""
    info: DatasetInfo
    """Image size, channel statistics and augmentation."""
    channels: int = 3

    @property
    def facts(self) -> DatasetInfo:
        """Deprecated name of `info`."""
        warn_renamed("ImageDataset.facts", "ImageDataset.info")
        return self.info
