"""Folders of images: a subfolder for each class, perhaps within folders train and test."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vicinal.data.decode import decode
from vicinal.data.image_dataset import Pictures
from vicinal.errors import VicinalError

__all__ = ["open_folder"]

TESTS = ("test", "val", "valid", "validation")


def open_folder(folder: Path) -> tuple[Pictures, Pictures | None, list[str]]:
    """The pictures for training, those for testing if they have a folder of their own, and the names of the classes."""
    if not folder.is_dir():
        raise VicinalError(f"{folder} is {'a file' if folder.exists() else 'not there'}; expected a folder of images")
    train, test = folder, None
    if _subfolders(folder / "train"):  # else it is a class of that name
        train = folder / "train"
        test = next((folder / name for name in TESTS if _subfolders(folder / name)), None)
    names = [each.name for each in _subfolders(train)]
    if not names:
        raise VicinalError(
            f"{train} has no subfolders; expected one for each class, as in {train / 'cat'} and {train / 'dog'}"
        )
    return _read(train, names), None if test is None else _read(test, names), names


@dataclass(frozen=True)
class _Files:
    """Reads the pictures of a split."""

    files: list[Path]

    def __call__(self, row: int) -> Image.Image:
        return decode(self.files[row], str(self.files[row]))


def _subfolders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))


def _read(folder: Path, names: list[str]) -> Pictures:
    endings = _endings()
    files: list[Path] = []
    labels: list[int] = []
    for each in _subfolders(folder):
        if each.name not in names:
            raise VicinalError(f"{each} is a class that is not among those to train on: {', '.join(names[:10])}")
        inside = [file for file in sorted(each.rglob("*")) if file.is_file() and not file.name.startswith(".")]
        if not inside:
            raise VicinalError(f"{each} is empty; put images of that class there, or remove the folder")
        images = [file for file in inside if file.suffix.lower() in endings]
        if not images:
            raise VicinalError(f"{each} has {len(inside)} files, but none is an image, such as {inside[0].name}")
        files += images
        labels += [names.index(each.name)] * len(images)
    version = hashlib.sha256(str(folder.resolve()).encode())
    for file in files:
        facts = file.stat()
        version.update(f"{file.relative_to(folder).as_posix()} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return Pictures.of_split(np.array(labels, np.int64), _Files(files), f"folder-{version.hexdigest()[:16]}")


def _endings() -> set[str]:
    """Of the files that Pillow opens."""
    Image.init()
    return {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}
