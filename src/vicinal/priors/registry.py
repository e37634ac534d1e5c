"""From a name or a line of text to a prior: `gmm:kernels=3,init=spread+gab`.

The grammar, the same in Python, YAML and an unquoted shell word:

    spec   = prior [ "+" prior ]...
    prior  = name [ ":" option "=" value [ "," option "=" value ]... ]
    value  = a number, true, false, none, a word, or numbers joined by "/"
"""

import contextlib
import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from vicinal.errors import VicinalError, unknown_name
from vicinal.grid import Grid
from vicinal.priors.base import Prior

__all__ = ["Option", "build_prior", "get_prior", "list_priors", "prior_options", "register_prior"]

# A prior's file is imported when the prior is first asked for, so each can also be run with `python -m`.
_BUILTIN = {
    "gmm": "gaussian_mixture.GaussianMixture",
    "elm": "elementwise.Elementwise",
    "gab": "gaussian_bias.GaussianBias",
    "rpe": "relative_bias.RelativeTable",
    "rpe-mlp": "relative_bias_mlp.RelativeMlp",
    "decay": "decay.Decay",
    "conv": "convolution.Convolution",
    "none": "none.NoPrior",
}
_registered: dict[str, type[Prior]] = {}

PriorClass = TypeVar("PriorClass", bound=type[Prior])


@dataclass(frozen=True)
class Option:
    """One option of a prior: its name, the type it takes and its default."""

    name: str
    type: Any
    default: Any


def register_prior(name: str) -> Callable[[PriorClass], PriorClass]:
    """Class decorator: make a `Prior` available to `build_prior` under `name`.

    Its options are the keyword-only arguments of its `__init__`; see `Prior` for an example.

    >>> import vicinal
    >>> @vicinal.register_prior("nothing")
    ... class Nothing(vicinal.Prior):
    ...     "Leaves attention as it is."
    >>> "nothing" in vicinal.list_priors()
    True
    """
    if not re.fullmatch(_NAME, name):
        raise VicinalError(f"a prior's name is letters, digits, '-' and '_', starting with a letter; given {name!r}")

    def register(cls: PriorClass) -> PriorClass:
        known = _registered.get(name)
        redefined = known is not None and (known.__module__, known.__qualname__) == (cls.__module__, cls.__qualname__)
        if name in _BUILTIN or (known is not None and not redefined):
            raise VicinalError(f"a prior named {name!r} exists already; register {cls.__name__} under another name")
        _registered[name] = cls
        return cls

    return register


def list_priors() -> list[str]:
    """Names of all priors, the built-in ones first.

    >>> import vicinal
    >>> vicinal.list_priors()[:3]
    ['gmm', 'elm', 'gab']
    """
    return [*_BUILTIN, *_registered]


def get_prior(name: str) -> type[Prior]:
    """The class behind a prior's name."""
    if name in _registered:
        return _registered[name]
    if name not in _BUILTIN:
        raise unknown_name("prior", name, list_priors())
    module, cls = _BUILTIN[name].split(".")
    return typing.cast("type[Prior]", getattr(importlib.import_module(f"vicinal.priors.{module}"), cls))


def prior_options(name: str) -> list[Option]:
    """The options that a prior takes."""
    init = get_prior(name).__init__
    hints = typing.get_type_hints(init)
    return [
        Option(parameter.name, hints.get(parameter.name, type(parameter.default)), parameter.default)
        for parameter in inspect.signature(init).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]


