import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.auto_augment import rand_augment_transform
from torchvision.transforms import ColorJitter

from vicinal.data import Augmentation, Loader, Preprocessing, TransformedImages, derive_seed
from vicinal.data.rand_augment import ArrayRandAugment
from vicinal.data.transforms import Augmenter
from vicinal.errors import VicinalError
from vicinal.training.config import ConfigError, TrainConfig

SPEC = "rand-m8-n3-inc1"  # at magnitude 10, timm asks Pillow for 0 bits, which raises


def seed(number):
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def preprocessing(channels=3):
    return Preprocessing(24, 32, channels, (0.5, 0.4, 0.3)[:channels], (0.2,) * channels)


@pytest.mark.parametrize("channels", [3, 1])
def test_pixels_are_those_of_timm_and_torchvision(noise, channels):
    augmenter = Augmenter(
        preprocessing(channels), Augmentation(crop=False, flip=False, rand_augment=SPEC, color_jitter=0.4)
    )
    fill = 128 if channels == 1 else (128, 102, 76)
    policy = rand_augment_transform(SPEC, {"translate_const": int(24 * 0.45), "img_mean": fill})
    jitter, changed = ColorJitter(0.4, 0.4, 0.4), 0
    for number in range(40):
        array = noise(24, 32, number)[..., :channels]
        seed(number)
        found = augmenter(array)
        seed(number)
        expected = np.asarray(jitter(policy(Image.fromarray(array.squeeze()))))
        assert np.array_equal(found.squeeze(), expected)
        changed += not np.array_equal(found, array)
    assert changed >= 35


def test_images_depend_on_seed_epoch_and_image_only(in_memory, noise):
    split = in_memory([noise(24, 32, number) for number in range(12)])
    augmentation = Augmentation(rand_augment=SPEC, color_jitter=0.4, erasing=0.5)

    def epoch(workers, number, seed=0):
        images = TransformedImages(split, preprocessing(), augmentation, seed=seed)
        loader = Loader(images, batch_size=4, shuffle=True, seed=seed, workers=workers)
        return torch.cat([batch for batch, _ in loader.batches(number)])

    first = epoch(0, 3)
    np.random.seed(99)
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert torch.equal(epoch(0, 3), first)
    assert random.getstate() == state[0]
    assert np.random.get_state()[1].tolist() == state[1]
    assert torch.equal(torch.get_rng_state(), state[2])
    assert torch.equal(epoch(2, 3), first)
    assert not torch.equal(epoch(0, 4), first)
    assert not torch.equal(epoch(0, 3, seed=1), first)
    one = TransformedImages(split, preprocessing(), Augmentation(crop=False, flip=False, rand_augment=SPEC), seed=7)
    alone = one[2, 5][0]
    policy = rand_augment_transform(SPEC, {"translate_const": 10, "img_mean": (128, 102, 76)})
    number = derive_seed(7, 2, 5)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    pixels = torch.from_numpy(np.array(policy(Image.fromarray(noise(24, 32, 5))))).permute(2, 0, 1) / 255
    expected = (pixels - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)) / 0.2
    torch.testing.assert_close(alone, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "spec",
    ["rand", "rand-m9", "rand-m9-n9-mstd0.5-inc1", "rand-m10-n9-p1-inc1", "rand-m18-n9-p0.7-mmax20-inc1", "rand-t3aw"],
)
def test_notations_of_timm_are_taken(spec, noise):
    augmenter = Augmenter(preprocessing(), Augmentation(rand_augment=spec))
    for number in range(30):
        seed(number)
        assert augmenter(noise(24, 32, number)).shape == (24, 32, 3)


def test_an_image_of_no_bits_is_black(noise):
    policy = ArrayRandAugment("rand-m10-p1-inc1", (24, 32), [1, 2, 3])
    (posterize,) = (each for each in policy.transform.ops if "Posterize" in each.name)
    assert not np.asarray(posterize(Image.fromarray(noise(24, 32)))).any()


@pytest.mark.parametrize("spec", ["", "m9", "rand-", "rand-m", "rand-x3", "rand-m9-n2.5", "original", "rand-tnone"])
def test_mistakes_are_errors(spec):
    with pytest.raises(VicinalError, match="rand_augment must be in timm's notation"):
        Augmentation(rand_augment=spec)


def test_settings_that_do_not_fit_are_errors():
    with pytest.raises(VicinalError, match="rand_augment and auto_augment exclude each other"):
        Augmentation(rand_augment="rand-m9", auto_augment="cifar10")
    with pytest.raises(VicinalError, match=r"color_jitter must be from 0 to 1, got 1\.5"):
        Augmentation(color_jitter=1.5)
    with pytest.raises(ConfigError, match="color_jitter must be a number from 0 to 1, got -1"):
        TrainConfig(color_jitter=-1)
