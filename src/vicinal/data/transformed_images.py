"""A split as a dataset of model inputs, augmented or not."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vicinal.cache_folder import cache_folder
from vicinal.data.decode_cache import open_cache
from vicinal.data.image_array import ImageArray, image_to_array
from vicinal.data.image_dataset import ImageSplit
from vicinal.data.rng import derive_seed, preserve_rng, reseed
from vicinal.data.transforms import Augmentation, Augmenter, Preprocessing, center_crop, normalize
from vicinal.deprecation import renamed_parameters

__all__ = ["TransformedImages"]

MAX_CACHED_SIDE = 96  # pixels; a cache of larger images takes too much disk space


class TransformedImages(Dataset[tuple[Tensor, Tensor]]):
    """The images of a split, prepared for a model.

    A key is a pair `(epoch, index)`. Random draws depend on seed, epoch and image only.

    >>> import tempfile
    >>> from vicinal.data import Preprocessing, TransformedImages, open_dataset
    >>> digits = open_dataset("digits")
    >>> preprocessing = Preprocessing(8, 8, 1, digits.info.mean, digits.info.std)
    >>> images = TransformedImages(digits.test, preprocessing, cache_dir=Path(tempfile.mkdtemp()))
    >>> image, label = images[0, 5]  # epoch 0, image 5
    >>> tuple(image.shape), int(label)
    ((1, 8, 8), 8)

    Args:
        split: a split, or a part of one.
        preprocessing: size and normalization of the model's input.
        augmentation: random augmentation; none by default.
        seed: seed of the augmentation.
        cache_dir: folder for decoded images of up to 96 x 96 pixels; `$VICINAL_CACHE` by default, or `vicinal` in the
            user's cache folder.
    """

    @renamed_parameters(pictures="split")
    def __init__(
        self,
        split: ImageSplit,
        preprocessing: Preprocessing,
        augmentation: Augmentation | None = None,
        *,
        seed: int = 0,
        cache_dir: Path | None = None,
    ) -> None:
        self.split, self.preprocessing, self.seed = split, preprocessing, seed
        self.labels = torch.from_numpy(split.labels.copy())
        self.cached = max(preprocessing.height, preprocessing.width) <= MAX_CACHED_SIDE
        self.cache = open_cache(split, preprocessing, cache_folder(cache_dir)) if self.cached else None
        self.augmenter = None if augmentation is None else Augmenter(preprocessing, augmentation)

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Returns one image `(channels, height, width)` and its label."""
        images, labels = self.__getitems__([key])
        return images[0], labels[0]

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Returns normalized images, float32 `(n, channels, height, width)`, and labels, int64 `(n,)`."""
        size = self.preprocessing.height, self.preprocessing.width, self.preprocessing.channels
        batch = np.empty((len(keys), *size), np.uint8)
        labels = self.labels[[index for _, index in keys]]
        if self.augmenter is None:
            for position, (_, index) in enumerate(keys):
                batch[position] = center_crop(self._array(index), self.preprocessing)
            return normalize(batch, self.preprocessing), labels
        with preserve_rng():
            for position, (epoch, index) in enumerate(keys):
                array = self._array(index)
                reseed(derive_seed(self.seed, epoch, index))
                batch[position] = self.augmenter(array)
            images = normalize(batch, self.preprocessing)
            if self.augmenter.augmentation.erasing:  # acts on normalized images, with a seed of its own
                for image, (epoch, index) in zip(images, keys, strict=True):
                    random.seed(derive_seed(self.seed, epoch, index, 1))
                    self.augmenter.erase(image)
        return images, labels

    def _array(self, index: int) -> ImageArray:
        if self.cache is not None:
            return self.cache[int(self.split.rows[index])]
        return image_to_array(self.split.image(index), self.preprocessing.channels)
