import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torchvision.transforms import AutoAugment, AutoAugmentPolicy

from vicinal.data.auto_augment import ArrayAutoAugment


def pixels(number: int, channels: int) -> np.ndarray:
    """Noise around some value, narrow or wide, of any size."""
    random = np.random.default_rng(number)
    shape = (*random.integers(1, 40, 2), channels)
    return random.normal(random.integers(256), random.integers(1, 90), shape).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["cifar10", "svhn", "imagenet"])
def test_it_is_torchvisions_auto_augment_pixel_for_pixel(name, channels):
    fill = [10, 20, 30][:channels]
    ours, theirs = ArrayAutoAugment(name, fill), AutoAugment(AutoAugmentPolicy[name.upper()], fill=fill)
    for number in range(150):
        image = pixels(number, channels)
        torch.manual_seed(number)
        found = ours(image)
        torch.manual_seed(number)
        expected = np.asarray(theirs(Image.fromarray(image[..., 0] if channels == 1 else image)))
        assert np.array_equal(found, expected.reshape(image.shape))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.sampled_from([1, 3]))
def test_tables_are_pillows(number, channels):
    image = pixels(number, channels)
    picture = Image.fromarray(image[..., 0] if channels == 1 else image)
    policy = ArrayAutoAugment("cifar10", [0] * channels)
    expected = {
        ("AutoContrast", 0.0): ImageOps.autocontrast(picture),
        ("Equalize", 0.0): ImageOps.equalize(picture),
        ("Invert", 0.0): ImageOps.invert(picture),
        **{("Solarize", value): ImageOps.solarize(picture, value) for value in (0.0, 28.3, 255.0)},
        **{("Posterize", float(bits)): ImageOps.posterize(picture, bits) for bits in range(4, 9)},
    }
    for (name, magnitude), by_pillow in expected.items():
        found = policy._apply(image, name, magnitude)
        assert np.array_equal(found, np.asarray(by_pillow).reshape(image.shape)), name
