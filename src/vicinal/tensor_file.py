"""Tensors with JSON in a safetensors file, written whole or not at all, with a digest that shows damage. No pickle."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from vicinal.files import replace_file

__all__ = ["read_tensors", "write_tensors"]


def write_tensors(file: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Writes tensors and a header to a safetensors file, atomically.

    Args:
        file: its folder must exist. A file of this name is replaced.
        tensors: by name.
        header: values that JSON can hold.
    """
    temporary = file.with_name(f".writing-{file.name}")
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    metadata = {"state": json.dumps(header), "digest": _digest(contiguous)}
    try:
        save_file(contiguous, temporary, metadata=metadata)
        replace_file(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors and the header of a file of `write_tensors`.

    Raises:
        OSError: the file cannot be opened.
        ValueError: the file is damaged, or another program wrote it.
    """
    try:
        with safetensors.safe_open(file, framework="pt") as content:
            metadata = content.metadata() or {}
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"it is not a whole safetensors file: {error}") from None
    if not {"state", "digest"} <= metadata.keys():
        raise ValueError("it is a safetensors file without a header of vicinal")
    if _digest(tensors) != metadata["digest"]:
        raise ValueError("the tensors do not match their digest")
    header: dict[str, Any] = json.loads(metadata["state"])
    return tensors, header


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 digest of names and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
