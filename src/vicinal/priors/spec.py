"""Prior specs: `gmm:kernels=3,init=spread+gab`.

The grammar, the same in Python, YAML and an unquoted shell word:

    spec   = prior [ "+" prior ]...
    prior  = name [ ":" option "=" value [ "," option "=" value ]... ]
    value  = a number, true, false, none, a word, or numbers joined by "/"
"""

import re
from dataclasses import dataclass, field
from typing import Any

from vicinal.deprecation import warn_renamed
from vicinal.errors import VicinalError

__all__ = ["NAME", "PriorSpec", "current_options", "current_spec", "parse_spec"]

NAME = r"[A-Za-z][\w-]*"
_PART = re.compile(rf"(?P<name>{NAME})(?::(?P<options>.+))?")
_OPTION = re.compile(r"(?P<key>[A-Za-z]\w*)=(?P<value>[^=]+)")

# (prior, option, old value): new value
RENAMED_VALUES = {("conv", "centers", "neighbours"): "neighbors"}


@dataclass(frozen=True)
class PriorSpec:
    """One prior of a spec: its name, and its options as text."""

    name: str
    options: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name


def parse_spec(spec: str) -> list[PriorSpec]:
    """Returns the priors that a spec names.

    >>> [str(part) for part in parse_spec("gmm:kernels=3,init=spread+gab")]
    ['gmm:kernels=3,init=spread', 'gab']

    Raises:
        VicinalError: the spec does not follow the grammar.
    """

    def malformed(problem: str) -> VicinalError:
        return VicinalError(f"malformed prior {spec!r}: {problem}; expected name:option=value,option=value+name")

    if not isinstance(spec, str):
        raise VicinalError(f"a prior must be a text such as 'gmm:kernels=3', got {spec!r}")
    parts = []
    for text in re.split(r"\+(?=[A-Za-z]|$)", spec.strip()):  # the + of 1e+3 is not a separator
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
        parts.append(PriorSpec(part["name"], options))
    return parts


def current_spec(spec: str, *, warn: bool = False) -> str:
    """Returns a spec with renamed values replaced by their new names.

    >>> current_spec("conv:centers=neighbours+gab")
    'conv:centers=neighbors+gab'

    Args:
        spec: as a user or a file has it. A spec without renamed values, or malformed, comes back unchanged.
        warn: warn of renamed values: True for specs that a user wrote, False for specs read from a file.
    """
    try:
        parts = parse_spec(spec)
    except VicinalError:
        return spec
    current = [PriorSpec(part.name, current_options(part.name, part.options, warn=warn)) for part in parts]
    return spec if current == parts else "+".join(map(str, current))


def current_options(name: str, options: dict[str, Any], *, warn: bool = False) -> dict[str, Any]:
    """Returns the options of a prior with renamed values replaced by their new names.

    Args:
        name: of the prior.
        options: values by name.
        warn: as for `current_spec`.
    """
    current = dict(options)
    for (prior, option, old), new in RENAMED_VALUES.items():
        if name == prior and isinstance(options.get(option), str) and options[option] == old:
            current[option] = new
            if warn:
                warn_renamed(f"{prior}:{option}={old}", f"{prior}:{option}={new}")
    return current
