"""Old spellings of attributes: they work, and warn with DeprecationWarning."""

from typing import Any

from vicinal.deprecation import warn_renamed

__all__ = ["RenamedAttribute"]


class RenamedAttribute:
    """The old name of an attribute or method, as a descriptor.

    >>> import warnings
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
