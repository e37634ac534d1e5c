"""The registry of priors: register, list, and build from a spec such as `gmm:kernels=3,init=spread+gab`."""

import importlib
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from vicinal.errors import VicinalError, unknown_name
from vicinal.grid import Grid
from vicinal.priors.base import Prior
from vicinal.priors.spec import NAME, current_options, current_spec, parse_spec
from vicinal.typed_value import convert_value

__all__ = ["Option", "build_prior", "get_prior", "list_priors", "prior_options", "register_prior"]

# Imported on first use, so that each file can also run with `python -m`.
_BUILTIN = {
    "gmm": "gaussian_mixture.GaussianMixture",
    "elm": "elementwise.Elementwise",
    "gab": "gaussian_bias.GaussianBias",
    "rpe": "relative_bias.RelativeBias",
    "rpe-mlp": "relative_bias_mlp.RelativeBiasMlp",
    "decay": "decay.Decay",
    "conv": "convolution.Convolution",
    "none": "none.NoPrior",
}
_registered: dict[str, type[Prior]] = {}

PriorClass = TypeVar("PriorClass", bound=type[Prior])


@dataclass(frozen=True)
class Option:
    """An option of a prior."""

    name: str
    type: Any
    """Type of its values, as annotated."""
    default: Any


def register_prior(name: str) -> Callable[[PriorClass], PriorClass]:
    """Returns a class decorator that makes a `Prior` available to `build_prior` under `name`.

    The options of the prior are the keyword-only arguments of its `__init__`; see `Prior` for an example.

    >>> import vicinal
    >>> @vicinal.register_prior("nothing")
    ... class Nothing(vicinal.Prior):
    ...     "Leaves attention unchanged."
    >>> "nothing" in vicinal.list_priors()
    True

    Args:
        name: letters, digits, `-` and `_`, starting with a letter.

    Raises:
        VicinalError: the name is malformed, or another prior has it.
    """
    if not re.fullmatch(NAME, name):
        raise VicinalError(
            f"the name of a prior must be letters, digits, '-' and '_', starting with a letter, got {name!r}"
        )

    def register(cls: PriorClass) -> PriorClass:
        known = _registered.get(name)
        redefined = known is not None and (known.__module__, known.__qualname__) == (cls.__module__, cls.__qualname__)
        if name in _BUILTIN or (known is not None and not redefined):
            raise VicinalError(f"a prior named {name!r} exists already; register {cls.__name__} under another name")
        _registered[name] = cls
        return cls

    return register


def list_priors() -> list[str]:
    """Returns the names of all priors, the built-in ones first.

    >>> import vicinal
    >>> vicinal.list_priors()[:3]
    ['gmm', 'elm', 'gab']
    """
    return [*_BUILTIN, *_registered]


def get_prior(name: str) -> type[Prior]:
    """Returns the class of a prior.

    Raises:
        VicinalError: the name is unknown.
    """
    if name in _registered:
        return _registered[name]
    if name not in _BUILTIN:
        raise unknown_name("prior", name, list_priors())
    module, cls = _BUILTIN[name].split(".")
    return typing.cast("type[Prior]", getattr(importlib.import_module(f"vicinal.priors.{module}"), cls))


def prior_options(name: str) -> list[Option]:
    """Returns the options of a prior.

    Raises:
        VicinalError: the name is unknown.
    """
    init = get_prior(name).__init__
    hints = typing.get_type_hints(init)
    return [
        Option(parameter.name, hints.get(parameter.name, type(parameter.default)), parameter.default)
        for parameter in inspect.signature(init).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]


def build_prior(spec: str, *, heads: int, grid: Grid, layer: int = 0, depth: int = 1, **options: Any) -> Prior:
    """Returns a new prior.

    >>> import vicinal
    >>> prior = vicinal.build_prior("gmm:kernels=3,init=spread+gab", heads=6, grid=vicinal.Grid(8, 8, prefix=1))
    >>> scale, bias = prior()
    >>> scale.shape, bias.shape
    (torch.Size([6, 65, 65]), torch.Size([6, 65, 65]))

    Args:
        spec: `name`, `name:option=value,...`, or several of them joined by `+`.
        heads: number of attention heads.
        grid: layout of the tokens.
        layer: index of the attention layer, from 0.
        depth: number of attention layers in the model.
        options: further options of a single prior, as Python values.

    Raises:
        VicinalError: the spec is malformed, or a name or a value is unknown.
    """
    from vicinal.priors.composition import Composition  # is a prior itself

    spec = current_spec(spec, warn=True)
    parts = parse_spec(spec)
    if options and len(parts) > 1:
        raise VicinalError(f"{spec!r} names {len(parts)} priors; write the options {sorted(options)} inside the spec")
    options = current_options(parts[0].name, options, warn=True)
    built = []
    for part in parts:
        if twice := sorted(part.options.keys() & options.keys()):
            raise VicinalError(
                f"option {twice[0]!r} of {part.name!r} is given in the spec and as an argument; give it once"
            )
        converted = _convert_options(part.name, part.options, text=True) | _convert_options(part.name, options)
        built.append(get_prior(part.name)(heads, grid, layer, depth, **converted))
    prior = built[0] if len(built) == 1 else Composition(built)
    prior.spec, prior.spec_options = spec, options
    return prior


def _convert_options(name: str, options: Mapping[str, Any], *, text: bool = False) -> dict[str, Any]:
    """Returns options of a prior as their annotated types; `text` for the options of a spec."""
    known = {option.name: option for option in prior_options(name)}
    converted = {}
    for key, value in options.items():
        if key not in known:
            raise unknown_name(f"option of prior {name!r}:", key, known)
        try:
            converted[key] = convert_value(value, known[key].type, text=text)
        except ValueError as error:
            raise VicinalError(f"option {key!r} of prior {name!r} must be {error}, got {value!r}") from None
    return converted
