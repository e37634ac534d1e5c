import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from vicinal.data import Augmentation, Loader, Preprocessing, TransformedImages, evaluation_tensor, open_dataset, split
from vicinal.errors import VicinalError

ALL = Augmentation(auto_augment="cifar10", erasing=0.5)


@pytest.fixture
def pictures(in_memory, noise):
    """70 pictures of several sizes; the label is what the number leaves when divided by 3."""
    return in_memory([noise(20 + number % 3 * 10, 24, number) for number in range(70)])


@pytest.fixture
def images(pictures, square):
    return TransformedImages(pictures, square(16), ALL, seed=3)


def batches(images, epoch=0, start=0, **options):
    return list(Loader(images, **options).batches(epoch, start))


def same(first, second) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)
    )


def test_evaluation_shows_every_picture_as_evaluation_tensor_does(pictures, square):
    for size in (16, 100):  # from the cache, and decoded now
        images = TransformedImages(pictures, square(size))
        found, labels = images.__getitems__([(0, index) for index in range(70)])
        assert found.shape == (70, 3, size, size)
        assert found.dtype == torch.float32
        assert labels.tolist() == [index % 3 for index in range(70)]
        expected = [evaluation_tensor(pictures.image(index), square(size)) for index in range(70)]
        assert torch.equal(found, torch.stack(expected))


def test_one_image_is_the_same_alone(images):
    found, labels = images.__getitems__([(2, 5), (2, 6)])
    image, label = images[2, 6]
    assert torch.equal(image, found[1])
    assert label == labels[1] == 0


def test_what_is_drawn_depends_on_seed_epoch_and_image_only(pictures, square, images):
    reference = images.__getitems__([(1, 7)])[0]
    assert torch.equal(images.__getitems__([(0, 1), (1, 7), (5, 5)])[0][1:2], reference)
    torch.manual_seed(99)
    random.seed(99)
    assert torch.equal(images.__getitems__([(1, 7)])[0], reference)
    assert not torch.equal(images.__getitems__([(2, 7)])[0], reference)
    assert not torch.equal(TransformedImages(pictures, square(16), ALL, seed=4).__getitems__([(1, 7)])[0], reference)


def test_the_global_generators_are_not_touched(images):
    def drawn():
        return random.random(), np.random.rand(), torch.rand(()).item()

    for workers in (0, 1):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        expected = drawn()
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        batches(images, batch_size=8, shuffle=True, workers=workers)
        assert drawn() == expected


def test_one_channel_and_rectangles_are_altered_too(cache):
    source = open_dataset("digits")
    images = TransformedImages(
        split(source).train, Preprocessing(8, 12, 1, (0.3,), (0.4,)), Augmentation(auto_augment="svhn", erasing=1.0)
    )
    found, _ = images.__getitems__([(0, index) for index in range(200)])
    assert found.shape == (200, 1, 8, 12)
    assert torch.isfinite(found).all()


def test_gray_pictures_serve_models_of_three_channels(square):
    source = open_dataset("digits")
    found, _ = TransformedImages(source.test, Preprocessing(8, 8, 3, (0.5,) * 3, (0.5,) * 3)).__getitems__([(0, 0)])
    assert torch.equal(found[0, 0], found[0, 2])
    assert np.allclose(found[0, 0] * 0.5 + 0.5, np.asarray(source.test.image(0)) / 255, atol=1e-6)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(images, workers):
    for shuffle in (True, False):
        alone = Loader(images, batch_size=16, shuffle=shuffle, seed=5)
        helped = Loader(images, batch_size=16, shuffle=shuffle, seed=5, workers=workers)
        for epoch in (0, 1):
            assert same(list(alone.batches(epoch)), list(helped.batches(epoch)))


def test_large_pictures_are_decoded_by_workers_alike(pictures, square):
    images = TransformedImages(pictures, square(100), ALL)
    assert same(batches(images, batch_size=8, shuffle=True), batches(images, batch_size=8, shuffle=True, workers=2))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_goes_on_where_it_was_interrupted(images, workers):
    loader = Loader(images, batch_size=8, shuffle=True, workers=workers)
    assert loader.steps == 9
    whole = list(loader.batches(4))
    assert [len(labels) for _, labels in whole] == [8] * 8 + [6]
    for start in (0, 3, 8, 9):
        assert same(list(loader.batches(4, start)), whole[start:])


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_can_be_left_in_the_middle(images, workers):
    loader = Loader(images, batch_size=4, shuffle=True, workers=workers)
    whole = list(loader.batches(1))
    for number, _ in enumerate(loader.batches(0)):
        if number == 2:
            break
    assert same(list(loader.batches(1)), whole)
    left = loader.batches(0)
    next(left)
    assert torch.equal(next(loader.batches(1))[0], whole[0][0])
    with pytest.raises(RuntimeError, match="ended when batches"):
        next(left)


def test_an_epoch_shows_every_image_once_in_an_order_of_its_own(images):
    def order(epoch, seed=0, batch_size=10):
        loader = Loader(images, batch_size=batch_size, shuffle=True, seed=seed)
        return [index for part in loader.sampler.keys(epoch) for _, index in part]

    assert sorted(order(0)) == list(range(70))
    assert order(0) == order(0)
    assert order(0) != order(1)
    assert order(0) != order(0, seed=1)
    assert order(0, batch_size=32) == order(0)  # 32, 32 and 6
    assert order(0, batch_size=500) == order(0)  # one step


