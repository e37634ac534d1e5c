"""Preprocessing for evaluation and random augmentation for training.

Cropping and flipping slice an array, which takes a tenth of Pillow's time for small images.
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

from vicinal.data.auto_augment import ArrayAutoAugment
from vicinal.data.image_array import ImageArray, array_to_image, image_to_array
from vicinal.data.rand_augment import ArrayColorJitter, ArrayRandAugment, check_rand_augment
from vicinal.deprecation import renamed_parameters
from vicinal.errors import VicinalError, unknown_name

__all__ = [
    "Augmentation",
    "Augmenter",
    "Preprocessing",
    "center_crop",
    "cover",
    "evaluation_tensor",
    "normalize",
]

MIN_RESIZED_CROP_SIDE = 96  # pixels; smaller images are padded and cropped
MIN_ERASED_AREA = 0.02  # of an image, timm's default
GRAY = 128  # fill of the GMM paper's AutoAugment
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
    """Size and normalization of a model's input.

    >>> from vicinal.data import Preprocessing
    >>> Preprocessing(height=32, width=48, channels=1, mean=(0.5,), std=(0.25,)).declared()["crop_pct"]
    1.0
    """

    height: int
    width: int
    channels: int
    mean: tuple[float, ...]
    """Mean of each channel, of values between 0 and 1."""
    std: tuple[float, ...]
    """Standard deviation of each channel."""
    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    """Evaluation resizes an image to cover `size / crop_pct` and takes a center crop of `size`."""

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise VicinalError(f"height and width must be >= 1, got {self.height} x {self.width}")
        if self.channels not in (1, 3):
            raise VicinalError(f"channels must be 1 or 3, got {self.channels}")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.channels:
                raise VicinalError(f"{name} must have {self.channels} numbers, one per channel, got {len(values)}")
        if min(self.std) <= 0:
            raise VicinalError(f"std must be above 0, got {self.std}")
        if self.interpolation not in INTERPOLATIONS:
            raise unknown_name("interpolation", self.interpolation, INTERPOLATIONS)
        if not 0 < self.crop_pct <= 1:
            raise VicinalError(f"crop_pct must be above 0 and at most 1, got {self.crop_pct}")

    @classmethod
    def of_model(cls, declared: Mapping[str, Any]) -> "Preprocessing":
        """Returns the preprocessing of a model.

        Args:
            declared: the model's `pretrained_cfg`, in timm's format.
        """
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
        """Returns the entries of timm's `pretrained_cfg`, as `vicinal.save` takes them, without the image size."""
        return {
            "mean": self.mean,
            "std": self.std,
            "interpolation": self.interpolation,
            "crop_pct": self.crop_pct,
            "crop_mode": "center",
        }

    @property
    def covered(self) -> tuple[int, int]:
        """Height and width that evaluation resizes an image to cover."""
        return math.floor(self.height / self.crop_pct), math.floor(self.width / self.crop_pct)


@dataclass(frozen=True)
class Augmentation:
    """Random augmentation of training images."""

    crop: bool = True
    """Random crops: of the padded image below 96 pixels, random resized crops from 96 pixels on."""
    flip: bool = True
    """Random horizontal flips, with probability 0.5."""
    auto_augment: Literal["cifar10", "svhn", "imagenet"] | None = None
    """AutoAugment's policy (Cubuk et al. 2019)."""
    rand_augment: str | None = None
    """RandAugment (Cubuk et al. 2020) in timm's notation, such as `rand-m9-n2-mstd0.5-inc1`."""
    color_jitter: float = 0.0
    """Random factors of brightness, contrast and saturation are from `1 - color_jitter` to `1 + color_jitter`."""
    erasing: float = 0.0
    """Probability of random erasing, which sets a box to a constant (Zhong et al. 2020)."""
    padding: int | None = None
    """Padding of images below 96 pixels before they are cropped; 1/8 of the size by default."""
    erasing_area: float = 0.4
    """Largest fraction of an image that is erased."""
    erasing_aspect: float = 0.3
    """Smallest ratio of the sides of an erased box; the largest is its inverse."""
    fill: Literal["mean", "reference"] = "mean"
    """Value of erased pixels and of those that AutoAugment moves in. `mean`: the mean of the dataset. `reference`, as
    in the GMM paper's program: 128 in AutoAugment; in erasing the numbers of `Preprocessing.mean` as they are."""

    def __post_init__(self) -> None:
        if self.auto_augment not in (None, "cifar10", "svhn", "imagenet"):
            raise unknown_name("auto_augment", str(self.auto_augment), ("cifar10", "svhn", "imagenet"))
        if self.rand_augment is not None:
            check_rand_augment(self.rand_augment)
            if self.auto_augment is not None:
                raise VicinalError("rand_augment and auto_augment exclude each other: leave one of them out")
        if not 0 <= self.color_jitter <= 1:
            raise VicinalError(f"color_jitter must be from 0 to 1, got {self.color_jitter}")
        if not 0 <= self.erasing <= 1:
            raise VicinalError(f"erasing must be from 0 to 1, got {self.erasing}")
        if self.padding is not None and self.padding < 0:
            raise VicinalError(f"padding must be at least 0, got {self.padding}")
        if not MIN_ERASED_AREA <= self.erasing_area <= 1:
            raise VicinalError(f"erasing_area must be from {MIN_ERASED_AREA} to 1, got {self.erasing_area}")
        if not 0 < self.erasing_aspect <= 1:
            raise VicinalError(f"erasing_aspect must be above 0 and at most 1, got {self.erasing_aspect}")
        if self.fill not in ("mean", "reference"):
            raise unknown_name("fill", str(self.fill), ("mean", "reference"))


