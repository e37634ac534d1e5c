"""Images to run models on: from files and folders, or a random choice from the test split of a dataset."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vicinal.analysis.inputs import check_batch_size
from vicinal.analysis.opened_model import OpenedModel
from vicinal.analysis.output_files import distinct_names
from vicinal.data import Preprocessing, decode, evaluation_tensor, open_dataset
from vicinal.errors import VicinalError

__all__ = ["ImageSelection", "denormalize", "find_image_files", "read_images"]

NamedBatches = Iterator[tuple[list[str], Tensor]]
"""Names and images, `(n, channels, height, width)`, batch by batch."""


@dataclass
class ImageSelection:
    """Which images models are run on, and how many at a time."""

    images: str | Path | None = None
    """A folder of images, with `folder:` before it or without, an image file, or the name of a dataset, whose test
    split is used. By default the dataset that the model was trained on."""
    data_dir: Path | None = None
    """Folder of a Parquet copy of the dataset; by default that of the run."""
    count: int = 64
    """Maximum number of images; they are drawn at random if there are more."""
    batch_size: int = 32
    seed: int = 0
    """Of the random choice."""
    problems: list[str] = field(default_factory=list)
    """Error messages of the files that could not be read in the last iteration."""

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)
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
        path = None if self.images is None else Path(str(self.images).removeprefix("folder:")).expanduser()
        if path is not None and (path.exists() or str(self.images).startswith("folder:")):
            return self._from_files(path, opened.preprocessing)
        if self.images is not None:
            return self._from_dataset(str(self.images), self.data_dir, opened.preprocessing)
        if opened.run is not None:
            config = opened.run.config
            return self._from_dataset(config.dataset, self.data_dir or config.data_dir, opened.preprocessing)
        raise VicinalError(
            f"images must be a folder of images or one of `vicinal datasets`: {opened.name} is not a run, which would "
            "have a dataset of its own"
        )

    def _from_files(self, path: Path, preprocessing: Preprocessing) -> NamedBatches:
        files, self.problems[:] = find_image_files([path])
        if not files:
            raise VicinalError("there are no images: " + "; ".join(self.problems))
        if len(files) > self.count:  # a folder of classes begins with many images of one class
            files = random.Random(self.seed).sample(files, len(files))
        for names, images in read_images(files, preprocessing, self.batch_size, self.problems, self.count):
            yield [Path(name).stem for name in names], images

    def _from_dataset(self, name: str, data_dir: Path | None, preprocessing: Preprocessing) -> NamedBatches:
        source = open_dataset(name, data_dir=data_dir)
        drawn = np.sort(np.random.default_rng(self.seed).permutation(len(source.test))[: self.count])
        for start in range(0, len(drawn), self.batch_size):
            chosen = drawn[start : start + self.batch_size]
            names = [f"{source.class_names[source.test.labels[index]]}-{index}" for index in chosen]
            yield names, torch.stack([evaluation_tensor(source.test.image(int(i)), preprocessing) for i in chosen])


def find_image_files(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Returns image files, and error messages for paths without any.

    Args:
        paths: files, which are taken as they are, and folders, which are searched recursively for endings that Pillow
            can read, sorted by name.
    """
    Image.init()
    endings = {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    files, problems = [], []
    for path in paths:
        if path.is_dir():
            inside = [
                file
                for file in sorted(path.rglob("*"))
                if file.suffix.lower() in endings and file.is_file() and not file.name.startswith(".")
            ]
            files += inside
            problems += [] if inside else [f"the folder {path} has no images in it"]
        elif path.exists():
            files.append(path)
        else:
            problems.append(f"there is no file or folder {path}")
    return files, problems


def read_images(
    files: Sequence[Path],
    preprocessing: Preprocessing,
    batch_size: int,
    problems: list[str],
    count: int | None = None,
) -> NamedBatches:
    """Yields paths and images, as the model takes them, of the files that can be read.

    Args:
        files: image files.
        preprocessing: that of the model.
        batch_size: maximum number of images in a batch.
        problems: error messages of unreadable files are appended to this list.
        count: maximum number of images; all by default.
    """
    readable = itertools.islice(_readable(files, preprocessing, problems), count)
    while some := list(itertools.islice(readable, batch_size)):
        yield [name for name, _ in some], torch.stack([image for _, image in some])


def _readable(files: Sequence[Path], preprocessing: Preprocessing, problems: list[str]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        try:
            image = evaluation_tensor(decode(file, str(file), preprocessing.channels), preprocessing)
        except VicinalError as error:
            problems.append(str(error))
        else:
            yield str(file), image


def denormalize(images: Tensor, preprocessing: Preprocessing) -> NDArray[Any]:
    """Returns normalized images as pixels in [0, 1], `(n, height, width, channels)`, for plots.

    Args:
        images: `(n, channels, height, width)`, as the model takes them.
        preprocessing: that of the model.
    """
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    return (images * std + mean).clamp(0, 1).movedim(1, -1).numpy()
