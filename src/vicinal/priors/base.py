"""What every prior is: a pair `(scale, bias)` for the attention logits, over offsets and over tokens."""

import contextlib
import copy
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.priors.formula import formula_at, formula_on, table_stretch
from vicinal.priors.placed import PriorOnGrid, PriorOnPairs, ScaleBias, TokenCache, TokenPairs

__all__ = ["Prior", "ScaleBias", "Values"]

Values = float | Sequence[float] | Sequence[Sequence[float]] | Tensor

EPSILON = 1e-5  # added to a squared width, in patches: a kernel of width 0 touches its own patch only


class Prior(nn.Module):
    """Turns logits into `scale * logits + bias`, where scale and bias depend on where the tokens sit.

    A subclass overrides `scale`, `bias` or both, and registers under a name:

    >>> import torch, vicinal
    >>> @vicinal.register_prior("ring")
    ... class Ring(vicinal.Prior):
    ...     "A preferred distance."
    ...     def __init__(self, heads, grid, layer=0, depth=1, *, radius: float = 2.0):
    ...         super().__init__(heads, grid, layer, depth)
    ...         self.radius = torch.nn.Parameter(torch.full((heads,), radius))
    ...     def bias(self):
    ...         return -(self.grid.squared_distance().sqrt() - self.radius[:, None, None]).square()
    >>> ring = vicinal.build_prior("ring:radius=3", heads=4, grid=vicinal.Grid(8, 8, prefix=1))
    >>> scale, bias = ring()
    >>> scale, bias.shape
    (None, torch.Size([4, 65, 65]))

    Args:
        heads: attention heads the prior serves.
        grid: where the tokens sit.
        layer: index of the attention layer, from 0.
        depth: number of attention layers in the model.
    """

    per_offset: bool = True
    """Whether `scale` and `bias` are tables over offsets, or free per pair of patches."""
    free_table: bool = False
    """Whether the values over offsets are free numbers, which are stretched to another grid."""
    without_formula: frozenset[str] = frozenset()
    """Those of `scale` and `bias` that a subclass overrides without `scale_at` or `bias_at`."""
    spec: str = ""
    """What `build_prior` made it from."""
    spec_options: Mapping[str, Any] = MappingProxyType({})
    """The options given to `build_prior` next to the spec."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)

        def overrides(name: str) -> bool:
            return getattr(cls, name) is not getattr(Prior, name)

        cls.without_formula = frozenset(x for x in ("scale", "bias") if overrides(x) and not overrides(f"{x}_at"))

    def __init__(self, heads: int, grid: Grid, layer: int = 0, depth: int = 1) -> None:
        super().__init__()
        if not isinstance(heads, int) or heads < 1:
            raise VicinalError(f"a prior needs heads as a whole number >= 1, given {heads!r}")
        if not isinstance(grid, Grid):
            raise VicinalError(f"a prior needs a Grid(height, width, prefix), given {grid!r}")
        self.heads, self.layer, self.depth = heads, layer, depth
        self.grid = grid
        self._cache = TokenCache()

    @property
    def device(self) -> torch.device | None:
        """Where the parameters are; None if there are none, as for `none`."""
        state = self._state()
        return state[0].device if state else None

    @property
    def dtype(self) -> torch.dtype:
        """In which the formula is computed: that of the parameters, at least fp32."""
        state = [x.dtype for x in self._state() if x.is_floating_point()]
        return torch.promote_types(state[0], torch.float32) if state else torch.float32

    def _state(self) -> list[Tensor]:
        """Returns parameters and buffers. `nn.Module.parameters` takes 10 microseconds, much for one image."""
        modules = self.modules() if self._modules else (self,)
        return [
            x for module in modules for x in (*module._parameters.values(), *module._buffers.values()) if x is not None
        ]

    @property
    def queries(self) -> int:
        """Number of query tokens."""
        return self.grid.tokens

    @property
    def keys(self) -> int:
        """Number of key tokens."""
        return self.grid.tokens

    def scale_at(self, rows: Tensor, columns: Tensor) -> Tensor | None:
        """Returns the factors of the logits by the prior's formula, `(heads or 1, *shape)`; None for 1.

        Args:
            rows: offsets from query to key in patches, 2-D; they broadcast with `columns` to `shape`.
            columns: as rows.
        """
        return None

    def bias_at(self, rows: Tensor, columns: Tensor) -> Tensor | None:
        """Returns the terms that are added to the logits; arguments and shapes as for `scale_at`; None for 0."""
        return None

    def scale(self) -> Tensor | None:
        """Returns what multiplies the logits; None for 1.

        `(heads or 1, 2h-1, 2w-1)` over the offsets of the grid, or `(heads or 1, patches, patches)`.
        """
        if type(self).scale_at is Prior.scale_at:
            return None
        return self.scale_at(*self.grid.offsets(self.device, self.dtype))

    def bias(self) -> Tensor | None:
        """Returns what is added to the logits; shapes as for `scale`; None for 0."""
        if type(self).bias_at is Prior.bias_at:
            return None
        return self.bias_at(*self.grid.offsets(self.device, self.dtype))

    def values(self) -> ScaleBias:
        """Returns `(scale(), bias())` for every head, in full precision whatever the autocast around it.

        On a CPU, factors below `smallest_factor` are 0, because products with them would be denormal numbers.
        """
        with full_precision(self.device or torch.device("cpu")):
            return self._for_every_head(self.scale(), self.bias())

    def at(self, offsets: Tensor, grid: Grid | None = None) -> ScaleBias:
        """Returns scale and bias at any offsets, each `(heads, *shape)` or None.

        >>> import torch, vicinal
        >>> prior = vicinal.build_prior("decay:gamma=0.5", heads=2, grid=vicinal.Grid(8, 8))
        >>> scale, bias = prior.at(torch.tensor([[0.0, 0.0], [0.5, -1.0]]))
        >>> bias.exp()
        tensor([[1.0000, 0.3536],
                [1.0000, 0.3536]])

        Raises VicinalError for a prior that is no function of the offset.

        Args:
            offsets: rows and columns from query to key, in patches, whole or fractional: `(*shape, 2)`. A free table is
                interpolated; beyond its edge, its last value counts.
            grid: of the patches, to which free tables are stretched; by default the prior's.
        """
        if offsets.shape[-1:] != (2,):
            raise VicinalError(f"at takes offsets (*shape, 2), rows and columns, given shape {tuple(offsets.shape)}")
        stretch = offsets.new_tensor(table_stretch(self, grid or self.grid))
        rows, columns = (offsets * stretch).to(self.device, self.dtype).reshape(-1, 2).T[..., None]
        with full_precision(self.device or torch.device("cpu")):
            pair = self._for_every_head(*formula_at(self, rows, columns))
        scale, bias = (None if x is None else x.reshape(self.heads, *offsets.shape[:-1]) for x in pair)
        return scale, bias

    def values_on(self, grid: Grid) -> ScaleBias:
        """Returns `values()` as they are on another grid: widths stay in patches, free tables are stretched.

        The parameters are this prior's own, so gradients reach them; `resize` returns a prior with its own ones.
        """
        if grid.same_patches(self.grid):
            return self.values()
        with full_precision(self.device or torch.device("cpu")):
            return self._for_every_head(*self._on_grid(grid))

    def _on_grid(self, grid: Grid) -> ScaleBias:
        """Returns scale and bias over the offsets of another grid, for `heads or 1`."""
        return formula_on(self, grid)

    def _for_every_head(self, scale: Tensor | None, bias: Tensor | None) -> ScaleBias:
        return (
            None if scale is None else zero_tiny_factors(scale).expand(self.heads, -1, -1),
            None if bias is None else bias.expand(self.heads, -1, -1),
        )

    def table(self) -> ScaleBias | None:
        """Scale and bias over offsets, each `(heads, 2h-1, 2w-1)` or None; None if they are free per pair."""
        return self.values() if self.per_offset else None

    def pairs(self) -> ScaleBias:
        """Returns scale and bias over pairs of patches, each `(heads, patches, patches)` or None."""
        return self.pairs_on(self.grid)

    def pairs_on(self, grid: Grid) -> ScaleBias:
        """Returns `pairs()` as they are on another grid, see `values_on`."""
        scale, bias = self.values_on(grid)
        if not self.per_offset:
            return scale, bias
        return None if scale is None else grid.unfold(scale), None if bias is None else grid.unfold(bias)

    def forward(self) -> ScaleBias:
        """Returns scale and bias over tokens, each `(heads, tokens, tokens)` or None; 1 and 0 with a prefix token."""
        return self.on(self.grid)()

    def on(self, grid: Grid) -> PriorOnGrid:
        """Returns this prior as it acts on another grid, for `attend`; its parameters are this prior's own."""
        return PriorOnGrid(self, grid)

    def between(self, places: TokenPairs, grid: Grid | None = None) -> PriorOnPairs:
        """Returns this prior as it acts between queries and keys with places of their own, for `attend`.

        Args:
            places: offsets of all pairs of a query and a key.
            grid: over which free tables are stretched; by default the prior's.
        """
        return PriorOnPairs(self, places, grid or self.grid)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cache": TokenCache()}  # pickles and copies stay small

    def resize(self, grid: Grid, *, rescale: bool = False) -> "Prior":
        """The same prior on another grid, as a new module.

        Args:
            grid: the new grid; its number of prefix tokens may differ too.
            rescale: stretch widths with the grid, instead of keeping them in patches. Free tables always stretch.
        """
        resized, before = copy.deepcopy(self), self.grid
        resized.grid = grid
        with torch.no_grad():
            resized._carry(before, rescale)
        return resized

    def _carry(self, before: Grid, rescale: bool) -> None:
        """Fit the parameters to `self.grid`; they come from the grid `before`."""

    def extra_repr(self) -> str:
        """Heads and grid, for `print(model)`."""
        return f"heads={self.heads}, grid={self.grid}"


