"""What every prior is: a pair `(scale, bias)` for the attention logits, over offsets and over tokens."""

import contextlib
import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from vicinal.errors import VicinalError
from vicinal.grid import Grid

__all__ = ["Prior", "ScaleBias", "Values"]

ScaleBias = tuple[Tensor | None, Tensor | None]
Values = float | Sequence[float] | Sequence[Sequence[float]] | Tensor

CACHED = 2**20  # numbers of a prior over tokens that are kept between calls in inference
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
    spec: str = ""
    """What `build_prior` made it from."""
    spec_options: Mapping[str, Any] = MappingProxyType({})
    """The options given to `build_prior` next to the spec."""

    def __init__(self, heads: int, grid: Grid, layer: int = 0, depth: int = 1) -> None:
        super().__init__()
        if not isinstance(heads, int) or heads < 1:
            raise VicinalError(f"a prior needs heads as a whole number >= 1, given {heads!r}")
        if not isinstance(grid, Grid):
            raise VicinalError(f"a prior needs a Grid(height, width, prefix), given {grid!r}")
        self.heads, self.layer, self.depth = heads, layer, depth
        self.grid = grid
        self._cache: tuple[list[int | float | str | Grid], list[Tensor], ScaleBias] | None = None

    @property
    def device(self) -> torch.device | None:
        """Where the parameters are; None if there are none, as for `none`."""
        state = self._state()
        return state[0].device if state else None

    def _state(self) -> list[Tensor]:
        """Returns parameters and buffers. `nn.Module.parameters` takes 10 microseconds, much for one image."""
        modules = self.modules() if self._modules else (self,)
        return [
            x for module in modules for x in (*module._parameters.values(), *module._buffers.values()) if x is not None
        ]

    def scale(self) -> Tensor | None:
        """What multiplies the logits: `(heads or 1, 2h-1, 2w-1)`, or `(heads or 1, patches, patches)`; None for 1."""
        return None

    def bias(self) -> Tensor | None:
        """What is added to the logits; shapes as for `scale`; None for 0."""
        return None

    def values(self) -> ScaleBias:
        """Returns `(scale(), bias())` for every head, in full precision whatever the autocast around it.

        On a CPU, factors below `smallest_factor` are 0, because products with them would be denormal numbers.
        """
        with full_precision(self.device or torch.device("cpu")):
            scale, bias = self.scale(), self.bias()
        return (
            None if scale is None else zero_tiny_factors(scale).expand(self.heads, -1, -1),
            None if bias is None else bias.expand(self.heads, -1, -1),
        )

    def table(self) -> ScaleBias | None:
        """Scale and bias over offsets, each `(heads, 2h-1, 2w-1)` or None; None if they are free per pair."""
        return self.values() if self.per_offset else None

    def pairs(self) -> ScaleBias:
        """Scale and bias over pairs of patches, each `(heads, patches, patches)` or None."""
        scale, bias = self.values()
        if not self.per_offset:
            return scale, bias
        return None if scale is None else self.grid.unfold(scale), None if bias is None else self.grid.unfold(bias)

    def forward(self) -> ScaleBias:
        """Scale and bias over tokens, each `(heads, tokens, tokens)` or None; 1 and 0 with a prefix token."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or self.heads * self.grid.tokens**2 > CACHED:
            return self._over_tokens()
        # Inference of a few images spends more on rebuilding a prior than on attention, so the last one is kept with a
        # copy of what it came from. Comparing values, not version counters, sees writes through `.data` too.
        state = self._state()
        if any(values.device.type != "cpu" for values in state):  # comparing would wait for the device
            return self._over_tokens()
        modules = self.modules() if self._modules else (self,)
        held: list[object] = [value for module in modules for value in vars(module).values()]
        plain = [value for value in held if isinstance(value, int | float | str | Grid)]
        if self._cache is None or self._cache[0] != plain or not _equal(self._cache[1], state):
            self._cache = plain, [values.clone() for values in state], self._over_tokens()
        return self._cache[2]

    def _over_tokens(self) -> ScaleBias:
        scale, bias = self.pairs()
        return (
            None if scale is None else self.grid.add_prefix(scale, 1.0),
            None if bias is None else self.grid.add_prefix(bias, 0.0),
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cache": None}  # pickles and copies stay small

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


def _equal(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    return all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


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
