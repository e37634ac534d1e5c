"""Inputs of all measuring functions: the display name of a model, and images in batches."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from vicinal.errors import VicinalError

__all__ = ["check_batch_size", "check_same_shape", "iterate_batches", "model_name"]


def model_name(model: nn.Module) -> str:
    """Returns the architecture that a model declares, as timm's do; else the name of its class."""
    declared = getattr(model, "pretrained_cfg", None)
    return (declared.get("architecture") if isinstance(declared, Mapping) else None) or type(model).__name__


def iterate_batches(images: Tensor | Iterable[Any], batch_size: int) -> Iterator[Tensor]:
    """Yields images in batches, `(n, channels, height, width)` with n of at most `batch_size`.

    Args:
        images: `(n, channels, height, width)`; or batches of them, alone or first in a tuple, as DataLoaders give them.
        batch_size: maximum number of images in a batch.

    Raises:
        VicinalError: for anything else.
    """
    if not isinstance(images, Iterable):
        raise VicinalError(f"images must be a tensor or an iterable of batches, got {type(images).__name__}")
    for given in [images] if isinstance(images, Tensor) else images:
        batch = given[0] if isinstance(given, tuple | list) and given else given
        if not isinstance(batch, Tensor) or batch.dim() != 4 or not batch.is_floating_point():
            got = f"{batch.dtype} {tuple(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
            raise VicinalError(f"images must be floating point (n, channels, height, width), got {got}")
        yield from (part for part in batch.split(batch_size) if len(part))


def check_batch_size(batch_size: int) -> None:
    """Raises VicinalError if `batch_size` is not a whole number of at least 1."""
    if not isinstance(batch_size, int) or batch_size < 1:
        raise VicinalError(f"batch_size must be a whole number >= 1, got {batch_size}")


def check_same_shape(batch: Tensor, shape: Iterable[int]) -> None:
    """Raises VicinalError if images are not of `shape`, `(channels, height, width)`."""
    expected, given = tuple(shape), tuple(batch.shape[1:])
    if given != expected:
        first, other = (" x ".join(map(str, each)) for each in (expected, given))
        raise VicinalError(f"all images must have one shape, got {first} and {other}")
