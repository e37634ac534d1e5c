import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vicinal.data import open_dataset, split
from vicinal.data.splits import hold_out, subset
from vicinal.errors import VicinalError

labels = st.lists(st.integers(2, 40), min_size=2, max_size=8).flatmap(
    lambda sizes: st.permutations([number for number, size in enumerate(sizes) for _ in range(size)]).map(np.array)
)


@settings(deadline=None, max_examples=60)
@given(labels, st.floats(0.02, 0.5), st.integers(0, 2**40))
def test_a_split_is_disjoint_exhaustive_and_stratified(labels, share, seed):
    left, held = hold_out(labels, share, seed)
    assert sorted([*left, *held]) == list(range(len(labels)))
    assert len(held) == round(share * len(labels))
    for number in np.unique(labels):
        exact = (labels == number).sum() * len(held) / len(labels)
        assert abs((labels[held] == number).sum() - exact) <= 1
        assert (labels[left] == number).any()
    again = hold_out(labels, share, seed)
    assert np.array_equal(again[0], left)
    assert np.array_equal(again[1], held)


@settings(deadline=None, max_examples=60)
@given(labels, st.floats(0, 1), st.integers(0, 100))
def test_a_subset_is_stratified(labels, share, seed):
    size = max(1, round(share * len(labels)))
    taken = subset(labels, size, seed)
    assert len(np.unique(taken)) == size
    for number in np.unique(labels):
        exact = (labels == number).sum() * size / len(labels)
        assert abs((labels[taken] == number).sum() - exact) <= 1
    assert np.array_equal(taken, subset(labels, size, seed))


def test_other_seeds_hold_other_images_out():
    labels = np.arange(1000) % 10
    held = [set(hold_out(labels, 100, seed)[1]) for seed in range(5)]
    assert len({frozenset(each) for each in held}) == 5
    assert len(held[0] & held[1]) < 30  # 10 are expected to be in both


def test_validation_comes_out_of_train_and_the_test_split_does_not_depend_on_the_seed():
    source = open_dataset("digits")
    first, second = (split(source, val_size=200, train_size=300, seed=seed) for seed in (0, 1))
    for splits in (first, second):
        assert (len(splits.train), len(splits.val), len(splits.test)) == (300, 200, 359)
        rows = [set(part.rows) for part in (splits.train, splits.val, splits.test)]
        assert not rows[0] & rows[1]
        assert not (rows[0] | rows[1]) & rows[2]
    assert np.array_equal(first.test.rows, second.test.rows)
    assert not np.array_equal(first.val.rows, second.val.rows)
    assert not np.array_equal(first.train.rows, second.train.rows)


def test_validation_images_do_not_depend_on_how_many_are_trained_on():
    source = open_dataset("digits")
    small, whole = split(source, train_size=100), split(source)
    assert np.array_equal(small.val.rows, whole.val.rows)
    assert set(small.train.rows) < set(whole.train.rows)


def test_parts_keep_labels_and_pictures_together():
    source = open_dataset("digits")
    part = split(source, val_size=0.3).val.take(np.array([5, 2]))
    for index in range(2):
        where = list(source.train.rows).index(part.rows[index])
        assert part.labels[index] == source.train.labels[where]
        assert part.image(index).tobytes() == source.train.image(where).tobytes()


def test_nothing_is_held_out_for_0():
    splits = split(open_dataset("digits"), val_size=0)
    assert (len(splits.val), len(splits.train)) == (0, 1438)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_size": -0.1}, "got -0.1"),
        ({"val_size": 1.5}, "got 1.5"),
        ({"val_size": 1438}, "at most 1428 of 1438 images, got 1438"),
        ({"val_size": 0.999}, "1428 of 1438 images, got 1437"),
        ({"train_size": 0}, "train_size .* 1 to 1294, .* got 0"),
        ({"train_size": 1295}, "train_size .* 1 to 1294, .* got 1295"),
    ],
)
def test_impossible_sizes_are_errors(options, message):
    with pytest.raises(VicinalError, match=message):
        split(open_dataset("digits"), **options)
