"""Where images, windows and heads are in the leading axes of the logits."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from vicinal.errors import VicinalError

__all__ = ["Factor", "HeadLayout"]


class Factor(Enum):
    """What an axis counts; an axis may count several of them at once, as `batch * heads` does."""

    IMAGES = "images"
    WINDOWS = "windows"
    HEADS = "heads"


@dataclass(frozen=True)
class HeadLayout:
    """What each leading axis of logits `(..., queries, keys)` counts."""

    axes: tuple[tuple[tuple[Factor, int], ...], ...]
    """For each leading axis its factors and their sizes, slowest first; the size of `IMAGES` is that of a probe."""
    turns: int = 1
    """How many attentions a module computes one after another, each for one head; 1 where heads have axes."""
    shared: tuple[int, ...] | None = None
    """Which head of the prior acts on each head of the logits, if several heads share one, as the two maps of
    differential attention do."""

    @property
    def logit_heads(self) -> int:
        """Number of heads along the axes of the logits."""
        return self._count(Factor.HEADS)

    @property
    def heads(self) -> int:
        """Number of heads that a prior must have."""
        return max(self.shared) + 1 if self.shared is not None else self.logit_heads * self.turns

    @property
    def windows(self) -> int:
        """Number of windows of an image; 1 where attention is global."""
        return self._count(Factor.WINDOWS)

    def apply(
        self, operation: Callable[[Tensor, Tensor], Tensor], logits: Tensor, values: Tensor, turn: int = 0
    ) -> Tensor:
        """Returns `operation(logits, values)`, in the shape of the logits.

        Args:
            operation: elementwise, such as `torch.mul`.
            logits: `(..., queries, keys)`.
            values: of a prior, `(heads, queries, keys)`, or `(images, heads, queries, keys)` of global attention.
            turn: which of the heads, where they take turns.
        """
        if self.turns > 1:
            values = values[..., turn : turn + 1, :, :]
        if self.shared is not None:
            values = values[..., list(self.shared), :, :]
        if values.dim() == 4:
            images = self.standard(logits)
            if len(values) not in (1, len(images)):
                raise VicinalError(f"a prior with places of {len(values)} images got logits of {len(images)} images")
            return self.restore(operation(images, values[:, None]), tuple(logits.shape[:-2]))
        if self._heads_stand_alone:  # broadcast; splits of other axes do not matter
            sizes = [_size(axis) if self._holds_heads(axis) else 1 for axis in self.axes]
            first = next((place for place, size in enumerate(sizes) if size > 1), len(sizes))
            return operation(logits, values.view(*sizes[first:], *values.shape[-2:]))
        split, sizes = [], []  # only axes that hold heads: there may be more or fewer windows than when it was found
        for axis, length in zip(self.axes, logits.shape, strict=False):
            factors = axis if self._holds_heads(axis) else ()
            split += [-1 if factor is Factor.IMAGES else size for factor, size in factors] or [length]
            sizes += [size if factor is Factor.HEADS else 1 for factor, size in factors] or [1]
        parts = logits.reshape(*split, *logits.shape[-2:])
        return operation(parts, values.view(*sizes, *values.shape[-2:])).reshape(logits.shape)

    def expand(self, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Returns values `(windows or 1, heads or 1, queries, keys)` as logits of `shape`, the same for every image."""
        windows, heads = self._sizes(Factor.WINDOWS), self._sizes(Factor.HEADS)
        if self.shared is not None and values.shape[1] > 1:
            values = values[:, list(self.shared)]
        values = values.expand(math.prod(windows), math.prod(heads), -1, -1)
        values = values.reshape(*windows, *heads, *values.shape[-2:])
        taken = {Factor.WINDOWS: 0, Factor.HEADS: len(windows)}
        order = []
        for factor, _ in self._factors:
            if factor is not Factor.IMAGES:
                order.append(taken[factor])
                taken[factor] += 1
        values = values.permute(*order, -2, -1)
        for place, (factor, _) in enumerate(self._factors):
            if factor is Factor.IMAGES:
                values = values.unsqueeze(place)
        images = math.prod(shape[:-2]) // math.prod(windows) // math.prod(heads)
        sizes = [images if factor is Factor.IMAGES else size for factor, size in self._factors]
        return values.expand(*sizes, *values.shape[-2:]).reshape(shape)

    def standard(self, x: Tensor) -> Tensor:
        """Returns a tensor with the leading axes of the logits, `(..., m, n)`, as `(images, windows, heads, m, n)`."""
        order = [place for kind in Factor for place, (factor, _) in enumerate(self._factors) if factor is kind]
        split = self._split(x).permute(*order, -2, -1)
        windows, heads = self.windows, self.logit_heads
        return split.reshape(-1, windows, heads, *split.shape[-2:])

    def restore(self, x: Tensor, leading: tuple[int, ...]) -> Tensor:
        """Returns `(images, windows, heads, m, n)` with the leading axes of the logits, `(*leading, m, n)`."""
        kinds = [kind for kind in Factor for factor, _ in self._factors if factor is kind]
        sizes = [size for kind in Factor for factor, size in self._factors if factor is kind]
        sizes = [-1 if kind is Factor.IMAGES else size for kind, size in zip(kinds, sizes, strict=True)]
        order = [place for kind in Factor for place, (factor, _) in enumerate(self._factors) if factor is kind]
        back = [order.index(place) for place in range(len(order))]
        return x.reshape(*sizes, *x.shape[-2:]).permute(*back, -2, -1).reshape(*leading, *x.shape[-2:])

    @property
    def is_batch_by_heads(self) -> bool:
        """Whether the leading axes are `(batch, heads)`, as `attend` takes them."""
        return len(self.axes) == 2 and self._heads_stand_alone and not self._holds_heads(self.axes[0])

    def _split(self, x: Tensor) -> Tensor:
        """Returns a tensor with an axis for every factor; there may be more or fewer images than when it was found."""
        sizes = [-1 if factor is Factor.IMAGES else size for factor, size in self._factors]
        return x.reshape(*sizes, *x.shape[-2:])

    @property
    def _factors(self) -> list[tuple[Factor, int]]:
        return [factor for axis in self.axes for factor in axis]

    @property
    def _heads_stand_alone(self) -> bool:
        """Whether no axis counts heads together with something else."""
        return all(all(factor is Factor.HEADS for factor, _ in axis) for axis in self.axes if self._holds_heads(axis))

    @staticmethod
    def _holds_heads(axis: tuple[tuple[Factor, int], ...]) -> bool:
        return any(factor is Factor.HEADS and size > 1 for factor, size in axis)

    def _sizes(self, kind: Factor) -> list[int]:
        return [size for factor, size in self._factors if factor is kind]

    def _count(self, kind: Factor) -> int:
        return math.prod(self._sizes(kind))


def _size(axis: tuple[tuple[Factor, int], ...]) -> int:
    return math.prod([size for _, size in axis])  # Dynamo does not trace a generator here


def split_heads(layout: HeadLayout, responses: Tensor) -> Tensor:
    """Returns responses with an axis for windows and one for heads.

    Args:
        layout: of the logits.
        responses: `(ramps, *leading, tokens)`, where the leading axes are those of the logits without images.

    Returns:
        `(ramps, windows, heads, tokens)`.
    """
    factors = [factor for axis in layout.axes for factor in axis if factor[0] is not Factor.IMAGES]
    split = responses.reshape(len(responses), *(size for _, size in factors), responses.shape[-1])
    kinds = Factor.WINDOWS, Factor.HEADS
    order = [place + 1 for kind in kinds for place, (factor, _) in enumerate(factors) if factor is kind]
    return split.permute(0, *order, -1).reshape(len(responses), layout.windows, layout.logit_heads, responses.shape[-1])
