"""The recipe `paper` against formulas of the reference program, written out here."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import vicinal
from vicinal.attachment import get_priors
from vicinal.data import Preprocessing, open_dataset
from vicinal.data.catalog import SETS
from vicinal.mixing import Mixing
from vicinal.training.accelerator import make_accelerator
from vicinal.training.config import recipe
from vicinal.training.optimizer import create_optimizer
from vicinal.training.setup import make_loaders, prepare


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for number in range(12):
        (folder / "ab"[number % 2]).mkdir(exist_ok=True)
        pixels = generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "ab"[number % 2] / f"{number}.png")
    return folder


def augmenter(photos, tmp_path, name, size, recipe_name="paper", **changes):
    """Returns what augments the training images of a recipe, on images of one of the named sets' kind."""
    settings = {"dataset": f"folder:{photos}", "device": "cpu", "batch_size": 4, "cache_dir": tmp_path / "cache"}
    config = recipe(recipe_name, **{**settings, **changes})
    info = SETS[name].info
    dataset = replace(open_dataset(config.dataset), info=info)
    preprocessing = Preprocessing(size, size, 3, info.mean, info.std)
    train, _, _ = make_loaders(config, dataset, preprocessing, make_accelerator(config))
    return train.images.augmenter


@pytest.mark.parametrize(("name", "size"), [("cifar10", 32), ("tiny-imagenet", 64)])
def test_images_are_padded_by_four_pixels_at_every_size(photos, tmp_path, name, size):
    made = augmenter(photos, tmp_path, name, size)
    image = np.random.default_rng(0).integers(1, 256, (size, size, 3), dtype=np.uint8)
    padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
    by_hand = {padded[row : row + size, column : column + size].tobytes() for row in range(9) for column in range(9)}
    random.seed(0)
    assert {made.padded_crop(image).tobytes() for _ in range(1500)} == by_hand


@pytest.mark.parametrize("name", ["cifar10", "svhn", "tiny-imagenet"])
def test_every_set_is_flipped(photos, tmp_path, name):
    assert augmenter(photos, tmp_path, name, 32).augmentation.flip is True
    assert augmenter(photos, tmp_path, name, 32, "quick").augmentation.flip is (name != "svhn")


def test_pixels_that_move_in_are_gray(photos, tmp_path):
    image = np.full((32, 32, 3), 7, np.uint8)
    for recipe_name, fill in (
        ("paper", [128] * 3),
        ("quick", [round(255 * value) for value in SETS["svhn"].info.mean]),
    ):
        made = augmenter(photos, tmp_path, "svhn", 32, recipe_name, auto_augment=True)
        rotated = made.policy._apply(image, "Rotate", 30.0)
        assert rotated[0, 0].tolist() == fill
        assert sorted(set(map(tuple, rotated.reshape(-1, 3).tolist()))) == sorted({(7, 7, 7), tuple(fill)})


def test_erased_pixels_are_the_mean_as_a_normalized_value(photos, tmp_path):
    made = augmenter(photos, tmp_path, "cifar10", 32, erasing=1.0).erase
    random.seed(3)
    image = torch.randn(3, 32, 32) + 100
    erased = image.clone()
    made(erased)
    inside = (erased != image).all(0)
    rows, columns = (inside.any(axis).nonzero().flatten() for axis in (1, 0))
    assert inside.sum() == len(rows) * len(columns) > 0.01 * 32 * 32  # one box
    assert inside.sum() <= 0.45 * 32 * 32
    assert torch.equal((erased != image).all(0), (erased != image).any(0))
    assert torch.equal(erased[:, inside], torch.tensor([[0.4914], [0.4822], [0.4465]]).expand(3, int(inside.sum())))


def test_sides_and_area_of_an_erased_box_are_bounded(photos, tmp_path):
    made = augmenter(photos, tmp_path, "cifar10", 32, erasing=1.0, erasing_area=0.1, erasing_aspect=0.9)
    random.seed(0)
    for _ in range(50):
        image = torch.full((3, 32, 32), 9.0)
        made.erase(image)
        inside = image[0] != 9
        height, width = int(inside.any(1).sum()), int(inside.any(0).sum())
        assert 0.01 * 1024 <= height * width <= 0.12 * 1024
        assert abs(height - width) <= 1


