import numpy as np
import pytest
import torch
from timm.data.mixup import Mixup
from timm.loss import SoftTargetCrossEntropy
from torch.nn import functional as F

from vicinal.errors import VicinalError
from vicinal.mixing import Mixing
from vicinal.mixing.batch_mixer import boxes


def some(count=6, height=12, width=20):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, height, width, generator=generator), torch.arange(count) % 4


def one_hot(labels, smoothing, classes=4):
    targets = torch.full((len(labels), classes), smoothing / classes)
    targets[torch.arange(len(labels)), labels] += 1 - smoothing
    return targets


def where_from(batch, images):
    """Which pixels `(batch, height, width)` are an image's own, and which the other one's."""
    return (batch.images == images).all(1), (batch.images == images.flip(0)).all(1)


def test_none_smooths_labels_and_leaves_images():
    images, labels = some()
    batch = Mixing("none", classes=4, prob=1.0, smoothing=0.1)(images, labels, seed=3)
    assert torch.equal(batch.images, images)
    assert batch.mask is None
    assert torch.allclose(batch.targets(), one_hot(labels, 0.1))


@pytest.mark.parametrize("count", [1, 5, 6])
def test_mixup_is_the_formula_for_odd_batches_too(count):
    images, labels = some(count)
    batch = Mixing("mixup", classes=4, prob=1.0, smoothing=0.1)(images, labels, seed=3)
    np.random.seed(3)
    np.random.rand()
    kept = np.random.beta(1.0, 1.0)
    assert torch.allclose(batch.images, kept * images + (1 - kept) * images.flip(0), atol=1e-6)
    expected = kept * one_hot(labels, 0.1) + (1 - kept) * one_hot(labels.flip(0), 0.1)
    assert torch.allclose(batch.targets(), expected, atol=1e-6)
    assert batch.mask is None
    assert torch.allclose(batch.share, torch.full((count,), 1 - kept))


@pytest.mark.parametrize("mode", ["mixup", "cutmix", "both"])
def test_batches_and_labels_are_timms(mode):
    """timm's own, which works in place, for the same numbers from numpy."""
    alphas = {"mixup": (1.0, 0.0), "cutmix": (0.0, 1.0), "both": (1.0, 1.0)}[mode]
    theirs = Mixup(*alphas, prob=0.7, label_smoothing=0.1, num_classes=4)
    images, labels = some()
    for seed in range(50):
        batch = Mixing(mode, classes=4, prob=0.7, smoothing=0.1)(images, labels, seed=seed)
        np.random.seed(seed)
        mixed, targets = theirs(images.clone(), labels)
        torch.testing.assert_close(batch.images, mixed)
        torch.testing.assert_close(batch.targets(), targets, rtol=0, atol=1e-6)
        logits = torch.randn(6, 4)
        torch.testing.assert_close(F.cross_entropy(logits, batch.targets()), SoftTargetCrossEntropy()(logits, targets))


@pytest.mark.parametrize("per_example", [False, True])
@pytest.mark.parametrize("count", [1, 5, 6])
def test_cutmix_says_where_the_other_image_is(per_example, count):
    images, labels = some(count)
    for seed in range(20):
        mixing = Mixing("cutmix", classes=4, prob=1.0, smoothing=0.0, per_example=per_example)
        batch = mixing(images, labels, seed=seed)
        own, other = where_from(batch, images)
        assert torch.equal(batch.mask, other & ~own | batch.mask & own)  # the middle of an odd batch is its own other
        assert (batch.images == torch.where(batch.mask[:, None], images.flip(0), images)).all()
        assert torch.allclose(batch.share, batch.mask.float().mean((1, 2)))
        expected = torch.lerp(one_hot(labels, 0.0), one_hot(labels.flip(0), 0.0), batch.share[:, None])
        assert torch.allclose(batch.targets(), expected)
        assert torch.allclose(batch.targets().sum(1), torch.ones(count))


