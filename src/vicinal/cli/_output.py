"""Flags for the output, shared by the verbs of `vicinal analyze`."""

import json as json_
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vicinal.analysis.opened_model import OpenedModel

__all__ = ["OutputArgs"]


@dataclass
class OutputArgs:
    """What to write and print."""

    out: Path | None = None
    """Folder to write to; by default analysis/ in the folder of the run. Files of an earlier call are replaced."""
    json: bool = False
    """Print all figures as JSON."""

    def folder(self, models: "Sequence[OpenedModel]") -> Path:
        """Returns the folder to write to; raises VicinalError if it cannot be written."""
        from vicinal.analysis.output_files import output_folder

        return output_folder(models, self.out)

    def print(self, document: Any, text: str) -> None:
        """Prints the document as JSON if `--json` is given, else the text."""
        print(json_.dumps(document) if self.json else text)
