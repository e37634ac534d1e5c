"""Opens a dataset by name: named datasets, folders, Parquet files, datasets on the Hub, the embedded digits."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vicinal.cache_folder import cache_folder
from vicinal.data.catalog import DIGITS, OWN_DATA, SETS
from vicinal.data.hf_datasets import open_hub, open_parquet, read_tables
from vicinal.data.image_dataset import ImageDataset, ImageSplit, OwnSplits
from vicinal.data.image_folder import open_folder
from vicinal.data.splits import hold_out
from vicinal.data.unreadable import without_unreadable
from vicinal.errors import VicinalError, unknown_name

__all__ = ["SPELLINGS", "divide", "open_dataset", "open_own_splits"]

SPELLINGS = {
    "folder:PATH": "a folder with a subfolder of images for each class, or such folders in train, val and test",
    "parquet:PATH": "a folder of SPLIT-*.parquet files in the layout of the Hub, or one such file",
    "hub:ID, hub:ID@CONFIG": "any dataset of labeled images on the Hugging Face Hub",
}
DIGITS_FILE = "datasets/data/digits.csv.gz"  # in the package sklearn
TEST_FRACTION, TEST_SEED = 0.2, 0  # independent of a run's seed: all runs share one test split


def open_dataset(
    name: str, *, data_dir: Path | None = None, cache_dir: Path | None = None, skip_unreadable: bool = False
) -> ImageDataset:
    """Returns a dataset with training, validation and test images.

    The splits are those of the dataset itself. Without a validation split, `split` holds validation images out of the
    training split. With neither a validation nor a test split, a fifth of the images is the test split, the same for
    every run. With a validation split only, the test split is empty.

    >>> from vicinal.data import open_dataset
    >>> digits = open_dataset("digits")
    >>> len(digits.train), len(digits.test), digits.class_names[:3], digits.train.image(0).size
    (1438, 359, ['0', '1', '2'], (8, 8))

    Args:
        name: one of `vicinal datasets`, or `folder:PATH`, `parquet:PATH`, `hub:ID`, `hub:ID@CONFIG`.
        data_dir: for a named dataset, a Parquet copy to read in place of the Hub.
        cache_dir: folder for the files that Hugging Face Datasets makes of Parquet files; see `cache_folder`.
        skip_unreadable: read all images, and leave out those that cannot be read.

    Raises:
        VicinalError: the name is unknown, the files cannot be read, or the dataset has too few classes or images.
    """
    own = open_own_splits(name, data_dir=data_dir, cache_dir=cache_dir)
    return divide(name, without_unreadable(own, cache_folder(cache_dir)) if skip_unreadable else own)


def divide(name: str, own: OwnSplits) -> ImageDataset:
    """Returns the dataset of some splits: without a test and a validation split, a fifth is held out for testing.

    Args:
        name: name that `open_own_splits` opened.
        own: its splits.

    Raises:
        VicinalError: there is no training split, or there are too few classes or images.
    """
    if len(own.class_names) < 2:
        raise VicinalError(f"{name} must have at least two classes, got {', '.join(own.class_names) or 'none'}")
    if "train" not in own.splits:
        known = " and ".join(own.names.values())
        raise VicinalError(
            f"{name} has no training split, only {known}; add one that is named train, or rename the split that is to "
            "be trained on"
        )
    train, val, test = own.splits["train"], own.splits.get("val"), own.splits.get("test")
    if test is None:
        left, held = hold_out(train.labels, TEST_FRACTION if val is None else 0, TEST_SEED)
        train, test = train.take(left), train.take(held)
    if not len(train) or not len(val or test):
        raise VicinalError(f"{name} has too few images: {len(train)} for training, {len(val or test)} for testing")
    info, channels = OWN_DATA, 3
    if name == "digits":
        info, channels = DIGITS, 1
    elif name in SETS:
        info = SETS[name].info
    return ImageDataset(name, train, test, own.class_names, info, channels, val, own)


def open_own_splits(name: str, *, data_dir: Path | None = None, cache_dir: Path | None = None) -> OwnSplits:
    """Returns the splits that a dataset comes with; there need not be a training split.

    Args:
        name: as in `open_dataset`; so are the other arguments.
        data_dir: a Parquet copy of a named dataset.
        cache_dir: the cache folder.

    Raises:
        VicinalError: the name is unknown, or the files cannot be read.
    """
    if data_dir is not None and name not in SETS:
        raise VicinalError(
            f"data_dir (--data-dir) must come with one of {', '.join(SETS)}, got {name!r}; parquet:{data_dir} opens "
            "that folder"
        )
    if name == "digits":
        return _open_digits()
    if name in SETS:
        return _open_named(name, data_dir, cache_dir)
    return _open_by_prefix(name, cache_dir)


@dataclass(frozen=True)
class _Digits:
    """Reads the embedded digits."""

    pixels: NDArray[np.uint8]

    def __call__(self, row: int) -> Image.Image:
        return Image.fromarray(self.pixels[row])


def _open_digits() -> OwnSplits:
    rows = _read_digits()
    pixels = np.round(rows[:, :64].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    split = ImageSplit.of_split(rows[:, 64].copy(), _Digits(pixels), "digits")
    return OwnSplits({"train": split}, [str(digit) for digit in range(10)])


def _read_digits() -> NDArray[np.int64]:
    """Returns 64 pixels from 0 to 16 and the digit for each image, `(images, 65)`.

    Reads the file of scikit-learn's `load_digits` itself where it is: importing scikit-learn takes a second.
    """
    package = find_spec("sklearn")
    file = Path((package and package.origin) or "").parent / DIGITS_FILE
    if file.exists():
        return np.loadtxt(file, delimiter=",", dtype=np.int64)
    from sklearn.datasets import load_digits

    digits = load_digits()
    return np.column_stack([digits.data, digits.target]).astype(np.int64)


def _open_named(name: str, data_dir: Path | None, cache_dir: Path | None) -> OwnSplits:
    known = SETS[name]
    if data_dir is None:
        return read_tables(open_hub(known.id, known.config), known.id, known)
    inner = data_dir / (known.config or "")  # a copy of the whole repository has a folder for each config
    tables = open_parquet(inner if inner.is_dir() else data_dir, cache_folder(cache_dir))
    own = read_tables(tables, str(data_dir), known)
    if len(own.class_names) != known.classes:
        raise VicinalError(
            f"{data_dir} must have the {known.classes} classes of {name}, got {len(own.class_names)}; it may be a copy "
            "of another dataset"
        )
    return own


def _open_by_prefix(name: str, cache_dir: Path | None) -> OwnSplits:
    kind, _, rest = name.partition(":")
    if kind in ("folder", "parquet", "hub") and not rest:
        spelling = next(spelling for spelling in SPELLINGS if spelling.startswith(kind))
        raise VicinalError(f"{name!r} must be written as {spelling}")
    if kind == "folder":
        return open_folder(Path(rest).expanduser())
    if kind == "parquet":
        path = Path(rest).expanduser()
        return read_tables(open_parquet(path, cache_folder(cache_dir)), str(path))
    if kind == "hub":
        repository, _, config = rest.partition("@")
        return read_tables(open_hub(repository, config or None), repository)
    known, suggestions = ["digits", *SETS], None
    if Path(name).expanduser().is_dir():
        suggestions = [f"folder:{name}"]
    elif "/" in name and ":" not in name:
        suggestions = [f"hub:{name}"]
    listing = f"Known: {', '.join(known)}, {', '.join(SPELLINGS)}"
    raise unknown_name("dataset", name, known, suggestions=suggestions, listing=listing)
