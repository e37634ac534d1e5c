"""Files that are written whole or not at all: text, JSON and CSV.

Each function writes a temporary file in the same folder, flushes it to disk and renames it. A reader, or a run that was
killed, finds the old content or the new one, never a part.
"""

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["csv_text", "replace_file", "write_csv", "write_json", "write_text"]


def write_text(file: Path, text: str) -> None:
    """Writes a text file in UTF-8, with line ends as they are in `text`.

    Args:
        file: its folder must exist. A file of this name is replaced.
        text: the content.
    """
    temporary = file.with_name(f".writing-{file.name}")
    try:
        temporary.write_text(text, encoding="utf-8", newline="")
        replace_file(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(file: Path, content: Any) -> None:
    """Writes a JSON file. NaN and infinities, which JSON does not have, become null.

    Args:
        file: its folder must exist. A file of this name is replaced.
        content: mappings, sequences, strings, numbers, booleans and None.
    """
    write_text(file, json.dumps(_without_nan(content), indent=1, allow_nan=False) + "\n")


def write_csv(file: Path, columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Writes a CSV file.

    Args:
        file: its folder must exist. A file of this name is replaced.
        columns: the header.
        rows: one value for each column. None becomes an empty cell.
    """
    write_text(file, csv_text([columns, *rows]))


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    r"""Returns rows as the text of a CSV file.

    >>> from vicinal.files import csv_text
    >>> csv_text([("epoch", "loss"), (1, None)])
    'epoch,loss\n1,\n'
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def replace_file(temporary: Path, file: Path) -> None:
    """Renames a finished temporary file to `file`, in the same folder, once its content is on disk."""
    _flush_to_disk(temporary)
    os.replace(temporary, file)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        _flush_to_disk(file.parent)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # Windows flushes writable files only
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _without_nan(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: _without_nan(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_without_nan(value) for value in content]
    return content
