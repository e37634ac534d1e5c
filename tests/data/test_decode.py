import io

import numpy as np
import pytest
from PIL import Image

from vicinal.data import decode
from vicinal.errors import VicinalError


def stored(picture: Image.Image, kind: str = "png", **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def pixels(content: bytes, channels: int = 3) -> np.ndarray:
    picture = decode(content, "x", channels)
    assert picture.mode == {1: "L", 3: "RGB"}[channels]
    return np.asarray(picture)


def test_colors_stay(noise):
    assert np.array_equal(pixels(stored(Image.fromarray(noise(5, 7)))), noise(5, 7))


def test_grayscale_becomes_three_equal_channels(noise):
    gray = noise(5, 7)[..., 0]
    assert np.array_equal(pixels(stored(Image.fromarray(gray))), np.stack([gray] * 3, -1))
    assert np.array_equal(pixels(stored(Image.fromarray(gray)), channels=1), gray)


def test_black_and_white(noise):
    bits = noise(5, 7)[..., 0] > 127
    assert np.array_equal(pixels(stored(Image.fromarray(bits)), channels=1), bits * 255)


def test_a_palette_is_looked_up(noise):
    indices, colors = noise(5, 7)[..., 0] % 4, noise(1, 4, 1)[0]
    picture = Image.fromarray(indices, "L")
    picture.putpalette(colors.tobytes())
    assert picture.mode == "P"
    assert np.array_equal(pixels(stored(picture)), colors[indices])


def test_transparent_parts_become_white(noise):
    colors, alpha = noise(5, 7), noise(5, 7, 1)[..., :1]
    alpha[0], alpha[1] = 0, 255
    found = pixels(stored(Image.fromarray(np.concatenate([colors, alpha], -1))))
    share = alpha / 255
    assert np.abs(found - (colors * share + 255 * (1 - share))).max() <= 1
    assert (found[0] == 255).all()
    assert np.array_equal(found[1], colors[1])


def test_a_transparent_palette_and_gray_with_alpha_become_white():
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    assert pixels(stored(palette, transparency=0)).tolist() == [[[255, 255, 255], [40, 50, 60]]]
    gray = Image.fromarray(np.array([[[7, 0], [9, 255]]], np.uint8), "LA")
    assert pixels(stored(gray), channels=1).tolist() == [[255, 9]]


def test_cmyk():
    picture = Image.new("CMYK", (2, 2), (0, 255, 255, 0))  # red
    assert pixels(stored(picture, "tiff"))[0, 0].tolist() == [255, 0, 0]


def test_16_bits_are_scaled_not_cut_off():
    values = np.array([[0, 255, 256, 32768, 65535]], np.uint16)
    found = pixels(stored(Image.fromarray(values)), channels=1)
    assert found.tolist() == (values // 256).tolist() == [[0, 0, 1, 128, 255]]


@pytest.mark.parametrize(
    ("orientation", "turned"),
    [
        (1, lambda x: x),
        (2, lambda x: x[:, ::-1]),
        (3, lambda x: x[::-1, ::-1]),
        (4, lambda x: x[::-1]),
        (5, lambda x: x.transpose(1, 0, 2)),
        (6, lambda x: np.rot90(x, -1)),
        (7, lambda x: x[::-1, ::-1].transpose(1, 0, 2)),
        (8, lambda x: np.rot90(x)),
    ],
)
def test_pictures_are_turned_upright(orientation, turned, noise):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = stored(Image.fromarray(noise(5, 7)), exif=exif)
    assert np.array_equal(pixels(content), turned(noise(5, 7)))


@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "bmp", "tiff", "webp"])
def test_a_file_that_is_cut_off_is_an_error_that_names_it(kind, noise, tmp_path):
    file = tmp_path / f"half.{kind}"
    content = stored(Image.fromarray(noise(64, 64)), kind)
    file.write_bytes(content)
    assert decode(file, str(file)).size == (64, 64)
    for length in (len(content) // 2, 20, 1, 0):
        file.write_bytes(content[:length])
        with pytest.raises(VicinalError, match=f"half.{kind}"):
            decode(file, str(file))


def test_foreign_and_missing_files_are_errors(tmp_path):
    with pytest.raises(VicinalError, match=r"^here .*Pillow"):
        decode(b"these are words", "here")
    with pytest.raises(VicinalError, match=r"^none\.png does not exist"):
        decode(tmp_path / "none.png", "none.png")
