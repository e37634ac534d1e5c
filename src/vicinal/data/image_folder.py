"""Image folders: a subfolder for each class, or such folders inside of folders such as `train`, `val` and `test`."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vicinal.data.decode import decode
from vicinal.data.image_dataset import ImageSplit, Indices, OwnSplits
from vicinal.data.split_names import SplitRole, assign_roles, known_names, split_role
from vicinal.errors import VicinalError

__all__ = ["find_splits", "image_extensions", "open_folder"]


def open_folder(folder: Path) -> OwnSplits:
    """Returns the splits and the class names.

    Raises:
        VicinalError: a folder has no images, the training split lacks a class, or it is not clear whether a folder is a
            class or a split.
    """
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise VicinalError(f"{folder} {problem}; expected a folder of images")
    folders = find_splits(folder)
    if not folders:
        _check_class_folders(folder)
        class_names = [subfolder.name for subfolder in _subfolders(folder)]
        return OwnSplits({"train": _read(folder, folder, class_names)}, class_names)
    of_classes = [folders["train"]] if "train" in folders else list(folders.values())
    class_names = sorted({subfolder.name for split in of_classes for subfolder in _subfolders(split)})
    splits = {role: _read(folder, split, class_names) for role, split in folders.items()}
    return OwnSplits(splits, class_names, {role: split.name for role, split in folders.items()})


def find_splits(folder: Path) -> dict[SplitRole, Path]:
    """Returns the folders of the training, validation and test split; none if the subfolders are classes.

    Raises:
        VicinalError: only some of the subfolders can be splits, or two are the same split.
    """
    subfolders = _subfolders(folder)
    splits = [path for path in subfolders if split_role(path.name) and _subfolders(path)]
    if not splits:
        return {}
    names = " and ".join(path.name for path in splits)
    for path in subfolders:
        if path not in splits and split_role(path.name):
            raise VicinalError(
                f"{path} has no class folders, but {names} has; sort its images into folders such as "
                f"{path / _subfolders(splits[0])[0].name}, or move it elsewhere: do its images have labels?"
            )
        if path not in splits and _images(path):
            raise VicinalError(
                f"{folder} has {path.name} next to {names}; splits must have names such as {known_names()}. Rename it, "
                "or move it elsewhere: is it a class or a split?"
            )
    roles = assign_roles((path.name for path in splits), str(folder))
    return {role: folder / name for role, name in roles.items()}


def _check_class_folders(folder: Path) -> None:
    """Raises VicinalError if there are no class folders, or some of them are named as splits."""
    names = [subfolder.name for subfolder in _subfolders(folder)]
    if not names:
        raise VicinalError(
            f"{folder} has no subfolders; expected one for each class, such as {folder / 'cat'} and {folder / 'dog'}"
        )
    # A class can be called train, which is a vehicle too.
    like_splits = [name for name in names if split_role(name)]
    if like_splits and (like_splits != ["train"] or len(names) == 1):
        raise VicinalError(
            f"{folder} has {' and '.join(like_splits)} without class folders; expected folders such as "
            f"{folder / like_splits[0] / 'cat'} in a split. Rename classes that have the name of a split: is "
            f"{like_splits[0]} a class or a split?"
        )


@dataclass(frozen=True)
class _Files:
    """Reads the images of a split."""

    root: Path
    files: list[Path]
    sizes: Indices

    def __call__(self, row: int) -> Image.Image:
        return decode(self.files[row], str(self.files[row]))

    def list_files(self) -> tuple[list[str], Indices]:
        """Returns path below the root and size in bytes of each image."""
        return [file.relative_to(self.root).as_posix() for file in self.files], self.sizes


def _subfolders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]


def _images(folder: Path) -> list[Path]:
    extensions = image_extensions()
    return [path for path in _files(folder) if path.suffix.lower() in extensions]


def _read(root: Path, folder: Path, class_names: list[str]) -> ImageSplit:
    extensions = image_extensions()
    files: list[Path] = []
    labels: list[int] = []
    for subfolder in _subfolders(folder):
        if subfolder.name not in class_names:
            known = ", ".join(class_names[:10])
            raise VicinalError(f"{subfolder} is a class that the training split does not have; it has {known}")
        found = _files(subfolder)
        if not found:
            raise VicinalError(f"{subfolder} is empty; add images of this class, or remove the folder")
        images = [path for path in found if path.suffix.lower() in extensions]
        if not images:
            raise VicinalError(f"{subfolder} has {len(found)} files but no image, only files such as {found[0].name}")
        files += images
        labels += [class_names.index(subfolder.name)] * len(images)
    version, sizes = hashlib.sha256(str(folder.resolve()).encode()), np.empty(len(files), np.int64)
    for row, file in enumerate(files):
        status = file.stat()
        sizes[row] = status.st_size
        version.update(f"{file.relative_to(folder).as_posix()} {status.st_size} {status.st_mtime_ns}\n".encode())
    reader, key = _Files(root, files, sizes), f"folder-{version.hexdigest()[:16]}"
    return ImageSplit.of_split(np.array(labels, np.int64), reader, key, reader.list_files)


def image_extensions() -> set[str]:
    """Returns the file extensions that Pillow opens."""
    Image.init()
    return {extension for extension, format in Image.registered_extensions().items() if format in Image.OPEN}
