"""Images to run models on: from files and folders, or a random choice from the test split of a dataset."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vicinal.analysis.inputs import check_batch_size
from vicinal.analysis.opened_model import OpenedModel
from vicinal.analysis.output_files import distinct_names
from vicinal.data import ImageSplit, Preprocessing, evaluation_tensor
from vicinal.data.image_files import NamedBatches, find_image_files, read_images
from vicinal.data.image_folder import find_splits
from vicinal.data.open_dataset import divide, open_own_splits
from vicinal.errors import VicinalError
from vicinal.training.evaluation_data import NoImagesError, open_evaluation_data

__all__ = ["ImageSelection", "denormalize"]


@dataclass
class ImageSelection:
    """Which images models are run on, and how many at a time."""

    images: str | Path | None = None
    """A folder of images, an image file, or the name of a dataset, such as `folder:PATH`, whose test split is used: its
    validation split if it has no test split, and what training holds out if it has neither. Of a folder with folders
    such as `train` and `test` it is the test split, too. By default the dataset that the model was trained on."""
    data_dir: Path | None = None
    """Folder of a Parquet copy of the dataset; by default that of the run."""
    count: int = 64
    """Maximum number of images; they are drawn at random if there are more."""
    batch_size: int = 32
    seed: int = 0
    """Of the random choice."""
    dataset: str | None = None
    """Where the dataset of a run is now, if it was moved."""
    split: str | None = None
    """Split of a run's data that the last images are from: `test`, or `val` if it has no test images."""
    problems: list[str] = field(default_factory=list)
    """Error messages of the files that could not be read in the last iteration."""

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)
        if self.images is not None and self.dataset is not None:
            raise VicinalError(f"images and dataset exclude each other, got {self.images} and {self.dataset}")
        if self.count < 1:
            raise VicinalError(f"count must be a whole number >= 1, got {self.count}")
        if not 0 <= self.seed < 2**63:
            raise VicinalError(f"seed must be a whole number from 0 to 2^63 - 1, got {self.seed}")

    def batches(self, opened: OpenedModel) -> NamedBatches:
        """Yields names and images, as the model takes them.

        Raises:
            VicinalError: if no images are given or known, or none can be read.
        """
        self.problems.clear()
        empty = True
        for batch in self._choose(opened):
            empty = False
            yield batch
        if empty:
            raise VicinalError("none of the images can be read:\n  " + "\n  ".join(self.problems))

    def tensors(self, opened: OpenedModel) -> Iterator[Tensor]:
        """Yields images without names, `(n, channels, height, width)`."""
        return (images for _, images in self.batches(opened))

    def first(self, opened: OpenedModel, count: int) -> tuple[list[str], Tensor]:
        """Returns distinct names of the first images, and these, `(count, channels, height, width)`."""
        names: list[str] = []
        tensors = []
        for some, images in self.batches(opened):
            names += some
            tensors.append(images)
            if len(names) >= count:
                break
        return distinct_names(names[:count]), torch.cat(tensors)[:count]

    def check_all_read(self) -> None:
        """Raises VicinalError that lists the files that could not be read, if there are any."""
        if self.problems:
            raise VicinalError("some images could not be read and are left out:\n  " + "\n  ".join(self.problems))

    def _choose(self, opened: OpenedModel) -> NamedBatches:
        if self.images is not None and not _is_dataset(str(self.images)):
            path = Path(str(self.images).removeprefix("folder:")).expanduser()
            return self._from_files(path, opened.preprocessing)
        if self.images is not None:
            name = f"folder:{self.images}" if Path(self.images).expanduser().is_dir() else str(self.images)
            return self._from_split(*_test_images(name, self.data_dir), opened.preprocessing)
        if opened.run is None and self.dataset is not None:
            return self._from_split(*_test_images(self.dataset, self.data_dir), opened.preprocessing)
        if opened.run is not None:
            return self._from_split(*self._images_of_run(opened), opened.preprocessing)
        raise VicinalError(
            f"images must be a folder of images or one of `vicinal datasets`: {opened.name} is not a run, which would "
            "have a dataset of its own"
        )

    def _images_of_run(self, opened: OpenedModel) -> tuple[ImageSplit, list[str]]:
        """Returns the test images of a run, or its validation images if it has none, and the class names."""
        declared: Any = opened.model.pretrained_cfg
        names, run = declared["label_names"], opened.run
        assert run is not None
        try:
            self.split = "test"
            return open_evaluation_data(run, "test", names, self.dataset, self.data_dir).images, names
        except NoImagesError:
            self.split = "val"
            return open_evaluation_data(run, "val", names, self.dataset, self.data_dir).images, names

    def _from_files(self, path: Path, preprocessing: Preprocessing) -> NamedBatches:
        files, self.problems[:] = find_image_files([path])
        if not files:
            raise VicinalError("there are no images: " + "; ".join(self.problems))
        if len(files) > self.count:  # a folder of classes begins with many images of one class
            files = random.Random(self.seed).sample(files, len(files))
        for names, images in read_images(files, preprocessing, self.batch_size, self.problems, self.count):
            yield [Path(name).stem for name in names], images

    def _from_split(self, split: ImageSplit, class_names: list[str], preprocessing: Preprocessing) -> NamedBatches:
        drawn = np.sort(np.random.default_rng(self.seed).permutation(len(split))[: self.count])
        for start in range(0, len(drawn), self.batch_size):
            chosen = drawn[start : start + self.batch_size]
            names = [f"{class_names[split.labels[index]]}-{index}" for index in chosen]
            yield names, torch.stack([evaluation_tensor(split.image(int(i)), preprocessing) for i in chosen])


def _is_dataset(images: str) -> bool:
    """Returns whether images are a dataset, which has a test split, and not a file or a folder of images."""
    path = Path(images.removeprefix("folder:")).expanduser()
    if images.startswith("folder:"):
        return path.is_dir() and any(each.is_dir() and not each.name.startswith(".") for each in path.iterdir())
    return bool(find_splits(path)) if path.is_dir() else not path.exists()


def _test_images(name: str, data_dir: Path | None) -> tuple[ImageSplit, list[str]]:
    """Returns the test images of a dataset, its validation images if it has none, and the class names."""
    own = open_own_splits(name, data_dir=data_dir)
    split = own.splits.get("test") or own.splits.get("val") or divide(name, own).test
    return split, own.class_names


def denormalize(images: Tensor, preprocessing: Preprocessing) -> NDArray[Any]:
    """Returns normalized images as pixels in [0, 1], `(n, height, width, channels)`, for plots.

    Args:
        images: `(n, channels, height, width)`, as the model takes them.
        preprocessing: that of the model.
    """
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    return (images * std + mean).clamp(0, 1).movedim(1, -1).numpy()
