"""From a call of attention to where its tokens sit: heads, grid and prefix tokens, or why there is no grid."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from vicinal.attachment.finding import FOLDED, IN_TURN, Call, heads_third
from vicinal.errors import VicinalError
from vicinal.grid import Grid

__all__ = ["LeftAlone", "Site", "patch_queries", "place"]


MOST_PREFIX = 16  # class, distillation and register tokens that are looked for where a model does not declare them


@dataclass(frozen=True)
class Site:
    """An attention module that a prior can be attached to."""

    name: str
    call: Call
    heads: int
    heads_axis: int
    """-3 for logits `(..., heads, tokens, tokens)`, -4 for `(batch, heads, windows, tokens, tokens)`; or none, see
    `FOLDED` and `IN_TURN`."""
    windows: int
    """Sequences of an image: 1 where attention is global."""
    grid: Grid
    padding: Tensor | None = None
    """Which patches are none of the image, `(windows, patches)`; None if that was not seen, from one image."""

    @property
    def module(self) -> nn.Module:
        """The module that computes it."""
        return self.call.module

    @property
    def place(self) -> str:
        """The grid, and how many of it there are."""
        return f"{self.grid}" if self.windows == 1 else f"{self.windows} windows of {self.grid}"


@dataclass(frozen=True)
class LeftAlone:
    """An attention module that no prior can be attached to."""

    name: str
    module: nn.Module
    reason: str
    logits: tuple[int, ...]
    """Shape of its logits, `(..., queries, keys)`."""


def place(model: nn.Module, calls: Sequence[Call], batch: int, image: tuple[int, int]) -> list[Site | LeftAlone]:
    """Where the tokens of each attention module sit, in the order in which the modules run.

    Args:
        model: the model that ran.
        calls: what it computed.
        batch: number of images that it was given.
        image: their height and width.
    """
    names = {module: name for name, module in model.named_modules()}
    by_module: dict[nn.Module, list[Call]] = {}
    for call in calls:
        by_module.setdefault(call.module, []).append(call)
    found: list[Site | LeftAlone] = []
    for module, its_calls in by_module.items():
        name = names[module] or type(module).__name__
        try:
            found.append(_place(name, model, its_calls, batch, image))
        except VicinalError as error:
            found.append(LeftAlone(name, module, str(error), its_calls[0].logits))
    return found


CHANNELS = re.compile("channel|crosscovariance|xca", re.IGNORECASE)


def _place(name: str, model: nn.Module, calls: list[Call], batch: int, image: tuple[int, int]) -> Site:
    if CHANNELS.search(type(calls[0].module).__name__):
        raise VicinalError("it attends over channels, which have no places")
    square = [call for call in calls if call.queries is not None and call.logits[-1] == call.logits[-2]]
    if not square:
        shape = calls[0].logits
        if shape[-1] != shape[-2]:
            raise VicinalError(f"{shape[-2]} queries see {shape[-1]} keys, which have no common grid")
        raise VicinalError("its weights are no softmax of a product of queries and keys")
    if len({call.logits for call in square}) > 1:
        raise VicinalError(f"it runs on sequences of {_join(call.logits[-1] for call in square)} tokens in one pass")
    call = square[0]
    heads, axis, sequences = _heads(call, len(square))
    if sequences % batch:
        raise VicinalError(f"its {sequences} sequences do not divide among {batch} images")
    windows, tokens = sequences // batch, call.logits[-1]
    still = None if batch == 1 else _still(call, heads, axis, windows, batch)
    if windows > 1:
        grid = _window_grid(call.module, tokens, image)
    else:
        padded = None if still is None else _padded_window(call.module, still[0])
        grid = padded or _global_grid(model, tokens, image)
    if grid.patches == 1:
        raise VicinalError("its grid is a single patch, which has no neighbours")
    padding = None if still is None else still[:, grid.prefix :]
    return Site(name, call, heads, axis, windows, grid, padding)


def _still(call: Call, heads: int, heads_axis: int, windows: int, images: int) -> Tensor:
    """Tokens that are the same whatever the image, `(windows, tokens)`: prefix tokens of the first layer; and padding,
    since models pad with zeros, which all have the same queries.
    """
    assert call.queries is not None
    queries = heads_third(call.queries, heads, heads_axis)
    queries = queries.reshape(images, windows, -1, *queries.shape[-2:])
    return (queries == queries[:1]).all(0).all(-1).all(1).cpu()


def _padded_window(module: nn.Module, still: Tensor) -> Grid | None:
    """The grid of a single window that an image, smaller than it, was padded to."""
    try:
        grid = _declared_window(module, len(still)) or Grid.from_tokens(len(still))
    except VicinalError:
        return None
    real = ~still.view(grid.height, grid.width)
    rows, columns = int(real.any(1).sum()), int(real.any(0).sum())
    padded = 0 < rows * columns == int(real.sum()) < len(still) and bool(real[:rows, :columns].all())
    return grid if padded else None


def patch_queries(site: Site, call: Call, images: int) -> Tensor:
    """Queries of a call of a site's, of patches only: `(images, windows, heads, patches, dim)`."""
    assert call.queries is not None
    queries = heads_third(call.queries, site.heads, site.heads_axis)
    return queries.reshape(images, site.windows, -1, site.grid.tokens, queries.shape[-1])[..., site.grid.prefix :, :]


