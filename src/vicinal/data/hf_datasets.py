"""Datasets on the Hugging Face Hub and Parquet files in its layout, opened by Hugging Face Datasets."""

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

from vicinal.data.catalog import HubDataset
from vicinal.data.decode import decode
from vicinal.data.image_dataset import ImageSplit, Indices, OwnSplits
from vicinal.data.split_names import SplitRole, assign_roles, known_names, split_role
from vicinal.errors import VicinalError

__all__ = ["Table", "open_hub", "open_parquet", "read_tables"]

IMAGE_COLUMNS = ("image", "img", "images", "picture", "pixel_values", "jpg", "png")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "category", "target", "cls")


@dataclass(frozen=True)
class Table:
    """One split, as a `datasets.Dataset`."""

    dataset: Any
    version: str
    """Changes whenever the split changes."""


def open_parquet(path: Path, cache: Path) -> dict[str, Table]:
    """Returns the splits, by name, of a folder of `SPLIT-*.parquet` files; one file is the split `train`.

    Args:
        path: a folder or a file.
        cache: folder for the Arrow files that Datasets writes.

    Raises:
        VicinalError: there are no Parquet files, or they cannot be read.
    """
    from datasets.exceptions import DatasetGenerationError

    if not path.exists():
        raise VicinalError(
            f"{path} does not exist; expected a folder of Parquet files such as train-00000-of-00001.parquet"
        )
    found = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not found:
        raise VicinalError(f"{path} has no Parquet files; expected files such as train-00000-of-00001.parquet")
    files: dict[str, list[Path]] = {}
    for file in found:
        split = file.stem.split("-")[0] if path.is_dir() else "train"
        if split_role(split) is None and (split.isdigit() or split_role(file.parent.name)) and file.parent != path:
            split = file.parent.name  # SPLIT/0000.parquet: the layout of the Hub's own conversions
        files.setdefault(split, []).append(file)
    try:
        loaded = _load(
            "parquet",
            data_files={split: [str(file) for file in parts] for split, parts in files.items()},
            cache_dir=str(cache / "parquet"),
        )
    except (DatasetGenerationError, OSError, ValueError) as error:
        raise VicinalError(f"cannot read {path}: {_one_line(error.__cause__ or error)}") from None
    return {split: Table(loaded[split], _version(parts)) for split, parts in files.items()}


