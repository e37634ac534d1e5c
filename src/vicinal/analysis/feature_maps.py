"""Which layer of a model is meant, and which of its numbers belong to a patch of the image.

Nothing is asked of a model but to run: its modules' outputs are looked at while it does. A feature map is an output of
`(images, channels, rows, columns)`, `(images, rows, columns, channels)`, or `(images, tokens, channels)`, whose tokens
are a grid of the image's shape behind class, distillation and register tokens.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vicinal.attachment.finding import calls_of
from vicinal.attachment.placing import Site, place
from vicinal.attachment.running import Runner, quietly
from vicinal.errors import VicinalError, unknown
from vicinal.grid import Grid

__all__ = ["FeatureMap", "find_map"]

Layout = Literal["tokens", "channels first", "channels last"]
CONTAINERS = (nn.Sequential, nn.ModuleList)
LAYERS = (nn.Linear, nn.Conv2d)
DISTURBED = 8  # images, at most, that are looked at with a patch as it is and with another in its place
OTHER = 0.5  # a place that changes less than so much of the one that changes most is not the patch's
CLEAR = 4.0  # times the median: what the patch's token changes by at least
ROUNDING = 1e-5  # of its usual change: a mean over channels that changes less does not change
SAME = 1e-3  # of the largest value: differences between two runs that the order of sums may make


@dataclass(frozen=True)
class FeatureMap:
    """A layer's output over a grid of patches."""

    name: str
    module: nn.Module
    turn: int
    """Which of its module's calls in a run, from 1: a module may be used again."""
    layout: Layout
    grid: Grid
    at: tuple[int, int] = (0, 0)
    """Row and column of the patch."""
    token: int = 0
    """Where the patch is among the tokens, if the layout is `tokens`."""
    stem: tuple[int, int] = (1, 1)
    """Rows and columns of the finest grid that a block up to here has."""

    def of_patch(self, output: Tensor) -> Tensor:
        """The patch's channels, `(images, channels)`."""
        row, column = self.at
        if self.layout == "tokens":
            return output[:, self.token]
        return output[:, :, row, column] if self.layout == "channels first" else output[:, row, column]

    def output(self, run: Runner, images: Tensor) -> Tensor:
        """What the layer gives for a batch of images; the model runs no further than that."""
        left, found = self.turn, []

        def stop(module: nn.Module, _: Any, output: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                found.append(_tensor(output, len(images)))
                raise _Reached

        hook = self.module.register_forward_hook(stop)
        try:
            run(images)
        except _Reached:
            pass
        finally:
            hook.remove()
        if not found or found[0] is None:
            raise VicinalError(f"{self.name} did not run this time; name a layer that always does")
        return found[0]


class _Reached(BaseException):
    """Nothing behind the layer needs to run. No `Exception`, so that nobody on the way takes it for a failure."""


def find_map(run: Runner, layer: int | str | None = None, at: tuple[int, int] | None = None) -> FeatureMap:
    """Find a layer, and a patch in its output.

    Args:
        run: the model, and the images that it takes.
        layer: index of a block, from 0 or, below zero, from the end; or any module's name. By default the last block.
            Blocks are what attention repeats in; in a network without attention, what its sequences and lists hold.
        at: row and column of the patch; by default `(rows // 2, columns // 2)`.
    """
    with quietly(run.model), torch.no_grad():
        maps, attention = _look(run)
        blocks = _blocks(run.model, maps, attention)
        chosen = _laid_out(run, maps[_choose(run.model, maps, blocks, layer)])
        height, width = chosen.grid.height, chosen.grid.width
        row, column = (height // 2, width // 2) if at is None else _pair(at)
        if not (0 <= row < height and 0 <= column < width):
            raise VicinalError(
                f"{chosen.name} has a grid of {height} x {width} patches; at is a row from 0 to {height - 1} and a "
                f"column from 0 to {width - 1}, given {row} {column}"
            )
        order = list(maps)
        before = [name for name in blocks if order.index(name) < order.index(chosen.name)] + [chosen.name]
        stem = max((maps[name][0].grid for name in before), key=lambda grid: grid.patches)
        chosen = replace(chosen, at=(row, column), stem=(stem.height, stem.width))
        output = chosen.output(run, run.noise(2))
        _refuse_chance(run, chosen, output)
        if chosen.layout == "tokens":
            chosen = _with_token(run, chosen, _least_mixed(chosen, maps, before))
        else:
            _refuse_other_axes(run, chosen)
        _refuse_rounding(chosen, output)
        return chosen


def _pair(at: Any) -> tuple[int, int]:
    try:
        row, column = at
        return operator.index(row), operator.index(column)
    except (TypeError, ValueError):
        raise VicinalError(f"at is a patch's row and column, two whole numbers such as (3, 4); given {at!r}") from None


def _look(run: Runner) -> tuple[dict[str, list[FeatureMap]], list[str]]:
    """Every module's feature map, in the layouts that it could have, in the order in which they are done; and the
    names of modules in which patches attend.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    turns: dict[str, int] = {}

    def note(name: str, output: Any) -> None:
        tensor = _tensor(output, 2)
        turns[name] = turns.get(name, 0) + 1
        shapes.pop(name, None)  # the last call counts, also for the order
        if tensor is not None:
            shapes[name] = tuple(tensor.shape)

    with _watching(run.model, note):
        calls = calls_of(run.model, lambda: run(run.noise(2)))
    sites = place(run.model, calls, 2, run.image)
    prefixes = [site.grid.prefix for site in sites if isinstance(site, Site) and site.windows == 1]
    declared = getattr(run.model, "num_prefix_tokens", 0)
    prefixes = list(dict.fromkeys([*prefixes, *([declared] if isinstance(declared, int) else []), 0, 1, 2]))
    modules, maps = dict(run.model.named_modules()), {}
    for name, shape in shapes.items():
        readings = list(_readings(shape, run.image, prefixes)) if shape and shape[0] == 2 else []
        if readings:
            maps[name] = [FeatureMap(name, modules[name], turns[name], *reading) for reading in readings]
    alone = {call.module for call in calls if call.logits[-2] == 1}  # a class token that looks at the patches
    return maps, [site.name for site in sites if site.module not in alone]


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


def _tensor(output: Any, images: int) -> Tensor | None:
    """The first tensor that a module gives for so many images, which is the one that goes on."""
    tensors = list(_tensors(output))
    return next((tensor for tensor in tensors if len(tensor) == images), tensors[0] if tensors else None)


def _tensors(output: Any) -> Iterator[Tensor]:
    """All tensors of an output; TNT's first are of the pixels inside of patches."""
    if isinstance(output, Tensor) and output.dim():
        yield output
    for part in output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ():
        yield from _tensors(part)


def _readings(shape: tuple[int, ...], image: tuple[int, int], prefixes: Sequence[int]) -> Iterator[tuple[Layout, Grid]]:
    """How an output of a shape can be a map of the image."""
    if len(shape) == 4:
        if _like(shape[2:], image):
            yield "channels first", Grid(*shape[2:])
        if _like(shape[1:3], image):
            yield "channels last", Grid(*shape[1:3])
    elif len(shape) == 3:
        for prefix in prefixes:
            try:
                yield "tokens", Grid.from_tokens(shape[1], prefix=prefix, aspect=image[0] / image[1])
            except VicinalError:
                continue
            return


def _like(grid: Sequence[int], image: tuple[int, int]) -> bool:
    """Whether a grid has the image's shape, up to a row or column that rounding adds."""
    smaller = 1 <= grid[0] <= image[0] and 1 <= grid[1] <= image[1]
    return smaller and abs(grid[0] * image[1] - grid[1] * image[0]) <= max(image)


def _blocks(model: nn.Module, maps: Mapping[str, Any], attention: Sequence[str]) -> list[str]:
    """Names of the blocks that give a feature map, in the order in which they run."""
    blocks = {_block_of(model, name, maps) for name in attention} or set(_held(model, "", False, maps))
    several = {name for name in blocks if name in maps and maps[name][0].grid.patches > 1}
    return [name for name in maps if name in (several or blocks)]  # nothing behind pooling, unless there is no more


def _block_of(model: nn.Module, attention: str, maps: Mapping[str, Any]) -> str:
    """The block that an attention module is part of: what a sequence or list holds, with an MLP beside attention."""
    modules, parts = dict(model.named_modules()), attention.split(".")
    around = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    held = [name for name in around if name in maps and isinstance(modules[name.rpartition(".")[0]], CONTAINERS)]
    inside = set(modules[attention].modules())
    whole = [name for name in held if any(isinstance(m, LAYERS) for m in set(modules[name].modules()) - inside)]
    return next((name for name in (*whole, *held, *around[1:]) if name in maps), attention)


def _held(module: nn.Module, name: str, in_container: bool, maps: Mapping[str, Any]) -> Iterator[str]:
    """Modules that sequences and lists hold, those inside of another such left out."""
    for own, child in module.named_children():
        full = f"{name}.{own}" if name else own
        if isinstance(child, CONTAINERS):
            yield from _held(child, full, True, maps)
        elif (in_container or isinstance(module, CONTAINERS)) and full in maps:
            yield full
        else:
            yield from _held(child, full, False, maps)


def _choose(model: nn.Module, maps: Mapping[str, Any], blocks: Sequence[str], layer: int | str | None) -> str:
    """The name of the layer that is meant."""
    kind = type(model).__name__
    if isinstance(layer, str):
        modules = dict(model.named_modules())
        if layer in maps:
            return layer
        if layer in modules and layer:
            raise VicinalError(
                f"{layer} of {kind} gives no map of the image's patches; blocks that do: {_listed(blocks)}"
            )
        raise unknown("layer", layer, blocks or maps)
    if not blocks:
        others = f"; name a module that does: {_listed(list(maps))}" if maps else ""
        raise VicinalError(f"no block of {kind} gives a map of the image's patches{others}")
    try:
        index = -1 if layer is None else operator.index(layer)
        return blocks[index]
    except (IndexError, TypeError):
        raise VicinalError(
            f"{kind} has no layer {layer}: it has {len(blocks)} blocks, {_listed(blocks)}; "
            f"give an index from 0 to {len(blocks) - 1}, or a module's name"
        ) from None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} to {names[-1]}" if names else "none"


def _laid_out(run: Runner, readings: Sequence[FeatureMap]) -> FeatureMap:
    """Which reading of an output is right: the one in which a disturbed patch changes the fewest places."""
    if len(readings) == 1:
        return readings[0]
    grid = readings[0].grid
    change = _change(run, replace(readings[0], at=(grid.height // 2, grid.width // 2)), DISTURBED)
    peaks = [float(change.sum(0 if each.layout == "channels first" else -1).max()) for each in readings]
    return readings[peaks.index(max(peaks))]


def _refuse_chance(run: Runner, chosen: FeatureMap, output: Tensor) -> None:
    """Refuse a layer that draws at random, also in evaluation, as models do that are trained by masking."""
    again = chosen.output(run, run.noise(2)[:1])
    if not bool(((output[:1] - again).abs() <= SAME * output.abs().max()).all()):
        raise VicinalError(
            f"{chosen.name} gives another output each time for the same images, so patches have no place in it; "
            "switch off what the model draws at random, such as masking"
        )


def _refuse_rounding(chosen: FeatureMap, output: Tensor) -> None:
    """Refuse a patch whose mean channel is the same whatever the image, so that its gradient is rounding."""
    one, other = chosen.of_patch(output).cpu().double()
    change = one - other
    usual = (
        float(change.square().mean().sqrt()) / len(change) ** 0.5
    )  # of a mean of channels that have nothing in common
    if float(change.mean().abs()) < max(ROUNDING, 4 * torch.finfo(output.dtype).eps) * usual:
        raise VicinalError(
            f"the mean channel of {chosen.name} is the same for every image, as behind a norm whose weights are all "
            "alike, so its gradient is only rounding; name a layer in front of that norm, or take trained weights"
        )


def _least_mixed(
    chosen: FeatureMap, maps: Mapping[str, Sequence[FeatureMap]], before: Sequence[str]
) -> list[FeatureMap]:
    """The same tokens where the image is mixed least: the first block that has them, and what is done first in it."""
    alike = {name: each for name, (each, *_) in maps.items() if (each.layout, each.grid) == ("tokens", chosen.grid)}
    block = next(name for name in before if name in alike)
    inside = next(each for name, each in alike.items() if f"{name}.".startswith(f"{block}."))
    return [replace(each, at=chosen.at) for each in (alike[block], inside)]


def _with_token(run: Runner, chosen: FeatureMap, least_mixed: Sequence[FeatureMap]) -> FeatureMap:
    """Which token is the patch's: the one that changes where the patch's pixels are disturbed.

    Not every model holds its tokens row by row: Hiera does not.
    """
    grid, (row, column) = chosen.grid, chosen.at
    patch = row * grid.width + column
    rows, columns = torch.arange(grid.height)[:, None], torch.arange(grid.width)
    far = (((rows - row).abs() > 1) | ((columns - column).abs() > 1)).flatten()  # patches may overlap their neighbours
    for first in least_mixed:
        for images in (1, DISTURBED):  # one is enough for most models
            change = _change(run, first, images).sum(1)[grid.prefix :]
            others = change[far].median() if bool(far.any()) else 0
            if change[patch] >= OTHER * change.max() and change[patch] >= CLEAR * others:
                return replace(chosen, token=grid.prefix + patch)
        if change.max() >= CLEAR * change.median():
            return replace(chosen, token=grid.prefix + int(change.argmax()))
    raise _unplaced(chosen, "many tokens alike")


def _refuse_other_axes(run: Runner, chosen: FeatureMap) -> None:
    """Refuse an output whose axes look like rows and columns and are others: tokens of windows, or attention's.

    The patch's place changes when its pixels are disturbed, or one next to it: convolutions move what a patch sees.
    """
    row, column = chosen.at
    for images in (1, DISTURBED):
        change = _change(run, chosen, images).sum(0 if chosen.layout == "channels first" else -1)
        if change[max(0, row - 1) : row + 2, max(0, column - 1) : column + 2].max() >= OTHER * change.max():
            return
    raise _unplaced(chosen, "other places more")


def _unplaced(chosen: FeatureMap, changed: str) -> VicinalError:
    return VicinalError(
        f"which place in {chosen.name} stands for the patch at {chosen.at[0]} {chosen.at[1]} cannot be told: "
        f"disturbing the patch's pixels changes {changed}; name another layer"
    )


def _change(run: Runner, chosen: FeatureMap, images: int) -> Tensor:
    """Squared change of a layer's output where the patch's pixels become others, a mean over images: one's shape."""
    rows, columns = (
        slice(place * size // count, -(-(place + 1) * size // count))
        for place, size, count in zip(chosen.at, run.image, (chosen.grid.height, chosen.grid.width), strict=True)
    )
    changes = []
    for seed in range(images):  # one at a time, for the memory
        pair = run.noise(1, seed).repeat(2, 1, 1, 1)
        pair[1:, :, rows, columns] = run.noise(1, seed + DISTURBED)[:, :, rows, columns]
        before, after = chosen.output(run, pair).cpu().double()  # MPS has no double precision
        changes.append((after - before).square())
    return torch.stack(changes).mean(0)
