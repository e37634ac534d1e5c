"""`product_sides`: both sides of a product of rows, whatever operation computes it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from vicinal.inspection.attention_mode import product_sides


def check_sides(func: Any, *args: Any, without: Tensor | None = None) -> None:
    """Asserts that the sides multiply to the product, less what `baddbmm` adds to it."""
    sides = product_sides(func, args)
    product = func(*args) if without is None else func(*args) - without
    assert sides is not None
    result = sides[0] @ sides[1].mT
    assert result.shape == product.shape
    torch.testing.assert_close(result, product)


@pytest.mark.parametrize("func", [torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.linalg.matmul])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (1, 2, 3)])
def test_sides_of_matmul_multiply_to_its_result(func: Any, lead: tuple[int, ...]) -> None:
    check_sides(func, torch.randn(*lead, 4, 8), torch.randn(*lead, 8, 5))


def test_sides_of_a_matmul_that_broadcasts_multiply_to_its_result() -> None:
    check_sides(torch.matmul, torch.randn(2, 3, 4, 8), torch.randn(8, 5))
    check_sides(torch.matmul, torch.randn(4, 8), torch.randn(2, 3, 8, 5))


@pytest.mark.parametrize("func", [torch.bmm, torch.Tensor.bmm])
def test_sides_of_bmm_multiply_to_its_result(func: Any) -> None:
    check_sides(func, torch.randn(3, 4, 8), torch.randn(3, 8, 5))


@pytest.mark.parametrize("func", [torch.baddbmm, torch.Tensor.baddbmm])
def test_sides_of_baddbmm_leave_out_its_input(func: Any) -> None:
    added = torch.randn(3, 4, 5)
    check_sides(func, added, torch.randn(3, 4, 8), torch.randn(3, 8, 5), without=added)


EINSUMS = [
    ("bhid,bhjd->bhij", (2, 3, 4, 8), (2, 3, 5, 8)),
    ("b h i d, b h j d -> b h i j", (2, 3, 4, 8), (2, 3, 5, 8)),
    ("bihd,bjhd->bhij", (2, 4, 3, 8), (2, 5, 3, 8)),
    ("bhdi,bhdj->bhij", (2, 3, 8, 4), (2, 3, 8, 5)),
    ("bhid,bhjd->bhji", (2, 3, 4, 8), (2, 3, 5, 8)),
    ("bqnc,bnkc->bnqk", (2, 4, 3, 8), (2, 3, 5, 8)),
    ("idb,jdb->bij", (4, 8, 2), (5, 8, 2)),
    ("id,jd->ij", (4, 8), (5, 8)),
    ("id,jd->ji", (4, 8), (5, 8)),
    ("bixy,bjxy->bij", (2, 4, 3, 2), (2, 5, 3, 2)),
    ("bixy,bjyx->bij", (2, 4, 3, 2), (2, 5, 2, 3)),
    ("...id,...jd->...ij", (2, 3, 4, 8), (2, 3, 5, 8)),
    ("...id,...jd->...ij", (4, 8), (5, 8)),
    ("...id,...jd->...ji", (2, 3, 4, 8), (2, 3, 5, 8)),
    ("b...id,b...jd->b...ij", (2, 3, 4, 8), (2, 3, 5, 8)),
    ("...hid,...hjd->...hij", (2, 6, 3, 4, 8), (2, 6, 3, 5, 8)),
]


@pytest.mark.parametrize(("equation", "one", "two"), EINSUMS)
@pytest.mark.parametrize("as_list", [False, True])
def test_sides_of_einsum_multiply_to_its_result(
    equation: str, one: tuple[int, ...], two: tuple[int, ...], as_list: bool
) -> None:
    operands = torch.randn(one), torch.randn(two)
    check_sides(torch.einsum, equation, *([list(operands)] if as_list else operands))


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bhij,bhjd->bihd", [(2, 3, 4, 5), (2, 3, 5, 8)]),  # a batch axis between rows and columns
        ("bid,bjd->ibj", [(2, 4, 8), (2, 5, 8)]),
        ("bi,bj->bij", [(2, 4), (2, 5)]),  # nothing is summed over
        ("bixd,bjd->bixj", [(2, 4, 3, 8), (2, 5, 8)]),  # two row axes
        ("bid,bid->bi", [(2, 4, 8), (2, 4, 8)]),  # no columns
        ("bid,d->bi", [(2, 4, 8), (8,)]),
        ("bixd,bjd->bij", [(2, 4, 3, 8), (2, 5, 8)]),  # one side sums over an axis of its own
        ("bii,bji->bij", [(2, 4, 4), (2, 5, 4)]),  # a diagonal
        ("bid,bjd,bd->bij", [(2, 4, 8), (2, 5, 8), (2, 8)]),  # three operands
        ("bid->bi", [(2, 4, 8)]),
        ("bid,bjd", [(2, 4, 8), (2, 5, 8)]),  # no output given
    ],
)
@pytest.mark.parametrize("as_list", [False, True])
def test_einsums_of_another_kind_have_no_sides(equation: str, shapes: list[tuple[int, ...]], as_list: bool) -> None:
    operands = [torch.randn(shape) for shape in shapes]
    torch.einsum(equation, *operands)  # a valid one
    assert product_sides(torch.einsum, (equation, operands) if as_list else (equation, *operands)) is None


def test_einsum_in_sublist_form_has_no_sides() -> None:
    args = torch.randn(2, 4, 8), [0, 1, 2], torch.randn(2, 5, 8), [0, 3, 2], [0, 1, 3]
    assert torch.einsum(*args).shape == (2, 4, 5)
    assert product_sides(torch.einsum, args) is None


@pytest.mark.parametrize(("one", "two"), [((4, 8), (8,)), ((8,), (8, 5)), ((8,), (8,))])
def test_products_with_a_vector_have_no_sides(one: tuple[int, ...], two: tuple[int, ...]) -> None:
    assert product_sides(torch.matmul, (torch.randn(one), torch.randn(two))) is None


def test_sides_keep_gradients() -> None:
    one, two = torch.randn(2, 4, 3, 8, requires_grad=True), torch.randn(2, 5, 3, 8, requires_grad=True)
    sides = product_sides(torch.einsum, ("bihd,bjhd->bhij", one, two))
    assert sides is not None
    (sides[0] @ sides[1].mT).sum().backward()
    expected = torch.einsum("bjhd->bhd", two)[:, None].expand_as(one)
    torch.testing.assert_close(one.grad, expected)
