"""From the argument STUDY to a definition and a folder: a ready study, a YAML file, or the folder of a study."""

import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vicinal.errors import VicinalError, unknown_name
from vicinal.studies.spec import StudySpec
from vicinal.studies.spec_reader import read_spec
from vicinal.studies.study_folder import StudyFolder

__all__ = ["OpenedStudy", "open_study", "ready_studies"]


@dataclass(frozen=True)
class OpenedStudy:
    """A study with its definition and its folder, which need not exist yet."""

    spec: StudySpec
    folder: StudyFolder
    directory: Path
    """The folder that relative paths of data start at."""
    name: str


def ready_studies() -> dict[str, Path]:
    """Returns the files of the studies that ship with the package, by name."""
    folder = Path(str(importlib.resources.files("vicinal.studies") / "ready"))
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def open_study(source: str | Path | Mapping[str, Any], out: str | Path | None = None) -> OpenedStudy:
    """Returns a study.

    Args:
        source: the name of a ready study, a YAML file, the folder of a study, or the content of a file as a mapping.
        out: folder of the study; by default `runs/NAME`, of a folder that folder itself.

    Raises:
        VicinalError: if there is no such study, or its definition cannot be used.
    """
    if isinstance(source, Mapping):
        return OpenedStudy(read_spec(source), StudyFolder(out or "runs/study"), Path.cwd(), "study")
    path = Path(source)
    if path.is_dir() and not (path.name == str(source) and path.name in ready_studies()):
        return _open_folder(path, out)
    if path.is_file():
        return OpenedStudy(read_spec(path), StudyFolder(out or Path("runs") / path.stem), Path.cwd(), path.stem)
    ready = ready_studies()
    if str(source) not in ready:
        listing = f"Ready studies: {', '.join(ready)}; or give a YAML file or the folder of a study"
        raise unknown_name("study", str(source), ready, listing=listing)
    name = str(source)
    return OpenedStudy(read_spec(ready[name]), StudyFolder(out or Path("runs") / name), Path.cwd(), name)


def _open_folder(path: Path, out: str | Path | None) -> OpenedStudy:
    folder = StudyFolder(path)
    if not folder.exists:
        raise VicinalError(
            f"{path} is not the folder of a study: it has no study.yaml; `vicinal compare` compares runs of any folders"
        )
    if out is not None and Path(out) != path:
        raise VicinalError(f"out must not be given with the folder of a study, {path}: its runs are there")
    return OpenedStudy(folder.spec(), folder, folder.record().directory, path.name)
