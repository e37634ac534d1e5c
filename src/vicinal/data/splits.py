"""Stratified training, validation and test splits, determined by a seed."""

from dataclasses import dataclass

import numpy as np

from vicinal.data.image_dataset import ImageDataset, ImageSplit, Indices
from vicinal.data.rng import derive_seed
from vicinal.deprecation import renamed_parameters
from vicinal.errors import VicinalError

__all__ = ["Splits", "hold_out", "split", "subset"]


@dataclass(frozen=True)
class Splits:
    """The training, validation and test images of a run."""

    train: ImageSplit
    val: ImageSplit
    """Empty for `val_size=0`, unless the dataset has a validation split of its own."""
    test: ImageSplit
    """Empty for a dataset with a validation split and no test split of its own."""


@renamed_parameters(source="dataset")
def split(dataset: ImageDataset, *, val_size: float = 0.1, train_size: int | None = None, seed: int = 0) -> Splits:
    """Returns the training, validation and test images of a run.

    A validation split of the dataset's own is used whole, otherwise validation images are held out of the training
    split, stratified. The test split stays unchanged.

    >>> from vicinal.data import open_dataset, split
    >>> splits = split(open_dataset("digits"), val_size=0.1, train_size=500, seed=0)
    >>> len(splits.train), len(splits.val), len(splits.test)
    (500, 144, 359)

    Args:
        dataset: as `open_dataset` returns it.
        val_size: images to hold out: a fraction below 1, or a number of images; 0 for none. Not used for a dataset with
            a validation split of its own.
        train_size: number of training images, drawn from those that remain; all by default.
        seed: determines which images are drawn.

    Raises:
        VicinalError: a size is out of range.
    """
    left, held = hold_out(dataset.train.labels, val_size if dataset.val is None else 0, seed)
    if train_size is not None:
        left = left[subset(dataset.train.labels[left], train_size, seed)]
    return Splits(dataset.train.take(left), dataset.val or dataset.train.take(held), dataset.test)


def hold_out(labels: Indices, size: float, seed: int) -> tuple[Indices, Indices]:
    """Returns the indices of the remaining images and of the images held out, `(n,)` each; stratified.

    >>> import numpy as np
    >>> labels = np.array([0] * 8 + [1] * 4)
    >>> left, held = hold_out(labels, size=0.25, seed=0)
    >>> np.bincount(labels[left]).tolist(), np.bincount(labels[held]).tolist()
    ([6, 3], [2, 1])
    """
    count = round(size * len(labels)) if 0 < size < 1 else round(size)
    if size < 0 or (size >= 1 and size != count):
        raise VicinalError(f"the split size must be a fraction from 0 to 1, or a number of images, got {size}")
    classes = len(np.unique(labels))
    if count > len(labels) - classes:
        raise VicinalError(
            f"the split size must be at most {len(labels) - classes} of {len(labels)} images, got {count}: each of "
            f"{classes} classes keeps one image"
        )
    held = _stratified(labels, count, seed, keep=1)
    return np.setdiff1d(np.arange(len(labels)), held), held


def subset(labels: Indices, size: int, seed: int) -> Indices:
    """Returns the indices of `size` images, `(size,)`; stratified."""
    if not 1 <= size <= len(labels):
        raise VicinalError(f"train_size must be from 1 to {len(labels)}, the images left for training, got {size}")
    return _stratified(labels, size, seed, keep=0)


def _stratified(labels: Indices, count: int, seed: int, keep: int) -> Indices:
    """Returns the sorted indices of `count` images, `(count,)`.

    Each class gets its proportion, by the largest-remainder method, and keeps at least `keep` images.
    """
    classes, sizes = np.unique(labels, return_counts=True)
    shares = sizes * (count / max(len(labels), 1))
    taken = np.minimum(np.floor(shares).astype(int), sizes - keep)
    while taken.sum() < count:
        room = np.flatnonzero(taken < sizes - keep)
        taken[room[np.argmax((shares - taken)[room])]] += 1
    chosen = [np.empty(0, np.int64)]
    for label, amount in zip(classes, taken, strict=True):
        # A generator per class: the images drawn of a class do not depend on the other classes.
        order = np.random.default_rng(derive_seed(seed, label)).permutation(np.flatnonzero(labels == label))
        chosen.append(order[:amount])
    return np.sort(np.concatenate(chosen))
