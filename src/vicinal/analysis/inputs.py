"""What every instrument is given: a model, by its name, and images, in batches."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from vicinal.errors import VicinalError

__all__ = ["in_batches", "name_of"]


def name_of(model: nn.Module) -> str:
    """The architecture that a model declares, or its class."""
    declared = getattr(model, "pretrained_cfg", None)
    return (declared.get("architecture") if isinstance(declared, Mapping) else None) or type(model).__name__


def in_batches(images: Tensor | Iterable[Any], batch_size: int) -> Iterator[Tensor]:
    """Images, or batches of them with or without labels, in batches of at most that size."""
    if not isinstance(images, Iterable):
        raise VicinalError(f"images are a tensor, or batches such as a loader gives; given {type(images).__name__}")
    for given in [images] if isinstance(images, Tensor) else images:
        batch = given[0] if isinstance(given, tuple | list) and given else given
        if not isinstance(batch, Tensor) or batch.dim() != 4 or not batch.is_floating_point():
            what = f"{batch.dtype} {tuple(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
            raise VicinalError(
                f"images are floating point (n, channels, height, width), as the model takes them; given {what}"
            )
        yield from (part for part in batch.split(batch_size) if len(part))
