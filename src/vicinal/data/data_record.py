"""The images of a run: name, size, class and split of each, kept to notice that the data changed."""

import csv
import gzip
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path

import numpy as np

from vicinal.data.image_dataset import ImageSplit
from vicinal.files import csv_text, write_bytes, write_csv

__all__ = ["DATA_FILE", "SKIPPED_FILE", "DataRecord"]

DATA_FILE, SKIPPED_FILE = "data.csv.gz", "skipped.csv"
COLUMNS = ("split", "name", "bytes", "class")
MAX_EXAMPLES = 3


@dataclass(frozen=True)
class DataRecord:
    """The images of each split of a run, in order.

    Names are relative to the dataset, and times do not count: a dataset that was moved or copied has the same record.

    >>> import numpy as np
    >>> from vicinal.data import DataRecord, open_dataset
    >>> digits = open_dataset("digits")
    >>> parts = digits.test, digits.test.take(np.arange(1, 359))
    >>> before, after = (DataRecord.of({"test": part}, digits.class_names) for part in parts)
    >>> before.difference(after)
    '1 removed (image 3)'
    """

    text: str
    """CSV with the columns split, name, bytes and class. Images that are left out are in the split `skipped`."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Names of images that are left out because they cannot be read, with the error message."""

    @classmethod
    def of(cls, splits: Mapping[str, ImageSplit], class_names: Sequence[str]) -> "DataRecord":
        """Returns the record of the images of some splits."""
        names = np.array(class_names, dtype=object)
        rows = (zip(repeat(role), *split.files(), names[split.labels]) for role, split in splits.items())
        skipped = {name: problem for split in splits.values() for name, problem in split.skipped_files().items()}
        left_out = (("skipped", name, None, None) for name in skipped)
        return cls(csv_text(chain([COLUMNS], *rows, left_out)), skipped)

    @classmethod
    def read(cls, folder: Path) -> "DataRecord | None":
        """Returns the record in a folder, without error messages; None if there is none."""
        file = folder / DATA_FILE
        return cls(gzip.decompress(file.read_bytes()).decode()) if file.is_file() else None

    def write(self, folder: Path) -> None:
        """Writes the record as gzip-compressed CSV, and the names of skipped images, if any, as CSV."""
        write_bytes(folder / DATA_FILE, gzip.compress(self.text.encode(), compresslevel=1, mtime=0))
        if self.skipped:
            write_csv(folder / SKIPPED_FILE, ("name", "problem"), self.skipped.items())

    def difference(self, other: "DataRecord") -> str | None:
        """Returns how another record differs from this one, with a few names; None if it does not.

        The text names images that were added, removed or changed. Only if there are none, it names those that are in
        another split: added images can change the split of others.
        """
        if self.text == other.text:
            return None
        old, new = self._by_name(), other._by_name()
        common = [name for name in old if name in new]
        found = {
            "removed": [name for name in old if name not in new],
            "added": [name for name in new if name not in old],
            "of another size in bytes": [name for name in common if old[name][1] != new[name][1]],
            "of another class": [name for name in common if old[name][2] != new[name][2]],
        }
        if not any(found.values()):
            found = {"in another split": [name for name in common if old[name][0] != new[name][0]]}
        parts = [f"{len(names)} {kind} ({_examples(names)})" for kind, names in found.items() if names]
        return ", ".join(parts) or "the same images in another order"

    def count_known(self, split: ImageSplit, roles: Sequence[str]) -> int:
        """Returns how many images of a split have name and size of an image of this record in one of some splits."""
        known = {(name, size) for name, (role, size, _) in self._by_name().items() if role in roles}
        return sum((name, str(size)) in known for name, size in zip(*split.files(), strict=True))

    def _by_name(self) -> dict[str, tuple[str, str, str]]:
        rows = csv.reader(io.StringIO(self.text))
        next(rows)
        return {name: (role, size, label) for role, name, size, label in rows}


def _examples(names: Sequence[str]) -> str:
    return ", ".join([*names[:MAX_EXAMPLES], *(["..."] if len(names) > MAX_EXAMPLES else [])])
