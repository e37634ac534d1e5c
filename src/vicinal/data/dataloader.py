"""Batches of an epoch, in an order that depends on seed and epoch only, for one process or several."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from vicinal.data.image_dataset import Indices
from vicinal.data.rng import derive_seed
from vicinal.data.transformed_images import TransformedImages
from vicinal.errors import VicinalError

__all__ = ["EpochBatchSampler", "Loader"]

Batch = tuple[Tensor, Tensor]
Key = tuple[int, int]
"""Epoch and index of an image."""
REPEATED = 2**32  # added to the epoch in the key of an image that is drawn again


class Loader:
    """Batches of images and labels, epoch by epoch.

    In training (`shuffle=True`), a step takes `batch_size` images over all processes, the last step of an epoch those
    that are left. Each process gets a slice of the step; slices differ by at most one image, and `weight` says how much
    each counts. In evaluation, each process gets every `world`-th image.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from vicinal.data import Loader, Preprocessing, TransformedImages, open_dataset
    >>> digits = open_dataset("digits")
    >>> preprocessing = Preprocessing(8, 8, 1, digits.info.mean, digits.info.std)
    >>> images = TransformedImages(digits.test, preprocessing, cache_dir=Path(tempfile.mkdtemp()))
    >>> loader = Loader(images, batch_size=100, shuffle=False)
    >>> [len(labels) for _, labels in loader.batches(epoch=0)]
    [100, 100, 100, 59]

    Args:
        images: the images to load.
        batch_size: images per step over all processes in training, images per batch of this process in evaluation.
        shuffle: True for training, False for evaluation.
        seed: seed of the order.
        balanced: draw as many images of each class in a training epoch, give or take one. Images of rare classes are
            drawn several times, each time with another augmentation, and of frequent ones not all.
        rank: index of this process.
        world: number of processes.
        workers: worker processes of the DataLoader; with 0, this process prepares the batches. They do not change the
            batches.
        pin_memory: put batches into page-locked memory, for faster copies to a GPU.

    Raises:
        VicinalError: a size is out of range, or the batch cannot be divided among the processes.
    """

    def __init__(
        self,
        images: TransformedImages,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int = 0,
        balanced: bool = False,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        if workers < 0:
            raise VicinalError(f"workers must be a number of processes >= 0, got {workers}")
        self.images, self.batch_size, self.shuffle, self.seed = images, batch_size, shuffle, seed
        self.rank, self.world = rank, world
        self.sampler = EpochBatchSampler(
            len(images),
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            rank=rank,
            world=world,
            labels=images.labels.numpy() if balanced else None,
        )
        self.steps = self.sampler.steps
        """Number of batches in an epoch on this process."""
        self._iterations = 0
        self._loader: DataLoader[Batch] = DataLoader(
            ErrorsAsText(images),
            batch_sampler=self.sampler,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=_identity,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # otherwise DataLoader draws from the global generator every epoch
        )

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Returns an iterator over the batches of an epoch: images `(n, channels, height, width)`, labels `(n,)`.

        A new iteration ends an unfinished earlier one.

        Args:
            epoch: index of the epoch.
            start: step to start at, to resume an interrupted epoch.

        Raises:
            VicinalError: `start` is behind the last step, or an image cannot be read.
        """
        if not 0 <= start <= self.steps:
            raise VicinalError(f"start must be a step from 0 to {self.steps}, got {start}")
        return self._iterate(epoch, start)

    def step_size(self, position: int) -> int:
        """Returns the number of images at a training step of an epoch, counted from 0, over all processes."""
        return self.sampler.slice_sizes(position)[1]

    def weight(self, position: int) -> float:
        """Returns the factor of this process's mean loss at a step of an epoch, counted from 0; 1 for equal slices.

        The mean over processes of the losses times their weights is the mean over the images of the step. A process
        whose slice is empty gets an image of another one, with the weight 0.
        """
        own, total = self.sampler.slice_sizes(position)
        return own * self.world / total

    def _iterate(self, epoch: int, start: int) -> Iterator[Batch]:
        self._iterations += 1
        iteration = self._iterations
        self.sampler.set_epoch(epoch, start)
        for batch in self._loader:
            if isinstance(batch, str):
                raise VicinalError(batch)
            yield batch
            if iteration != self._iterations:
                raise RuntimeError("these batches ended when batches() was called again")


