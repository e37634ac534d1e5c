"""The parameters of a prior by name: sigma, alpha, mu and others, one number for each head or each kernel and head.

These are the values that a person reads, such as `prior.sigma`, and not the tensors of the state dict, which are stored
flat. A free table, as `elm` and `rpe` have it, is not listed: it has too many values for each head.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vicinal.priors.base import Prior
from vicinal.priors.composition import Composition
from vicinal.priors.convolution import Convolution
from vicinal.priors.decay import Decay
from vicinal.priors.registry import get_prior, list_priors

__all__ = ["get_parameters", "get_parts", "parameter_rows", "set_parameters"]

MAX_VALUES_PER_HEAD = 32


def get_parts(prior: Prior) -> dict[str, Prior]:
    """Returns the parts of a composition by name: `gmm` and `gab` for `gmm+gab`.

    Parts of the same kind are numbered, such as `gmm-1` and `gmm-2`. A prior that is not a composition has the empty
    name.
    """
    if not isinstance(prior, Composition):
        return {"": prior}
    parts = [part for part in prior.parts if isinstance(part, Prior)]
    registered = {get_prior(name): name for name in list_priors()}
    names = [registered.get(type(part), type(part).__name__) for part in parts]
    return {
        name if names.count(name) == 1 else f"{name}-{number}": part
        for number, (name, part) in enumerate(zip(names, parts, strict=True), start=1)
    }


def get_parameters(prior: Prior) -> dict[str, NDArray[Any]]:
    """Returns the parameters of a prior by name, each `(heads,)` or `(kernels, heads)`.

    >>> import vicinal
    >>> from vicinal.priors.parameters import get_parameters
    >>> prior = vicinal.build_prior("gmm:kernels=3+gab", heads=6, grid=vicinal.Grid(8, 8))
    >>> {name: values.shape for name, values in get_parameters(prior).items()}
    {'gmm.sigma': (3, 6), 'gmm.alpha': (3, 6), 'gab.sigma': (6,), 'gab.amplitude': (6,)}

    Args:
        prior: of any class. Its properties, and attributes with the name of an option, are listed where their last axis
            is heads. The center of `conv`, `mu`, is listed as `mu_row` and `mu_column`.
    """
    return {
        f"{part}.{name}" if part else name: values.numpy(force=True)
        for part, part_prior in get_parts(prior).items()
        for name, values in _tensors(part_prior)
        if values.dim() in (1, 2)
        and values.shape[-1] == prior.heads
        and values.numel() <= MAX_VALUES_PER_HEAD * prior.heads
    }


def set_parameters(prior: Prior, values: Mapping[str, NDArray[Any]]) -> bool:
    """Sets the parameters of a prior to values that `get_parameters` returned before, such as those of another epoch.

    Args:
        prior: of any class.
        values: by name, each `(heads,)` or `(kernels, heads)`.

    Returns:
        Whether everything that the prior learns is now as `values` say. If not, as for a free table, nothing changed.
    """
    listed = get_parameters(prior)
    if {name: each.shape for name, each in values.items()} != {name: each.shape for name, each in listed.items()}:
        return False
    before = [(parameter, parameter.detach().clone()) for parameter in prior.parameters()]
    with torch.no_grad():
        known = all(_set_part(part_prior, _of_part(values, part)) for part, part_prior in get_parts(prior).items())
        found = get_parameters(prior) if known else {}
        # A class can list a parameter in another form than it stores it.
        if known and all(np.allclose(found[name], wanted, rtol=1e-4) for name, wanted in values.items()):
            return True
        for parameter, old in before:
            parameter.copy_(old)
    return False


def _of_part(values: Mapping[str, NDArray[Any]], part: str) -> dict[str, NDArray[Any]]:
    """Returns the values of a part, under names without that of the part."""
    start = f"{part}." if part else ""
    return {name.removeprefix(start): each for name, each in values.items() if name.startswith(start)}


def _set_part(prior: Prior, values: dict[str, NDArray[Any]]) -> bool:
    """Sets the parameters of a prior that is not a composition. Returns whether all of them have values."""
    if isinstance(prior, Convolution):
        values = {**values, "mu": np.stack([values["mu_row"], values["mu_column"]], 1)}
    if isinstance(prior, Decay):
        values = {"rate": np.log(-np.log(values["gamma"]))}
    for name, parameter in prior.named_parameters():
        wanted = values.get(name.removeprefix("flat_"))
        if wanted is None:
            return False
        if wanted.size != parameter.numel():
            wanted = wanted[..., :1]  # one value for all heads is listed for each of them
        if wanted.size != parameter.numel():
            return False
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(wanted)).view(parameter.shape))
    return True


def parameter_rows(parameters: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, int | str, int, str]]:
    """Yields one row `(name, kernel, head, value)` for each number that `get_parameters` returned.

    Kernels and heads count from 1. `kernel` is empty for a parameter of shape `(heads,)`. `value` has the fewest digits
    that give the same number again.
    """
    for name, values in parameters.items():
        for index, value in np.ndenumerate(values):
            *kernel, head = (number + 1 for number in index)
            yield name, kernel[0] if kernel else "", head, str(value)


def _tensors(prior: Prior) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors among a prior's properties and options, with their names."""
    classes = [base for base in type(prior).__mro__ if issubclass(base, Prior) and base is not Prior]
    properties = [name for base in classes for name, value in vars(base).items() if isinstance(value, property)]
    arguments = inspect.signature(type(prior).__init__).parameters.values()
    options = [argument.name for argument in arguments if argument.kind is argument.KEYWORD_ONLY]
    for name in dict.fromkeys(properties + options):
        value = getattr(prior, name, None)
        if isinstance(prior, Convolution) and name == "mu":
            yield from zip(("mu_row", "mu_column"), prior.mu.unbind(1), strict=True)
        elif isinstance(value, Tensor):
            yield name, value
