"""A section of a report."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

__all__ = ["Section"]


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading."""

    name: str
    """Its id in the page, such as `results`."""
    title: str
    html: Markup
    """The content, with everything escaped that is not ours. It is complete without the script."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the script reads, as JSON in the page; binary data as base64 text."""
