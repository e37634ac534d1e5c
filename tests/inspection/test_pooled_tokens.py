"""Places of pooled tokens: the mean row and column of the patches that torch pools into each of them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vicinal.cells import TokenLines
from vicinal.grid import Grid
from vicinal.inspection.kernel_places import Resampling, kernel_places, spread_evenly
from vicinal.inspection.pool_calls import token_pooling
from vicinal.inspection.size_rule import SizeRule, finer_grid, lines_at
from vicinal.pooled_tokens import AdaptivePooling, PooledTokens, SequencePooling
from vicinal.priors.token_values import TokenPairs


def coordinates(rows, columns):
    """Returns a map whose channels are row and column, `(1, 2, rows, columns)`."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([row, column])[None].double()


@pytest.mark.parametrize("size", [(7, 7), (13, 25), (14, 9), (4, 1), (50, 17)])
@pytest.mark.parametrize("pooled", [(7, 7), (1, 3), (5, 2)])
def test_adaptive_windows_are_those_of_torch(size, pooled):
    expected = F.adaptive_avg_pool2d(coordinates(*size), pooled).flatten(2)[0].mT
    torch.testing.assert_close(AdaptivePooling(*pooled).places(*size), expected, atol=1e-12, rtol=0)


def test_adaptive_windows_by_hand():
    rows = AdaptivePooling(7, 1).places(13, 1)[:, 0]  # [0, 2), [1, 4), [3, 6), ..., [9, 12), [11, 13)
    assert rows.tolist() == [0.5, 2, 4, 6, 8, 10, 11.5]


@pytest.mark.parametrize("size", [(7, 7), (10, 7), (3, 20), (1, 9)])
@pytest.mark.parametrize(("kernel", "stride"), [(4, 4), (9, 9), (4, 2), (1, 3)])
def test_windows_of_a_sequence_are_those_of_torch(size, kernel, stride):
    expected = F.avg_pool1d(coordinates(*size).flatten(2), kernel, stride)[0].mT
    torch.testing.assert_close(SequencePooling(kernel, stride).places(*size), expected, atol=1e-12, rtol=0)


def test_a_key_over_the_end_of_a_row_lies_between_its_ends():
    assert SequencePooling(4, 4).places(2, 6).tolist() == [[0, 1.5], [0.5, 2.5], [1, 3.5]]


def test_a_sequence_shorter_than_the_kernel_has_no_windows():
    assert PooledTokens(SequencePooling(9, 9), 2, 4).tokens == 0


@pytest.mark.parametrize(
    ("module", "shape", "pooling"),
    [
        (nn.AvgPool1d(4), (2, 8, 20), SequencePooling(4, 4)),
        (nn.AvgPool1d(4, 2), (2, 8, 20), SequencePooling(4, 2)),
        (nn.AvgPool1d(4, padding=1), (2, 8, 20), None),
        (nn.AvgPool1d(4, ceil_mode=True), (2, 8, 20), None),
        (nn.AdaptiveAvgPool2d(7), (2, 8, 9, 9), AdaptivePooling(7, 7)),
        (nn.AdaptiveMaxPool2d((3, 5)), (2, 8, 9, 9), AdaptivePooling(3, 5)),
        (nn.AdaptiveAvgPool2d((None, 5)), (2, 8, 9, 9), None),
        (nn.AdaptiveAvgPool2d(7), (8, 9, 9), None),
        (nn.AvgPool2d(2), (2, 8, 9, 9), None),
    ],
)
def test_poolings_are_read_from_calls(module, shape, pooling):
    found = []

    class Reader(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            found.append(token_pooling(func, args, kwargs or {}))
            return func(*args, **kwargs or {})

    with Reader():
        module(torch.zeros(shape))
    assert [each for each in found if each is not None] == ([] if pooling is None else [pooling])


@pytest.mark.parametrize(("size", "parts"), [(7, 4), (13, 7), (12, 4), (5, 5), (9, 2)])
def test_even_parts_have_evenly_spaced_centers(size, parts):
    centers = spread_evenly(coordinates(size, 1), (parts, 1))[0, 0, :, 0]
    expected = (torch.arange(parts) + 0.5).double() * size / parts - 0.5
    # A fraction of a place counts at the place's center.
    torch.testing.assert_close(centers, expected, atol=0.15 if size % parts else 1e-12, rtol=0)


@pytest.mark.parametrize(("size", "parts"), [((7, 9), (4, 2)), ((4, 3), (7, 7))])
def test_even_parts_are_means(size, parts):
    ones = spread_evenly(torch.ones(1, 1, *size).double(), parts)
    torch.testing.assert_close(ones, torch.ones(1, 1, *parts).double(), atol=1e-12, rtol=0)


def test_interpolation_is_passed_on_as_it_is():
    x = torch.rand(1, 1, 5, 4).double()
    found = kernel_places(F.interpolate, (x,), {"scale_factor": 2, "mode": "bilinear"})
    assert found == Resampling("bilinear", None)
    torch.testing.assert_close(found.carry(x, (10, 8)), F.interpolate(x, scale_factor=2, mode="bilinear"))


PATCHES = TokenLines(10, 7, (0.0, 0.0), (1, 1), prefix=1)


@pytest.mark.parametrize("pooled_queries", [False, True])
def test_pooled_tokens_follow_the_map_that_they_pool(pooled_queries):
    lines, tokens = (PATCHES, PooledTokens(SequencePooling(4, 4), 10, 7)), (1 + 7 * 12, 21)
    expected = TokenLines(7, 12, (0.0, 0.0), (1, 1), prefix=1), PooledTokens(SequencePooling(4, 4), 7, 12)
    if pooled_queries:
        lines, tokens, expected = lines[::-1], tokens[::-1], expected[::-1]
    assert lines_at(SizeRule.FOLLOWS, lines, (40, 28), (28, 48), tokens) == expected
    assert finer_grid(*expected) == Grid(7, 12)


def test_another_number_of_pooled_tokens_than_predicted_is_unknown():
    lines = PATCHES, PooledTokens(AdaptivePooling(7, 7), 10, 7)
    assert lines_at(SizeRule.FOLLOWS, lines, (40, 28), (28, 48), (85, 49)) is not None
    assert lines_at(SizeRule.FOLLOWS, lines, (40, 28), (28, 48), (85, 25)) is None
    assert lines_at(SizeRule.FOLLOWS, lines, (40, 28), (28, 48), (86, 49)) is None
    assert lines_at(SizeRule.UNKNOWN, lines, (40, 28), (28, 48), (85, 49)) is None


def test_offsets_on_ninths_are_kept_exactly():
    keys = SequencePooling(9, 9).places(7, 10)
    offsets = keys[None] - coordinates(7, 10).flatten(2)[0].mT[:, None]
    pairs = TokenPairs(offsets)
    torch.testing.assert_close(pairs.offsets[pairs.index], offsets, atol=1e-14, rtol=0)
