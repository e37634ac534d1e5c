"""The size of images, from one or two numbers."""

from collections.abc import Iterable
from typing import Any

from vicinal.errors import VicinalError

__all__ = ["ImageSize", "height_and_width"]

ImageSize = int | tuple[int, int]
"""The side of square images in pixels, or height and width."""


def height_and_width(size: Any, name: str = "img_size") -> tuple[int, int]:
    """Returns height and width in pixels.

    >>> height_and_width(32), height_and_width((32, 48)), height_and_width([64])
    ((32, 32), (32, 48), (64, 64))

    Args:
        size: one number, or an iterable of one or two.
        name: name of the parameter in error messages.

    Raises:
        VicinalError: the size is not one or two whole numbers >= 1.
    """
    sides = list(size) if isinstance(size, Iterable) and not isinstance(size, str) else [size]
    try:
        height, width = (int(side) for side in (sides * 2 if len(sides) == 1 else sides))
    except (TypeError, ValueError):
        height = width = 0
    if height < 1 or width < 1:
        raise VicinalError(f"{name} must be one number of pixels or (height, width), got {size!r}")
    return height, width
