"""Images as NumPy arrays, and back to Pillow."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

__all__ = ["ImageArray", "array_to_image", "image_to_array"]

ImageArray = NDArray[np.uint8]
"""`(height, width, channels)`."""


def image_to_array(image: Image.Image, channels: int) -> ImageArray:
    """Returns an image as an array, `(height, width, channels)`, converted to grayscale or RGB if it is not.

    Args:
        image: in any mode.
        channels: 1 or 3.
    """
    mode = "L" if channels == 1 else "RGB"
    array = np.asarray(image if image.mode == mode else image.convert(mode))
    return array[..., None] if channels == 1 else array


def array_to_image(array: ImageArray) -> Image.Image:
    """Returns an array `(height, width, channels)` as a grayscale or RGB image."""
    return Image.fromarray(np.ascontiguousarray(array[..., 0] if array.shape[-1] == 1 else array))
