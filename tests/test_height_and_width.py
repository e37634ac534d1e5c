import numpy as np
import pytest
import torch

from vicinal.errors import VicinalError
from vicinal.image_size import height_and_width


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (32, (32, 32)),
        ((32, 48), (32, 48)),
        ([64], (64, 64)),
        (torch.Size([8, 12]), (8, 12)),
        (np.array([8, 12]), (8, 12)),
        (np.int64(7), (7, 7)),
    ],
)
def test_one_or_two_numbers(size, expected):
    assert height_and_width(size) == expected


@pytest.mark.parametrize("size", [0, (32, -1), (), (32, 32, 3), "large", None, ("a", "b")])
def test_other_sizes_are_errors_that_name_the_parameter(size):
    with pytest.raises(VicinalError, match=r"^img_size .* got "):
        height_and_width(size)
    with pytest.raises(VicinalError, match=r"^--img-size "):
        height_and_width(size, "--img-size")