def open_hub(name: str, config: str | None) -> dict[str, Table]:
    """Returns the splits, by name, of a dataset on the Hub.

    Args:
        name: repository, such as `uoft-cs/cifar10`.
        config: configuration of the repository, if it has several.

    Raises:
        VicinalError: the Hub does not answer, or has no such dataset.
    """
    from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled

    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise VicinalError(f"{name!r} is not the ID of a dataset on the Hub; expected one such as uoft-cs/cifar10")
    page = f"https://huggingface.co/datasets/{name}"
    try:
        loaded = _load(name, config)
    except (DatasetNotFoundError, GatedRepoError) as error:
        if isinstance(error, GatedRepoError) or "gated" in str(error):
            raise VicinalError(
                f"{name} is gated: accept its terms at {page}, then run `hf auth login`; or give a Parquet copy as "
                "data_dir (--data-dir)"
            ) from None
        raise VicinalError(f"the Hub has no dataset {name}, or it is private; see {page}") from None
    except DataFilesNotFoundError:
        raise VicinalError(f"{name} has no files that Datasets can read; see {page}") from None
    except (ConnectionError, TimeoutError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        raise VicinalError(
            f"cannot get {name} from the Hugging Face Hub: {_one_line(error)}. Without the Hub, --data-dir PATH "
            "reads a Parquet copy of a named dataset; folder:PATH, parquet:PATH and digits need no connection"
        ) from None
    except (ValueError, RuntimeError) as error:
        raise VicinalError(f"cannot open {name}: {_one_line(error)}. hub:ID@CONFIG selects a config") from None
    return {str(split): Table(dataset, str(dataset._fingerprint)) for split, dataset in loaded.items()}


def _load(*arguments: Any, **options: Any) -> Any:
    """Calls `datasets.load_dataset`, without progress bars if stderr is not a terminal."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets.load_dataset(*arguments, **options)


def read_tables(tables: Mapping[str, Table], where: str, known: HubDataset | None = None) -> OwnSplits:
    """Returns the splits and the class names.

    Args:
        tables: splits by name.
        where: name of the dataset in error messages.
        known: the splits and columns to use; inferred if None.

    Raises:
        VicinalError: a split or a column is missing, an image has no label, or it is not clear which split is which.
    """
    names = _choose_splits(tables, where, known)
    parts = {role: name.split("+") if known else [name] for role, name in names.items()}
    for split in (split for splits in parts.values() for split in splits):
        if split not in tables:
            raise VicinalError(f"{where} has no split {split!r}; it has {', '.join(tables)}")
    training = parts["train"] if "train" in parts else [split for splits in parts.values() for split in splits]
    features = tables[training[0]].dataset.features
    columns = (known.image, known.label) if known else _columns(features, where)
    for column in columns:
        if column not in features:
            raise VicinalError(f"{where} has no column {column!r}; it has {', '.join(features)}")
    class_names = getattr(features[columns[1]], "names", None)
    if class_names is None:
        values = {value for part in training for value in tables[part].dataset.unique(columns[1])}
        class_names = [str(value) for value in sorted(values - {None, -1})]
    splits = {
        role: _read([tables[part] for part in parts[role]], names[role], columns, class_names, where) for role in names
    }
    used = {split for splits in parts.values() for split in splits}
    unused = [split for split in tables if split not in used]
    return OwnSplits(splits, list(class_names), names if len(tables) > 1 or "train" not in names else {}, unused)


def _choose_splits(tables: Mapping[str, Table], where: str, known: HubDataset | None) -> dict[SplitRole, str]:
    """Returns the name of the split for each role; the only split is that to train on, unless its name says else."""
    if known is not None:
        return {"train": known.train, "test": known.test}
    roles = assign_roles(tables, where)
    if not roles and len(tables) > 1:
        raise VicinalError(
            f"{where} has the splits {', '.join(tables)}; splits must have names such as {known_names()}: which one is "
            "to be trained on?"
        )
    return roles or {"train": next(iter(tables))}


@dataclass(frozen=True)
class _Rows:
    """Reads the images of a split."""

    dataset: Any
    column: str
    where: str
    split: str

    def __call__(self, row: int) -> Image.Image:
        image = self.dataset.data.column(self.column)[row].as_py()
        where = f"{self.where}, split {self.split}, image {row}"
        if isinstance(image, dict):  # as Datasets stores an image: the bytes of the file, or its path
            image = image["bytes"] or (image.get("path") and Path(image["path"]))
        if not image:
            raise VicinalError(f"{where} is missing")
        return decode(image, where)

    def list_files(self) -> tuple[list[str], Indices]:
        """Returns name and size in bytes of each image. Only the offsets of the column are read, not the images."""
        import pyarrow as pa
        import pyarrow.compute as pc

        column = self.dataset.data.column(self.column)
        paths: list[str | None] = [None] * len(column)
        if pa.types.is_struct(column.type):
            paths = pc.struct_field(column, "path").to_pylist()
            column = pc.struct_field(column, "bytes")
        names = [Path(path).name if path else f"image {row}" for row, path in enumerate(paths)]
        if len(set(names)) < len(names):
            names = [f"{name}, image {row}" for row, name in enumerate(names)]
        sizes = pc.fill_null(pc.binary_length(column), 0).to_numpy()
        return [f"{self.split}/{name}" for name in names], sizes.astype(np.int64)


def _read(tables: list[Table], split: str, columns: tuple[str, str], names: list[str], where: str) -> ImageSplit:
    from datasets import concatenate_datasets

    image, label = columns
    for table in tables:
        for column in columns:
            if column not in table.dataset.features:
                have = ", ".join(table.dataset.features)
                raise VicinalError(f"{where}, split {split} has no column {column!r}; it has {have}")
    datasets = [table.dataset.select_columns([image, label]) for table in tables]
    dataset = datasets[0] if len(datasets) == 1 else concatenate_datasets(datasets)
    labels = _class_indices(dataset, label, names, f"{where}, split {split}")
    version = hashlib.sha256("\n".join([image, *(table.version for table in tables)]).encode()).hexdigest()[:16]
    rows = _Rows(dataset, image, where, split)
    return ImageSplit.of_split(labels, rows, f"{split}-{version}", rows.list_files)


def _class_indices(dataset: Any, column: str, names: list[str], where: str) -> Indices:
    """Returns the class index of every row, `(rows,)`."""
    values = dataset.data.column(column).to_pylist()
    numbered = getattr(dataset.features[column], "names", None) is not None
    number = {index if numbered else name: index for index, name in enumerate(names)}
    labels = np.empty(len(values), np.int64)
    for row, value in enumerate(values):
        if value is None or value == -1:
            raise VicinalError(f"{where} has images without a label; the first is image {row}")
        label = number.get(value if numbered else str(value))
        if label is None:
            raise VicinalError(f"{where}, image {row} has class {value!r}, which the training split does not have")
        labels[row] = label
    return labels


def _columns(features: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Returns the columns of images and of labels: by feature type, then by common names."""
    types = {name: type(feature).__name__ for name, feature in features.items()}
    dtypes = {name: str(getattr(feature, "dtype", "")) for name, feature in features.items()}
    images = [name for name, type_ in types.items() if type_ == "Image"] or [
        name
        for name in IMAGE_COLUMNS
        if dtypes.get(name) == "binary" or (types.get(name) == "dict" and "bytes" in features[name])
    ]
    labels = [name for name, type_ in types.items() if type_ == "ClassLabel"] or [
        name for name in LABEL_COLUMNS if dtypes.get(name, "").startswith(("int", "uint", "string"))
    ]
    return (
        _choose_column("images", images, IMAGE_COLUMNS, features, where),
        _choose_column("labels", labels, LABEL_COLUMNS, features, where),
    )


def _choose_column(kind: str, found: list[str], common: Iterable[str], features: Mapping[str, Any], where: str) -> str:
    chosen = found if len(found) == 1 else [name for name in common if name in found]
    if not chosen:
        problem = f"several columns of {kind} ({', '.join(found)})" if found else f"no column of {kind}"
        raise VicinalError(f"{where} has {problem}; its columns are {', '.join(features)}")
    return chosen[0]


def _version(files: list[Path]) -> str:
    """Returns a text that changes whenever a file changes."""
    status = [(file, os.stat(file)) for file in files]
    return "\n".join(f"{file.resolve()} {each.st_size} {each.st_mtime_ns}" for file, each in status)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:300].rstrip(".")
