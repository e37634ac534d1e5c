"""From a picture to the pixels that a model sees: cut and resized alike for evaluation, altered at random for training.

Cropping and flipping are slices of an array, which takes a tenth of the time that Pillow needs for small pictures.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor

from vicinal.data.auto_augment import Pixels, Policy, as_picture, as_pixels
from vicinal.errors import VicinalError

__all__ = [
    "Augmentation",
    "Augmenter",
    "Preprocessing",
    "centre",
    "cover",
    "evaluation_tensor",
    "normalise",
]

RESIZED_CROPS_FROM = 96  # pixels; smaller images are cropped after padding
INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
}


@dataclass(frozen=True)
class Preprocessing:
    """How pictures become what a model takes.

    >>> from vicinal.data import Preprocessing
    >>> Preprocessing(height=32, width=48, channels=1, mean=(0.5,), std=(0.25,)).declared()["crop_pct"]
    1.0
    """

    height: int
    width: int
    channels: int
    mean: tuple[float, ...]
    """Of each channel, of values between 0 and 1."""
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    """Evaluation resizes a picture to cover the size divided by this, and takes the centre."""

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise VicinalError(f"images need a size of at least 1 x 1, given {self.height} x {self.width}")
        if self.channels not in (1, 3):
            raise VicinalError(f"images have 1 or 3 channels, given {self.channels}")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.channels:
                raise VicinalError(f"{name} has {len(values)} numbers, for images of {self.channels} channels")
        if min(self.std) <= 0:
            raise VicinalError(f"std must be above 0, given {self.std}")
        if self.interpolation not in INTERPOLATIONS:
            raise VicinalError(
                f"unknown interpolation {self.interpolation!r}; expected one of {', '.join(INTERPOLATIONS)}"
            )
        if not 0 < self.crop_pct <= 1:
            raise VicinalError(f"crop_pct is above 0 and at most 1, given {self.crop_pct}")

    @classmethod
    def of_model(cls, declared: Mapping[str, Any]) -> "Preprocessing":
        """What a model declares, in timm's words (`model.pretrained_cfg`)."""
        channels, height, width = declared["input_size"]
        return cls(
            height,
            width,
            channels,
            tuple(declared["mean"]),
            tuple(declared["std"]),
            declared.get("interpolation") or "bicubic",
            declared.get("crop_pct") or 1.0,
        )

    def declared(self) -> dict[str, Any]:
        """The same in timm's words, as `vicinal.save` takes it; the size is the model's."""
        return {
            "mean": self.mean,
            "std": self.std,
            "interpolation": self.interpolation,
            "crop_pct": self.crop_pct,
            "crop_mode": "center",
        }

    @property
    def covered(self) -> tuple[int, int]:
        """Height and width that a resized picture covers."""
        return math.floor(self.height / self.crop_pct), math.floor(self.width / self.crop_pct)


@dataclass(frozen=True)
class Augmentation:
    """How training pictures are altered."""

    crop: bool = True
    """Random crops: of the padded picture below 96 pixels, resized ones from there on."""
    flip: bool = True
    """Mirror every other picture."""
    auto_augment: Literal["cifar10", "svhn", "imagenet"] | None = None
    """AutoAugment's policy (Cubuk et al. 2019)."""
    erasing: float = 0.0
    """Share of the pictures in which a rectangle of up to 0.4 of the area becomes the mean (Zhong et al. 2020)."""

    def __post_init__(self) -> None:
        if self.auto_augment not in (None, "cifar10", "svhn", "imagenet"):
            raise VicinalError(f"unknown policy {self.auto_augment!r}; expected cifar10, svhn or imagenet")
        if not 0 <= self.erasing <= 1:
            raise VicinalError(f"erasing is a share between 0 and 1, given {self.erasing}")