def cover(image: Image.Image, size: tuple[int, int], interpolation: str, *, enlarge: bool = True) -> Image.Image:
    """Returns an image resized to the smallest size of the same aspect ratio that covers a height and a width.

    The longer side is rounded down, as in torchvision.

    Args:
        image: the image.
        size: height and width to cover.
        interpolation: a key of `INTERPOLATIONS`.
        enlarge: if False, an image that would grow is returned unchanged.
    """
    (width, height), (to_height, to_width) = image.size, size
    if to_height * width >= to_width * height:
        resized = (max(to_width, to_height * width // height), to_height)
    else:
        resized = (to_width, max(to_height, to_width * height // width))
    if resized == image.size or (not enlarge and (resized[0] > width or resized[1] > height)):
        return image
    return image.resize(resized, INTERPOLATIONS[interpolation])


def center_crop(array: ImageArray, preprocessing: Preprocessing) -> ImageArray:
    """Returns an image resized and center-cropped for evaluation, `(height, width, channels)`."""
    size = preprocessing.height, preprocessing.width
    array = _cover(array, preprocessing.covered, preprocessing.interpolation)
    top, left = (round((have - want) / 2) for have, want in zip(array.shape, size, strict=False))
    return array[top : top + size[0], left : left + size[1]]


def normalize(array: ImageArray, preprocessing: Preprocessing) -> Tensor:
    """Returns images `(..., height, width, channels)`, normalized, as float32 `(..., channels, height, width)`."""
    values = torch.from_numpy(array).movedim(-1, -3).contiguous().float()
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (preprocessing.mean, preprocessing.std))
    return values.div_(255).sub_(mean).div_(std)


@renamed_parameters(picture="image")
def evaluation_tensor(image: Image.Image, preprocessing: Preprocessing) -> Tensor:
    """Returns the model input for an image in evaluation, float32 `(channels, height, width)`.

    Args:
        image: in any mode and size.
        preprocessing: size and normalization of the model's input.
    """
    return normalize(center_crop(image_to_array(image, preprocessing.channels), preprocessing).copy(), preprocessing)


class Augmenter:
    """Augments images; draws from the global generators of `random`, NumPy and torch.

    Args:
        preprocessing: size of the model's input.
        augmentation: what to apply.
    """

    def __init__(self, preprocessing: Preprocessing, augmentation: Augmentation) -> None:
        self.preprocessing, self.augmentation = preprocessing, augmentation
        self.size = preprocessing.height, preprocessing.width
        as_reference = augmentation.fill == "reference"
        self.resized_crop = RandomResizedCropAndInterpolation(self.size, interpolation=preprocessing.interpolation)
        self.policy: ArrayAutoAugment | ArrayRandAugment | None = None
        fill = [round(255 * value) for value in preprocessing.mean]
        if augmentation.auto_augment is not None:
            fill = [GRAY if as_reference else round(255 * value) for value in preprocessing.mean]
            self.policy = ArrayAutoAugment(augmentation.auto_augment, fill)
        elif augmentation.rand_augment is not None:
            self.policy = ArrayRandAugment(augmentation.rand_augment, self.size, fill)
        self.color_jitter = ArrayColorJitter(augmentation.color_jitter) if augmentation.color_jitter else None
        self.erasing = RandomErasing(
            augmentation.erasing,
            max_area=augmentation.erasing_area,
            min_aspect=augmentation.erasing_aspect,
            mode="const",
            device="cpu",
        )
        fill_values = preprocessing.mean if as_reference else [0.0] * preprocessing.channels
        self.erasing_fill = torch.tensor(fill_values).view(-1, 1, 1)

    def __call__(self, array: ImageArray) -> ImageArray:
        """Returns an augmented image, `(height, width, channels)`, from one of any size."""
        if not self.augmentation.crop:
            array = center_crop(array, self.preprocessing)
        elif max(self.size) < MIN_RESIZED_CROP_SIDE:
            array = self.padded_crop(_cover(array, self.size, self.preprocessing.interpolation))
        else:
            array = image_to_array(self.resized_crop(array_to_image(array)), self.preprocessing.channels)
        if self.augmentation.flip and random.random() < 0.5:
            array = array[:, ::-1]
        for operation in (self.policy, self.color_jitter):
            if operation is not None:
                array = operation(array)
        return array

    def erase(self, image: Tensor) -> None:
        """Sets a random box of a normalized image, `(channels, height, width)`, to a constant, in place."""
        kept = self.erasing(torch.ones(1, *image.shape[1:]))
        torch.where(kept.bool(), image, self.erasing_fill, out=image)

    def padded_crop(self, array: ImageArray) -> ImageArray:
        """Returns a random crop, `(height, width, channels)`, of the image padded with zeros."""
        crop = np.zeros((*self.size, array.shape[2]), np.uint8)
        source, target = [], []
        for have, want in zip(array.shape, self.size, strict=False):
            margin = round(want / 8) if self.augmentation.padding is None else self.augmentation.padding
            start = random.randint(-margin, have - want + margin)
            first, last = max(start, 0), min(start + want, have)
            source.append(slice(first, last))
            target.append(slice(first - start, last - start))
        crop[tuple(target)] = array[tuple(source)]
        return crop


def _cover(array: ImageArray, size: tuple[int, int], interpolation: str) -> ImageArray:
    height, width, channels = array.shape
    if height >= size[0] and width >= size[1] and (height == size[0] or width == size[1]):
        return array  # `cover` would return the image unchanged
    return image_to_array(cover(array_to_image(array), size, interpolation), channels)
