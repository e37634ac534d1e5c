"""Image folders: a subfolder for each class, optionally inside folders `train` and `test`."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vicinal.data.decode import decode
from vicinal.data.image_dataset import ImageSplit
from vicinal.errors import VicinalError

__all__ = ["open_folder"]

TEST_FOLDERS = ("test", "val", "valid", "validation")


def open_folder(folder: Path) -> tuple[ImageSplit, ImageSplit | None, list[str]]:
    """Returns the training split, the test split if it has a folder of its own, and the class names.

    Raises:
        VicinalError: the folder or a class folder has no images, or only the test split has a class.
    """
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise VicinalError(f"{folder} {problem}; expected a folder of images")
    train, test = folder, None
    if _subfolders(folder / "train"):  # without subfolders, `train` is the name of a class
        train = folder / "train"
        test = next((folder / name for name in TEST_FOLDERS if _subfolders(folder / name)), None)
    class_names = [subfolder.name for subfolder in _subfolders(train)]
    if not class_names:
        raise VicinalError(
            f"{train} has no subfolders; expected one for each class, such as {train / 'cat'} and {train / 'dog'}"
        )
    return _read(train, class_names), None if test is None else _read(test, class_names), class_names


@dataclass(frozen=True)
class _Files:
    """Reads the images of a split."""

    files: list[Path]

    def __call__(self, row: int) -> Image.Image:
        return decode(self.files[row], str(self.files[row]))


def _subfolders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _read(folder: Path, class_names: list[str]) -> ImageSplit:
    extensions = _image_extensions()
    files: list[Path] = []
    labels: list[int] = []
    for subfolder in _subfolders(folder):
        if subfolder.name not in class_names:
            known = ", ".join(class_names[:10])
            raise VicinalError(f"{subfolder} is a class that the training split does not have; it has {known}")
        found = [path for path in sorted(subfolder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
        if not found:
            raise VicinalError(f"{subfolder} is empty; add images of this class, or remove the folder")
        images = [path for path in found if path.suffix.lower() in extensions]
        if not images:
            raise VicinalError(f"{subfolder} has {len(found)} files but no image, only files such as {found[0].name}")
        files += images
        labels += [class_names.index(subfolder.name)] * len(images)
    version = hashlib.sha256(str(folder.resolve()).encode())
    for file in files:
        status = file.stat()
        version.update(f"{file.relative_to(folder).as_posix()} {status.st_size} {status.st_mtime_ns}\n".encode())
    return ImageSplit.of_split(np.array(labels, np.int64), _Files(files), f"folder-{version.hexdigest()[:16]}")


def _image_extensions() -> set[str]:
    """Returns the file extensions that Pillow opens."""
    Image.init()
    return {extension for extension, format in Image.registered_extensions().items() if format in Image.OPEN}