class EpochBatchSampler(Sampler[list[Key]]):
    """Batches of keys `(epoch, index)` of one epoch on one process; `set_epoch` chooses the epoch.

    Args:
        count: number of images.
        batch_size: as in `Loader`; so are the other arguments.
        shuffle: True for training, False for evaluation.
        seed: seed of the order.
        rank: index of this process.
        world: number of processes.
        labels: class index of each image, to draw classes equally often.
    """

    def __init__(
        self,
        count: int,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        rank: int,
        world: int,
        labels: Indices | None = None,
    ) -> None:
        if batch_size < 1:
            raise VicinalError(f"batch_size must be >= 1, got {batch_size}")
        if not 0 <= rank < world:
            raise VicinalError(f"rank must be from 0 to {world - 1}, got {rank}")
        if shuffle and batch_size % world:
            raise VicinalError(f"batch_size must be a multiple of the {world} processes, got {batch_size}")
        self.count, self.batch_size, self.shuffle, self.seed = count, batch_size, shuffle, seed
        self.rank, self.world, self.labels = rank, world, labels
        self.steps = -(-(count if shuffle else len(range(rank, count, world))) // batch_size)
        self.epoch = self.start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Chooses the epoch of the next iteration, and the step it starts at."""
        self.epoch, self.start = epoch, start

    def __iter__(self) -> Iterator[list[Key]]:
        # A list, not a generator: a later set_epoch must not change an iteration that has begun.
        return iter(self.keys(self.epoch)[self.start :])

    def __len__(self) -> int:
        return self.steps - self.start

    def keys(self, epoch: int) -> list[list[Key]]:
        """Returns the keys of the images of each step of an epoch on this process."""
        size = self.batch_size
        if not self.shuffle:
            own = [(epoch, index) for index in range(self.rank, self.count, self.world)]
            return [own[first : first + size] for first in range(0, len(own), size)]
        generator = np.random.default_rng(derive_seed(self.seed, epoch))
        if self.labels is None:
            order = [(epoch, index) for index in generator.permutation(self.count).tolist()]
        else:
            order = _balanced_keys(self.labels, epoch, generator)
        steps = [order[first : first + size] for first in range(0, self.count, size)]
        return [self._slice(step) or step[:1] for step in steps]

    def _slice(self, step: list[Key]) -> list[Key]:
        """Returns this process's part of a step: the parts differ by at most one, the first are the longer ones."""
        shortest, longer = divmod(len(step), self.world)
        first = self.rank * shortest + min(self.rank, longer)
        return step[first : first + shortest + (self.rank < longer)]

    def slice_sizes(self, position: int) -> tuple[int, int]:
        """Returns the number of images at a training step of an epoch: of this process, and of all."""
        total = min(self.batch_size, self.count - position * self.batch_size)
        return len(range(self.rank, total, self.world)), total


def _balanced_keys(labels: Indices, epoch: int, generator: np.random.Generator) -> list[Key]:
    """Returns as many keys as images, in random order; the numbers of keys of the classes differ by at most one.

    An image that is drawn again has another number in place of the epoch, and with it another augmentation.
    """
    classes = np.unique(labels)
    keys: list[Key] = []
    quotas = np.full(len(classes), len(labels) // len(classes))
    quotas[generator.permutation(len(classes))[: len(labels) % len(classes)]] += 1
    for label, quota in zip(classes, quotas.tolist(), strict=True):
        members = np.flatnonzero(labels == label)
        rounds = range(-(-quota // len(members)))
        drawn = [
            (epoch + number * REPEATED, index) for number in rounds for index in generator.permutation(members).tolist()
        ]
        keys += drawn[:quota]
    return [keys[position] for position in generator.permutation(len(keys))]


class ErrorsAsText(Dataset[Batch]):
    """Returns error messages as strings: DataLoader re-raises worker exceptions with the worker's traceback inside."""

    def __init__(self, images: TransformedImages) -> None:
        self.images = images

    def __getitems__(self, keys: Sequence[Key]) -> Batch | str:
        try:
            return self.images.__getitems__(keys)
        except VicinalError as error:
            return str(error)


def _identity(batch: Any) -> Any:
    return batch
