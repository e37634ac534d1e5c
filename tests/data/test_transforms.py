import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import transforms
from torchvision.transforms import functional

from vicinal.data import Augmentation, Preprocessing, evaluation_tensor
from vicinal.data.transforms import Augmenter, center_crop, cover
from vicinal.errors import VicinalError

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def made(height: int, width: int, **options) -> Preprocessing:
    return Preprocessing(height, width, 3, MEAN, STD, **options)


def augmented(pixels: np.ndarray, height: int, width: int, seed: int, **options) -> np.ndarray:
    random.seed(seed)
    torch.manual_seed(seed)
    return Augmenter(made(height, width), Augmentation(**options))(pixels)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 64), st.integers(1, 64))
def test_covering_leaves_no_gap_and_no_more_than_needed(height, width, to_height, to_width):
    covered = cover(Image.new("RGB", (width, height)), (to_height, to_width), "bicubic")
    assert covered.width >= to_width
    assert covered.height >= to_height
    assert covered.width == to_width or covered.height == to_height
    assert cover(covered, (to_height, to_width), "bicubic") is covered
    scale = max(to_height / height, to_width / width)
    assert abs(covered.width - width * scale) <= 1
    assert abs(covered.height - height * scale) <= 1


@pytest.mark.parametrize("shape", [(60, 40), (40, 61), (32, 32), (20, 30), (200, 33)])
@pytest.mark.parametrize("crop_pct", [1.0, 0.875])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_evaluation_is_what_torchvision_does(noise, shape, crop_pct, interpolation):
    picture = Image.fromarray(noise(*shape))
    by_hand = transforms.Compose(
        [
            transforms.Resize(int(32 / crop_pct), interpolation=transforms.InterpolationMode[interpolation.upper()]),
            transforms.CenterCrop(32),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    found = evaluation_tensor(picture, made(32, 32, interpolation=interpolation, crop_pct=crop_pct))
    assert found.dtype == torch.float32
    assert torch.allclose(found, by_hand(picture), atol=1e-6)


def test_evaluation_of_rectangles_by_hand(noise):
    picture = Image.fromarray(noise(60, 60))
    found = evaluation_tensor(picture, made(16, 48))
    resized = np.asarray(picture.resize((48, 48), Image.Resampling.BICUBIC)) / 255
    expected = (resized[16:32] - MEAN) / STD
    assert np.abs(found.permute(1, 2, 0).numpy() - expected).max() < 1e-5


def test_evaluation_with_one_channel(noise):
    picture = Image.fromarray(noise(8, 8))
    found = evaluation_tensor(picture, Preprocessing(8, 8, 1, (0.3,), (0.5,)))
    assert found.shape == (1, 8, 8)
    assert np.abs(found[0].numpy() - (np.asarray(picture.convert("L")) / 255 - 0.3) / 0.5).max() < 1e-5


def windows(pixels: np.ndarray, height: int, width: int) -> dict[bytes, tuple[int, int]]:
    """All crops of a picture that torchvision padded."""
    margins = [round(width / 8), round(height / 8)]
    padded = np.asarray(functional.pad(Image.fromarray(pixels), margins))
    rows, columns = padded.shape[0] - height + 1, padded.shape[1] - width + 1
    return {
        padded[top : top + height, left : left + width].tobytes(): (top, left)
        for top in range(rows)
        for left in range(columns)
    }


@pytest.mark.parametrize(("height", "width", "margin"), [(32, 32, (4, 4)), (8, 8, (1, 1)), (16, 24, (2, 3))])
def test_a_crop_is_a_window_of_the_padded_picture_and_all_windows_occur(noise, height, width, margin):
    pixels = noise(height, width)
    every = windows(pixels, height, width)
    assert len(every) == (2 * margin[0] + 1) * (2 * margin[1] + 1)
    found = [augmented(pixels, height, width, seed, flip=False).tobytes() for seed in range(len(every) * 12)]
    assert set(found) == set(every)


def test_a_crop_of_a_longer_picture_reaches_all_of_it(noise):
    pixels = noise(8, 20)
    every = windows(pixels, 8, 8)
    found = {augmented(pixels, 8, 8, seed, flip=False).tobytes() for seed in range(1000)}
    assert found == set(every)


def test_a_picture_of_another_size_is_resized_before_it_is_cropped(noise):
    pixels = noise(20, 20)
    resized = np.asarray(Image.fromarray(pixels).resize((32, 32), Image.Resampling.BICUBIC))
    every = windows(resized, 32, 32)
    assert all(augmented(pixels, 32, 32, seed, flip=False).tobytes() in every for seed in range(20))


def test_every_other_picture_is_mirrored(noise):
    pixels = noise(32, 32)
    mirrored = 0
    for seed in range(200):
        found = augmented(pixels, 32, 32, seed, crop=False)
        flipped = np.array_equal(found, pixels[:, ::-1])
        assert flipped or np.array_equal(found, pixels)
        mirrored += flipped
    assert 70 < mirrored < 130


def test_from_96_pixels_on_crops_are_resized(noise):
    pixels = np.zeros((200, 150, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(200)[:, None], np.arange(150)  # where a pixel was
    heights = []
    for seed in range(40):
        found = augmented(pixels, 96, 128, seed, flip=False).astype(int)
        assert found.shape == (96, 128, 3)
        heights.append(found[..., 0].max() - found[..., 0].min())
        assert (np.diff(found[:, 0, 0]) >= -1).all()
    assert min(heights) < 80 < 130 < max(heights)


def test_erasing_fills_a_rectangle_with_the_mean():
    augmenter = Augmenter(made(32, 32), Augmentation(erasing=1.0))
    shares = []
    for seed in range(100):
        random.seed(seed)
        image = torch.ones(3, 32, 32)
        augmenter.erasing(image)
        gone = image == 0
        assert torch.equal(gone[0], gone[1])
        rows, columns = gone[0].any(1).sum(), gone[0].any(0).sum()
        assert gone[0].sum() == rows * columns
        shares.append(float(gone[0].float().mean()))
    assert 0.3 < max(shares) < 0.43


def test_without_anything_to_alter_it_is_evaluation(noise):
    found = augmented(noise(40, 50), 32, 32, 0, crop=False, flip=False)
    assert np.array_equal(found, center_crop(noise(40, 50), made(32, 32)))


def test_preprocessing_goes_to_timms_words_and_back():
    ours = made(32, 48, interpolation="bilinear", crop_pct=0.9)
    declared = {**ours.declared(), "input_size": (3, 32, 48)}
    assert declared["crop_mode"] == "center"
    assert Preprocessing.of_model(declared) == ours
    plain = Preprocessing.of_model({"input_size": [1, 8, 8], "mean": [0.5], "std": [0.5], "crop_pct": None})
    assert plain == Preprocessing(8, 8, 1, (0.5,), (0.5,), "bicubic", 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"height": 0}, "got 0 x 32"),
        ({"channels": 4}, "channels .* 1 or 3, got 4"),
        ({"channels": 1}, "mean .* 1 numbers, .* got 3"),
        ({"std": (1.0, 0.0, 1.0)}, "std must be above 0"),
        ({"interpolation": "cubic"}, "interpolation 'cubic'"),
        ({"crop_pct": 1.5}, "crop_pct .* got 1.5"),
    ],
)
def test_bad_preprocessing_is_an_error(options, message):
    given = {"height": 32, "width": 32, "channels": 3, "mean": MEAN, "std": STD}
    with pytest.raises(VicinalError, match=message):
        Preprocessing(**(given | options))


def test_bad_augmentation_is_an_error():
    with pytest.raises(VicinalError, match=r"'cifar'.* cifar10, imagenet, svhn"):
        Augmentation(auto_augment="cifar")
    with pytest.raises(VicinalError, match=r"erasing .* got 25"):
        Augmentation(erasing=25)
