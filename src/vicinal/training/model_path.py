"""From the argument RUN to a model: a run, finished or not, the folder of a saved model, or a model on the Hub."""

import difflib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from vicinal.errors import VicinalError
from vicinal.training.failure import read_failure

if TYPE_CHECKING:
    from torch import nn

    from vicinal.image_size import ImageSize

__all__ = ["MODEL_CONFIG", "check_model", "is_weights_file", "load", "model_folder", "no_such_run", "open_model"]

EXPECTED_PATHS = "the folder of a run, such as runs/x, or of a saved model, or hf-hub:owner/name"
MARKER_FILES = ("config.yaml", "config.json", "model/config.json")  # of a run, a saved model, a finished run
MODEL_CONFIG = "model.json"
"""What a run stores at its start, to open its checkpoints as models."""


def load(source: str | Path, *, img_size: "ImageSize | None" = None, rescale: bool = True) -> "nn.Module":
    """Returns the model of a run, or a saved model, in evaluation mode; call `model.train()` to continue training.

    Of a run that is not finished, the last checkpoint is loaded, with a warning.

    >>> import tempfile, torch, vicinal
    >>> model = vicinal.create_model("vit-micro", prior="gmm", img_size=32).eval()
    >>> folder = vicinal.save(model, tempfile.mkdtemp() + "/model", class_names=list("abcdefghij"))
    >>> images = torch.randn(2, 3, 32, 32)
    >>> torch.equal(vicinal.load(folder)(images), model(images))
    True
    >>> vicinal.load(folder).pretrained_cfg["label_names"][:3]
    ['a', 'b', 'c']

    Args:
        source: the folder of a run or of a saved model, or `hf-hub:owner/name`, or `hf-hub:owner/name@revision`.
        img_size: change the image size, as `resize` does.
        rescale: as in `resize`.

    Raises:
        VicinalError: there is no such run or model, or files are missing, damaged or do not fit each other.
    """
    model, note = open_model(source, img_size=img_size, rescale=rescale)
    if note is not None:
        warnings.warn(note, stacklevel=2)
    return model


def open_model(
    source: str | Path, *, img_size: "ImageSize | None" = None, rescale: bool = True
) -> "tuple[nn.Module, str | None]":
    """Returns what `load` returns, and the sentence that it warns with; None for a finished run and a saved model.

    Args:
        source: as in `load`; so are the other arguments.
        img_size: change the image size.
        rescale: as in `resize`.

    Raises:
        VicinalError: as `load`.
    """
    from vicinal.models import load as load_saved

    if _is_unfinished(source):
        return _load_checkpoint(Path(source), img_size, rescale)
    is_model = Path(source).is_dir() and not any(Path(source, marker).is_file() for marker in MARKER_FILES)
    folder = source if is_model else model_folder(str(source))  # `load_saved` says which of its files are missing
    return load_saved(folder, img_size=img_size, rescale=rescale), None


def check_model(source: str | Path) -> None:
    """Raises VicinalError if there is no run or model; opens no large file."""
    if not _is_unfinished(source):
        model_folder(str(source))


def model_folder(run: str) -> str | Path:
    """Returns the folder of the saved model of a finished run, or of a saved model, or a Hub name unchanged.

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


def _is_unfinished(source: str | Path) -> bool:
    """Returns whether a path is a run with checkpoints and without a final model."""
    folder = Path(source)
    final = (folder / "model" / "config.json").is_file()
    return not final and (folder / MODEL_CONFIG).is_file() and any(folder.glob("checkpoints/step-*.safetensors"))


def _load_checkpoint(run: Path, img_size: "ImageSize | None", rescale: bool) -> "tuple[nn.Module, str]":
    """Returns the model of the last checkpoint, the moving average if the run has one, and a sentence about it."""
    import torch

    from vicinal.models.load import fill_model
    from vicinal.training.checkpoints import read_checkpoint

    found = read_checkpoint(run / "checkpoints")
    assert found is not None  # `_is_unfinished` found a file
    tensors, header = found
    part = "ema." if any(name.startswith("ema.") for name in tensors) else "model."
    weights = {
        name.removeprefix(part): values.float() if values.dtype == torch.float64 else values
        for name, values in tensors.items()
        if name.startswith(part)
    }
    model = fill_model(run / MODEL_CONFIG, weights, run / "checkpoints", img_size=img_size, rescale=rescale)
    progress = header["progress"]
    done = f"epoch {progress['epoch']}" if not progress["position"] else f"step {progress['step']}"
    return model, f"the run {run} is not finished: its checkpoint after {done} is used"


def _suggestion(folder: Path) -> str:
    if not folder.parent.is_dir():
        return ""
    runs = [path.name for path in folder.parent.iterdir() if any((path / marker).is_file() for marker in MARKER_FILES)]
    nearest = difflib.get_close_matches(folder.name, runs, n=1)
    return f"did you mean {folder.parent / nearest[0]}?" if nearest else ""
