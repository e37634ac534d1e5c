"""Output folders and files of an analysis: their paths and names, and the replacement of older ones."""

import itertools
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vicinal.errors import VicinalError
from vicinal.files import replace_file

if TYPE_CHECKING:
    from vicinal.analysis.opened_model import OpenedModel

__all__ = ["distinct_names", "file_stem", "folder_per_model", "output_folder", "replace_outputs", "temporary_file"]


def output_folder(models: "Sequence[OpenedModel]", out: str | Path | None = None) -> Path:
    """Returns the folder to write to, and checks that it can be written; the folder need not exist.

    Args:
        models: those that are analyzed.
        out: the folder; by default `analysis/` in the folder of the run, if there is one model, from a run.

    Raises:
        VicinalError: if the folder is not given and not known, or cannot be written.
    """
    if out is None:
        if len(models) != 1 or models[0].run is None:
            raise VicinalError("out must be the folder to write to; only a single run has a default, RUN/analysis")
        out = models[0].run.folder / "analysis"
    out = Path(out)
    with _short_errors(out):  # now, and not after hours of measuring
        existing = next(folder for folder in (out, *out.parents) if folder.exists())
        tempfile.TemporaryFile(dir=existing).close()
    return out


def folder_per_model(models: "Sequence[OpenedModel]", folder: Path) -> list[Path]:
    """Returns the folder for the files of each model: `folder` for a single one, else one inside `folder` for each."""
    return [folder] if len(models) == 1 else [folder / file_stem(each.name) for each in models]


@contextmanager
def replace_outputs(folders: Iterable[Path], *outputs: str) -> Iterator[None]:
    """Creates folders and deletes files of an earlier call in them; new ones are written inside `with`.

    Args:
        folders: where to write.
        outputs: names of the files that the caller writes, and wildcards for more. Files that match only a wildcard are
            deleted only if one of the fixed names exists, i.e. if the caller wrote the folder before.

    Raises:
        VicinalError: in place of any OSError, also those inside `with`.
    """
    names = [name for name in outputs if "*" not in name]
    with _short_errors():
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            if any((folder / name).exists() for name in names):
                for file in [file for pattern in outputs for file in folder.glob(pattern)]:
                    file.unlink()
        yield


@contextmanager
def temporary_file(file: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder, which replaces `file` if no error is raised inside `with`."""
    temporary = file.with_name(f".writing-{file.name}")
    try:
        yield temporary
        replace_file(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _short_errors(folder: Path | None = None) -> Iterator[None]:
    """Raises VicinalError in place of OSError."""
    try:
        yield
    except OSError as error:
        where = folder or error.filename2 or error.filename or "files"
        reason = error.strerror or error
        raise VicinalError(f"cannot write {where}: {reason}; out must be a folder that can be written") from error


def distinct_names(names: Iterable[str]) -> list[str]:
    """Returns names that also differ as names of files; a number is appended to a repeated one."""
    found: dict[str, str] = {}
    for name in names:
        tries = (name if number == 1 else f"{name} ({number})" for number in itertools.count(1))
        new = next(each for each in tries if file_stem(each).lower() not in found)  # some disks ignore case
        found[file_stem(new).lower()] = new
    return list(found.values())


def file_stem(text: str) -> str:
    """Returns a text as part of a file name: other characters than letters, digits and `_.=+-` become `-`."""
    return re.sub(r"[^\w.=+-]+", "-", text).strip("-.") or "x"