def _heads(call: Call, calls: int) -> tuple[int, int, int]:
    """Number of heads, their axis, and sequences in the batch; the module computes attention `calls` times."""
    shape = call.logits
    if len(shape) == 4:
        return shape[1], -3, shape[0]
    known = next(
        (getattr(call.module, name) for name in ("num_heads", "heads", "n_heads") if hasattr(call.module, name)), None
    )
    if len(shape) == 3 and calls > 1 and known == calls:
        return calls, IN_TURN, shape[0]
    if len(shape) == 3 and (known is None or shape[0] % known == 0):
        return known or 1, FOLDED, shape[0] // (known or 1)
    if len(shape) == 5 and known == shape[1] and (known != shape[2] or shape[2] == 1):
        return shape[1], -4, shape[0] * shape[2]
    if len(shape) == 5 and known == shape[2] and known != shape[1]:
        return shape[2], -3, shape[0] * shape[1]
    raise VicinalError(f"which axis of its logits {shape} counts heads cannot be told")


def _global_grid(model: nn.Module, tokens: int, image: tuple[int, int]) -> Grid:
    """One sequence per image: the declared prefix tokens, or the fewest that leave a grid of the image's aspect."""
    declared = getattr(model, "num_prefix_tokens", None)
    for prefix in (declared, 0) if isinstance(declared, int) else range(MOST_PREFIX + 1):
        try:
            grid = Grid.from_tokens(tokens, prefix=prefix, aspect=image[0] / image[1])
        except VicinalError:
            continue
        if prefix <= 2 or declared or (image[0] % grid.height == 0 and 2 * prefix < grid.patches):
            return grid
    raise VicinalError(f"its {tokens} tokens form no grid of the image's {image[0]} x {image[1]}")


def _window_grid(module: nn.Module, tokens: int, image: tuple[int, int]) -> Grid:
    """Several sequences per image: the grid is the window, a square, or of the image's aspect if it is dilated."""
    declared = _declared_window(module, tokens)
    if declared is not None:
        return declared
    for aspect in (1, image[0] / image[1]):
        try:
            return Grid.from_tokens(tokens, aspect=aspect)
        except VicinalError:
            continue
    raise VicinalError(f"its windows of {tokens} tokens are neither square nor of the image's shape")


def _declared_window(module: nn.Module, tokens: int) -> Grid | None:
    """The window that a module says it has, if it is that of its tokens."""
    size = getattr(module, "window_size", None)
    if isinstance(size, tuple | list) and len(size) == 2 and size[0] * size[1] == tokens:
        return Grid(int(size[0]), int(size[1]))
    return None


def _join(numbers: Iterable[int]) -> str:
    return " and ".join(str(number) for number in sorted(set(numbers)))
