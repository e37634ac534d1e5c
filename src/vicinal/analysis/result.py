"""The interface of all results of an analysis: a dictionary, a text table and files."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from vicinal.deprecation import warn_renamed
from vicinal.errors import VicinalError
from vicinal.files import write_csv, write_json

__all__ = ["AnalysisResult", "save_result", "without_nan", "write_rows"]


class AnalysisResult(ABC):
    """Base class of the results of measuring functions."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Returns all figures, ready for JSON; None in place of NaN."""

    @abstractmethod
    def table(self) -> str:
        """Returns the main figures as an aligned text table."""

    @abstractmethod
    def csv_rows(self) -> Iterable[Mapping[str, Any]]:
        """Returns the lines of the CSV file; all have the same columns."""

    def save(self, path: str | Path) -> None:
        """Writes the result to a file, whole or not at all.

        Args:
            path: ends in `.json`, for `as_dict()`, or in `.csv`, for `csv_rows()`.

        Raises:
            VicinalError: for another ending.
        """
        save_result(path, self.as_dict, self.csv_rows)

    def write_json(self, path: str | Path) -> None:
        """Deprecated: use `save`."""
        warn_renamed(f"{type(self).__name__}.write_json", "save")
        write_json(Path(path), self.as_dict())

    def write_csv(self, path: str | Path) -> None:
        """Deprecated: use `save`."""
        warn_renamed(f"{type(self).__name__}.write_csv", "save")
        write_rows(Path(path), self.csv_rows())


def save_result(path: str | Path, document: Callable[[], Any], rows: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
    """Writes a JSON or CSV file, as the ending of `path` says.

    Args:
        path: ends in `.json` or `.csv`.
        document: returns the content of the JSON file.
        rows: returns the lines of the CSV file.

    Raises:
        VicinalError: for another ending.
    """
    path = Path(path)
    if path.suffix == ".json":
        write_json(path, document())
    elif path.suffix == ".csv":
        write_rows(path, rows())
    else:
        raise VicinalError(f"path must end in .json or .csv, got {path.name}")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a CSV file from at least one row; all have the same columns. None and NaN become empty cells."""
    rows = list(rows)
    write_csv(path, list(rows[0]), ([without_nan(value) for value in row.values()] for row in rows))


def without_nan(value: Any) -> Any:
    """Returns None in place of NaN and infinities, which JSON and CSV do not have; other values as they are."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
