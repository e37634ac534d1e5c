"""Labeled images: a split of a dataset or a part of it, and the dataset."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vicinal.data.catalog import DatasetInfo
from vicinal.data.split_names import SplitRole
from vicinal.deprecation import warn_renamed

__all__ = ["ImageDataset", "ImageSplit", "Indices", "OwnSplits"]

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
    list_files: Callable[[], tuple[Sequence[str], Indices]] | None = None
    """Returns name and size in bytes of each image of the whole split; None where images have neither."""
    skipped: Mapping[int, str] = field(default_factory=dict)
    """Rows of the whole split that are left out because they cannot be read, with the error message."""

    @classmethod
    def of_split(
        cls,
        labels: Indices,
        read: Callable[[int], Image.Image],
        key: str,
        list_files: Callable[[], tuple[Sequence[str], Indices]] | None = None,
    ) -> "ImageSplit":
        """Returns a whole split.

        Args:
            labels: class index of each image, `(images,)`.
            read: returns the image at a row.
            key: identifies the split; must change whenever its images change.
            list_files: returns name and size in bytes of each image; rows are the names by default.
        """
        return cls(labels, np.arange(len(labels)), len(labels), read, key, list_files)

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """Returns one image, RGB or grayscale."""
        return self.read(int(self.rows[index]))

    def take(self, indices: Indices) -> "ImageSplit":
        """Returns the part with the images at these indices."""
        return replace(self, labels=self.labels[indices], rows=self.rows[indices])

    def files(self) -> tuple[list[str], list[int]]:
        """Returns name and size in bytes of each image. Names do not depend on where the dataset is stored."""
        return self._files_of(self.rows)

    def skipped_files(self) -> dict[str, str]:
        """Returns the names of images of the whole split that are left out, with their error messages."""
        names, _ = self._files_of(np.array(list(self.skipped), np.int64))
        return dict(zip(names, self.skipped.values(), strict=True))

    def _files_of(self, rows: Indices) -> tuple[list[str], list[int]]:
        if self.list_files is None or not len(rows):
            return [f"image {row}" for row in rows.tolist()], [0] * len(rows)
        names, sizes = self.list_files()
        return [names[row] for row in rows.tolist()], sizes[rows].tolist()

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
class OwnSplits:
    """The splits that a dataset comes with."""

    splits: Mapping[SplitRole, ImageSplit]
    class_names: list[str]
    """Name of each class, by class index."""
    names: Mapping[SplitRole, str] = field(default_factory=dict)
    """What the dataset itself calls its splits, if it has several."""
    unused: Sequence[str] = ()
    """Names of splits that are not used."""


@dataclass(frozen=True)
class ImageDataset:
    """A dataset of labeled images."""

    name: str
    """Name that `open_dataset` opened."""
    train: ImageSplit
    test: ImageSplit
    """Empty for a dataset with a validation split and no test split of its own."""
    class_names: list[str]
    """Name of each class, by class index."""
    info: DatasetInfo
    """Image size, channel statistics and augmentation."""
    channels: int = 3
    val: ImageSplit | None = None
    """The dataset's own validation split; None if validation images are held out of the training split."""
    own: OwnSplits | None = None
    """The splits as the dataset comes with them."""

    @property
    def facts(self) -> DatasetInfo:
        """Deprecated name of `info`."""
        warn_renamed("ImageDataset.facts", "ImageDataset.info")
        return self.info
