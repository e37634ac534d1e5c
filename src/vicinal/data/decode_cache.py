"""Decoded pictures on disk, memory-mapped: a split is decoded once, later epochs and runs only read.

One file per split: the pixels of all pictures, then where each starts and its height and width, then counts and a
checksum. A file appears whole or not at all; one that is damaged is made again.
"""

import os
import struct
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from vicinal.data.auto_augment import Pixels, as_pixels
from vicinal.data.image_dataset import Pictures
from vicinal.data.transforms import Preprocessing, cover
from vicinal.errors import VicinalError

__all__ = ["Cache", "open_cache"]

NAME = b"vicinal1"  # the number is that of the format
END = struct.Struct("<qqqI8s")  # pictures, channels, bytes of pixels, checksum of all before it, name
BLOCK = 1024  # pictures decoded at a time


class Cache:
    """The decoded pictures of one split, `(height, width, channels)` each."""

    def __init__(self, file: Path) -> None:
        self.file = file
        mapped = np.memmap(file, np.uint8, "r").view(np.ndarray)
        if len(mapped) < END.size:
            raise ValueError(f"{file} is cut off")
        count, self.channels, size, self.checksum, name = END.unpack(mapped[-END.size :].tobytes())
        if name != NAME or len(mapped) != size + 24 * count + END.size:
            raise ValueError(f"{file} is damaged")
        self.content = mapped[: -END.size]
        self.places = np.frombuffer(self.content[size:].tobytes(), "<i8").reshape(count, 3)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, row: int) -> Pixels:
        start, height, width = self.places[row].tolist()
        return self.content[start : start + height * width * self.channels].reshape(height, width, self.channels)

    def __reduce__(self) -> tuple[type["Cache"], tuple[Path]]:
        return Cache, (self.file,)  # a worker maps the file itself


def open_cache(pictures: Pictures, preprocessing: Preprocessing, folder: Path) -> Cache:
    """The decoded pictures of the whole split that some are of; made now, if they are not there.

    Pictures larger than what evaluation resizes to are stored in that size, smaller ones as they are.
    """
    height, width = preprocessing.covered
    kind = f"{height}x{width}x{preprocessing.channels}-{preprocessing.interpolation}"
    file = folder / "pictures" / f"{pictures.key}-{kind}.{NAME.decode()}"
    try:
        cache = Cache(file)
        if len(cache) == pictures.whole and zlib.crc32(cache.content.data) == cache.checksum:
            return cache
    except (OSError, ValueError):  # not there, or damaged
        pass
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _write(pictures, preprocessing, file)
    except OSError as error:
        raise VicinalError(
            f"cannot keep decoded pictures in {file.parent}: {error.strerror or error}; VICINAL_CACHE can name another "
            "folder"
        ) from None
    return Cache(file)


def _write(pictures: Pictures, preprocessing: Preprocessing, file: Path) -> None:
    """Decode a split into a file beside its place, then move it there: of several at once, the last one stays."""

    def pixels_of(row: int) -> Pixels:
        picture = cover(pictures.read(row), preprocessing.covered, preprocessing.interpolation, enlarge=False)
        return as_pixels(picture, preprocessing.channels)

    places, size, checksum = np.empty((pictures.whole, 3), "<i8"), 0, 0
    beside = file.with_name(f".writing-{uuid.uuid4().hex}")
    try:
        with (
            open(beside, "xb") as out,
            ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,
            tqdm(total=pictures.whole, desc="decoding", unit=" pictures", delay=2, leave=False, disable=None) as bar,
        ):
            for first in range(0, pictures.whole, BLOCK):
                block = range(first, min(first + BLOCK, pictures.whole))
                for row, pixels in zip(block, pool.map(pixels_of, block), strict=True):
                    places[row] = size, *pixels.shape[:2]
                    content = pixels.tobytes()
                    out.write(content)
                    size += len(content)
                    checksum = zlib.crc32(content, checksum)
                bar.update(len(block))
            out.write(places.tobytes())
            checksum = zlib.crc32(places.tobytes(), checksum)
            out.write(END.pack(pictures.whole, preprocessing.channels, size, checksum, NAME))
            out.flush()
            os.fsync(out.fileno())
        os.replace(beside, file)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
