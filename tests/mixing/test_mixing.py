import numpy as np
import pytest
import torch

from vicinal.errors import VicinalError
from vicinal.mixing import Mixing


def batch(count=6):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 12, 20, generator=generator), torch.arange(count) % 4


def one_hot(labels, smoothing, classes=4):
    targets = torch.full((len(labels), classes), smoothing / classes)
    targets[torch.arange(len(labels)), labels] += 1 - smoothing
    return targets


def test_none_smooths_labels_and_leaves_images():
    images, labels = batch()
    mixed, targets = Mixing("none", classes=4, prob=1.0, smoothing=0.1)(images.clone(), labels, seed=3)
    assert torch.equal(mixed, images)
    assert torch.allclose(targets, one_hot(labels, 0.1))


@pytest.mark.parametrize("count", [1, 5, 6])
def test_mixup_is_the_formula_for_odd_batches_too(count):
    images, labels = batch(count)
    mixed, targets = Mixing("mixup", classes=4, prob=1.0, smoothing=0.1)(images.clone(), labels, seed=3)
    np.random.seed(3)
    np.random.rand()
    share = np.random.beta(1.0, 1.0)
    assert torch.allclose(mixed, share * images + (1 - share) * images.flip(0), atol=1e-6)
    assert torch.allclose(targets, share * one_hot(labels, 0.1) + (1 - share) * one_hot(labels.flip(0), 0.1), atol=1e-6)


def test_cutmix_labels_are_the_area_of_the_box():
    images, labels = batch()
    for seed in range(20):
        mixed, targets = Mixing("cutmix", classes=4, prob=1.0, smoothing=0.0)(images.clone(), labels, seed=seed)
        from_other = (mixed == images.flip(0)).all(1)  # (images, height, width)
        own = (mixed == images).all(1)
        assert (own | from_other).all()
        share = own[0].double().mean()
        expected = share * one_hot(labels, 0.0) + (1 - share) * one_hot(labels.flip(0), 0.0)
        assert torch.allclose(targets, expected.float(), atol=1e-6)


def test_both_draws_each_half_of_the_time_and_probability_counts():
    images, labels = batch(2)
    kinds = []
    for seed in range(400):
        mixed, _ = Mixing("both", classes=4, prob=0.5)(images.clone(), labels, seed=seed)
        changed = not torch.equal(mixed, images)
        cut = ((mixed == images) | (mixed == images.flip(0))).all()
        kinds.append("cutmix" if changed and cut else "mixup" if changed else "none")
    assert 160 < kinds.count("none") < 240
    assert 65 < kinds.count("mixup") < 135
    assert 65 < kinds.count("cutmix") < 135


def test_the_same_seed_gives_the_same_mix_and_others_another():
    images, labels = batch()
    mixing = Mixing("both", classes=4, prob=1.0)
    one, again, other = (mixing(images.clone(), labels, seed=seed)[0] for seed in (5, 5, 6))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_an_unknown_mode_is_named():
    with pytest.raises(VicinalError, match="unknown --mix 'cutmx'; did you mean 'cutmix'"):
        Mixing("cutmx", classes=4)