def build_prior(spec: str, *, heads: int, grid: Grid, layer: int = 0, depth: int = 1, **options: Any) -> Prior:
    """Build a prior from its spec.

    >>> import vicinal
    >>> prior = vicinal.build_prior("gmm:kernels=3,init=spread+gab", heads=6, grid=vicinal.Grid(8, 8, prefix=1))
    >>> scale, bias = prior()
    >>> scale.shape, bias.shape
    (torch.Size([6, 65, 65]), torch.Size([6, 65, 65]))

    Args:
        spec: `name`, `name:option=value,...`, or several of them joined by `+`.
        heads: attention heads.
        grid: where the tokens sit.
        layer: index of the attention layer, from 0.
        depth: number of attention layers in the model.
        options: further options of a single prior, as Python values.
    """
    from vicinal.priors.composition import Composition  # it is a prior itself

    parts = _parse(spec)
    if options and len(parts) > 1:
        raise VicinalError(f"{spec!r} names {len(parts)} priors; write the options {sorted(options)} inside the spec")
    built = []
    for name, written in parts:
        if twice := sorted(written.keys() & options.keys()):
            raise VicinalError(f"option {twice[0]!r} of {name!r} is given in the spec and as an argument; give it once")
        chosen = _convert_options(name, {**written, **options})
        built.append(get_prior(name)(heads, grid, layer, depth, **chosen))
    prior = built[0] if len(built) == 1 else Composition(built)
    prior.spec, prior.spec_options = spec, options
    return prior


_NAME = r"[A-Za-z][\w-]*"
_PART = re.compile(rf"(?P<name>{_NAME})(?::(?P<options>.+))?")
_OPTION = re.compile(r"(?P<key>[A-Za-z]\w*)=(?P<value>[^=]+)")


def _parse(spec: str) -> list[tuple[str, dict[str, str]]]:
    def malformed(what: str) -> VicinalError:
        return VicinalError(f"malformed prior {spec!r}: {what}; expected name:option=value,option=value+name")

    if not isinstance(spec, str):
        raise VicinalError(f"a prior is named by a text such as 'gmm:kernels=3', given {spec!r}")
    parts = []
    for text in re.split(r"\+(?=[A-Za-z]|$)", spec.strip()):  # the + of 1e+3 is no separator
        part = _PART.fullmatch(text)
        if part is None:
            raise malformed(f"cannot read {text!r}" if text else "a name is missing")
        options: dict[str, str] = {}
        for item in part["options"].split(",") if part["options"] else []:
            option = _OPTION.fullmatch(item)
            if option is None:
                raise malformed(f"cannot read option {item!r}")
            if option["key"] in options:
                raise malformed(f"option {option['key']!r} is given twice")
            options[option["key"]] = option["value"]
        parts.append((part["name"], options))
    return parts


def _convert_options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    known = {option.name: option for option in prior_options(name)}
    converted = {}
    for key, value in given.items():
        if key not in known:
            raise unknown_name(f"option of prior {name!r}:", key, known)
        try:
            converted[key] = _convert(value, known[key].type)
        except ValueError as error:
            raise VicinalError(f"option {key!r} of prior {name!r} takes {error}, given {value!r}") from None
    return converted


def _convert(value: Any, kind: Any) -> Any:
    """`value`, maybe a text, as the type `kind`; a ValueError says what was expected."""
    for member in _members(kind):
        with contextlib.suppress(ValueError):
            return _convert_member(value, member)
    raise ValueError(describe_type(kind))


def _convert_member(value: Any, kind: Any) -> Any:
    text = value if isinstance(value, str) else None
    if kind is bool:
        if text and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if isinstance(value, bool):
            return value
    elif kind is types.NoneType:
        if value is None or (text and text.lower() == "none"):
            return None
    elif kind in (int, float):
        if text or (isinstance(value, (int, kind)) and not isinstance(value, bool)):
            return kind(value)
    elif typing.get_origin(kind) is Literal:
        if value in typing.get_args(kind):
            return value
    elif text is None or kind in (str, Any):
        return value  # numbers in a sequence or a tensor: the prior knows the shape they must have
    elif "/" in text:
        return [float(number) for number in text.split("/")]
    raise ValueError(describe_type(kind))


def _members(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def describe_type(kind: Any) -> str:
    """What an option takes, in words."""
    words = {int: "a whole number", float: "a number", bool: "true|false", str: "a word", types.NoneType: "none"}
    described = (
        "|".join(map(str, typing.get_args(member)))
        if typing.get_origin(member) is Literal
        else words.get(member, "numbers joined by '/'")
        for member in _members(kind)
    )
    return " or ".join(dict.fromkeys(described))
