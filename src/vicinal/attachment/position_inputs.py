"""Inputs beside the image that decide where tokens sit, such as the noise by which ViTMAE shuffles its patches.

A prior is right for the places that were measured, with the inputs of the example. If tokens sit elsewhere without one
of them, or with its values in another order, every call must give that input, with the same values. Hooks of the
modules that are given it check that.
"""

import functools
import inspect as signatures
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vicinal.cells import Cells
from vicinal.errors import VicinalError
from vicinal.inspection.attention_observer import observe_attention
from vicinal.inspection.image_context import is_tracing
from vicinal.inspection.model_inspection import Inspection, without_priors
from vicinal.inspection.model_runner import (
    ModelRunner,
    eval_without_side_effects,
    in_full_precision,
    restored_attributes,
)
from vicinal.inspection.sites import AttentionSite, find_sites

__all__ = ["PositionInputHook", "find_position_inputs", "remove_input_hooks", "require_inputs"]


class PositionInputHook:
    """A forward pre-hook that raises VicinalError if its module is given another input than in the example.

    Args:
        name: of the input.
        value: that of one image in the example, `(1, ...)`.
        parameter: name of the module's argument.
        index: its position among the arguments.
    """

    def __init__(self, name: str, value: Tensor, parameter: str, index: int) -> None:
        self.name, self.value, self.parameter, self.index = name, value, parameter, index

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Checks the input; of a compiled or traced model, only whether it is given."""
        given = kwargs.get(self.parameter, args[self.index] if len(args) > self.index else None)
        if not isinstance(given, Tensor):
            raise VicinalError(
                f"{type(module).__name__} was called without {self.name}, which decides where its tokens sit; the "
                f"priors were attached with an example that has it: give the same {self.name} in each call, or detach"
            )
        if torch.compiler.is_compiling() or is_tracing():
            return
        value = self.value.to(given)
        if given.shape[1:] != value.shape[1:] or not bool((given == value).all()):
            raise VicinalError(
                f"{type(module).__name__} was called with another {self.name} than that of the example which the "
                "priors were attached with, and it decides where tokens sit: give that one, or detach and attach again"
            )


def find_position_inputs(inspection: Inspection, sites: Sequence[AttentionSite]) -> list[str]:
    """Returns the names of inputs beside the image that decide where tokens of some site sit.

    For each tensor beside the image, the model runs on noise without it, and with its values in another order.
    Inputs that are checked already are left out.
    """
    runner, model = inspection.runner, inspection.runner.model
    hooked = {hook.name for module in model.modules() for hook in _input_hooks(module).values()}
    names = [name for name, value in runner.others.items() if isinstance(value, Tensor) and name not in hooked]
    with (
        eval_without_side_effects(model),
        without_priors(model),
        in_full_precision(model),
        restored_attributes(model),
    ):
        return [
            name for name in names if any(_moves_tokens(runner, others, sites) for others in _without(runner, name))
        ]


def _without(runner: ModelRunner, name: str) -> Iterator[dict[str, Any]]:
    """Yields the inputs beside the image, without one of them and with its values in reverse order."""
    others = dict(runner.others)
    value = others.pop(name)
    yield others
    if value.dim() > 1:
        yield {**others, name: value.flip(-1)}


def _moves_tokens(runner: ModelRunner, others: dict[str, Any], sites: Sequence[AttentionSite]) -> bool:
    """Returns whether tokens of some site sit elsewhere with other inputs; no, if the model does not run with them."""
    other = replace(runner, others=others)
    try:
        calls = observe_attention(other.model, functools.partial(other, other.noise(1)))
        found = {site.name: site for site in (find_sites(other, len(calls), rounds=1) if calls else [])}
    except VicinalError:
        return False
    return not all(site.name in found and _same_places(site, found[site.name]) for site in sites)


def _same_places(one: AttentionSite, other: AttentionSite) -> bool:
    sides = ((one.queries, other.queries), (one.keys, other.keys))
    return all(isinstance(a, Cells) and isinstance(b, Cells) and a.same_as(b) for a, b in sides)


def require_inputs(inspection: Inspection, names: Sequence[str]) -> None:
    """Registers hooks with the modules that are given inputs of the example, so that no call goes without them."""
    runner, model = inspection.runner, inspection.runner.model
    for name in names:
        value = runner.others[name].detach().clone()
        seen: dict[nn.Module, tuple[str, int]] = {}

        def note(
            module: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            value: Tensor = value,
            seen: dict[nn.Module, tuple[str, int]] = seen,
        ) -> None:
            for parameter, index, given in _arguments(module, args, kwargs):
                if given.shape == value.shape and given.dtype == value.dtype and torch.equal(given, value):
                    seen.setdefault(module, (parameter, index))

        hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in model.modules()]
        try:
            with eval_without_side_effects(model), torch.no_grad(), restored_attributes(model):
                runner(runner.noise(1))
        finally:
            for hook in hooks:
                hook.remove()
        for module, (parameter, index) in seen.items():
            module.register_forward_pre_hook(PositionInputHook(name, value, parameter, index), with_kwargs=True)


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, int, Tensor]]:
    """Yields name, position and value of each argument of a module's forward that is a tensor."""
    parameters = list(signatures.signature(module.forward).parameters)
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            yield (parameters[index] if index < len(parameters) else ""), index, value
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            yield name, parameters.index(name) if name in parameters else len(parameters), value


def remove_input_hooks(model: nn.Module) -> None:
    """Removes all hooks that `require_inputs` registered with modules of a model."""
    for module in model.modules():
        for number in _input_hooks(module):
            del module._forward_pre_hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)


def _input_hooks(module: nn.Module) -> dict[int, PositionInputHook]:
    """Returns the hooks of a module that check its inputs, by number."""
    hooks = module._forward_pre_hooks.items()
    return {number: hook for number, hook in hooks if isinstance(hook, PositionInputHook)}
