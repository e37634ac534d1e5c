"""From a name to pictures and labels: named sets, folders, Parquet files, sets on the Hub, the embedded digits."""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vicinal.data.catalog import DIGITS, SETS, Facts
from vicinal.data.hf_datasets import open_hub, open_parquet, read_tables
from vicinal.data.image_dataset import Pictures, Source
from vicinal.data.image_folder import open_folder
from vicinal.data.splits import hold_out
from vicinal.errors import VicinalError

__all__ = ["SPELLINGS", "cache_folder", "open_source"]

SPELLINGS = {
    "folder:PATH": "a folder with a subfolder of images for each class, or with folders train and test of that kind",
    "parquet:PATH": "a folder of SPLIT-*.parquet files, as the Hub has them, or one such file",
    "hub:ID, hub:ID@CONFIG": "any set of labelled images on the Hugging Face Hub",
}
TEST_SHARE, TEST_SEED = 0.2, 0  # whatever a run's seed is: all runs share one test split


def open_source(name: str, *, data_dir: Path | None = None, cache_dir: Path | None = None) -> Source:
    """Open a set of images.

    >>> from vicinal.data import open_source
    >>> source = open_source("digits")
    >>> len(source.train), len(source.test), source.class_names[:3], source.train.picture(0).size
    (1438, 359, ['0', '1', '2'], (8, 8))

    Args:
        name: one of `vicinal datasets`, or `folder:PATH`, `parquet:PATH`, `hub:ID`, `hub:ID@CONFIG`.
        data_dir: for a set with a name, a Parquet copy to read in place of the Hub.
        cache_dir: where to keep what is made of Parquet files; see `cache_folder`.
    """
    kind, _, place = name.partition(":")
    if data_dir is not None and name not in SETS:
        raise VicinalError(
            f"--data-dir is for {', '.join(SETS)}; given {name!r}. parquet:{data_dir} reads what is there"
        )
    facts, channels = Facts(), 3
    if name == "digits":
        train, test, names, facts, channels = *_digits(), DIGITS, 1
    elif name in SETS:
        known, facts = SETS[name], SETS[name].facts
        if data_dir is None:
            train, test, names = read_tables(open_hub(known.id, known.config), known.id, known)
        else:
            inner = data_dir / (known.config or "")  # a copy of the whole repository has a folder for each config
            tables = open_parquet(inner if inner.is_dir() else data_dir, cache_folder(cache_dir))
            train, test, names = read_tables(tables, str(data_dir), known)
            if len(names) != known.classes:
                raise VicinalError(f"{data_dir} has {len(names)} classes, {name} has {known.classes}: another set?")
    elif kind in ("folder", "parquet", "hub") and not place:
        raise VicinalError(f"{name!r} does not say which; write it as {_spelling(kind)}")
    elif kind == "folder":
        train, test, names = open_folder(Path(place).expanduser())
    elif kind == "parquet":
        path = Path(place).expanduser()
        train, test, names = read_tables(open_parquet(path, cache_folder(cache_dir)), str(path))
    elif kind == "hub":
        place, _, config = place.partition("@")
        train, test, names = read_tables(open_hub(place, config or None), place)
    else:
        raise _unknown(name)
    if len(names) < 2:
        raise VicinalError(f"{name} has one class only ({''.join(names)}); there is nothing to tell apart")
    if test is None:
        left, held = hold_out(train.labels, TEST_SHARE, TEST_SEED)
        train, test = train.take(left), train.take(held)
    if not len(train) or not len(test):
        raise VicinalError(f"{name} has too few images: {len(train)} to train on, {len(test)} to test on")
    return Source(name, train, test, names, facts, channels)


def cache_folder(given: Path | None = None) -> Path:
    """Where decoded pictures are kept: as given, else `$VICINAL_CACHE`, else vicinal in the user's cache folder."""
    if given is not None:
        return given
    if own := os.environ.get("VICINAL_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vicinal"


@dataclass(frozen=True)
class _Digits:
    pixels: NDArray[np.uint8]

    def __call__(self, row: int) -> Image.Image:
        return Image.fromarray(self.pixels[row])


def _digits() -> tuple[Pictures, None, list[str]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
    return (
        Pictures.of_split(digits.target.astype(np.int64), _Digits(pixels), "digits"),
        None,
        [str(name) for name in digits.target_names],
    )


def _spelling(kind: str) -> str:
    return next(spelling for spelling in SPELLINGS if spelling.startswith(kind))


def _unknown(name: str) -> VicinalError:
    known = ["digits", *SETS]
    nearest = difflib.get_close_matches(name, known, n=1)
    if Path(name).expanduser().is_dir():
        nearest = [f"folder:{name}"]
    elif "/" in name and ":" not in name:
        nearest = [f"hub:{name}"]
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    return VicinalError(f"unknown dataset {name!r}{hint} Known: {', '.join(known)}, {', '.join(SPELLINGS)}")
