"""Images that `vicinal analyze` takes of a dataset are test images."""

import numpy as np
import pytest
from PIL import Image

from vicinal.analysis import ImageSelection, open_models
from vicinal.data import open_dataset


@pytest.fixture(scope="module")
def opened():
    (model,) = open_models([], ["vit_tiny_patch16_224"], img_size=16, random_weights=True, device="cpu")
    return model


def paint(folder, names, shade):
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((16, 16, 3), shade + number, np.uint8)).save(folder / name)
    return folder


def shades(opened, images):
    """The pixel values of the images that are taken."""
    tensors = ImageSelection(images, count=100, batch_size=7).tensors(opened)
    return sorted(round((value * 0.5 + 0.5) * 255) for batch in tensors for value in batch[:, 0, 0, 0].tolist())


@pytest.mark.parametrize("prefix", ["folder:", ""])
@pytest.mark.parametrize("test", ["test", "Test", "val"])
def test_of_a_folder_with_splits_only_test_images_are_taken(opened, tmp_path, prefix, test):
    names = [f"{label}/{number}.png" for label in ("cat", "dog") for number in range(4)]
    paint(tmp_path / "train", names, shade=0)
    paint(tmp_path / test, names, shade=100)
    assert shades(opened, f"{prefix}{tmp_path}") == list(range(100, 108))


def test_of_a_folder_of_classes_the_images_are_taken_that_training_holds_out_for_testing(opened, tmp_path):
    paint(tmp_path, [f"{label}/{number:02}.png" for label in ("cat", "dog") for number in range(10)], shade=0)
    held = open_dataset(f"folder:{tmp_path}").test
    assert shades(opened, f"folder:{tmp_path}") == sorted(np.asarray(held.image(i))[0, 0, 0] for i in range(4))
    assert shades(opened, tmp_path) == list(range(20))  # a folder of images, not a dataset


def test_a_folder_without_classes_is_taken_whole(opened, tmp_path):
    paint(tmp_path, [f"{number}.png" for number in range(6)], shade=50)
    assert shades(opened, f"folder:{tmp_path}") == list(range(50, 56))
