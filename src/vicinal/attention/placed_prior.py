"""What attention needs of a prior: numbers for pairs of queries and keys, wherever these sit."""

from collections.abc import Callable
from typing import Protocol, cast

import torch

from vicinal.grid import Grid
from vicinal.priors.base import Prior, ScaleBias

__all__ = ["PlacedPrior", "current_values", "token_counts"]


class PlacedPrior(Protocol):
    """Structural type of a prior whose queries and keys have their places: a `Prior`, or one for other keys.

    Keys differ from queries where they are pooled, or where a window looks beyond itself. A `Prior` fits: its `grid` is
    that of both.
    """

    @property
    def heads(self) -> int:
        """Attention heads the prior serves."""

    @property
    def device(self) -> torch.device | None:
        """Where the parameters are; None if there are none."""

    @property
    def grid(self) -> Grid | None:
        """The grid of both queries and keys; None where `values` are over pairs of tokens already."""

    @property
    def per_offset(self) -> bool:
        """With a grid, whether `values` are tables over offsets; else they are over pairs of patches."""

    @property
    def queries(self) -> int:
        """Number of query tokens; `grid.tokens` with a grid."""

    @property
    def keys(self) -> int:
        """Number of key tokens; `grid.tokens` with a grid."""

    def values(self) -> ScaleBias:
        """Returns scale and bias, each None or a tensor of at least fp32.

        Its shape is `(heads, 2h-1, 2w-1)` over offsets, `(heads, patches, patches)` over pairs of patches, or, without
        a grid, `(heads, queries, keys)` over pairs of tokens, with 1 and 0 where a token has no place.
        """

    def __call__(self) -> ScaleBias:
        """Returns scale and bias over pairs of tokens, each `(heads, queries, keys)` or None; cached in inference."""


def token_counts(prior: Prior | PlacedPrior) -> tuple[int, int]:
    """Returns the numbers of query tokens and of key tokens that a prior serves."""
    grid = prior.grid
    if grid is not None:
        return grid.tokens, grid.tokens
    placed = cast("PlacedPrior", prior)
    return placed.queries, placed.keys


def current_values(prior: Prior | PlacedPrior) -> ScaleBias:
    """Returns `prior.values()`; in inference cached ones, if the prior caches them.

    For one image, to compute them takes longer than attention.
    """
    if torch.is_grad_enabled():
        return prior.values()
    values: Callable[[], ScaleBias] = getattr(prior, "cached_values", prior.values)
    return values()
