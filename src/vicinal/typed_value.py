"""The converter of settings: a value from Python, YAML, JSON, a prior spec or the command line as an annotated type."""

import contextlib
import math
import types
import typing
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

__all__ = ["choices", "convert_value", "describe_type", "union_members"]

_WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true|false",
    str: "text",
    Path: "a path",
    types.NoneType: "none",
}


def convert_value(value: Any, type_: Any, *, text: bool = False) -> Any:
    """Returns a value as a type: whole number, number, bool, text, path, choice, tuple, None, or a union of these.

    >>> convert_value(32, tuple[int, ...]), convert_value("1e-3", float), convert_value("3", int, text=True)
    ((32,), 0.001, 3)

    `True`, `"3"` and `3.0` are not whole numbers. Text is taken for a number that need not be whole, because YAML 1.1
    reads `1e-3` as text. Numbers are finite. One value is taken as a tuple of one. Values of any other type are
    returned unchanged.

    Args:
        value: the value.
        type_: as annotated, such as `int | None`.
        text: the value was written as text, where `3` is a whole number, `true` a bool, `none` None, and `1/2/3` a
            tuple or a sequence of numbers.

    Raises:
        ValueError: the value does not fit; the message describes the type.
    """
    for member in sorted(union_members(type_), key=lambda member: member is not types.NoneType):  # `none` is also text
        with contextlib.suppress(ValueError, OverflowError):
            return _convert_to_member(value, member, text)
    raise ValueError(describe_type(type_))


def describe_type(type_: Any) -> str:
    """Returns a description of the values of a type, such as `a whole number or none`."""
    return " or ".join(dict.fromkeys(_describe_member(member) for member in union_members(type_)))


def choices(type_: Any) -> tuple[str, ...]:
    """Returns the choices of all `Literal`s of a type; none if it has no `Literal`."""
    return tuple(
        str(choice)
        for member in union_members(type_)
        if typing.get_origin(member) is Literal
        for choice in typing.get_args(member)
    )


def union_members(type_: Any) -> tuple[Any, ...]:
    """Returns the types of a union; the type itself if it is not a union."""
    return typing.get_args(type_) if typing.get_origin(type_) in (typing.Union, types.UnionType) else (type_,)


def _convert_to_member(value: Any, type_: Any, text: bool) -> Any:
    origin, written = typing.get_origin(type_), isinstance(value, str) and text
    if type_ is types.NoneType:
        if value is None or (written and value.lower() == "none"):
            return None
    elif type_ is bool:
        if isinstance(value, bool):
            return value
        if written and value.lower() in ("true", "false"):
            return value.lower() == "true"
    elif type_ in (int, float):
        is_number = isinstance(value, Integral if type_ is int else Real) and not isinstance(value, bool)
        is_text = isinstance(value, str) and (text or type_ is float)
        if (is_number or is_text) and math.isfinite(number := type_(value)):
            return number
    elif type_ in (str, Path):
        if isinstance(value, str) or (type_ is Path and isinstance(value, Path)):
            return type_(value)
    elif origin is Literal:
        for choice in typing.get_args(type_):
            if isinstance(value, str) and (value == choice or (text and value == str(choice))):
                return choice
            if type(value) is type(choice) and value == choice:
                return choice
    elif origin is tuple:
        return _convert_tuple(value, typing.get_args(type_), text)
    elif not written or type_ is Any:
        return value  # a sequence or a tensor: the prior checks its shape
    elif "/" in value:
        return [float(number) for number in value.split("/")]
    raise ValueError(describe_type(type_))


def _convert_tuple(value: Any, types_: tuple[Any, ...], text: bool) -> tuple[Any, ...]:
    if isinstance(value, str) and text:
        value = value.split("/")
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if types_[-1] is Ellipsis:
        types_ = types_[:1] * len(values)
    return tuple(convert_value(each, type_, text=text) for each, type_ in zip(values, types_, strict=True))


def _describe_member(type_: Any) -> str:
    origin, arguments = typing.get_origin(type_), typing.get_args(type_)
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"{_WORDS.get(arguments[0], 'a value')}, or several"
    if origin is tuple:
        return f"{len(arguments)} values"
    return _WORDS.get(type_, "numbers joined by '/'")
