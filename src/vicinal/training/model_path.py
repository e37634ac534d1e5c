"""What a user types as RUN: a run's folder, a saved model's own folder, or a model on the Hub."""

import difflib
from pathlib import Path

from vicinal.errors import VicinalError

__all__ = ["model_folder", "no_such_run"]


def model_folder(run: str) -> str | Path:
    """What `vicinal.load` opens for it."""
    if run.startswith("hf-hub:"):
        return run
    folder = Path(run)
    for candidate in (folder / "model", folder):
        if (candidate / "config.json").is_file():
            return candidate
    if not folder.exists():
        raise no_such_run(folder)
    if (folder / "config.yaml").is_file():
        raise VicinalError(f"the run {run} is not finished; `vicinal train --resume {run}` continues it")
    what = "folder without a run or a model" if folder.is_dir() else "file"
    raise VicinalError(f"{run} is a {what}; expected {EXPECTED}")


EXPECTED = "the folder of a run, such as runs/x, or of a saved model, or hf-hub:owner/name"


def no_such_run(folder: Path) -> VicinalError:
    """The error for a folder that is not there."""
    return VicinalError(f"there is no run {folder}; {_nearest(folder) or f'expected {EXPECTED}'}")


def _nearest(folder: Path) -> str:
    """A hint at the run beside it whose name is most alike, if any is."""
    if not folder.parent.is_dir():
        return ""
    marks = ("config.yaml", "config.json", "model/config.json")
    runs = [each.name for each in folder.parent.iterdir() if any((each / mark).is_file() for mark in marks)]
    nearest = difflib.get_close_matches(folder.name, runs, n=1)
    return f"did you mean {folder.parent / nearest[0]}?" if nearest else ""
