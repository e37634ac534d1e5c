"""`Prior`, the base class: a pair `(scale, bias)` for the attention logits, over offsets and over tokens."""

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.priors.formula import formula_at, formula_on, table_stretch
from vicinal.priors.full_precision import full_precision, zero_tiny_factors
from vicinal.priors.quadratic_bias import QuadraticBias, formula_is_older
from vicinal.priors.token_values import PriorOnGrid, PriorOnPairs, ScaleBias, TokenCache, TokenPairs

__all__ = ["Prior", "ScaleBias", "Values"]

Values = float | Sequence[float] | Sequence[Sequence[float]] | Tensor

EPSILON = 1e-5  # added to squared widths, in patches, so that a width of 0 is a valid kernel on the query alone


class Prior(nn.Module):
    """Turns logits into `scale * logits + bias`, where scale and bias depend on the positions of the tokens.

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
        heads: number of attention heads.
        grid: layout of the tokens.
        layer: index of the attention layer, from 0.
        depth: number of attention layers in the model.

    Raises:
        VicinalError: `heads` or `grid` is invalid.
    """

    per_offset: bool = True
    """Whether `scale` and `bias` are tables over offsets, or free per pair of patches."""
    free_table: bool = False
    """Whether the values over offsets are free parameters, which are interpolated to another grid."""
    without_formula: frozenset[str] = frozenset()
    """Those of `scale` and `bias` that a subclass overrides without `scale_at` or `bias_at`."""
    spec: str = ""
    """Spec that `build_prior` built the prior from."""
    spec_options: Mapping[str, Any] = MappingProxyType({})
    """Options passed to `build_prior` in addition to the spec."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)

        def overrides(name: str) -> bool:
            return getattr(cls, name) is not getattr(Prior, name)

        cls.without_formula = frozenset(x for x in ("scale", "bias") if overrides(x) and not overrides(f"{x}_at"))
        if not formula_is_older(cls):
            cls.quadratic_bias = Prior.quadratic_bias  # type: ignore[method-assign]

    def __init__(self, heads: int, grid: Grid, layer: int = 0, depth: int = 1) -> None:
        super().__init__()
        if not isinstance(heads, int) or heads < 1:
            raise VicinalError(f"heads must be a whole number >= 1, got {heads!r}")
        if not isinstance(grid, Grid):
            raise VicinalError(f"grid must be a Grid(height, width, prefix), got {grid!r}")
        self.heads, self.layer, self.depth = heads, layer, depth
        self.grid = grid
        self._cache = TokenCache()

    @property
    def device(self) -> torch.device | None:
        """Device of the parameters and buffers; None if there are none."""
        state = self._state()
        return state[0].device if state else None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the formula is computed: that of the parameters, at least fp32."""
        state = [x.dtype for x in self._state() if x.is_floating_point()]
        return torch.promote_types(state[0], torch.float32) if state else torch.float32

    def _state(self) -> list[Tensor]:
        """Returns parameters and buffers; `nn.Module.parameters` takes 10 microseconds, too long for single images."""
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
        """Returns the terms added to the logits by the prior's formula, as `scale_at`; None for 0."""
        return None

    def quadratic_bias(self) -> QuadraticBias | None:
        """Returns the bias as coefficients, if it is quadratic in the offset and there is no scale; else None."""
        return None

    def scale(self) -> Tensor | None:
        """Returns the factors of the logits; None for 1.

        `(heads or 1, 2h-1, 2w-1)` over the offsets of the grid, or `(heads or 1, patches, patches)`.
        """
        if type(self).scale_at is Prior.scale_at:
            return None
        return self.scale_at(*self.grid.offsets(self.device, self.dtype))

    def bias(self) -> Tensor | None:
        """Returns the terms added to the logits; shapes as for `scale`; None for 0."""
        if type(self).bias_at is Prior.bias_at:
            return None
        return self.bias_at(*self.grid.offsets(self.device, self.dtype))

    def values(self) -> ScaleBias:
        """Returns `(scale(), bias())` for every head, in full precision, regardless of autocast.

        On a CPU, factors below `smallest_factor` are 0, because products with them would be denormal numbers.
        """
        with full_precision(self.device or torch.device("cpu")):
            return self._for_every_head(self.scale(), self.bias())

    def cached_values(self) -> ScaleBias:
        """Returns `values()`, cached in inference."""
        return self.on(self.grid).cached_values()

    def at(self, offsets: Tensor, grid: Grid | None = None) -> ScaleBias:
        """Returns scale and bias at any offsets, each `(heads, *shape)` or None.

        >>> import torch, vicinal
        >>> prior = vicinal.build_prior("decay:gamma=0.5", heads=2, grid=vicinal.Grid(8, 8))
        >>> scale, bias = prior.at(torch.tensor([[0.0, 0.0], [0.5, -1.0]]))
        >>> bias.exp()
        tensor([[1.0000, 0.3536],
                [1.0000, 0.3536]])

        Args:
            offsets: rows and columns from query to key, in patches, whole or fractional: `(*shape, 2)`. A free table is
                interpolated; beyond its edge, its last value counts.
            grid: of the patches, to which free tables are stretched; by default the prior's.

        Raises:
            VicinalError: the shape is wrong, or the prior is not a function of the offset.
        """
        if offsets.shape[-1:] != (2,):
            raise VicinalError(f"offsets must be (*shape, 2), rows and columns, got shape {tuple(offsets.shape)}")
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
        """Returns scale and bias over offsets, each `(heads, 2h-1, 2w-1)` or None; None if they are free per pair."""
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
        """Returns this prior as it acts between queries and keys with positions of their own, for `attend`.

        Args:
            places: offsets of all pairs of a query and a key.
            grid: over which free tables are stretched; by default the prior's.
        """
        return PriorOnPairs(self, places, grid or self.grid)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cache": TokenCache()}  # keeps pickles and copies small

    def resize(self, grid: Grid, *, rescale: bool = False) -> "Prior":
        """Returns the same prior on another grid, as a new module.

        Args:
            grid: the new grid; its number of prefix tokens can differ too.
            rescale: scale widths with the grid, instead of keeping them in patches. Free tables always scale.
        """
        resized, before = copy.deepcopy(self), self.grid
        resized.grid = grid
        with torch.no_grad():
            resized._carry(before, rescale)
        return resized

    def _carry(self, before: Grid, rescale: bool) -> None:
        """Converts the parameters from the grid `before` to `self.grid`."""

    def extra_repr(self) -> str:
        """Returns heads and grid, for `print(model)`."""
        return f"heads={self.heads}, grid={self.grid}"


def flat_parameter(values: Tensor, requires_grad: bool = True) -> nn.Parameter:
    """Returns values as a 1-D parameter, which the common rule "no weight decay below 2-D" exempts from decay."""
    return nn.Parameter(values.detach().flatten().clone(memory_format=torch.contiguous_format), requires_grad)


def initial_values(prior: str, option: str, values: Values, shape: tuple[int, ...]) -> Tensor:
    """Returns an option's initial values as a tensor of `shape`.

    Args:
        prior: name of the prior, for the error message.
        option: name of the option.
        values: one number for all, one per row, or all of them.
        shape: of the result.

    Raises:
        VicinalError: the values do not broadcast to `shape`.
    """
    tensor = torch.as_tensor(values, dtype=torch.float32)
    if tensor.dim() == 1 and len(shape) == 2:
        tensor = tensor[:, None]
    try:
        return tensor.expand(shape)
    except RuntimeError:
        raise VicinalError(
            f"{prior}: {option} must be one number or of shape {shape}, got shape {tuple(tensor.shape)}"
        ) from None
