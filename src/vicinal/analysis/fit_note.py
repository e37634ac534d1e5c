"""Notes of a fit: a kind for code to decide on, and a sentence for people."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vicinal.analysis.result import without_nan

__all__ = ["FitNote", "NoteKind", "NotedFit"]


class NoteKind(StrEnum):
    """Reason why a table cannot be fitted, or is not fitted well, or a limit of its fit."""

    TOO_SMALL = "too_small"
    NOT_FINITE = "not_finite"
    FLAT = "flat"
    NOT_CONVERGED = "not_converged"
    LIKE_NOISE = "like_noise"
    POOR = "poor"
    PEAK_OUTSIDE = "peak_outside"
    TOO_WIDE = "too_wide"
    PARABOLA = "parabola"
    TOO_NARROW = "too_narrow"
    MOSTLY_CONSTANT = "mostly_constant"


@dataclass(frozen=True)
class FitNote:
    """One note of a fit."""

    kind: NoteKind
    text: str
    """The note in words, with its numbers and axes."""


class NotedFit:
    """Base class of the dataclasses of fits: notes in words, and a dictionary."""

    notes: tuple[FitNote, ...]

    @property
    def note(self) -> str | None:
        """All notes as one sentence; None if there are none."""
        return "; ".join(note.text for note in self.notes) or None

    @property
    def kinds(self) -> tuple[NoteKind, ...]:
        """Kinds of the notes."""
        return tuple(note.kind for note in self.notes)

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields, ready for JSON; `notes` as `note`, in words, and `note_kinds`."""
        names = [name for name in self.__dataclass_fields__ if name != "notes"]  # type: ignore[attr-defined]
        figures = {name: without_nan(getattr(self, name)) for name in names}
        return {**figures, "note": self.note, "note_kinds": [str(kind) for kind in self.kinds]}
