"""`vicinal report`: one HTML file about a study, a comparison or a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from vicinal.cli._flags import call_with_flags

__all__ = ["run"]


def report(runs: Annotated[tuple[str, ...], tyro.conf.Positional], /, out: Path | None = None) -> None:
    """Writes a report that needs no network: answer, table, curves, masks, receptive fields and attention.

    Args:
        runs: The folder of a study, such as runs/demo; or run folders, or patterns such as 'runs/a-*'.
        out: HTML file; by default report.html in the folder of the study or run, or here for several runs.
    """
    from vicinal.report import write_report

    file = write_report(runs, out=out)
    print(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB); open it in a browser")


def run(args: Sequence[str]) -> None:
    """Parses the arguments after `vicinal report`, and writes the page."""
    call_with_flags(report, "vicinal report", args)
