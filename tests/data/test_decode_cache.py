import copy
import os
import threading

import numpy as np
import pytest
from PIL import Image

from vicinal.data import Preprocessing, TransformedImages, open_dataset
from vicinal.data.decode_cache import open_cache
from vicinal.errors import VicinalError

SIZES = [(32, 32), (20, 40), (64, 64), (100, 50), (33, 500), (1, 1)]


@pytest.fixture
def pictures(in_memory, noise):
    return in_memory([noise(*size, number) for number, size in enumerate(SIZES)])


def covering(pixels: np.ndarray, size: int) -> np.ndarray:
    """By Pillow: the shorter side becomes `size`, if it is longer."""
    height, width = pixels.shape[:2]
    short = min(height, width)
    if short <= size:
        return pixels
    to = (size * width // short, size * height // short)
    return np.asarray(Image.fromarray(pixels).resize(to, Image.Resampling.BICUBIC))


def test_large_pictures_are_shrunk_until_they_just_cover_and_small_ones_stay(pictures, square, cache):
    kept = open_cache(pictures, square(32), cache)
    assert len(kept) == len(SIZES)
    for row, original in enumerate(pictures.read.arrays):
        assert np.array_equal(kept[row], covering(original, 32))
    assert [kept[row].shape[:2] for row in range(6)] == [(32, 32), (20, 40), (32, 32), (64, 32), (32, 484), (1, 1)]


def test_rectangles(pictures, cache):
    wide = Preprocessing(16, 48, 3, (0.5,) * 3, (0.5,) * 3)
    kept = open_cache(pictures, wide, cache)
    assert [kept[row].shape[:2] for row in range(5)] == [(32, 32), (20, 40), (48, 48), (96, 48), (16, 242)]


def test_one_channel_is_kept_as_one(pictures, cache):
    gray = Preprocessing(32, 32, 1, (0.5,), (0.5,))
    kept = open_cache(pictures, gray, cache)
    assert np.array_equal(kept[0][..., 0], np.asarray(pictures.image(0).convert("L")))


def test_nothing_is_decoded_a_second_time(pictures, square, cache):
    first = open_cache(pictures, square(32), cache)
    calls = pictures.read.calls
    assert calls == len(SIZES)
    again = open_cache(pictures.take(np.array([2, 4])), square(32), cache)
    assert pictures.read.calls == calls
    assert all(np.array_equal(first[row], again[row]) for row in range(6))
    TransformedImages(pictures, square(32)).__getitems__([(0, 1), (1, 1)])
    assert pictures.read.calls == calls


def test_other_sizes_channels_and_pictures_are_other_files(pictures, square, cache, in_memory):
    open_cache(pictures, square(32), cache)
    open_cache(pictures, square(16), cache)
    open_cache(pictures, square(32, crop_pct=0.8), cache)
    open_cache(pictures, Preprocessing(32, 32, 1, (0.5,), (0.5,)), cache)
    open_cache(in_memory(pictures.read.arrays, key="other"), square(32), cache)
    assert len(list((cache / "pictures").iterdir())) == 5


def test_other_statistics_are_the_same_file(pictures, square, cache):
    open_cache(pictures, square(32), cache)
    open_cache(pictures, Preprocessing(32, 32, 3, (0.0,) * 3, (1.0,) * 3), cache)
    assert pictures.read.calls == len(SIZES)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:10],
        lambda content: content[:-1],
        lambda content: content[1:],
        lambda content: content + b"x",
        lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
        lambda content: content[:-100] + bytes([content[-100] ^ 1]) + content[-99:],
        lambda content: content[:-1] + b"0",
    ],
)
def test_a_damaged_file_is_made_again(pictures, square, cache, damage):
    open_cache(pictures, square(32), cache)
    (file,) = (cache / "pictures").iterdir()
    content = file.read_bytes()
    file.write_bytes(damage(content))
    open_cache(pictures, square(32), cache)
    assert pictures.read.calls == 2 * len(SIZES)
    assert file.read_bytes() == content


def test_a_failure_leaves_nothing_behind(pictures, square, cache):
    pictures.read.arrays[3] = "no picture"
    with pytest.raises(AttributeError):
        open_cache(pictures, square(32), cache)
    assert list((cache / "pictures").iterdir()) == []


def test_several_at_once_are_harmless(pictures, square, cache):
    threads = [threading.Thread(target=open_cache, args=(pictures, square(32), cache)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls = pictures.read.calls
    open_cache(pictures, square(32), cache)
    assert pictures.read.calls == calls
    assert len(list((cache / "pictures").iterdir())) == 1


def test_a_copy_maps_the_same_file(pictures, square, cache):
    kept = open_cache(pictures, square(32), cache)
    twin = copy.deepcopy(kept)
    assert twin.file == kept.file
    assert np.array_equal(twin[4], kept[4])


def test_a_folder_that_cannot_be_written_is_an_error(pictures, square, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(VicinalError, match=r"file.*VICINAL_CACHE"):
        open_cache(pictures, square(32), tmp_path / "file")


def test_a_changed_file_is_decoded_again(folder, square, noise):
    before = TransformedImages(open_dataset(f"folder:{folder}").train, square(12))
    file = folder / "cat" / "3.png"
    Image.fromarray(noise(12, 16, 99)).save(file)
    os.utime(file, (1, 1))
    after = TransformedImages(open_dataset(f"folder:{folder}").train, square(12))
    assert before.cache.file != after.cache.file
    assert np.array_equal(after.cache[3], noise(12, 16, 99))
    assert np.array_equal(before.cache[3], noise(12, 16, 3))


@pytest.mark.parametrize(("height", "width", "cached"), [(96, 96, True), (8, 97, False), (97, 8, False), (1, 1, True)])
def test_pictures_are_kept_up_to_96_pixels(pictures, height, width, cached, cache):
    images = TransformedImages(pictures, Preprocessing(height, width, 3, (0.5,) * 3, (0.5,) * 3))
    assert images.cached == cached == cache.exists()
    assert (pictures.read.calls > 0) == cached