@pytest.mark.parametrize("world", [2, 4, 8])
def test_slices_of_the_processes_join_to_the_batch_of_one(images, world):
    """The last step has 6 images: 3 + 3, 2 + 2 + 1 + 1, and 6 processes with 1, 2 with none."""
    loaders = [Loader(images, batch_size=16, shuffle=True, rank=rank, world=world) for rank in range(world)]
    whole = batches(images, batch_size=16, shuffle=True, epoch=2)
    assert [len(labels) for _, labels in whole] == [16, 16, 16, 16, 6]
    parts = [list(loader.batches(2)) for loader in loaders]
    for position, (expected, *shares) in enumerate(zip(whole, *parts, strict=True)):
        weights = [loader.weight(position) for loader in loaders]
        assert sum(weights) == pytest.approx(world)
        assert all(len(labels) >= 1 for _, labels in shares)  # a process without images gets one of weight 0
        counted = [share for share, weight in zip(shares, weights, strict=True) if weight]
        assert same([tuple(torch.cat(pieces) for pieces in zip(*counted, strict=True))], [expected])
        for (_, labels), weight in zip(shares, weights, strict=True):
            assert weight in (0, pytest.approx(len(labels) * world / len(expected[1])))


@pytest.mark.parametrize(("rare", "classes"), [(1, 2), (9, 2), (3, 4)])
def test_balanced_epochs_draw_every_class_equally_often(in_memory, noise, square, rare, classes):
    """Of 70 images, `rare` of each class but the first: those are drawn as evenly as can be, never twice alike."""
    labels = np.array([1 + number % (classes - 1) if number < rare * (classes - 1) else 0 for number in range(70)])
    pictures = replace(in_memory([noise(16, 16, number) for number in range(70)]), labels=labels)
    images = TransformedImages(pictures, square(16), ALL, seed=3)
    loader = Loader(images, batch_size=16, shuffle=True, seed=1, balanced=True)
    orders = [[key for step in loader.sampler.keys(epoch) for key in step] for epoch in range(20)]
    for keys in orders:
        assert len(keys) == len(set(keys)) == 70
        counts = np.bincount(labels[[index for _, index in keys]])
        assert counts.max() - counts.min() <= 1
        times = np.bincount([index for _, index in keys], minlength=70)
        for label in range(classes):
            assert np.ptp(times[labels == label]) <= 1
    assert len({key for keys in orders for key in keys}) == 20 * 70  # another augmentation each time
    assert {index for keys in orders for _, index in keys} == set(range(70))
    again, twice = next(key for key in orders[0] if key[0] > 2**31), orders[0]
    assert (0, again[1]) in twice
    assert not torch.equal(images[again][0], images[0, again[1]][0])
    assert same(list(loader.batches(4, start=2)), list(loader.batches(4))[2:])


@pytest.mark.parametrize("world", [1, 2, 3, 71])
def test_evaluation_covers_every_image_once(pictures, square, world):
    images = TransformedImages(pictures, square(16))
    everything = images.__getitems__([(0, index) for index in range(70)])[0]
    seen = 0
    for rank in range(world):
        loader = Loader(images, batch_size=8, shuffle=False, rank=rank, world=world)
        own = list(loader.batches(0))
        assert len(own) == loader.steps
        assert all(len(labels) == 8 for _, labels in own[:-1])
        found = torch.cat([images for images, _ in own]) if own else everything[:0]
        assert torch.equal(found, everything[rank::world])
        seen += len(found)
    assert seen == 70


def test_no_images_are_no_batches(pictures, square):
    images = TransformedImages(pictures.take(np.array([], int)), square(16))
    assert len(images) == 0
    assert batches(images, batch_size=8, shuffle=False) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 10, "world": 4}, "batch_size .* 4 .*, got 10"),
        ({"batch_size": 0}, "batch_size .* 1, got 0"),
        ({"batch_size": 4, "rank": 2, "world": 2}, "rank .* 0 to 1, got 2"),
        ({"batch_size": 4, "workers": -1}, "workers .* 0, got -1"),
    ],
)
def test_bad_options_are_errors(images, options, message):
    with pytest.raises(VicinalError, match=message):
        Loader(images, shuffle=True, **options)


def test_a_start_behind_the_end_is_an_error(images):
    with pytest.raises(VicinalError, match=r"start .* 9, got 10"):
        Loader(images, batch_size=8, shuffle=True).batches(0, 10)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_picture_is_told_in_one_line_also_by_workers(folder, square, workers):
    (folder / "dog" / "2.png").write_bytes(b"words")
    images = TransformedImages(open_dataset(f"folder:{folder}").train, square(100))
    with pytest.raises(VicinalError) as raised:
        batches(images, batch_size=4, shuffle=False, workers=workers)
    assert str(raised.value).startswith(str(folder / "dog" / "2.png"))
    assert "\n" not in str(raised.value)


def test_a_damaged_picture_is_told_when_pictures_are_kept(folder, square):
    (folder / "dog" / "2.png").write_bytes(b"words")
    with pytest.raises(VicinalError, match=r"dog.2\.png"):
        TransformedImages(open_dataset(f"folder:{folder}").train, square(16))