def autocasting(device: torch.device) -> bool:
    """Whether autocast is on for a device; the meta device has none to ask for."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """No autocast inside."""
    if autocasting(device):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def smallest_factor(dtype: torch.dtype) -> float:
    """Returns the square root of the smallest normal number of `dtype`: 1.1e-19 in fp32, 1.5e-154 in fp64.

    A product of two numbers is normal if neither is smaller. Softmax divides exponentials of at least 1.1e-19 by the
    sum of their row, which is at most the number of tokens: with 1,000 tokens the smallest weight is 1.1e-22, and
    d_logits = weight * (d_weight - sum) is normal where the bracket exceeds 1.1e-16. Zero weights in place of smaller
    ones change an output by less than 1,000 * 1.1e-19 of the largest value; a rounding error of fp32 is 6e-8.
    """
    return math.sqrt(torch.finfo(dtype).tiny)


def zero_tiny_factors(x: Tensor) -> Tensor:
    """Returns `x`, on a CPU with 0 in place of numbers below `smallest_factor`; all of `x` gets its gradient."""
    if x.device.type != "cpu":
        return x
    return x - x.detach().masked_fill(x.detach().abs() >= smallest_factor(x.dtype), 0.0)


def flat_parameter(values: Tensor, requires_grad: bool = True) -> nn.Parameter:
    """A 1-D parameter: the rule "no weight decay below 2-D", common to all trainers, then spares it."""
    return nn.Parameter(values.detach().flatten().clone(memory_format=torch.contiguous_format), requires_grad)


def widen(values: Tensor) -> Tensor:
    """At least fp32, so that a model cast to half precision keeps exact tables."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def given_values(prior: str, option: str, values: Values, shape: tuple[int, ...]) -> Tensor:
    """Starting values that the user gave, as `shape`: a number for all, one per row, or all of them."""
    tensor = torch.as_tensor(values, dtype=torch.float32)
    if tensor.dim() == 1 and len(shape) == 2:
        tensor = tensor[:, None]
    try:
        return tensor.expand(shape)
    except RuntimeError:
        raise VicinalError(
            f"{prior} takes {option} as one number or as shape {shape}, given shape {tuple(tensor.shape)}"
        ) from None
