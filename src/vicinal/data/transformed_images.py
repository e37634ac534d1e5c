"""Pictures as the batches that a model takes, altered at random or not."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vicinal.data.auto_augment import Pixels, as_pixels
from vicinal.data.decode_cache import open_cache
from vicinal.data.image_dataset import Pictures
from vicinal.data.open_dataset import cache_folder
from vicinal.data.rng import derive, own_randomness, reseed
from vicinal.data.transforms import Augmentation, Augmenter, Preprocessing, centre, normalise

__all__ = ["Images"]

CACHED_UP_TO = 96  # pixels a side; larger pictures would need too much disk


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Pictures, prepared for a model.

    A key is a pair (epoch, index): what is drawn at random depends on the seed, the epoch and the picture only.

    >>> import tempfile
    >>> from vicinal.data import Images, Preprocessing, open_source
    >>> source = open_source("digits")
    >>> preprocessing = Preprocessing(8, 8, 1, source.facts.mean, source.facts.std)
    >>> images = Images(source.test, preprocessing, cache_dir=Path(tempfile.mkdtemp()))
    >>> image, label = images[0, 5]  # epoch 0, image 5
    >>> tuple(image.shape), int(label)
    ((1, 8, 8), 8)

    Args:
        pictures: a split, or part of one.
        preprocessing: what the model takes.
        augmentation: how to alter them; not at all by default.
        seed: of what is drawn.
        cache_dir: where decoded pictures are kept, up to 96 pixels a side; `$VICINAL_CACHE` by default, or `vicinal` in
            the user's cache folder.
    """

    def __init__(
        self,
        pictures: Pictures,
        preprocessing: Preprocessing,
        augmentation: Augmentation | None = None,
        *,
        seed: int = 0,
        cache_dir: Path | None = None,
    ) -> None:
        self.pictures, self.preprocessing, self.seed = pictures, preprocessing, seed
        self.labels = torch.from_numpy(pictures.labels.copy())
        self.cached = max(preprocessing.height, preprocessing.width) <= CACHED_UP_TO
        self.cache = open_cache(pictures, preprocessing, cache_folder(cache_dir)) if self.cached else None
        self.augmenter = None if augmentation is None else Augmenter(preprocessing, augmentation)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """One image `(channels, height, width)` and its label."""
        images, labels = self.__getitems__([key])
        return images[0], labels[0]

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """A batch: float32 images `(n, channels, height, width)`, normalised, and int64 labels `(n,)`."""
        size = self.preprocessing.height, self.preprocessing.width, self.preprocessing.channels
        batch = np.empty((len(keys), *size), np.uint8)
        labels = self.labels[[index for _, index in keys]]
        if self.augmenter is None:
            for place, (_, index) in enumerate(keys):
                batch[place] = centre(self._pixels(index), self.preprocessing)
            return normalise(batch, self.preprocessing), labels
        with own_randomness():
            for place, (epoch, index) in enumerate(keys):
                pixels = self._pixels(index)
                reseed(derive(self.seed, epoch, index))
                batch[place] = self.augmenter(pixels)
            images = normalise(batch, self.preprocessing)
            if self.augmenter.augmentation.erasing:  # of normalised images, so it has draws of its own
                for image, (epoch, index) in zip(images, keys, strict=True):
                    random.seed(derive(self.seed, epoch, index, 1))
                    self.augmenter.erasing(image)
        return images, labels

    def _pixels(self, index: int) -> Pixels:
        if self.cache is not None:
            return self.cache[int(self.pictures.rows[index])]
        return as_pixels(self.pictures.picture(index), self.preprocessing.channels)
