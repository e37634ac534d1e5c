"""What a forward pass keeps for the backward pass."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["saved_bytes"]


def saved_bytes(forward: Callable[[], Tensor], kept_anyway: set[int]) -> int:
    """Bytes that autograd keeps between forward and backward, each once, however many views of it are kept.

    Args:
        forward: what to run.
        kept_anyway: addresses of storages that do not count, such as parameters.
    """
    kept: dict[int, tuple[int, dict[int, int]]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in kept_anyway:
            _, views = kept.setdefault(storage.data_ptr(), (storage.nbytes(), {}))
            views[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    del out
    return sum(min(whole, sum(views.values())) for whole, views in kept.values())