def test_boxes_of_their_own_differ_and_are_filled_rectangles_of_the_images_aspect():
    images, labels = some(200, 24, 40)
    batch = Mixing("cutmix", classes=4, prob=1.0, per_example=True)(images, labels, seed=1)
    assert len({tuple(mask.flatten().tolist()) for mask in batch.mask}) > 150
    for mask in batch.mask:
        rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
        if len(rows):
            box = mask[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
            assert box.all()
    uncut = boxes(np.full(20000, 0.25), 24, 40)  # half the height and width
    sizes = uncut.any(2).sum(1), uncut.any(1).sum(1)
    assert sizes[0].max() == 12
    assert sizes[1].max() == 20
    center = uncut.mean(0)
    assert center[12, 20] == pytest.approx(0.25, abs=0.02)  # as often as a box of a quarter holds the center
    assert center[0, 0] == pytest.approx(7 / 24 * 11 / 40, abs=0.01)  # of 24 x 40 centers, 7 x 11 are near enough


def test_each_image_has_a_chance_of_its_own():
    images, labels = some(4000, 4, 4)
    batch = Mixing("both", classes=4, prob=0.6, per_example=True)(images, labels, seed=0)
    own, other = where_from(batch, images)
    whole = own.flatten(1).all(1)
    blended = ~(own | other).flatten(1).all(1)
    assert 0.28 < blended.float().mean() < 0.32
    untouched = whole & ~batch.mask.flatten(1).any(1) & (batch.share == 0)
    assert 0.38 < untouched.float().mean() < 0.55  # besides empty boxes
    kept = 1 - batch.share[blended]
    mixed = (
        kept[:, None, None, None] * images[blended] + batch.share[blended, None, None, None] * images.flip(0)[blended]
    )
    torch.testing.assert_close(batch.images[blended], mixed)
    assert not batch.mask[blended].any()
    assert batch.share[blended].mean() == pytest.approx(0.5, abs=0.03)


def test_both_draws_each_half_of_the_time_and_probability_counts():
    images, labels = some(2)
    kinds = []
    for seed in range(400):
        batch = Mixing("both", classes=4, prob=0.5)(images, labels, seed=seed)
        changed = not torch.equal(batch.images, images)
        kinds.append("none" if not changed else "mixup" if batch.mask is None else "cutmix")
    assert 160 < kinds.count("none") < 240
    assert 65 < kinds.count("mixup") < 135
    assert 65 < kinds.count("cutmix") < 135


@pytest.mark.parametrize("per_example", [False, True])
def test_the_same_seed_gives_the_same_mix_and_others_another(per_example):
    images, labels = some()
    mixing = Mixing("both", classes=4, prob=1.0, per_example=per_example)
    before, numbers = images.clone(), np.random.get_state()[1].copy()
    one, again, other = (mixing(images, labels, seed=seed).images for seed in (5, 5, 6))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(images, before)  # what was given stays
    assert (np.random.get_state()[1] == numbers).all()


@pytest.mark.parametrize("mode", ["none", "mixup", "cutmix"])
def test_a_batch_in_pieces_is_the_batch(mode):
    images, labels = some(7)
    batch = Mixing(mode, classes=4, prob=1.0)(images, labels, seed=2)
    pieces = batch.pieces(3)
    assert [len(piece.images) for piece in pieces] == [3, 2, 2]
    assert torch.equal(torch.cat([piece.images for piece in pieces]), batch.images)
    assert torch.equal(torch.cat([piece.targets() for piece in pieces]), batch.targets())
    if mode == "cutmix":
        assert torch.equal(torch.cat([piece.mask for piece in pieces]), batch.mask)


def test_wrong_options_are_named():
    with pytest.raises(VicinalError, match="unknown mode 'cutmx'; did you mean 'cutmix'"):
        Mixing("cutmx", classes=4)
    for name, value in (("mixup_share", 1.5), ("prob", 2), ("prob", float("nan")), ("smoothing", 2), ("smoothing", -1)):
        with pytest.raises(VicinalError, match=rf"{name} .* got {value}"):
            Mixing("both", classes=4, **{name: value})
    for classes in (0, -3, 2.5, "4"):
        with pytest.raises(VicinalError, match=rf"classes .* got {classes!r}"):
            Mixing("both", classes=classes)


@pytest.mark.parametrize("per_example", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda images, labels: (images[:0], labels[:0]), r"got \(0, 3, 12, 20\) and \(0,\)"),
        (lambda images, labels: (images[0], labels), r"got \(3, 12, 20\) and \(6,\)"),
        (lambda images, labels: (images, labels[1:]), r"got .* and \(5,\)"),
        (lambda images, labels: (images, F.one_hot(labels)), r"got .* and \(6, 4\)"),
        (lambda images, labels: (images.byte(), labels), "images .* got torch.uint8"),
        (lambda images, labels: (images, labels.float()), "labels .* got torch.float32"),
        (lambda images, labels: (images, labels + 1), "labels .* classes=4, got 4"),
        (lambda images, labels: (images, labels - 1), "labels .* classes=4, got -1"),
    ],
)
def test_wrong_batches_are_told(per_example, change, message):
    mixing = Mixing("mixup", classes=4, prob=1.0, per_example=per_example)
    with pytest.raises(VicinalError, match=message):
        mixing(*change(*some()), seed=0)


@pytest.mark.parametrize("mode", ["none", "mixup", "cutmix", "both"])
def test_the_mode_can_be_read(mode):
    assert Mixing(mode, classes=4).mode == mode


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_labels_are_as_precise_as_the_images(smoothing):
    images, labels = some()
    for seed in range(10):
        batch = Mixing("both", classes=7, prob=1.0, smoothing=smoothing)(images.double(), labels, seed=seed)
        targets = batch.targets()
        assert targets.dtype == torch.float64
        torch.testing.assert_close(targets.sum(1), torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-15)
