"""Measures the memory that a forward pass saves for the backward pass."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["saved_bytes"]


def saved_bytes(forward: Callable[[], object], excluded: set[int]) -> int:
    """Returns the number of bytes that autograd saves between forward and backward; overlapping views count once.

    Args:
        forward: runs the forward pass and returns its output.
        excluded: addresses of storages that do not count, such as those of parameters.
    """
    saved: dict[int, tuple[int, dict[int, int]]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            _, views = saved.setdefault(storage.data_ptr(), (storage.nbytes(), {}))
            views[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    del output
    return sum(min(whole, sum(views.values())) for whole, views in saved.values())
