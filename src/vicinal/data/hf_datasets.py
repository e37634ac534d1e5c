"""Tables of images and labels, by Hugging Face Datasets: sets on the Hub, and Parquet files as they are there."""

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vicinal.data.catalog import HubSet
from vicinal.data.decode import decode
from vicinal.data.image_dataset import Indices, Pictures
from vicinal.errors import VicinalError

__all__ = ["Table", "open_hub", "open_parquet", "read_tables"]

TESTS = ("test", "validation", "valid", "val")
IMAGES = ("image", "img", "images", "picture", "pixel_values", "jpg", "png")
LABELS = ("label", "labels", "fine_label", "class", "category", "target", "cls")


@dataclass(frozen=True)
class Table:
    """One split, as Datasets has it."""

    dataset: Any
    version: str
    """Changes whenever the split does."""


def open_parquet(path: Path, cache: Path) -> dict[str, Table]:
    """The splits in a folder of `SPLIT-*.parquet` files, or in one file."""
    from datasets.exceptions import DatasetGenerationError

    if not path.exists():
        raise VicinalError(
            f"{path} is not there; expected a folder of Parquet files such as train-00000-of-00001.parquet"
        )
    found = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not found:
        raise VicinalError(f"{path} has no Parquet files; expected some such as train-00000-of-00001.parquet")
    files: dict[str, list[Path]] = {}
    for file in found:
        split = file.stem.split("-")[0] if path.is_dir() else "train"
        if split.isdigit():  # SPLIT/0000.parquet, as the Hub converts sets
            split = file.parent.name
        files.setdefault(split, []).append(file)
    try:
        loaded = _load(
            "parquet",
            data_files={split: [str(file) for file in parts] for split, parts in files.items()},
            cache_dir=str(cache / "parquet"),
        )
    except (DatasetGenerationError, OSError, ValueError) as error:
        raise VicinalError(f"cannot read {path}: {_said(error.__cause__ or error)}") from None
    return {split: Table(loaded[split], _version(parts)) for split, parts in files.items()}


