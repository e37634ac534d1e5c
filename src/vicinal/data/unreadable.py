"""Images that cannot be read: finds all of them at once, and leaves them out."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from vicinal.data.image_dataset import ImageSplit, OwnSplits
from vicinal.errors import VicinalError
from vicinal.files import write_json

__all__ = ["find_unreadable", "without_unreadable"]


def find_unreadable(split: ImageSplit) -> dict[int, str]:
    """Returns the error message for each row of a split whose image cannot be read; decodes all images.

    >>> from vicinal.data import open_dataset
    >>> from vicinal.data.unreadable import find_unreadable
    >>> find_unreadable(open_dataset("digits").test)
    {}
    """

    def problem(row: int) -> str | None:
        try:
            split.read(row)
        except VicinalError as error:
            return str(error)
        return None

    rows = split.rows.tolist()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        bar = tqdm(rows, desc="reading", unit=" images", delay=2, leave=False, disable=None)
        return {row: message for row, message in zip(bar, pool.map(problem, rows), strict=True) if message is not None}


def without_unreadable(own: OwnSplits, cache: Path) -> OwnSplits:
    """Returns splits without the images that cannot be read, as if these were not there.

    Args:
        own: splits as they were opened.
        cache: the cache folder, which keeps the rows that cannot be read: the next run need not read all images.

    Raises:
        VicinalError: no image of a split can be read.
    """
    splits = {}
    for role, split in own.splits.items():
        problems = _stored_problems(split, cache / "unreadable" / f"{split.key}.json")
        readable = np.flatnonzero(~np.isin(split.rows, list(problems)))
        if not len(readable):
            raise VicinalError(f"none of the {len(split)} {role} images can be read: {next(iter(problems.values()))}")
        digest = hashlib.sha256(json.dumps(sorted(problems)).encode()).hexdigest()[:8]
        key = f"{split.key}-without-{digest}" if problems else split.key  # a cache without these rows is another one
        splits[role] = replace(split.take(readable), key=key, skipped=problems)
    return replace(own, splits=splits)


def _stored_problems(split: ImageSplit, file: Path) -> dict[int, str]:
    try:
        return {int(row): str(message) for row, message in json.loads(file.read_text()).items()}
    except (OSError, ValueError):  # does not exist, or is damaged
        pass
    problems = find_unreadable(split)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, problems)
    except OSError:
        pass  # the next run reads all images again
    return problems
