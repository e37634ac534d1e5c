"""From the bytes of a picture to pixels: any mode, any rotation, and errors that name the file."""

import io
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from vicinal.errors import VicinalError

__all__ = ["decode"]


def decode(content: bytes | Path, where: str, channels: int = 3) -> Image.Image:
    """A picture as RGB, or as grayscale for one channel, turned upright as its EXIF says.

    Args:
        content: the file, or its bytes.
        where: what to call it in an error.
        channels: 3 or 1.
    """
    try:
        with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as picture:
            return _plain(ImageOps.exif_transpose(picture)).convert("L" if channels == 1 else "RGB")
    except FileNotFoundError:
        raise VicinalError(f"{where} is not there") from None
    except UnidentifiedImageError:
        raise VicinalError(f"{where} is no picture that can be read; remove or replace it") from None
    except Exception as error:  # Pillow's decoders raise many kinds at what they do not expect
        raise VicinalError(f"{where} cannot be read: {error}; it may be cut off, remove or replace it") from None


def _plain(picture: Image.Image) -> Image.Image:
    """Without transparency, and with 8 bits."""
    if picture.mode in ("P", "PA", "LA", "La", "RGBA", "RGBa") or "transparency" in picture.info:
        solid = picture.convert("RGBA")  # transparent parts become white, not what lies behind them
        return Image.alpha_composite(Image.new("RGBA", solid.size, "white"), solid)
    if picture.mode.startswith("I;16"):  # 16 bits, which would be cut off at 255
        return picture.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    return picture