def open_hub(name: str, config: str | None) -> dict[str, Table]:
    """The splits of a set on the Hub."""
    from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled

    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise VicinalError(f"{name!r} is no name of a set on the Hub; expected one such as uoft-cs/cifar10")
    page = f"https://huggingface.co/datasets/{name}"
    try:
        loaded = _load(name, config)
    except (DatasetNotFoundError, GatedRepoError) as error:
        if isinstance(error, GatedRepoError) or "gated" in str(error):
            raise VicinalError(
                f"{name} asks for consent first: accept its terms at {page}, then run `hf auth login`; or give a "
                "Parquet copy with --data-dir"
            ) from None
        raise VicinalError(f"the Hub has no set {name}, or it is private; see {page}") from None
    except DataFilesNotFoundError:
        raise VicinalError(f"{name} holds no files that Datasets can read; see {page}") from None
    except (ConnectionError, TimeoutError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        raise VicinalError(
            f"cannot get {name} from the Hugging Face Hub: {_said(error)}. Without the Hub, --data-dir PATH "
            "reads a Parquet copy of a named set, and folder:PATH, parquet:PATH and digits need none"
        ) from None
    except (ValueError, RuntimeError) as error:
        raise VicinalError(f"cannot open {name}: {_said(error)}. hub:ID@CONFIG chooses a config") from None
    return {str(split): Table(dataset, str(dataset._fingerprint)) for split, dataset in loaded.items()}


def _load(*arguments: Any, **options: Any) -> Any:
    """Datasets' own function, whose bars would fill a log file."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets.load_dataset(*arguments, **options)


def read_tables(
    tables: Mapping[str, Table], where: str, known: HubSet | None = None
) -> tuple[Pictures, Pictures | None, list[str]]:
    """The pictures for training, those for testing if there are such, and the names of the classes.

    Args:
        tables: splits by name.
        where: what to call them in an error.
        known: which splits and columns to take; found out if not given.
    """
    if known is not None:
        parts, test = known.train.split("+"), known.test
        for split in (*parts, test):
            if split not in tables:
                raise VicinalError(f"{where} has no split {split!r}; it has {', '.join(tables)}")
    else:
        parts = ["train" if "train" in tables else next(iter(tables))]
        test = next((name for name in TESTS if name in tables and name not in parts), "")
    features = tables[parts[0]].dataset.features
    columns = (known.image, known.label) if known else _columns(features, where)
    for column in columns:
        if column not in features:
            raise VicinalError(f"{where} has no column {column!r}; it has {', '.join(features)}")
    names = getattr(features[columns[1]], "names", None)
    if names is None:
        values = {value for part in parts for value in tables[part].dataset.unique(columns[1])}
        names = [str(value) for value in sorted(values - {None, -1})]
    training = _read([tables[part] for part in parts], "+".join(parts), columns, names, where)
    testing = _read([tables[test]], test, columns, names, where) if test else None
    return training, testing, list(names)


@dataclass(frozen=True)
class _Rows:
    """Reads the pictures of a split."""

    dataset: Any
    column: str
    where: str

    def __call__(self, row: int) -> Image.Image:
        image = self.dataset.data.column(self.column)[row].as_py()
        where = f"{self.where}, image {row}"
        if isinstance(image, dict):  # as Datasets stores it: the file, or where it is
            image = image["bytes"] or (image.get("path") and Path(image["path"]))
        if not image:
            raise VicinalError(f"{where} is missing")
        return decode(image, where)


def _read(tables: list[Table], split: str, columns: tuple[str, str], names: list[str], where: str) -> Pictures:
    from datasets import concatenate_datasets

    image, label = columns
    for table in tables:
        for column in columns:
            if column not in table.dataset.features:
                have = ", ".join(table.dataset.features)
                raise VicinalError(f"{where}, split {split} has no column {column!r}; it has {have}")
    datasets = [table.dataset.select_columns([image, label]) for table in tables]
    dataset = datasets[0] if len(datasets) == 1 else concatenate_datasets(datasets)
    labels = _numbers(dataset, label, names, f"{where}, split {split}")
    version = hashlib.sha256("\n".join([image, *(table.version for table in tables)]).encode()).hexdigest()[:16]
    return Pictures.of_split(labels, _Rows(dataset, image, f"{where}, split {split}"), f"{split}-{version}")


def _numbers(dataset: Any, column: str, names: list[str], where: str) -> Indices:
    """The label of every row as a class number."""
    values = dataset.data.column(column).to_pylist()
    numbered = getattr(dataset.features[column], "names", None) is not None
    number = {index if numbered else name: index for index, name in enumerate(names)}
    labels = np.empty(len(values), np.int64)
    for row, value in enumerate(values):
        if value is None or value == -1:
            raise VicinalError(f"{where} has images without a label; the first is image {row}")
        label = number.get(value if numbered else str(value))
        if label is None:
            raise VicinalError(f"{where}, image {row} is of class {value!r}, which the split to train on does not have")
        labels[row] = label
    return labels


def _columns(features: Mapping[str, Any], where: str) -> tuple[str, str]:
    """The columns of images and of labels, by what they hold, then by usual names."""
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    plain = {name: str(getattr(feature, "dtype", "")) for name, feature in features.items()}
    images = [name for name, kind in kinds.items() if kind == "Image"] or [
        name
        for name in IMAGES
        if plain.get(name) == "binary" or (kinds.get(name) == "dict" and "bytes" in features[name])
    ]
    labels = [name for name, kind in kinds.items() if kind == "ClassLabel"] or [
        name for name in LABELS if plain.get(name, "").startswith(("int", "uint", "string"))
    ]
    return _usual("images", images, IMAGES, features, where), _usual("labels", labels, LABELS, features, where)


def _usual(kind: str, found: list[str], usual: Iterable[str], features: Mapping[str, Any], where: str) -> str:
    chosen = found if len(found) == 1 else [name for name in usual if name in found]
    if not chosen:
        several = f"several columns of {kind} ({', '.join(found)})" if found else f"no column of {kind}"
        raise VicinalError(f"{where} has {several}; its columns are {', '.join(features)}")
    return chosen[0]


def _version(files: list[Path]) -> str:
    facts = [(file, os.stat(file)) for file in files]
    return "\n".join(f"{file.resolve()} {about.st_size} {about.st_mtime_ns}" for file, about in facts)


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:300].rstrip(".")
