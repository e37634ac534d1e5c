"""AutoAugment (Cubuk et al. 2019), by torchvision, for arrays.

Pixel for pixel what torchvision does to a picture. Where an operation gives each value a new one, a table of 256 values
does it: Pillow makes such tables in Python, which for a picture of 32 x 32 takes longer than all the rest.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import AutoAugment, AutoAugmentPolicy
from torchvision.transforms.autoaugment import _apply_op

__all__ = ["Pixels", "Policy", "as_picture", "as_pixels"]

Pixels = NDArray[np.uint8]
"""(height, width, channels)"""

VALUES = np.arange(256)


def as_pixels(picture: Image.Image, channels: int) -> Pixels:
    """A picture as an array."""
    mode = "L" if channels == 1 else "RGB"
    pixels = np.asarray(picture if picture.mode == mode else picture.convert(mode))
    return pixels[..., None] if channels == 1 else pixels


def as_picture(pixels: Pixels) -> Image.Image:
    """An array as a picture."""
    return Image.fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels))


class Policy(AutoAugment):
    """Two operations, drawn from torch's global generator, for a picture.

    Args:
        name: `cifar10`, `svhn` or `imagenet`.
        fill: what moves in from outside, a value for each channel.
    """

    def __init__(self, name: str, fill: list[int]) -> None:
        super().__init__(AutoAugmentPolicy[name.upper()], fill=fill)
        self.magnitudes: dict[tuple[int, ...], Any] = {}

    def forward(self, pixels: Pixels) -> Pixels:
        """An altered copy."""
        size = pixels.shape[:2]
        if size not in self.magnitudes:  # torchvision works them out for every picture
            self.magnitudes[size] = self._augmentation_space(10, size)
        number, chances, signs = self.get_params(len(self.policies))
        for (name, share, level), chance, sign in zip(
            self.policies[number], chances.tolist(), signs.tolist(), strict=True
        ):
            if chance <= share:
                values, signed = self.magnitudes[size][name]
                magnitude = 0.0 if level is None else float(values[level])
                pixels = self._apply(pixels, name, -magnitude if signed and sign == 0 else magnitude)
        return pixels

    def _apply(self, pixels: Pixels, name: str, magnitude: float) -> Pixels:
        if name == "Invert":
            return 255 - pixels
        if name == "Solarize":
            return _look_up(np.where(magnitude > VALUES, VALUES, 255 - VALUES), pixels)
        if name == "Posterize":
            return pixels & np.uint8(256 - 2 ** (8 - int(magnitude)))
        if name in ("AutoContrast", "Equalize"):
            table = _stretched if name == "AutoContrast" else _equalised
            channels = np.ascontiguousarray(np.moveaxis(pixels, -1, 0))
            return np.stack([_look_up(table(channel), channel) for channel in channels], -1)
        altered = _apply_op(as_picture(pixels), name, magnitude, interpolation=self.interpolation, fill=self.fill)
        return as_pixels(altered, pixels.shape[2])


def _look_up(table: Any, values: Pixels) -> Pixels:
    """The same as `table[values]`, in half the time."""
    return np.frombuffer(values.tobytes().translate(table.astype(np.uint8).tobytes()), np.uint8).reshape(values.shape)


def _stretched(channel: Pixels) -> Any:
    """New values, from 0 for the darkest to 255 for the brightest."""
    low, high = int(channel.min()), int(channel.max())
    scale = 255.0 / (high - low) if high > low else 1.0
    offset = -low * scale if high > low else 0.0
    return np.clip((VALUES * scale + offset).astype(int), 0, 255)


def _equalised(channel: Pixels) -> Any:
    """New values, about as many pixels of each."""
    counts = np.bincount(channel.reshape(-1), minlength=256)
    step = int(counts.sum() - counts[channel.max()]) // 255
    if step == 0:
        return VALUES
    below = np.cumsum(counts) - counts
    return np.minimum((step // 2 + below) // step, 255)