@pytest.mark.parametrize("model", ["vit", "swin", "vit-relpos"])
def test_everything_decays_but_the_mask_and_relative_tables(model):
    config = recipe("paper", model=model)
    network = vicinal.create_model(model, prior="gmm", img_size=32, num_classes=10)
    optimizer = create_optimizer(network, config)
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    masks = {id(parameter) for prior in get_priors(network).values() for parameter in prior.parameters()}
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # AdamW without a gradient: p - lr * decay * p
    assert masks
    for name, parameter in network.named_parameters():
        spared = id(parameter) in masks or "relative_position" in name
        kept = 1 - config.lr * config.weight_decay * (not spared)
        torch.testing.assert_close(parameter.detach(), before[name] * kept, rtol=1e-7, atol=0)


def by_hand(images, labels, seed, prob):
    """Mixup or CutMix of the reference program for one batch: `(images, labels of the partners, weights of these)`."""
    draw = np.random.RandomState(seed)
    share, cut = 0.0, False
    if draw.rand() < prob:
        cut = draw.rand() < 0.5
        share = 1 - draw.beta(1, 1)
    height, width = images.shape[-2:]
    box = np.zeros((height, width), bool)
    if cut:
        sides = [int(side * np.sqrt(share)) for side in (height, width)]
        centers = [draw.randint(0, side, size=1)[0] for side in (height, width)]
        low, high = zip(
            *((max(c - s // 2, 0), c + (s + 1) // 2) for s, c in zip(sides, centers, strict=True)), strict=True
        )
        box[low[0] : high[0], low[1] : high[1]] = True
        share = box.mean()
    partners = draw.permutation(len(images))
    other = images[partners]
    mixed = torch.where(torch.from_numpy(box), other, images) if cut else images * (1 - share) + other * share
    return mixed, labels[partners], share


@pytest.mark.parametrize("seed", range(12))
def test_partners_are_a_random_order_of_the_batch(tmp_path, seed):
    config = recipe("paper", dataset="digits", model="vit-micro", device="cpu", cache_dir=tmp_path)
    mixing = prepare(config, make_accelerator(config)).mixing
    images, labels = torch.randn(7, 1, 8, 8), torch.arange(7)
    batch = mixing(images, labels, seed)
    mixed, other_labels, share = by_hand(images, labels, seed, prob=0.5)
    torch.testing.assert_close(batch.images, mixed)
    assert torch.equal(batch.other_labels, other_labels)
    torch.testing.assert_close(batch.share.double(), torch.full((7,), float(share), dtype=torch.float64))
    logits = torch.randn(7, 10)
    loss = (1 - share) * F.cross_entropy(logits, labels, label_smoothing=0.1)
    loss += share * F.cross_entropy(logits, other_labels, label_smoothing=0.1)
    torch.testing.assert_close(F.cross_entropy(logits, mixing.targets(batch)), loss)


def test_partners_are_uniform_and_reversed_by_default():
    labels, images = torch.arange(4), torch.zeros(4, 1, 2, 2)
    mixing = Mixing("mixup", classes=4, partner="random")
    counts = np.zeros((4, 4))
    for seed in range(2000):
        counts[np.arange(4), mixing(images, labels, seed).other_labels.numpy()] += 1
    assert np.abs(counts / 2000 - 0.25).max() < 4 * np.sqrt(0.25 * 0.75 / 2000)
    assert Mixing("mixup", classes=4)(images, labels, 0).other_labels.tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize(("mode", "name"), [("mixup", "mixup_alpha"), ("cutmix", "cutmix_alpha")])
def test_alpha_is_the_parameter_of_the_beta_distribution(mode, name):
    mixing = Mixing(mode, classes=2, prob=1.0, **{name: 0.2})
    images, labels = torch.zeros(2, 1, 64, 64), torch.arange(2)
    for seed in range(20):
        draw = np.random.RandomState(seed)
        draw.rand()
        share = 1 - draw.beta(0.2, 0.2)
        batch = mixing(images, labels, seed)
        if mode == "mixup":
            assert float(batch.share[0]) == pytest.approx(share)
        else:
            assert float(batch.share[0]) <= share + 1e-6  # a box that is cut off at the border is smaller


@pytest.mark.parametrize(
    "arguments", [{"partner": "other"}, {"mixup_alpha": 0.0}, {"cutmix_alpha": -1.0}, {"mixup_alpha": float("nan")}]
)
def test_wrong_arguments_of_mixing_are_named(arguments):
    with pytest.raises(vicinal.VicinalError, match=next(iter(arguments))):
        Mixing("both", classes=2, **arguments)
