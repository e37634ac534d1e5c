"""A memory-mapped file of decoded images: a split is decoded once, later epochs and runs only read it.

One file per split: the pixels of all images, then start, height and width of each, then counts and a checksum. A file
is written atomically; a damaged file is written again.
"""

import os
import struct
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from vicinal.data.image_array import ImageArray, image_to_array
from vicinal.data.image_dataset import ImageSplit
from vicinal.data.transforms import Preprocessing, cover
from vicinal.errors import VicinalError

__all__ = ["Cache", "open_cache"]

FORMAT_NAME = b"vicinal1"  # ends with the version of the format
FOOTER = struct.Struct("<qqqI8s")  # images, channels, bytes of pixels, checksum of everything before, format name
BLOCK_SIZE = 1024  # images decoded at a time


class Cache:
    """The decoded images of one split, `(height, width, channels)` each.

    Args:
        file: a file that `open_cache` wrote.

    Raises:
        ValueError: the file is truncated or damaged.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        mapped = np.memmap(file, np.uint8, "r").view(np.ndarray)
        if len(mapped) < FOOTER.size:
            raise ValueError(f"{file} is truncated")
        count, self.channels, size, self.checksum, name = FOOTER.unpack(mapped[-FOOTER.size :].tobytes())
        if name != FORMAT_NAME or len(mapped) != size + 24 * count + FOOTER.size:
            raise ValueError(f"{file} is damaged")
        self.content = mapped[: -FOOTER.size]
        self.positions = np.frombuffer(self.content[size:].tobytes(), "<i8").reshape(count, 3)

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, row: int) -> ImageArray:
        """Returns the image at a row of the split, `(height, width, channels)`."""
        start, height, width = self.positions[row].tolist()
        return self.content[start : start + height * width * self.channels].reshape(height, width, self.channels)

    def __reduce__(self) -> tuple[type["Cache"], tuple[Path]]:
        return Cache, (self.file,)  # a worker process maps the file itself


def open_cache(split: ImageSplit, preprocessing: Preprocessing, folder: Path) -> Cache:
    """Returns the decoded images of a whole split; writes the file if it does not exist or is damaged.

    Images larger than the size that evaluation resizes to are stored in that size, smaller ones unchanged.

    Args:
        split: a split, or a part of one.
        preprocessing: its size, channels and interpolation determine the stored images.
        folder: the cache folder, see `cache_folder`.

    Raises:
        VicinalError: the file cannot be written, or an image cannot be read.
    """
    height, width = preprocessing.covered
    variant = f"{height}x{width}x{preprocessing.channels}-{preprocessing.interpolation}"
    file = folder / "pictures" / f"{split.key}-{variant}.{FORMAT_NAME.decode()}"
    try:
        cache = Cache(file)
        if len(cache) == split.split_size and zlib.crc32(cache.content.data) == cache.checksum:
            return cache
    except (OSError, ValueError):  # does not exist, or is damaged
        pass
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _write(split, preprocessing, file)
    except OSError as error:
        raise VicinalError(
            f"cannot write decoded images to {file.parent}: {error.strerror or error}; set VICINAL_CACHE to another "
            "folder"
        ) from None
    return Cache(file)


def _write(split: ImageSplit, preprocessing: Preprocessing, file: Path) -> None:
    """Decodes a split into a temporary file, then renames it. If several processes write, the last file stays."""

    def decode_row(row: int) -> ImageArray:
        if row in split.skipped:
            return np.empty((0, 0, preprocessing.channels), np.uint8)
        image = cover(split.read(row), preprocessing.covered, preprocessing.interpolation, enlarge=False)
        return image_to_array(image, preprocessing.channels)

    positions, size, checksum = np.empty((split.split_size, 3), "<i8"), 0, 0
    temporary = file.with_name(f".writing-{uuid.uuid4().hex}")
    try:
        with (
            open(temporary, "xb") as out,
            ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,
            tqdm(total=split.split_size, desc="decoding", unit=" images", delay=2, leave=False, disable=None) as bar,
        ):
            for first in range(0, split.split_size, BLOCK_SIZE):
                block = range(first, min(first + BLOCK_SIZE, split.split_size))
                for row, array in zip(block, pool.map(decode_row, block), strict=True):
                    positions[row] = size, *array.shape[:2]
                    content = array.tobytes()
                    out.write(content)
                    size += len(content)
                    checksum = zlib.crc32(content, checksum)
                bar.update(len(block))
            out.write(positions.tobytes())
            checksum = zlib.crc32(positions.tobytes(), checksum)
            out.write(FOOTER.pack(split.split_size, preprocessing.channels, size, checksum, FORMAT_NAME))
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
