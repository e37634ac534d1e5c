"""The blocks of a model: what its attention, or in a network without attention its layers, repeat in."""

import operator
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from vicinal.errors import VicinalError, unknown_name

__all__ = ["find_blocks", "select_block"]

CONTAINERS = (nn.Sequential, nn.ModuleList)
LAYERS = (nn.Linear, nn.Conv2d)


def find_blocks(model: nn.Module, patches: Mapping[str, int], attention: Sequence[str]) -> list[str]:
    """Returns the names of the blocks that give a feature map, in the order in which they run.

    Args:
        model: any vision model.
        patches: number of patches of every feature map, by the name of its module, in the order in which they run.
        attention: names of the modules in which patches attend; if there are none, blocks are the modules that
            sequences and lists hold.
    """
    blocks = {_block_of(model, name, patches) for name in attention} or set(_held(model, "", False, patches))
    several = {name for name in blocks if patches.get(name, 0) > 1}
    return [name for name in patches if name in (several or blocks)]  # nothing behind pooling, unless that is all


def _block_of(model: nn.Module, attention: str, maps: Mapping[str, int]) -> str:
    """Returns the block of an attention module: the module in a sequence or list that has an MLP beside attention."""
    modules, parts = dict(model.named_modules()), attention.split(".")
    around = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    held = [name for name in around if name in maps and isinstance(modules[name.rpartition(".")[0]], CONTAINERS)]
    inside = set(modules[attention].modules())
    whole = [name for name in held if any(isinstance(m, LAYERS) for m in set(modules[name].modules()) - inside)]
    return next((name for name in (*whole, *held, *around[1:]) if name in maps), attention)


def _held(module: nn.Module, name: str, in_container: bool, maps: Mapping[str, int]) -> Iterator[str]:
    """Yields modules that sequences and lists hold, without those inside another such module."""
    for own, child in module.named_children():
        full = f"{name}.{own}" if name else own
        if isinstance(child, CONTAINERS):
            yield from _held(child, full, True, maps)
        elif (in_container or isinstance(module, CONTAINERS)) and full in maps:
            yield full
        else:
            yield from _held(child, full, False, maps)


def select_block(model: nn.Module, maps: Sequence[str], blocks: Sequence[str], layer: int | str | None) -> str:
    """Returns the name of the module that is asked for.

    Args:
        model: any vision model.
        maps: names of all modules that give a feature map.
        blocks: those that `find_blocks` found.
        layer: index of a block, or a name from `maps`; None for the last block.

    Raises:
        VicinalError: if there is no such module, or it gives no map.
    """
    kind = type(model).__name__
    if isinstance(layer, str):
        if layer in maps:
            return layer
        if layer and layer in dict(model.named_modules()):
            raise VicinalError(
                f"{layer} of {kind} gives no map of the image's patches; blocks that do: {_listed(blocks)}"
            )
        raise unknown_name("layer", layer, blocks or maps)
    if not blocks:
        others = f"; name a module that does: {_listed(maps)}" if maps else ""
        raise VicinalError(f"no block of {kind} gives a map of the image's patches{others}")
    try:
        return blocks[-1 if layer is None else operator.index(layer)]
    except (IndexError, TypeError):
        raise VicinalError(
            f"{kind} has no layer {layer}: it has {len(blocks)} blocks, {_listed(blocks)}; "
            f"give an index from 0 to {len(blocks) - 1}, or a module's name"
        ) from None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} to {names[-1]}" if names else "none"
