"""Image files that a user names: files, folders, patterns and lists, as batches of model inputs."""

import glob
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from vicinal.data.decode import decode
from vicinal.data.image_folder import image_extensions
from vicinal.data.transforms import Preprocessing, evaluation_tensor
from vicinal.errors import VicinalError

__all__ = ["NamedBatches", "find_image_files", "read_images"]

NamedBatches = Iterator[tuple[list[str], Tensor]]
"""Names and images, `(n, channels, height, width)`, batch by batch."""


def find_image_files(paths: Iterable[str | Path]) -> tuple[list[Path], list[str]]:
    """Returns image files, and error messages for paths without any.

    Args:
        paths: files, which are taken as they are; folders, which are searched recursively for endings that Pillow can
            read, sorted by name; patterns such as `photos/*.jpg` and `photos/**/*.png`.
    """
    endings = image_extensions()
    files, problems = [], []
    for path in (Path(path).expanduser() for path in paths):
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
        elif glob.has_magic(str(path)):
            found = [Path(file) for file in sorted(glob.glob(str(path), recursive=True)) if Path(file).is_file()]
            files += found
            problems += [] if found else [f"no file matches {path}"]
        else:
            problems.append(f"there is no file or folder {path}")
    return files, problems


def read_images(
    files: Sequence[Path | Image.Image],
    preprocessing: Preprocessing,
    batch_size: int,
    problems: list[str],
    count: int | None = None,
) -> NamedBatches:
    """Yields names and images, as the model takes them, of the files that can be read.

    Args:
        files: image files, which are named by their paths, or images, which have empty names.
        preprocessing: that of the model.
        batch_size: maximum number of images in a batch.
        problems: error messages of unreadable files are appended to this list.
        count: maximum number of images; all by default.
    """
    readable = itertools.islice(_readable(files, preprocessing, problems), count)
    while some := list(itertools.islice(readable, batch_size)):
        yield [name for name, _ in some], torch.stack([image for _, image in some])


def _readable(
    files: Sequence[Path | Image.Image], preprocessing: Preprocessing, problems: list[str]
) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        if isinstance(file, Image.Image):
            yield "", evaluation_tensor(file, preprocessing)
            continue
        try:
            image = evaluation_tensor(decode(file, str(file), preprocessing.channels), preprocessing)
        except VicinalError as error:
            problems.append(str(error))
        else:
            yield str(file), image
