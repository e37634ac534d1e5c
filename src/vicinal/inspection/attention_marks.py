"""Marks on tensors, by which the observer follows a product of queries and keys to its softmax and to the values."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vicinal.inspection.attention_mode import Operation, Step

__all__ = [
    "AttentionCall",
    "Frame",
    "ProductMark",
    "SoftmaxMark",
    "marks_of",
    "product_arguments",
    "set_marks",
    "tensors_in",
]


@dataclass(eq=False)
class AttentionCall:
    """One attention computed in a run."""

    module: nn.Module
    """The innermost module that computes it."""
    forward: int
    """Which forward of the module in the run, from 0."""
    step: Step
    q: Tensor
    """`(..., queries, dim)`."""
    k: Tensor
    """`(..., keys, dim)`."""
    logits: tuple[int, ...]
    """Shape of the logits, `(..., queries, keys)`."""
    used: tuple[int, ...] = ()
    """Shape of the weights that meet the values; empty as long as nobody used them."""
    group: int = 0
    """Number shared by the attentions whose weights are combined before they meet the values, as in differential
    attention; unique in the run otherwise."""
    softmaxes: int = 1
    """How many softmaxes are combined in the weights, those of no product included, as in ConViT."""
    met: int | None = None
    """Number, among the module's products, of the one with the values; None if the attention is fused."""
    refused: str = ""
    """Why no prior can act on it, whatever its cells: causal or grouped-query attention."""


@dataclass(eq=False)
class Frame:
    """A module that is running, and what it has computed so far, its submodules included."""

    module: nn.Module
    forward: int
    products: int = 0
    softmaxes: int = 0
    fused: int = 0


@dataclass(eq=False)
class ProductMark:
    """The mark of a product that may be Q K^T."""

    owners: list[tuple[Frame, int]]
    """Modules that run it, innermost first, and its number among the products of each."""
    operation: Operation
    q: Tensor
    k: Tensor
    shape: tuple[int, ...]


@dataclass(eq=False)
class SoftmaxMark:
    """The mark of a softmax: the attention that it belongs to, if its input came from a product."""

    call: AttentionCall | None
    frame: Frame | None = None


def product_arguments(args: tuple[Any, ...]) -> list[Any]:
    """Returns the arguments of a product one by one, whether or not einsum was given a list."""
    return [args[0], *args[1]] if len(args) == 2 and isinstance(args[1], tuple | list) else list(args)


def tensors_in(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yields the tensors among arguments, those in lists and tuples included."""
    for x in (*args, *kwargs.values()):
        yield from (each for each in (x if isinstance(x, tuple | list) else (x,)) if isinstance(each, Tensor))


def marks_of(args: Any, kwargs: Any) -> list[Any]:
    """Returns the marks of all tensors among arguments, each once."""
    found = [mark for x in tensors_in(args, kwargs) for mark in getattr(x, "_attention_marks", ())]
    return list(dict.fromkeys(found))


def set_marks(x: Tensor, marks: list[Any]) -> None:
    """Sets the marks of a result."""
    if not isinstance(x, nn.Parameter):
        x._attention_marks = tuple(marks)  # type: ignore[attr-defined]
