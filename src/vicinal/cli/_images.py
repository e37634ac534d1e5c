"""The pictures that a user names on the command line: files, folders, or a set of images."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from vicinal.errors import VicinalError

if TYPE_CHECKING:
    from torch import Tensor

    from vicinal.data import Preprocessing

__all__ = ["as_seen", "batches", "of_set", "search"]


def search(images: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Picture files, those of folders sorted by name; and what is wrong with the rest."""
    from PIL import Image

    Image.init()
    endings = {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    files, problems = [], []
    for image in images:
        if image.is_dir():
            inside = [
                file
                for file in sorted(image.rglob("*"))
                if file.suffix.lower() in endings and file.is_file() and not file.name.startswith(".")
            ]
            files += inside
            problems += [] if inside else [f"the folder {image} has no pictures in it"]
        elif image.exists():
            files.append(image)
        else:
            problems.append(f"there is no file or folder {image}")
    return files, problems


def batches(
    files: Sequence[Path],
    preprocessing: "Preprocessing",
    batch_size: int,
    problems: list[str],
    count: int | None = None,
) -> Iterator[tuple[list[str], "Tensor"]]:
    """Names and pictures that can be read, as the model takes them; what is wrong with others joins `problems`.

    Args:
        files: of pictures.
        preprocessing: of the model.
        batch_size: pictures at a time.
        problems: a list that grows.
        count: how many pictures, at most; all by default.
    """
    import torch

    readable = itertools.islice(_readable(files, preprocessing, problems), count)
    while some := list(itertools.islice(readable, batch_size)):
        yield [name for name, _ in some], torch.stack([picture for _, picture in some])


def _readable(
    files: Sequence[Path], preprocessing: "Preprocessing", problems: list[str]
) -> Iterator[tuple[str, "Tensor"]]:
    from vicinal.data import decode, evaluation_tensor

    for file in files:
        try:
            picture = evaluation_tensor(decode(file, str(file), preprocessing.channels), preprocessing)
        except VicinalError as error:
            problems.append(str(error))
        else:
            yield str(file), picture


def of_set(
    name: str, data_dir: Path | None, preprocessing: "Preprocessing", count: int, seed: int, batch_size: int
) -> Iterator[tuple[list[str], "Tensor"]]:
    """The same for pictures of a set's test split, drawn at random."""
    import numpy as np
    import torch

    from vicinal.data import evaluation_tensor, open_dataset

    source = open_dataset(name, data_dir=data_dir)
    drawn = np.sort(np.random.default_rng(seed).permutation(len(source.test))[:count])
    for start in range(0, len(drawn), batch_size):
        chosen = drawn[start : start + batch_size]
        names = [f"{source.class_names[source.test.labels[index]]}-{index}" for index in chosen]
        yield names, torch.stack([evaluation_tensor(source.test.image(int(i)), preprocessing) for i in chosen])


def as_seen(tensors: "Tensor", preprocessing: "Preprocessing") -> NDArray[Any]:
    """Pictures as the model sees them, `(n, height, width, channels)` of values from 0 to 1."""
    import torch

    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    return (tensors * std + mean).clamp(0, 1).movedim(1, -1).numpy()
