"""The feature map of a layer: which of the numbers in its output are those of a patch of the image.

The pixels of a patch are disturbed: what changes in the output is the patch's.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vicinal.errors import VicinalError
from vicinal.inspection.blocks import find_blocks, select_block
from vicinal.inspection.model_inspection import inspect_runner
from vicinal.inspection.model_runner import ModelRunner, eval_without_side_effects
from vicinal.inspection.module_outputs import FeatureMap, OutputLayout, list_maps

__all__ = ["FeatureMap", "find_map"]

MAX_PROBES = 8  # images on which a patch is disturbed, at most
MIN_RELATIVE_CHANGE = 0.5  # of the largest change: less is not that of the patch
MIN_CHANGE_OVER_MEDIAN = 4.0  # of the patch's token
MIN_MEAN_CHANGE = 1e-5  # of its usual change: a mean over channels that changes less is constant
MAX_DIFFERENCE = 1e-3  # of the largest value, between two runs on the same images


def find_map(runner: ModelRunner, layer: int | str | None = None, at: tuple[int, int] | None = None) -> FeatureMap:
    """Returns the feature map of a layer, with a patch in it.

    Args:
        runner: the model, and the images that it takes.
        layer: index of a block, from 0 or, below zero, from the end; or any module's name. By default the last block.
            Blocks are what attention repeats in; in a network without attention, what its sequences and lists hold.
        at: row and column of the patch; by default `(rows // 2, columns // 2)`.

    Raises:
        VicinalError: if there is no such layer or patch, or if the patch's place in the output cannot be measured.
    """
    model, sites = runner.model, inspect_runner(runner).sites
    names = {module: name for name, module in model.named_modules()}
    alone = {site.module for site in sites if site.logits[-2] == 1}  # a class token that attends to the patches
    attention = list(dict.fromkeys(names[site.module] for site in sites if site.module not in alone))
    with eval_without_side_effects(model), torch.no_grad():
        maps = list_maps(runner, sites)
        blocks = find_blocks(model, {name: each.grid.patches for name, (each, *_) in maps.items()}, attention)
        chosen = _likeliest(runner, maps[select_block(model, list(maps), blocks, layer)])
        height, width = chosen.grid.height, chosen.grid.width
        row, column = (height // 2, width // 2) if at is None else _pair(at)
        if not (0 <= row < height and 0 <= column < width):
            raise VicinalError(
                f"{chosen.name} has a grid of {height} x {width} patches; at must be a row from 0 to {height - 1} and "
                f"a column from 0 to {width - 1}, got {row} {column}"
            )
        order = list(maps)
        before = [name for name in blocks if order.index(name) < order.index(chosen.name)] + [chosen.name]
        stem = max((maps[name][0].grid for name in before), key=lambda grid: grid.patches)
        chosen = replace(chosen, at=(row, column), stem=(stem.height, stem.width))
        output = chosen.output(runner, runner.noise(2))
        _check_deterministic(runner, chosen, output)
        if chosen.layout is OutputLayout.TOKENS:
            chosen = _with_token(runner, chosen, _least_mixed(chosen, maps, before))
        else:
            _check_axes(runner, chosen)
        _check_varies(chosen, output)
        return chosen


def _pair(at: Any) -> tuple[int, int]:
    try:
        row, column = at
        return operator.index(row), operator.index(column)
    except (TypeError, ValueError):
        raise VicinalError(
            f"at must be a patch's row and column, two whole numbers such as (3, 4), got {at!r}"
        ) from None


def _likeliest(runner: ModelRunner, readings: Sequence[FeatureMap]) -> FeatureMap:
    """Returns the reading of an output in which a disturbed patch changes the fewest places."""
    if len(readings) == 1:
        return readings[0]
    grid = readings[0].grid
    change = _change(runner, replace(readings[0], at=(grid.height // 2, grid.width // 2)), MAX_PROBES)
    peaks = [float(_over_channels(each, change).max()) for each in readings]
    return readings[peaks.index(max(peaks))]


def _check_deterministic(runner: ModelRunner, chosen: FeatureMap, output: Tensor) -> None:
    """Raises VicinalError for a layer that draws at random in evaluation, as models trained by masking do."""
    again = chosen.output(runner, runner.noise(2)[:1])
    if not bool(((output[:1] - again).abs() <= MAX_DIFFERENCE * output.abs().max()).all()):
        raise VicinalError(
            f"{chosen.name} gives another output each time for the same images, so patches have no place in it; "
            "switch off what the model draws at random, such as masking"
        )


def _check_varies(chosen: FeatureMap, output: Tensor) -> None:
    """Raises VicinalError if the mean channel of the patch is the same for every image: its gradient is rounding."""
    one, other = chosen.of_patch(output).cpu().double()
    change = one - other
    usual = float(change.square().mean().sqrt()) / len(change) ** 0.5  # of a mean of uncorrelated channels
    if float(change.mean().abs()) < max(MIN_MEAN_CHANGE, 4 * torch.finfo(output.dtype).eps) * usual:
        raise VicinalError(
            f"the mean channel of {chosen.name} is the same for every image, as behind a norm whose weights are all "
            "alike, so its gradient is only rounding; name a layer in front of that norm, or take trained weights"
        )


def _least_mixed(
    chosen: FeatureMap, maps: Mapping[str, Sequence[FeatureMap]], before: Sequence[str]
) -> list[FeatureMap]:
    """Returns maps of the same tokens where they are mixed least: the first block that has them, and its first part."""
    same = {
        name: each
        for name, (each, *_) in maps.items()
        if each.layout is OutputLayout.TOKENS and each.grid == chosen.grid
    }
    block = next(name for name in before if name in same)
    inside = next(each for name, each in same.items() if f"{name}.".startswith(f"{block}."))
    return [replace(each, at=chosen.at) for each in (same[block], inside)]


def _with_token(runner: ModelRunner, chosen: FeatureMap, least_mixed: Sequence[FeatureMap]) -> FeatureMap:
    """Returns the map with the patch's token: the one that changes where the patch's pixels are disturbed.

    Where attention is in windows, the order of tokens is not known before; Hiera's are not row by row.
    """
    grid, (row, column) = chosen.grid, chosen.at
    patch = row * grid.width + column
    rows, columns = torch.arange(grid.height)[:, None], torch.arange(grid.width)
    far = (((rows - row).abs() > 1) | ((columns - column).abs() > 1)).flatten()  # patches can overlap their neighbors
    tokens = torch.tensor(chosen.tokens)
    for first in least_mixed:
        for images in (1, MAX_PROBES):  # one is enough for most models
            change = _change(runner, first, images).sum(1)[tokens]
            others = change[far].median() if bool(far.any()) else 0
            if change[patch] >= MIN_RELATIVE_CHANGE * change.max() and change[patch] >= MIN_CHANGE_OVER_MEDIAN * others:
                return replace(chosen, token=int(tokens[patch]))
        if change.max() >= MIN_CHANGE_OVER_MEDIAN * change.median():
            return replace(chosen, token=int(tokens[change.argmax()]))
    raise _unplaced(chosen, "many tokens alike")


def _check_axes(runner: ModelRunner, chosen: FeatureMap) -> None:
    """Raises VicinalError if axes that look like rows and columns are others: tokens of windows, or attention's.

    The patch's place changes when its pixels are disturbed, or one next to it: convolutions move what a patch sees.
    """
    row, column = chosen.at
    for images in (1, MAX_PROBES):
        change = _over_channels(chosen, _change(runner, chosen, images))
        around = change[max(0, row - 1) : row + 2, max(0, column - 1) : column + 2]
        if around.max() >= MIN_RELATIVE_CHANGE * change.max():
            return
    raise _unplaced(chosen, "other places more")


def _over_channels(chosen: FeatureMap, change: Tensor) -> Tensor:
    """Returns changes of an output of four axes, without images, summed over channels: `(rows, columns)`."""
    return change.sum(0 if chosen.layout is OutputLayout.CHANNELS_FIRST else -1)


def _unplaced(chosen: FeatureMap, changed: str) -> VicinalError:
    return VicinalError(
        f"the place in {chosen.name} of the patch at {chosen.at[0]} {chosen.at[1]} cannot be measured: "
        f"disturbing the patch's pixels changes {changed}; name another layer"
    )


def _change(runner: ModelRunner, chosen: FeatureMap, images: int) -> Tensor:
    """Returns the squared change of an output where the patch's pixels are replaced, without the axis of images."""
    rows, columns = (
        slice(place * size // count, -(-(place + 1) * size // count))
        for place, size, count in zip(chosen.at, runner.image, (chosen.grid.height, chosen.grid.width), strict=True)
    )
    changes = []
    for seed in range(images):  # one at a time, for the memory
        pair = runner.noise(1, seed).repeat(2, 1, 1, 1)
        pair[1:, :, rows, columns] = runner.noise(1, seed + MAX_PROBES)[:, :, rows, columns]
        before, after = chosen.output(runner, pair).cpu().double()  # MPS has no double precision
        changes.append((after - before).square())
    return torch.stack(changes).mean(0)
