"""What the modules of a model return, and how each output can be a map of the image.

The model runs, and the outputs of its modules are recorded. A feature map is an output of `(images, channels, rows,
columns)`, `(images, rows, columns, channels)`, or `(images, tokens, channels)`, whose tokens are a grid of the image's
shape and some tokens without a place.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, nn

from vicinal.cells import Cells
from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.inspection.model_runner import ModelRunner
from vicinal.inspection.sites import AttentionSite

__all__ = ["FeatureMap", "OutputLayout", "list_maps"]


class OutputLayout(Enum):
    """What the axes of a module's output count."""

    TOKENS = "images, tokens, channels"
    CHANNELS_FIRST = "images, channels, rows, columns"
    CHANNELS_LAST = "images, rows, columns, channels"


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """A module's output over a grid of patches."""

    name: str
    module: nn.Module
    call: int
    """Which of the module's calls in a run, from 1: a module can run several times."""
    layout: OutputLayout
    grid: Grid
    """Rows and columns, and the number of tokens without a place."""
    tokens: tuple[int, ...] = ()
    """Token of each patch, row by row, as far as known, if the layout is `TOKENS`."""
    at: tuple[int, int] = (0, 0)
    """Row and column of the patch that is asked for."""
    token: int = 0
    """Token of that patch, if the layout is `TOKENS`."""
    stem: tuple[int, int] = (1, 1)
    """Rows and columns of the finest grid among the blocks up to here."""

    def of_patch(self, output: Tensor) -> Tensor:
        """Returns the channels of the patch, `(images, channels)`."""
        row, column = self.at
        if self.layout is OutputLayout.TOKENS:
            return output[:, self.token]
        return output[:, :, row, column] if self.layout is OutputLayout.CHANNELS_FIRST else output[:, row, column]

    def output(self, runner: ModelRunner, images: Tensor) -> Tensor:
        """Returns the module's output for a batch of images; the model runs no further than that."""
        left, found = self.call, []

        def stop(module: nn.Module, _: Any, output: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                found.append(_first_tensor(output, len(images)))
                raise _Reached

        hook = self.module.register_forward_hook(stop)
        try:
            runner(images)
        except _Reached:
            pass
        finally:
            hook.remove()
        if not found or found[0] is None:
            raise VicinalError(f"{self.name} did not run this time; name a layer that always does")
        return found[0]


class _Reached(BaseException):
    """Stops a run behind the layer. Not an `Exception`, so that no model and no runner handles it as a failure."""


def list_maps(runner: ModelRunner, sites: Sequence[AttentionSite]) -> dict[str, list[FeatureMap]]:
    """Returns the feature maps that each module's output can be, by name, in the order in which modules end.

    Args:
        runner: the model, in evaluation mode, and the images that it takes; it runs once on noise.
        sites: attention of the model; its cells say where the tokens of a sequence are.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    calls: dict[str, int] = {}

    def note(name: str, output: Any) -> None:
        tensor = _first_tensor(output, 2)
        calls[name] = calls.get(name, 0) + 1
        shapes.pop(name, None)  # the last call counts, also for the order
        if tensor is not None:
            shapes[name] = tuple(tensor.shape)

    with _watching(runner.model, note):
        runner(runner.noise(2))
    sequences: dict[int, Cells] = {}
    for site in sites:
        if isinstance(site.keys, Cells) and site.windows == 1:
            sequences.setdefault(site.keys.tokens, site.keys)
    declared = getattr(runner.model, "num_prefix_tokens", 0)
    prefixes = list(dict.fromkeys([*([declared] if isinstance(declared, int) else []), 0, 1, 2]))
    modules, maps = dict(runner.model.named_modules()), {}
    for name, shape in shapes.items():
        readings = list(_readings(shape, runner.image, sequences, prefixes)) if shape and shape[0] == 2 else []
        if readings:
            maps[name] = [FeatureMap(name, modules[name], calls[name], *reading) for reading in readings]
    return maps


@contextmanager
def _watching(model: nn.Module, note: Any) -> Iterator[None]:
    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: note(name, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _first_tensor(output: Any, images: int) -> Tensor | None:
    """Returns the first tensor of an output that has so many images, or else the first; None if there is none."""
    tensors = list(_tensors(output))
    return next((tensor for tensor in tensors if len(tensor) == images), tensors[0] if tensors else None)


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yields all tensors of an output; TNT's first are of the pixels inside patches."""
    if isinstance(output, Tensor) and output.dim():
        yield output
    for part in output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ():
        yield from _tensors(part)


def _readings(
    shape: tuple[int, ...], image: tuple[int, int], sequences: Mapping[int, Cells], prefixes: Sequence[int]
) -> Iterator[tuple[OutputLayout, Grid, tuple[int, ...]]]:
    """Yields layout, grid and tokens of the patches: how an output of a shape can be a map of the image.

    Args:
        shape: of the output.
        image: height and width.
        sequences: cells of the model's global attention, by number of tokens.
        prefixes: numbers of prefix tokens to try for other sequences.
    """
    if len(shape) == 4:
        if _like(shape[2:], image):
            yield OutputLayout.CHANNELS_FIRST, Grid(*shape[2:]), ()
        if _like(shape[1:3], image):
            yield OutputLayout.CHANNELS_LAST, Grid(*shape[1:3]), ()
    elif len(shape) == 3 and shape[1] in sequences:
        cells = sequences[shape[1]]
        prefix = int((cells.index[0] < 0).sum())
        tokens = cells.index[0].argsort(stable=True)[prefix:].tolist()
        yield OutputLayout.TOKENS, Grid(cells.rows, cells.columns, prefix), tuple(tokens)
    elif len(shape) == 3:
        for prefix in prefixes:
            try:
                grid = Grid.from_tokens(shape[1], prefix=prefix, aspect=image[0] / image[1])
            except VicinalError:
                continue
            yield OutputLayout.TOKENS, grid, tuple(range(prefix, shape[1]))
            return


def _like(grid: Sequence[int], image: tuple[int, int]) -> bool:
    """Returns whether a grid has the image's shape, up to a row or column that rounding adds."""
    smaller = 1 <= grid[0] <= image[0] and 1 <= grid[1] <= image[1]
    return smaller and abs(grid[0] * image[1] - grid[1] * image[0]) <= max(image)
