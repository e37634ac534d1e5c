"""The values of a prior over tokens: on a grid, or between queries and keys with positions of their own.

`attend` takes a prior in these forms. In inference, values over tokens are cached for a few grids.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vicinal.grid import Grid
from vicinal.priors.function_transforms import transforms_active
from vicinal.priors.quadratic_bias import QuadraticBias

if TYPE_CHECKING:
    from vicinal.priors.base import Prior

__all__ = ["PriorOnGrid", "PriorOnPairs", "ScaleBias", "TokenCache", "TokenPairs"]

ScaleBias = tuple[Tensor | None, Tensor | None]

MAX_CACHED_VALUES = 2**20  # numbers of a prior over tokens
MAX_CACHED_PLACES = 8  # grids or `TokenPairs` per prior
PLAIN_TYPES = (int, float, str, Grid)  # of settings on which the values of a prior can depend
MODULE_NAMES = frozenset(vars(nn.Module())) - {"training"}  # what every module holds: no settings
OFFSET_RESOLUTION = 2**16  # steps per patch; offsets within a step are equal


class TokenPairs:
    """The offsets between all queries and keys of an attention, each offset stored once.

    Args:
        offsets: from query to key in patches, `(queries, keys, 2)`; NaN if a token of the pair has no position.
    """

    def __init__(self, offsets: Tensor) -> None:
        placed = ~offsets.isnan().any(-1)
        given = offsets[placed].double()
        rows, columns = (given * OFFSET_RESOLUTION).round().long().unbind(-1)
        # One integer per pair, in the order of rows and then columns: `unique(dim=0)` takes ten times as long.
        distinct, number = ((rows << 32) + columns).unique(return_inverse=True)
        self.offsets = given.new_empty(len(distinct), 2)
        self.offsets[number] = given  # not the rounded ones: means of three patches lie on thirds
        """The distinct offsets, `(n, 2)`."""
        self.index = torch.full(placed.shape, len(distinct))
        """Index of each pair's offset in `offsets`, `(queries, keys)`; n if a token has no position."""
        self.index[placed] = number

    @property
    def queries(self) -> int:
        """Number of query tokens."""
        return self.index.shape[0]

    @property
    def keys(self) -> int:
        """Number of key tokens."""
        return self.index.shape[1]


class PriorOnGrid:
    """A prior on a grid, its own or another one: widths stay in patches, free tables are stretched.

    Args:
        prior: the prior, whose parameters are used.
        grid: grid of queries and keys.
    """

    def __init__(self, prior: "Prior", grid: Grid) -> None:
        self.prior, self.grid = prior, grid
        self.heads, self.per_offset = prior.heads, prior.per_offset
        self.queries = self.keys = grid.tokens

    @property
    def device(self) -> torch.device | None:
        """Device of the parameters; None if there are none."""
        return self.prior.device

    def values(self) -> ScaleBias:
        """Returns scale and bias over offsets, or over pairs of patches if `per_offset` is False."""
        return self.prior.values_on(self.grid)

    def cached_values(self) -> ScaleBias:
        """Returns `values()`, cached in inference."""
        rows, columns = self.grid.table_shape if self.per_offset else (self.grid.patches, self.grid.patches)
        return self.prior._cache.get(self.prior, ("values", self.grid), rows * columns, self.values)

    def quadratic_bias(self) -> QuadraticBias | None:
        """Returns the prior's own: offsets are in patches on every grid."""
        return self.prior.quadratic_bias()

    def __call__(self) -> ScaleBias:
        """Returns scale and bias over tokens, each `(heads, tokens, tokens)` or None; 1 and 0 with a prefix token."""
        return self.prior._cache.get(self.prior, self.grid, self.grid.tokens**2, self._over_tokens)

    def _over_tokens(self) -> ScaleBias:
        scale, bias = self.prior.pairs_on(self.grid)
        return (
            None if scale is None else self.grid.add_prefix(scale, 1.0),
            None if bias is None else self.grid.add_prefix(bias, 0.0),
        )


class PriorOnPairs:
    """A prior between queries and keys with positions of their own, such as pooled keys.

    Args:
        prior: the prior, whose parameters are used.
        places: offsets of all pairs.
        grid: grid to which free tables are stretched.
    """

    grid = None
    """Queries and keys share no grid; `values` are over pairs of tokens."""
    per_offset = False

    def __init__(self, prior: "Prior", places: TokenPairs, grid: Grid) -> None:
        self.prior, self.places, self.table_grid = prior, places, grid
        self.heads, self.queries, self.keys = prior.heads, places.queries, places.keys

    @property
    def device(self) -> torch.device | None:
        """Device of the parameters; None if there are none."""
        return self.prior.device

    def values(self) -> ScaleBias:
        """Returns scale and bias over tokens, each `(heads, queries, keys)` or None; 1 and 0 without a position."""
        scale, bias = self.prior.at(self.places.offsets, self.table_grid)
        index = self.places.index.to(self.device)
        return (
            None if scale is None else F.pad(scale, (0, 1), value=1.0)[:, index],
            None if bias is None else F.pad(bias, (0, 1), value=0.0)[:, index],
        )

    def cached_values(self) -> ScaleBias:
        """Returns `values()`, cached in inference."""
        return self()

    def __call__(self) -> ScaleBias:
        """Returns `values()`, cached in inference."""
        return self.prior._cache.get(self.prior, (self.places, self.table_grid), self.queries * self.keys, self.values)


class TokenCache:
    """A cache of a prior's values over tokens, in inference, for the most recently used grids.

    For a few images, computing these values takes longer than attention. The cache keeps a copy of the parameters and
    compares it by value, because version counters miss writes through `.data`.
    """

    def __init__(self) -> None:
        self._plain: Sequence[object] = []
        self._state: list[Tensor] = []
        self._values: dict[Hashable, ScaleBias] = {}

    def get(self, prior: "Prior", places: Hashable, pairs: int, make: Callable[[], ScaleBias]) -> ScaleBias:
        """Returns `make()`, or the cached result for the same parameters and places.

        Args:
            prior: the prior, whose parameters are compared.
            places: key of the cache: a grid, or `TokenPairs` and a grid.
            pairs: number of pairs of tokens.
            make: computes the values.
        """
        traced = torch.compiler.is_compiling() or transforms_active()
        if torch.is_grad_enabled() or traced or prior.heads * pairs > MAX_CACHED_VALUES:
            return make()
        state = prior._state()
        if not all(map(_can_be_compared, state)):
            return make()
        plain = _settings(prior)
        if self._plain != plain or not _equal(self._state, state):
            self._values.clear()
            self._plain, self._state = plain, [values.clone() for values in state]
        values = self._values.pop(places, None)
        if values is None:
            values = make()
            while len(self._values) >= MAX_CACHED_PLACES:
                self._values.pop(next(iter(self._values)), None)
        self._values[places] = values  # most recently used last
        return values


def _can_be_compared(values: Tensor) -> bool:
    """Returns whether values can be compared at once: a GPU would be waited for, fake tensors have no values."""
    return values.device.type == "cpu" and type(values) in (Tensor, nn.Parameter)


def _settings(prior: "Prior") -> list[object]:
    """Returns the numbers, texts and grids that a prior and its submodules hold."""
    modules = prior.modules() if prior._modules else (prior,)
    return [
        value
        for module in modules
        for name, value in vars(module).items()
        if name not in MODULE_NAMES and isinstance(value, PLAIN_TYPES)
    ]


def _equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )
