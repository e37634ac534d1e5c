"""`vicinal datasets`: what sets of images there are, and what is in one of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from vicinal.errors import VicinalError

if TYPE_CHECKING:
    from vicinal.data import ImageDataset, Splits

__all__ = ["run"]

LOOKED_AT = 200  # pictures, to find out sizes


def datasets(
    name: Annotated[str | None, tyro.conf.Positional] = None,
    /,
    data_dir: Path | None = None,
    check: bool = False,
) -> None:
    """List the sets of images that have a name, or look into one.

    Args:
        name: a set to open and describe; also folder:PATH, parquet:PATH, hub:ID or hub:ID@CONFIG.
        data_dir: a Parquet copy of a named set, to read in place of the Hub.
        check: read every image first, and list all those that cannot be read.
    """
    if name is None and data_dir is not None:
        raise VicinalError("--data-dir needs the name of a set, as in: vicinal datasets cifar10 --data-dir PATH")
    if name is None and check:
        raise VicinalError("--check needs the name of a set, as in: vicinal datasets folder:PATH --check")
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
    """All names, a line each, and the other spellings."""
    from vicinal.data.catalog import SETS
    from vicinal.data.open_dataset import SPELLINGS

    lines = [f"{'dataset':17}{'classes':>7}{'train':>11}{'test':>8}{'size':>6}{'channels':>10}  from"]
    lines.append(f"{'digits':17}{10:>7}{1438:>11,}{359:>8,}{8:>6}{1:>10}  scikit-learn, no download")
    for name, known in SETS.items():
        train, test = known.images
        channels = len(known.info.mean)
        lines.append(
            f"{name:17}{known.classes:>7,}{train:>11,}{test:>8,}{known.info.size:>6}{channels:>10}  {known.page}"
        )
    lines += ["", "size is what to train at, in pixels; validation images are held out of train", ""]
    lines += [f"{spelling:24}{meaning}" for spelling, meaning in SPELLINGS.items()]
    return "\n".join([*lines, "", "vicinal datasets NAME [--data-dir PATH] looks into one"])


def describe(name: str, data_dir: Path | None) -> str:
    """One set: its classes, splits, balance, sizes and statistics."""
    import numpy as np

    from vicinal.data import SETS, open_dataset, split

    source = open_dataset(name, data_dir=data_dir)
    splits, facts, count = split(source), source.info, len(source.class_names)
    place = data_dir or (SETS[name].page if name in SETS else "")
    counts = np.bincount(source.train.labels, minlength=count)
    few, many = (f"{counts[at]:,} ({source.class_names[at]})" for at in (counts.argmin(), counts.argmax()))
    looked_at = np.unique(np.linspace(0, len(source.train) - 1, LOOKED_AT).astype(int))
    sizes = np.array([source.train.image(int(index)).size for index in looked_at])
    low, high = sizes.min(0), sizes.max(0)
    size = f"{low[1]} x {low[0]}" + ("" if (low == high).all() else f" to {high[1]} x {high[0]}")
    shown = ", ".join(source.class_names[:10]) + (", ..." if count > 10 else "")
    lines = {
        "dataset": f"{name}  {place}".rstrip(),
        "classes": f"{count}: {shown}",
        "images": describe_splits(source, splits),
        "balance": f"{few} to {many} images a class in train and val",
        "sizes": f"{size} pixels, height x width, of {len(looked_at)} pictures looked at; to train at: {facts.size}",
        "channels": str(source.channels),
        "mean, std": f"{', '.join(map(str, facts.mean))}; {', '.join(map(str, facts.std))}",
        "augmentation": f"AutoAugment policy {facts.policy}, {'flips' if facts.flip else 'no flips'}",
    }
    return "\n".join(f"{key:14}{value}" for key, value in lines.items())


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


def run(words: Sequence[str]) -> None:
    """Parse the words behind the verb and act."""
    tyro.cli(datasets, prog="vicinal datasets", args=words)
