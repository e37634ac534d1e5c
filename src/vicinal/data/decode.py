"""Decodes image files of any mode and EXIF orientation; errors name the file."""

import io
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from vicinal.errors import VicinalError

__all__ = ["decode"]


def decode(content: bytes | Path, where: str, channels: int = 3) -> Image.Image:
    """Returns an image in RGB, or in grayscale for one channel, rotated by its EXIF orientation.

    Args:
        content: the file, or its bytes.
        where: name of the image in error messages.
        channels: 3 or 1.

    Raises:
        VicinalError: the file is missing, truncated or not an image.
    """
    try:
        with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as image:
            return _to_plain_mode(ImageOps.exif_transpose(image)).convert("L" if channels == 1 else "RGB")
    except FileNotFoundError:
        raise VicinalError(f"{where} does not exist") from None
    except UnidentifiedImageError:
        raise VicinalError(f"{where} is not an image that Pillow can read; remove or replace it") from None
    except Exception as error:  # Pillow's decoders raise exceptions of many types on malformed files
        raise VicinalError(f"{where} cannot be read: {error}; it may be truncated; remove or replace it") from None


def _to_plain_mode(image: Image.Image) -> Image.Image:
    """Returns an image with 8 bits per channel and without transparency, on a white background."""
    if image.mode in ("P", "PA", "LA", "La", "RGBA", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")  # convert("RGB") alone would show the hidden colors of transparent pixels
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    if image.mode.startswith("I;16"):  # 16 bits: convert() alone clips values at 255
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    return image
