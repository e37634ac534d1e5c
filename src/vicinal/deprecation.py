"""Old names of public things: they work, and warn with DeprecationWarning where a user writes them."""

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

__all__ = ["RenamedAttribute", "module_getattr", "renamed_parameters", "warn_renamed"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def warn_renamed(old: str, new: str) -> None:
    """Warns that a name has changed, at the innermost line of the call stack outside this package.

    Args:
        old: the name that was used.
        new: the name to use.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "vicinal":
        level, frame = level + 1, frame.f_back
    warnings.warn(f"{old} is deprecated; use {new}", DeprecationWarning, stacklevel=level)


def module_getattr(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a module's `__getattr__` that resolves old names and warns.

    Args:
        module: `__name__` of the module.
        renamed: new name of each old one, both in that module.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"{module}.{renamed[name]}")
        return getattr(importlib.import_module(module), renamed[name])

    return __getattr__


def renamed_parameters(**renamed: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Returns a decorator for a function some of whose parameters were renamed: the old keywords work, and warn.

    Args:
        renamed: new name of each old parameter.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def with_old_names(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            for old, new in renamed.items():
                if old in kwargs:
                    warn_renamed(f"{function.__qualname__}({old}=)", f"{new}=")
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return with_old_names

    return decorate


class RenamedAttribute:
    """The old name of an attribute or method, as a descriptor.

    >>> import warnings
    >>> from vicinal.deprecation import RenamedAttribute
    >>> class Point:
    ...     center = 3
    ...     centre = RenamedAttribute("center")
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     print(Point().centre, caught[0].message)
    3 Point.centre is deprecated; use center

    Args:
        new: the name to use.
    """

    def __init__(self, new: str) -> None:
        self.new = new
        self.__doc__ = f"Deprecated: use `{new}`."

    def __set_name__(self, owner: type, name: str) -> None:
        self.old = f"{owner.__name__}.{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        warn_renamed(self.old, self.new)
        return getattr(instance, self.new)
