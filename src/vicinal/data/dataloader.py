"""Batches of an epoch, in an order that depends on seed and epoch only, for one process or several."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vicinal.data.rng import derive
from vicinal.data.transformed_images import Images
from vicinal.errors import VicinalError

__all__ = ["Loader"]

Batch = tuple[Tensor, Tensor]


class Loader:
    """Batches of images and labels, epoch by epoch.

    To train (`shuffle=True`), a step takes `batch_size` images over all processes, of which each has its slice; images
    that do not fill a last step are left out of that epoch. To evaluate, each process takes every `world`-th image.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from vicinal.data import Images, Loader, Preprocessing, open_source
    >>> source = open_source("digits")
    >>> preprocessing = Preprocessing(8, 8, 1, source.facts.mean, source.facts.std)
    >>> images = Images(source.test, preprocessing, cache_dir=Path(tempfile.mkdtemp()))
    >>> loader = Loader(images, batch_size=100, shuffle=False)
    >>> [len(labels) for _, labels in loader.batches(epoch=0)]
    [100, 100, 100, 59]

    Args:
        images: what to load.
        batch_size: images in a step; when evaluating, images in a batch of this process.
        shuffle: True to train, False to evaluate.
        seed: of the order.
        rank: number of this process.
        world: number of processes.
        workers: processes that prepare batches; 0 prepares them here. They change nothing but the time it takes.
        pin_memory: into memory that a GPU reads from directly.
    """

    def __init__(
        self,
        images: Images,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        if batch_size < 1:
            raise VicinalError(f"a batch has at least 1 image, given {batch_size}")
        if workers < 0:
            raise VicinalError(f"workers is a number of processes, or 0; given {workers}")
        if not 0 <= rank < world:
            raise VicinalError(f"rank is between 0 and {world - 1}, given {rank}")
        count = len(images)
        if shuffle and batch_size % world:
            raise VicinalError(f"a batch of {batch_size} images cannot be shared among {world} processes alike")
        if shuffle and batch_size > count:
            largest = count // world * world
            raise VicinalError(f"a batch of {batch_size} needs more than the {count} images; use at most {largest}")
        self.images, self.batch_size, self.shuffle, self.seed = images, batch_size, shuffle, seed
        self.rank, self.world = rank, world
        self.steps = count // batch_size if shuffle else -(-len(range(rank, count, world)) // batch_size)
        """Batches of an epoch on this process."""
        self._keys: list[list[tuple[int, int]]] = []
        self._turn = 0
        self._loader: DataLoader[Batch] = DataLoader(
            _Told(images),
            batch_sampler=_Current(self._keys),
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=_as_it_is,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # else every epoch would draw from the global one
        )

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from step `start` on. An earlier iteration that was not finished ends here."""
        if not 0 <= start <= self.steps:
            raise VicinalError(f"an epoch has {self.steps} steps; cannot start at step {start}")
        return self._iterate(epoch, start)

    def _iterate(self, epoch: int, start: int) -> Iterator[Batch]:
        self._turn += 1
        turn = self._turn
        self._keys[:] = [[(epoch, index) for index in part] for part in self._parts(epoch)[start:]]
        for batch in self._loader:
            if isinstance(batch, str):
                raise VicinalError(batch)
            yield batch
            if turn != self._turn:
                raise RuntimeError("these batches ended when batches() was called again")

    def _parts(self, epoch: int) -> list[list[int]]:
        """The images of each step on this process."""
        count, size = len(self.images), self.batch_size
        if not self.shuffle:
            own = list(range(self.rank, count, self.world))
            return [own[first : first + size] for first in range(0, len(own), size)]
        order = np.random.default_rng(derive(self.seed, epoch)).permutation(count)
        share = size // self.world
        firsts = range(self.rank * share, self.steps * size, size)
        return [order[first : first + share].tolist() for first in firsts]


class _Current:
    """The keys of the epoch that is being loaded; workers live longer than an epoch."""

    def __init__(self, keys: list[list[tuple[int, int]]]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return iter(list(self.keys))

    def __len__(self) -> int:
        return len(self.keys)


class _Told(Dataset[Batch]):
    """Gives what is wrong with an image as text: torch would add a worker's traceback to an error."""

    def __init__(self, images: Images) -> None:
        self.images = images

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Batch | str:
        try:
            return self.images.__getitems__(keys)
        except VicinalError as error:
            return str(error)


def _as_it_is(batch: Any) -> Any:
    return batch
