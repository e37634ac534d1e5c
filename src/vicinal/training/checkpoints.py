"""Checkpoints: one safetensors file each, with JSON in its header. No pickle.

    model.NAME, ema.NAME        state dicts of the model and of its moving average
    optimizer.state.I.NAME      tensors in the state of parameter I; numbers are in the header
    header                      progress, numbers of the optimizer, gradient scaler, SHA-256 digest of the tensors

A file is written whole or not at all. The last two are kept, so that a damaged file leaves one to resume from.
"""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vicinal.errors import VicinalError
from vicinal.tensor_file import read_tensors, write_tensors
from vicinal.training.setup import TrainState

__all__ = [
    "Progress",
    "checkpoint_file",
    "list_checkpoints",
    "load_best",
    "load_checkpoint",
    "pack_optimizer",
    "read_checkpoint",
    "save_best",
    "save_checkpoint",
    "unpack_optimizer",
    "write_checkpoint",
]

CHECKPOINTS_KEPT = 2
BEST_FILE = "best.safetensors"


@dataclass
class Progress:
    """What a run has done so far. Its fields are the keys of `progress` in a checkpoint's header."""

    epoch: int = 0
    """Epochs done."""
    position: int = 0
    """Steps done in this epoch."""
    step: int = 0
    """Steps done."""
    loss: float = 0.0
    """Sum of the losses of this epoch's images so far."""
    seconds: float = 0.0
    """Time of the run, without the time between an interruption and its resumption."""
    training_seconds: float = 0.0
    """Time of this epoch's steps."""
    history: list[dict[str, float | None]] = field(default_factory=list)
    """One row of metrics for each epoch done."""

    def add_step(self, loss: float, images: int) -> None:
        """Counts a step with its mean loss over a number of images."""
        self.step += 1
        self.position += 1
        self.loss += loss * images

    @property
    def best_epoch(self) -> int:
        """Index of the epoch with the highest validation top-1, the first of equal ones."""
        accuracies = [row["val_top1"] or 0.0 for row in self.history]
        return accuracies.index(max(accuracies))

    def is_over(self, epochs: int, patience: int | None) -> bool:
        """Returns whether all epochs are done, or the last `patience` of them were not better than the best before."""
        stale = patience is not None and bool(self.history) and self.epoch - 1 - self.best_epoch >= patience
        return self.epoch >= epochs or stale

    def end_epoch(self, metrics: dict[str, float | None]) -> None:
        """Appends the metrics of the epoch to the history, and goes to the start of the next epoch."""
        self.epoch += 1
        self.history.append(metrics)
        self.position, self.loss, self.training_seconds = 0, 0.0, 0.0


def save_checkpoint(run_folder: Path, state: TrainState, progress: Progress) -> None:
    """Writes a checkpoint of the current step to the run folder."""
    tensors = {f"model.{name}": value for name, value in state.raw_model.state_dict().items()}
    if state.ema is not None:
        tensors |= {f"ema.{name}": value for name, value in state.ema.module.state_dict().items()}
    optimizer_tensors, optimizer_values = pack_optimizer(state.optimizer)
    tensors |= {f"optimizer.{name}": value for name, value in optimizer_tensors.items()}
    scaler = state.accelerator.scaler
    header = {
        "progress": asdict(progress),
        "optimizer": optimizer_values,
        "scaler": scaler.state_dict() if scaler is not None else None,
    }
    write_checkpoint(_folder(run_folder), progress.step, tensors, header)


def load_checkpoint(run_folder: Path, state: TrainState) -> Progress:
    """Restores model, EMA, optimizer and gradient scaler from the last checkpoint. Returns the progress.

    Without a checkpoint, nothing is restored and the progress is that of a new run.

    Raises:
        VicinalError: if there are checkpoints, and all of them are damaged.
    """
    found = read_checkpoint(_folder(run_folder))
    if found is None:
        return Progress()
    tensors, header = found
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "ema": {}, "optimizer": {}}
    for key, value in tensors.items():
        part, _, name = key.partition(".")
        parts[part][name] = value
    state.raw_model.load_state_dict(parts["model"])
    if state.ema is not None:
        state.ema.module.load_state_dict(parts["ema"])
    unpack_optimizer(state.optimizer, parts["optimizer"], header["optimizer"])
    if state.accelerator.scaler is not None:
        state.accelerator.scaler.load_state_dict(header["scaler"])
    return Progress(**header["progress"])


def save_best(run_folder: Path, model: nn.Module) -> None:
    """Writes the weights of the best epoch so far, `best.safetensors` among the checkpoints."""
    folder = _folder(run_folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / BEST_FILE, model.state_dict(), {})


def load_best(run_folder: Path, model: nn.Module) -> None:
    """Loads the weights that `save_best` wrote.

    Raises:
        VicinalError: if the file is missing or damaged.
    """
    file = _folder(run_folder) / BEST_FILE
    try:
        model.load_state_dict(read_tensors(file)[0])
    except (OSError, ValueError) as error:
        raise VicinalError(f"cannot read the weights of the best epoch, {file}: {error}; start another run") from None


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Returns the checkpoint files of a run, oldest first."""
    return _files(_folder(run_folder))


def checkpoint_file(run_folder: Path, step: int) -> Path:
    """Returns the checkpoint file of a run after a number of steps, whether it exists or not."""
    return _file(_folder(run_folder), step)


def _folder(run_folder: Path) -> Path:
    return run_folder / "checkpoints"


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.safetensors"


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.safetensors"))


def write_checkpoint(folder: Path, step: int, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Path:
    """Writes the checkpoint file of a step, then removes all but the last two files.

    Args:
        folder: of the checkpoints; created if necessary.
        step: number of steps done.
        tensors: by name.
        header: values that JSON can hold.

    Returns:
        The file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = _file(folder, step)
    write_tensors(file, tensors, header)
    for old in _files(folder)[:-CHECKPOINTS_KEPT]:
        old.unlink()
    return file


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Returns the tensors and the header of the last checkpoint; None if there is none.

    A damaged file is skipped with a warning.

    Raises:
        VicinalError: if there are files, and all of them are damaged.
    """
    files = _files(folder)
    for file in reversed(files):
        try:
            return read_tensors(file)
        except (OSError, ValueError) as error:
            warnings.warn(f"{file} is damaged ({error}); the checkpoint before it is used", stacklevel=2)
    if files:
        raise VicinalError(f"all checkpoints in {folder} are damaged; start the run again in another folder (--out)")
    return None


def pack_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the state of an optimizer as tensors and as values that JSON can hold.

    The names are `state.INDEX.KEY` for a parameter and `group.INDEX.KEY` for a parameter group.
    """
    state = optimizer.state_dict()
    entries = {
        f"{part}.{index}.{key}": value
        for part, items in (("state", state["state"]), ("group", dict(enumerate(state["param_groups"]))))
        for index, values in items.items()
        for key, value in values.items()
    }
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in entries.items() if name not in tensors}


def unpack_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> None:
    """Loads into an optimizer what `pack_optimizer` returned."""
    state: dict[str, dict[int, dict[str, Any]]] = {"state": {}, "group": {}}
    for name, value in {**tensors, **values}.items():
        part, index, key = name.split(".", 2)
        state[part].setdefault(int(index), {})[key] = value
    groups = [state["group"][index] for index in sorted(state["group"])]
    optimizer.load_state_dict({"state": state["state"], "param_groups": groups})
