"""From the signature of a function to flags: tyro parses, `vicinal.typed_value` converts, errors are one line."""

import ast
import functools
import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from vicinal.errors import VicinalError
from vicinal.typed_value import choices, convert_value, describe_type, union_members

__all__ = ["call_with_flags", "field_docs"]

_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", bool: "true|false"}


class _FlagError(Exception):
    """The value of a flag cannot be used. Not a ValueError, which tyro would print in a box."""


def call_with_flags(function: Callable[..., Any], prog: str, args: Sequence[str], **options: Any) -> Any:
    """Calls a function, or makes a dataclass, with the values of flags. Returns the result.

    Every parameter is a flag, or a positional argument if it is annotated as `tyro.conf.Positional`. The flags of a
    parameter that is a dataclass are a group of the help.

    Args:
        function: a function, whose docstring is the help, or a dataclass.
        prog: what the user types, such as `vicinal train`.
        args: what follows.
        **options: of `tyro.cli`.

    Raises:
        VicinalError: a value does not fit its flag, or the function raises it.
    """
    try:
        return tyro.cli(_with_flags(function), prog=prog, args=args, config=(tyro.conf.OmitArgPrefixes,), **options)
    except _FlagError as error:
        raise VicinalError(str(error)) from None


def field_docs(cls: type) -> dict[str, str]:
    """Returns the docstring below each field of a dataclass, in one line, by the name of the field.

    Fields that it inherits are included; those of a class that was made without source are not.
    """
    docs: dict[str, str] = {}
    for base in filter(is_dataclass, reversed(cls.__mro__)):
        try:
            definition = ast.parse(inspect.getsource(base)).body[0]
        except OSError:  # `make_dataclass` made it
            continue
        assert isinstance(definition, ast.ClassDef)
        for each, doc in itertools.pairwise(definition.body):
            if isinstance(each, ast.AnnAssign) and isinstance(doc, ast.Expr):
                docs[ast.unparse(each.target)] = " ".join(ast.literal_eval(doc.value).split())
    return docs


def _flag_type(name: str, annotation: Any, description: str | None = None) -> Any:
    """Returns the annotation of a parameter with what tyro needs to show and convert its flag."""
    type_, *extras = typing.get_args(annotation) if typing.get_origin(annotation) is Annotated else (annotation,)
    if is_dataclass(type_):
        return Annotated[(_group_type(type_), *extras)] if extras else _group_type(type_)
    is_positional = tyro.conf.Positional in extras
    flag = name.upper() if is_positional else f"--{name.replace('_', '-')}"
    spec = [] if type_ is bool else _constructor(flag, type_, name.upper() if is_positional else None)
    return Annotated[(type_, *spec, tyro.conf.arg(help=description, help_behavior_hint=_describe_default), *extras)]


def _with_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function, or a dataclass, with annotated parameters."""
    if is_dataclass(function):
        return _group_type(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    del call.__wrapped__  # tyro would read the signature there
    call.__doc__ = _unwrapped(function.__doc__ or "")
    hints = typing.get_type_hints(function, include_extras=True)
    signature = inspect.signature(function)
    parameters = [each.replace(annotation=_flag_type(name, hints[name])) for name, each in signature.parameters.items()]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def _group_type(cls: Any) -> type:
    """Returns a subclass of a dataclass whose fields are flags."""
    hints, docs = typing.get_type_hints(cls, include_extras=True), field_docs(cls)
    members: list[tuple[str, Any, Any]] = []
    for each in fields(cls):
        values: dict[str, Any] = {"default": each.default, "default_factory": each.default_factory}
        default: Any = field(**{name: value for name, value in values.items() if value is not MISSING})
        members.append((each.name, _flag_type(each.name, hints[each.name], docs.get(each.name)), default))
    made = make_dataclass(cls.__name__, members, bases=(cls,), kw_only=True)
    # dataclasses make docstrings that are signatures
    made.__doc__ = "" if cls.__doc__.startswith(f"{cls.__name__}(") else _unwrapped(cls.__doc__)
    return made


def _unwrapped(doc: str) -> str:
    """Returns a docstring with one line for each argument: tyro shows the line breaks of the source."""
    return re.sub(r"\n {8,}(?=\S)", " ", inspect.cleandoc(doc))


def _constructor(flag: str, type_: Any, metavar: str | None) -> list[Any]:
    """Returns how tyro makes a value of a type from text: one constructor, or none if tyro's own serves."""
    members = [each for each in union_members(type_) if each is not types.NoneType]
    nargs: Any = 1
    if len(members) == 1 and typing.get_origin(members[0]) is tuple:
        members, count = [typing.get_args(members[0])[0]], len(typing.get_args(members[0]))
        nargs = "*" if typing.get_args(type_)[-1] is Ellipsis else count
    if not all(each in _METAVARS or typing.get_origin(each) is Literal for each in members):
        return []
    item = typing.Union[tuple(members)] if nargs != 1 else type_  # noqa: UP007

    def convert(words: list[str]) -> Any:
        value: Any = words[0] if nargs == 1 else words
        try:
            return convert_value(value, type_, text=True)
        except ValueError:
            wrong = next(word for word in words if not _fits(word, item))
            expected = describe_type(item).removesuffix(" or none")
            raise _FlagError(f"{flag} must be {expected}, got {wrong!r}") from None

    name = metavar or "|".join(_metavar(each) for each in members)
    shown = f"{name} ..." if nargs == "*" else " ".join([name] * nargs)
    return [tyro.constructors.PrimitiveConstructorSpec(nargs, shown, convert, lambda _: True, _words)]


def _fits(word: str, type_: Any) -> bool:
    try:
        convert_value(word, type_, text=True)
    except ValueError:
        return False
    return True


def _metavar(type_: Any) -> str:
    return "{" + ",".join(choices(type_)) + "}" if choices(type_) else _METAVARS[type_]


def _words(value: Any) -> list[str]:
    values = value if isinstance(value, tuple) else () if value is None else (value,)
    return [f"{each:g}" if isinstance(each, float) else str(each) for each in values]


def _describe_default(default: str) -> str:
    return "" if default in ("", "None", "False") else f"(default: {default})"
