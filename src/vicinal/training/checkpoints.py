"""Checkpoints: one safetensors file each, with the rest as JSON in its header. No pickle.

A file appears whole or not at all (write aside, fsync, rename), carries a digest of its tensors, and the last two are
kept, so that there is always one to go on from.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from vicinal.errors import VicinalError

__all__ = ["latest", "pack_optimizer", "unpack_optimizer", "write"]

KEPT = 2


def write(folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Write the checkpoint of a step, then remove all but the last two."""
    folder.mkdir(parents=True, exist_ok=True)
    file, beside = folder / f"step-{step:08d}.safetensors", folder / f".writing-{step:08d}"
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, beside, metadata={"state": json.dumps(state), "digest": _digest(contiguous)})
    _sync(beside)
    os.replace(beside, file)
    _sync(folder)
    for old in sorted(folder.glob("step-*.safetensors"))[:-KEPT]:
        old.unlink()
    return file


def latest(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The tensors and the state of the last checkpoint that is whole; None if there is none.

    A damaged one is skipped, with a warning, for the one before.
    """
    files = sorted(folder.glob("step-*.safetensors"), reverse=True)
    for file in files:
        try:
            return _read(file)
        except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
            warnings.warn(f"{file} is damaged ({error}); going on from the one before", stacklevel=2)
    if files:
        raise VicinalError(f"no checkpoint in {folder} can be read; start the run again in another folder (--out)")
    return None


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safetensors.safe_open(file, framework="pt") as content:
        notes = content.metadata() or {}
        tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    if _digest(tensors) != notes["digest"]:
        raise ValueError("its tensors do not match their digest")
    return tensors, json.loads(notes["state"])


def _digest(tensors: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].cpu().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def pack_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimiser's state as tensors by name, and the rest as what JSON can hold."""
    state = optimizer.state_dict()
    entries = {
        f"{part}.{index}.{name}": value
        for part, each in (("state", state["state"]), ("group", dict(enumerate(state["param_groups"]))))
        for index, values in each.items()
        for name, value in values.items()
    }
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in entries.items() if name not in tensors}


def unpack_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
    """Put back what `pack_optimizer` gave."""
    state: dict[str, dict[int, dict[str, Any]]] = {"state": {}, "group": {}}
    for name, value in {**tensors, **rest}.items():
        part, index, key = name.split(".", 2)
        state[part].setdefault(int(index), {})[key] = value
    groups = [state["group"][index] for index in sorted(state["group"])]
    optimizer.load_state_dict({"state": state["state"], "param_groups": groups})