def cover(picture: Image.Image, size: tuple[int, int], interpolation: str, *, enlarge: bool = True) -> Image.Image:
    """Resize a picture, keeping its aspect, so that it just covers a height and a width.

    The longer side is rounded down, as torchvision does it.
    """
    (width, height), (to_height, to_width) = picture.size, size
    if to_height * width >= to_width * height:
        resized = (max(to_width, to_height * width // height), to_height)
    else:
        resized = (to_width, max(to_height, to_width * height // width))
    if resized == picture.size or (not enlarge and (resized[0] > width or resized[1] > height)):
        return picture
    return picture.resize(resized, INTERPOLATIONS[interpolation])


def centre(pixels: Pixels, preprocessing: Preprocessing) -> Pixels:
    """What evaluation shows of a picture, `(height, width, channels)`."""
    size = preprocessing.height, preprocessing.width
    pixels = _covering(pixels, preprocessing.covered, preprocessing.interpolation)
    top, left = (round((have - want) / 2) for have, want in zip(pixels.shape, size, strict=False))
    return pixels[top : top + size[0], left : left + size[1]]


def normalise(pixels: Pixels, preprocessing: Preprocessing) -> Tensor:
    """Pixels `(..., height, width, channels)` as float32 `(..., channels, height, width)` of mean 0 and deviation 1."""
    values = torch.from_numpy(pixels).movedim(-1, -3).contiguous().float()
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (preprocessing.mean, preprocessing.std))
    return values.div_(255).sub_(mean).div_(std)


def evaluation_tensor(picture: Image.Image, preprocessing: Preprocessing) -> Tensor:
    """What a model is given of a picture when it is evaluated, `(channels, height, width)`."""
    return normalise(centre(as_pixels(picture, preprocessing.channels), preprocessing).copy(), preprocessing)


class Augmenter:
    """Alters pictures; draws from the global generators of `random` and torch."""

    def __init__(self, preprocessing: Preprocessing, augmentation: Augmentation) -> None:
        self.preprocessing, self.augmentation = preprocessing, augmentation
        self.size = preprocessing.height, preprocessing.width
        self.resized_crop = RandomResizedCropAndInterpolation(self.size, interpolation=preprocessing.interpolation)
        self.policy = None
        if augmentation.auto_augment is not None:
            fill = [round(255 * value) for value in preprocessing.mean]
            self.policy = Policy(augmentation.auto_augment, fill)
        self.erasing = RandomErasing(augmentation.erasing, max_area=0.4, mode="const", device="cpu")

    def __call__(self, pixels: Pixels) -> Pixels:
        """A picture of any size to one of `(height, width, channels)`."""
        if not self.augmentation.crop:
            pixels = centre(pixels, self.preprocessing)
        elif max(self.size) < RESIZED_CROPS_FROM:
            pixels = self.padded_crop(_covering(pixels, self.size, self.preprocessing.interpolation))
        else:
            pixels = as_pixels(self.resized_crop(as_picture(pixels)), self.preprocessing.channels)
        if self.augmentation.flip and random.random() < 0.5:
            pixels = pixels[:, ::-1]
        if self.policy is not None:
            pixels = self.policy(pixels)
        return pixels

    def padded_crop(self, pixels: Pixels) -> Pixels:
        """A window of a picture with an eighth of the size in black around it."""
        window = np.zeros((*self.size, pixels.shape[2]), np.uint8)
        inside, place = [], []
        for have, want in zip(pixels.shape, self.size, strict=False):
            margin = round(want / 8)
            start = random.randint(-margin, have - want + margin)
            first, last = max(start, 0), min(start + want, have)
            inside.append(slice(first, last))
            place.append(slice(first - start, last - start))
        window[tuple(place)] = pixels[tuple(inside)]
        return window


def _covering(pixels: Pixels, size: tuple[int, int], interpolation: str) -> Pixels:
    height, width, channels = pixels.shape
    if height >= size[0] and width >= size[1] and (height == size[0] or width == size[1]):
        return pixels  # without the detour over Pillow
    return as_pixels(cover(as_picture(pixels), size, interpolation), channels)
