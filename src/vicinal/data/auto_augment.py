"""AutoAugment (Cubuk et al. 2019) on arrays.

Gives the same pixels as torchvision's AutoAugment on a Pillow image. Operations that map each value to another one use
a lookup table of 256 values in NumPy: Pillow builds such tables in Python, which takes most of the time for images of
32 x 32 pixels.
"""

from typing import Any

import numpy as np
from torchvision.transforms import AutoAugment, AutoAugmentPolicy
from torchvision.transforms.autoaugment import _apply_op

from vicinal.data.image_array import ImageArray, array_to_image, image_to_array

__all__ = ["ArrayAutoAugment"]

VALUES = np.arange(256)


class ArrayAutoAugment(AutoAugment):
    """Applies the two operations of a policy that torch's global generator draws.

    Args:
        name: policy, `cifar10`, `svhn` or `imagenet`.
        fill: value of each channel for pixels that move in from outside the image.
    """

    def __init__(self, name: str, fill: list[int]) -> None:
        super().__init__(AutoAugmentPolicy[name.upper()], fill=fill)
        self.magnitudes: dict[tuple[int, ...], Any] = {}

    def forward(self, array: ImageArray) -> ImageArray:
        """Returns an augmented copy, `(height, width, channels)`."""
        size = array.shape[:2]
        if size not in self.magnitudes:  # torchvision computes them for every image
            self.magnitudes[size] = self._augmentation_space(10, size)
        index, draws, signs = self.get_params(len(self.policies))
        for (name, probability, level), draw, sign in zip(
            self.policies[index], draws.tolist(), signs.tolist(), strict=True
        ):
            if draw <= probability:
                values, signed = self.magnitudes[size][name]
                magnitude = 0.0 if level is None else float(values[level])
                array = self._apply(array, name, -magnitude if signed and sign == 0 else magnitude)
        return array

    def _apply(self, array: ImageArray, name: str, magnitude: float) -> ImageArray:
        if name == "Invert":
            return 255 - array
        if name == "Solarize":
            return _look_up(np.where(magnitude > VALUES, VALUES, 255 - VALUES), array)
        if name == "Posterize":
            return array & np.uint8(256 - 2 ** (8 - int(magnitude)))
        if name in ("AutoContrast", "Equalize"):
            make_table = _contrast_table if name == "AutoContrast" else _equalize_table
            channels = np.ascontiguousarray(np.moveaxis(array, -1, 0))
            return np.stack([_look_up(make_table(channel), channel) for channel in channels], -1)
        image = _apply_op(array_to_image(array), name, magnitude, interpolation=self.interpolation, fill=self.fill)
        return image_to_array(image, array.shape[2])


def _look_up(table: Any, values: ImageArray) -> ImageArray:
    """Returns `table[values]`; `bytes.translate` takes half the time of NumPy's indexing."""
    return np.frombuffer(values.tobytes().translate(table.astype(np.uint8).tobytes()), np.uint8).reshape(values.shape)


def _contrast_table(channel: ImageArray) -> Any:
    """Returns new values, `(256,)`, that stretch a channel's range to 0..255."""
    low, high = int(channel.min()), int(channel.max())
    scale = 255.0 / (high - low) if high > low else 1.0
    offset = -low * scale if high > low else 0.0
    return np.clip((VALUES * scale + offset).astype(int), 0, 255)


def _equalize_table(channel: ImageArray) -> Any:
    """Returns new values, `(256,)`, that equalize a channel's histogram."""
    counts = np.bincount(channel.reshape(-1), minlength=256)
    step = int(counts.sum() - counts[channel.max()]) // 255
    if step == 0:
        return VALUES
    below = np.cumsum(counts) - counts
    return np.minimum((step // 2 + below) // step, 255)
