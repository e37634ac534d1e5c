"""The argument RUN of the command line: a run folder, the folder of a saved model, or a model on the Hub."""

import difflib
from pathlib import Path

from vicinal.errors import VicinalError
from vicinal.training.failure import read_failure

__all__ = ["is_weights_file", "model_folder", "no_such_run"]

EXPECTED_PATHS = "the folder of a run, such as runs/x, or of a saved model, or hf-hub:owner/name"
MARKER_FILES = ("config.yaml", "config.json", "model/config.json")  # of a run, a saved model, a finished run


def model_folder(run: str) -> str | Path:
    """Returns what `vicinal.load` takes: the folder of the saved model, or a Hub name unchanged.

    Args:
        run: a run folder, the folder of a saved model, or `hf-hub:owner/name`.

    Raises:
        VicinalError: if there is no such folder, the run is not finished, or the folder has neither a run nor a model.
    """
    if run.startswith("hf-hub:"):
        return run
    folder = Path(run)
    for candidate in (folder / "model", folder):
        if (candidate / "config.json").is_file():
            return candidate
    if not folder.exists():
        raise no_such_run(folder)
    if failure := read_failure(folder):
        raise VicinalError(f"the run {run} has no model: {failure}")
    if (folder / "config.yaml").is_file():
        raise VicinalError(f"the run {run} is not finished; `vicinal train --resume {run}` continues it")
    kind = "folder without a run or a model" if folder.is_dir() else "file"
    raise VicinalError(f"{run} is a {kind}; expected {EXPECTED_PATHS}")


def is_weights_file(path: str) -> bool:
    """Returns whether a path is that of a file of weights alone, in place of a run or a saved model."""
    return Path(path).suffix in (".safetensors", ".pth", ".pt", ".bin", ".ckpt")


def no_such_run(folder: Path) -> VicinalError:
    """Returns the error for a folder that does not exist, which suggests the nearest name beside it."""
    return VicinalError(f"there is no run {folder}; {_suggestion(folder) or f'expected {EXPECTED_PATHS}'}")


def _suggestion(folder: Path) -> str:
    if not folder.parent.is_dir():
        return ""
    runs = [path.name for path in folder.parent.iterdir() if any((path / marker).is_file() for marker in MARKER_FILES)]
    nearest = difflib.get_close_matches(folder.name, runs, n=1)
    return f"did you mean {folder.parent / nearest[0]}?" if nearest else ""
