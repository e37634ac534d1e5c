"""RandAugment (Cubuk et al. 2020) and color jitter on arrays, by timm and torchvision.

timm's RandAugment draws from `random` and NumPy, torchvision's ColorJitter from torch: all three generators must be
seeded for each image.
"""

import re
from typing import Any

from PIL import Image
from timm.data.auto_augment import posterize as timm_posterize
from timm.data.auto_augment import rand_augment_transform
from torchvision.transforms import ColorJitter

from vicinal.data.image_array import ImageArray, array_to_image, image_to_array
from vicinal.errors import VicinalError

__all__ = ["ArrayColorJitter", "ArrayRandAugment", "check_rand_augment"]

TRANSLATE_FRACTION = 0.45  # of the shorter side at the largest magnitude, as in timm.data.create_transform


def check_rand_augment(spec: str) -> None:
    """Raises VicinalError if a text is not RandAugment in timm's notation; timm itself ignores some mistakes."""
    if not re.fullmatch(r"rand(-(m|n|mmax)\d+|-(p|mstd)\d+(\.\d+)?|-inc[01]|-t(weights|3aw?))*", spec):
        raise VicinalError(
            f"rand_augment must be in timm's notation, such as rand-m9-n2-mstd0.5-inc1, got {spec!r}: m is the "
            "magnitude from 0 to 10, n the number of operations, mstd the noise of m, inc1 severity that grows with m"
        )


class ArrayRandAugment:
    """Applies random operations of RandAugment.

    Args:
        spec: in timm's notation, such as `rand-m9-n2-mstd0.5-inc1`.
        size: height and width of the images.
        fill: value of each channel for pixels that move in from outside the image.
    """

    def __init__(self, spec: str, size: tuple[int, int], fill: list[int]) -> None:
        check_rand_augment(spec)
        color = fill[0] if len(fill) == 1 else tuple(fill)
        self.transform = rand_augment_transform(
            spec, {"translate_const": int(min(size) * TRANSLATE_FRACTION), "img_mean": color}
        )
        for operation in self.transform.ops:
            if operation.aug_fn is timm_posterize:
                operation.aug_fn = _posterize

    def __call__(self, array: ImageArray) -> ImageArray:
        """Returns an augmented copy, `(height, width, channels)`."""
        return image_to_array(self.transform(array_to_image(array)), array.shape[2])


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Returns timm's result; an image of no bits is black, as timm means it; Pillow raises an error."""
    return timm_posterize(image, bits) if bits > 0 else image.point(lambda _: 0)


class ArrayColorJitter:
    """Changes brightness, contrast and saturation by random factors, as timm does.

    Args:
        strength: factors are from `1 - strength` to `1 + strength`.
    """

    def __init__(self, strength: float) -> None:
        self.transform = ColorJitter(strength, strength, strength)

    def __call__(self, array: ImageArray) -> ImageArray:
        """Returns an augmented copy, `(height, width, channels)`."""
        return image_to_array(self.transform(array_to_image(array)), array.shape[2])
