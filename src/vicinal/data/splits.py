"""Which images are for training, which for validation: every class in proportion, by seed."""

from dataclasses import dataclass

import numpy as np

from vicinal.data.image_dataset import Indices, Pictures, Source
from vicinal.data.rng import derive
from vicinal.errors import VicinalError

__all__ = ["Splits", "hold_out", "split", "subset"]


@dataclass(frozen=True)
class Splits:
    """A set as a run uses it: to learn from, to choose by, to report on."""

    train: Pictures
    val: Pictures
    """Empty, if none are held out."""
    test: Pictures


def split(source: Source, *, val_size: float = 0.1, train_size: int | None = None, seed: int = 0) -> Splits:
    """Hold validation images out of a set's training split; the test split stays as it is.

    >>> from vicinal.data import open_source, split
    >>> splits = split(open_source("digits"), val_size=0.1, train_size=500, seed=0)
    >>> len(splits.train), len(splits.val), len(splits.test)
    (500, 144, 359)

    Args:
        source: what `open_source` gave.
        val_size: how many to hold out: a share below 1, or a number of images; 0 for none.
        train_size: take so many of the images that are left; all by default.
        seed: other seeds hold out, and take, other images.
    """
    left, held = hold_out(source.train.labels, val_size, seed)
    if train_size is not None:
        left = left[subset(source.train.labels[left], train_size, seed)]
    return Splits(source.train.take(left), source.train.take(held), source.test)


def hold_out(labels: Indices, size: float, seed: int) -> tuple[Indices, Indices]:
    """Split images in two, stratified: the indices of those that are left, and of those held out.

    >>> import numpy as np
    >>> labels = np.array([0] * 8 + [1] * 4)
    >>> left, held = hold_out(labels, size=0.25, seed=0)
    >>> np.bincount(labels[left]).tolist(), np.bincount(labels[held]).tolist()
    ([6, 3], [2, 1])
    """
    count = round(size * len(labels)) if 0 < size < 1 else round(size)
    if size < 0 or (size >= 1 and size != count):
        raise VicinalError(f"a split is a share between 0 and 1, or a number of images; given {size}")
    classes = len(np.unique(labels))
    if count > len(labels) - classes:
        raise VicinalError(
            f"cannot hold {count} of {len(labels)} images out: each of {classes} classes keeps one, so at most "
            f"{len(labels) - classes} can go"
        )
    held = _stratified(labels, count, seed, keep=1)
    return np.setdiff1d(np.arange(len(labels)), held), held


def subset(labels: Indices, size: int, seed: int) -> Indices:
    """The indices of `size` images, every class in proportion."""
    if not 1 <= size <= len(labels):
        raise VicinalError(f"cannot train on {size} images: between 1 and {len(labels)} are left to train on")
    return _stratified(labels, size, seed, keep=0)


def _stratified(labels: Indices, count: int, seed: int, keep: int) -> Indices:
    """`count` images: as many of each class as its share says, the largest remainders rounded up."""
    classes, sizes = np.unique(labels, return_counts=True)
    shares = sizes * (count / max(len(labels), 1))
    taken = np.minimum(np.floor(shares).astype(int), sizes - keep)
    while taken.sum() < count:
        room = np.flatnonzero(taken < sizes - keep)
        taken[room[np.argmax((shares - taken)[room])]] += 1
    chosen = [np.empty(0, np.int64)]
    for number, amount in zip(classes, taken, strict=True):
        # a generator per class, so that a class draws the same images whatever the others are
        order = np.random.default_rng(derive(seed, number)).permutation(np.flatnonzero(labels == number))
        chosen.append(order[:amount])
    return np.sort(np.concatenate(chosen))
