"""`HeadLayout` against a loop over every index of the leading axes."""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from vicinal.inspection.head_layout import Factor, HeadLayout

FACTORS = {"I": (Factor.IMAGES, 6), "W": (Factor.WINDOWS, 4), "H": (Factor.HEADS, 3), "G": (Factor.HEADS, 2)}
AXES = (
    *("I", "I H", "H I", "IH", "HI", "I H G", "I HG", "IHG", "HIG"),
    *("IW H", "WI H", "I W H", "I H W", "W I H", "H W I", "IWH", "IHW", "WHI", "HWI", "WH I", "I HW"),
    *("IW H G", "I H W G", "IWH G", "H IW G", "I W W H", "IH W", "W IH", "I HWG"),
)
QUERIES, KEYS = 2, 5

everywhere = pytest.mark.parametrize(("axes", "images"), list(itertools.product(AXES, (1, 5))))


def make_layout(axes: str, **options: object) -> HeadLayout:
    """Returns the layout of axes such as `IW H`: images and windows in one axis, then heads."""
    return HeadLayout(tuple(tuple(FACTORS[letter] for letter in axis) for axis in axes.split()), **options)  # type: ignore[arg-type]


def leading_shape(layout: HeadLayout, images: int) -> tuple[int, ...]:
    """Returns the sizes of the leading axes for a number of images."""
    return tuple(math.prod(images if f is Factor.IMAGES else size for f, size in axis) for axis in layout.axes)


def places(layout: HeadLayout, images: int) -> Iterator[tuple[tuple[int, ...], int, int, int]]:
    """Yields every index of the leading axes, with the image, window and head that it stands for."""
    for index in itertools.product(*map(range, leading_shape(layout, images))):
        number = {Factor.IMAGES: 0, Factor.WINDOWS: 0, Factor.HEADS: 0}
        for place, axis in zip(index, layout.axes, strict=True):
            digits = []
            for factor, given in reversed(axis):  # the last varies fastest
                size = images if factor is Factor.IMAGES else given
                place, digit = divmod(place, size)
                digits.append((factor, size, digit))
            for factor, size, digit in reversed(digits):
                number[factor] = number[factor] * size + digit
        yield index, number[Factor.IMAGES], number[Factor.WINDOWS], number[Factor.HEADS]


@everywhere
def test_counts_are_products_of_the_factors(axes: str, images: int) -> None:
    layout = make_layout(axes)
    found = list(places(layout, images))
    assert layout.heads == layout.logit_heads == len({head for _, _, _, head in found})
    assert layout.windows == len({window for _, _, window, _ in found})


@everywhere
@pytest.mark.parametrize("operation", [torch.mul, torch.add])
def test_apply_gives_each_head_its_values(axes: str, images: int, operation: object) -> None:
    layout = make_layout(axes)
    logits = torch.randn(*leading_shape(layout, images), QUERIES, KEYS)
    values = torch.randn(layout.heads, QUERIES, KEYS)
    result = layout.apply(operation, logits, values)  # type: ignore[arg-type]
    assert result.shape == logits.shape
    for index, _, _, head in places(layout, images):
        assert torch.equal(result[index], operation(logits[index], values[head]))  # type: ignore[operator]


@everywhere
def test_apply_gives_heads_that_share_one_head_of_the_prior_the_same_values(axes: str, images: int) -> None:
    heads = make_layout(axes).logit_heads
    shared = tuple(head // 2 for head in range(heads))
    layout = make_layout(axes, shared=shared)
    logits = torch.randn(*leading_shape(layout, images), QUERIES, KEYS)
    values = torch.randn(layout.heads, QUERIES, KEYS)
    result = layout.apply(torch.add, logits, values)
    assert layout.heads == (heads + 1) // 2
    for index, _, _, head in places(layout, images):
        assert torch.equal(result[index], logits[index] + values[shared[head]])


@pytest.mark.parametrize("axes", ["I", "IW", "WI", "I W"])
@pytest.mark.parametrize("turn", range(3))
def test_apply_takes_the_head_whose_turn_it_is(axes: str, turn: int) -> None:
    layout = make_layout(axes, turns=3)
    logits = torch.randn(*leading_shape(layout, 5), QUERIES, KEYS)
    values = torch.randn(3, QUERIES, KEYS)
    assert layout.heads == 3
    assert torch.equal(layout.apply(torch.add, logits, values, turn), logits + values[turn])


@everywhere
@pytest.mark.parametrize(("per_window", "per_head"), list(itertools.product((True, False), repeat=2)))
def test_expand_repeats_values_for_every_image(axes: str, images: int, per_window: bool, per_head: bool) -> None:
    layout = make_layout(axes)
    values = torch.randn(layout.windows if per_window else 1, layout.heads if per_head else 1, QUERIES, KEYS)
    shape = (*leading_shape(layout, images), QUERIES, KEYS)
    result = layout.expand(values, shape)
    assert result.shape == shape
    for index, _, window, head in places(layout, images):
        assert torch.equal(result[index], values[window if per_window else 0, head if per_head else 0])


@everywhere
def test_standard_order_is_images_windows_heads(axes: str, images: int) -> None:
    layout = make_layout(axes)
    x = torch.randn(*leading_shape(layout, images), QUERIES, KEYS)
    result = layout.standard(x)
    assert result.shape == (images, layout.windows, layout.logit_heads, QUERIES, KEYS)
    for index, image, window, head in places(layout, images):
        assert torch.equal(result[image, window, head], x[index])


@everywhere
def test_apply_keeps_gradients_apart(axes: str, images: int) -> None:
    """The gradient of a head's values sums over its images and windows."""
    layout = make_layout(axes)
    logits = torch.randn(*leading_shape(layout, images), QUERIES, KEYS)
    values = torch.zeros(layout.heads, QUERIES, KEYS, requires_grad=True)
    layout.apply(torch.mul, logits, values).sum().backward()
    expected: Tensor = torch.zeros(layout.heads, QUERIES, KEYS)
    for index, _, _, head in places(layout, images):
        expected[head] += logits[index]
    torch.testing.assert_close(values.grad, expected)
