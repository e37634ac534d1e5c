"""`vicinal datasets`: lists datasets, and describes one."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from vicinal.cli._flags import call_with_flags
from vicinal.errors import VicinalError
from vicinal.text_table import text_table

if TYPE_CHECKING:
    from vicinal.data import ImageDataset, Splits

__all__ = ["run"]

MAX_SIZE_SAMPLES = 200  # images whose size is read


def datasets(
    name: Annotated[str | None, tyro.conf.Positional] = None,
    /,
    data_dir: Path | None = None,
    check: bool = False,
) -> None:
    """Lists the datasets that have a name, or describes one.

    Args:
        name: Dataset to open and describe; also folder:PATH, parquet:PATH, hub:ID or hub:ID@CONFIG.
        data_dir: Folder of a Parquet copy of the dataset, to be used instead of the Hub.
        check: Read every image first, and list all those that cannot be read.
    """
    if name is None and data_dir is not None:
        raise VicinalError("--data-dir needs the name of a dataset, as in: vicinal datasets cifar10 --data-dir PATH")
    if name is None and check:
        raise VicinalError("--check needs the name of a dataset, as in: vicinal datasets folder:PATH --check")
    if name is not None and check:
        print(check_images(name, data_dir))
    print(overview() if name is None else describe(name, data_dir))


def check_images(name: str, data_dir: Path | None) -> str:
    """Reads every image. Returns a sentence; raises VicinalError that lists the images that cannot be read."""
    from vicinal.data.open_dataset import open_own_splits
    from vicinal.data.unreadable import find_unreadable

    splits = open_own_splits(name, data_dir=data_dir).splits.values()
    problems = [message for split in splits for message in find_unreadable(split).values()]
    count = sum(map(len, splits))
    if problems:
        raise VicinalError(
            f"{len(problems)} of {count:,} images cannot be read; `vicinal train --skip-unreadable` leaves them out:"
            + "".join(f"\n  {problem}" for problem in problems)
        )
    return f"all {count:,} images can be read"


def overview() -> str:
    """Returns a table of the named datasets, and the other spellings that `--dataset` takes."""
    from vicinal.data.catalog import SETS
    from vicinal.data.open_dataset import SPELLINGS

    rows = [["dataset", "classes", "train", "test", "size", "channels", "source"]]
    rows.append(["digits", "10", "1,438", "359", "8", "1", "scikit-learn, no download"])
    for name, known in SETS.items():
        numbers = (known.classes, *known.images, known.info.size, len(known.info.mean))
        rows.append([name, *(f"{number:,}" for number in numbers), known.page])
    lines = [text_table(rows, right=range(1, 6)), ""]
    lines += ["size: image size to train at, in pixels; validation images are held out of train", ""]
    lines += [text_table(list(SPELLINGS.items())), "", "vicinal datasets NAME [--data-dir PATH] describes one"]
    return "\n".join(lines)


def describe(name: str, data_dir: Path | None) -> str:
    """Returns classes, splits, balance, sizes and statistics of a dataset, one per line."""
    import numpy as np

    from vicinal.data import SETS, open_dataset, split

    source = open_dataset(name, data_dir=data_dir)
    splits, facts, count = split(source), source.info, len(source.class_names)
    place = data_dir or (SETS[name].page if name in SETS else "")
    counts = np.bincount(source.train.labels, minlength=count)
    few, many = (f"{counts[at]:,} ({source.class_names[at]})" for at in (counts.argmin(), counts.argmax()))
    sampled = np.unique(np.linspace(0, len(source.train) - 1, MAX_SIZE_SAMPLES).astype(int))
    sizes = np.array([source.train.image(int(index)).size for index in sampled])
    low, high = sizes.min(0), sizes.max(0)
    size = f"{low[1]} x {low[0]}" + ("" if (low == high).all() else f" to {high[1]} x {high[0]}")
    shown = ", ".join(source.class_names[:10]) + (", ..." if count > 10 else "")
    lines = {
        "dataset": f"{name}  {place}".rstrip(),
        "classes": f"{count}: {shown}",
        "images": describe_splits(source, splits),
        "balance": f"{few} to {many} images per class in train and val",
        "sizes": f"{size} pixels, height x width, of {len(sampled)} sampled images; train at: {facts.size}",
        "channels": str(source.channels),
        "mean, std": f"{', '.join(map(str, facts.mean))}; {', '.join(map(str, facts.std))}",
        "augmentation": f"AutoAugment policy {facts.policy}, {'flips' if facts.flip else 'no flips'}",
    }
    return text_table(list(lines.items()))


def describe_splits(dataset: "ImageDataset", splits: "Splits") -> str:
    """Returns the number of images of each split, with where they come from."""
    own = dataset.own.names if dataset.own is not None else {}
    held_out = {"val": "out of train", "test": "a fifth, the same for every seed"}
    parts = []
    for role in ("train", "val", "test"):
        name = own.get(role, role)
        note = held_out.get(role) if role not in own else name if name.casefold() != role else None
        count = len(getattr(splits, role))
        parts.append(f"{role} {count:,}" + (f" ({note})" if count and note else ""))
    unused = dataset.own.unused if dataset.own is not None else ()
    return ", ".join(parts) + (f"; not used: {', '.join(unused)}" if unused else "")


def run(args: Sequence[str]) -> None:
    """Parses the arguments after `vicinal datasets`, and prints."""
    call_with_flags(datasets, "vicinal datasets", args)
