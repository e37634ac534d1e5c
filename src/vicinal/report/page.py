"""The page: sections in one HTML file, with its style and its script in it."""

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import vicinal
from vicinal.errors import VicinalError
from vicinal.files import write_text
from vicinal.report.html import missing_list
from vicinal.report.section import Section
from vicinal.report.sections.answer import answer_section
from vicinal.report.sections.cost import cost_section
from vicinal.report.sections.curves import curves_section
from vicinal.report.sections.explorer import explorer_section
from vicinal.report.sections.fields import fields_section
from vicinal.report.sections.masks import masks_section
from vicinal.report.sections.results import results_section
from vicinal.report.sections.settings import settings_section
from vicinal.report.source import ReportSource, open_source

__all__ = ["render_page", "write_report"]

MAX_BYTES = 9_000_000
"""Of all sections; style and script are small."""
OPTIONAL = {"explorer": "attention", "masks": "masks", "fields": "erf"}
"""Sections that are left out if the page would be larger, and what `vicinal analyze` draws in their place."""
SECTIONS: Sequence[Callable[[ReportSource], Section | None]] = (
    answer_section,
    results_section,
    curves_section,
    masks_section,
    fields_section,
    explorer_section,
    cost_section,
    settings_section,
)
"""In the order of the page. A function returns None if there is nothing to show."""


def write_report(paths: Sequence[str | Path] | str | Path, *, out: str | Path | None = None) -> Path:
    """Writes the report of a study, of a comparison of runs, or of one run. Returns the file.

    Args:
        paths: the folder of a study; or run folders, of which patterns such as `runs/a-*` are expanded.
        out: HTML file; by default `report.html` in the folder of the study or run, or in the working folder.

    Raises:
        VicinalError: if a path is neither a study nor a run, or `out` is not the name of an HTML file that can be
            written.
    """
    if out is not None and Path(out).suffix not in (".html", ".htm"):
        raise VicinalError(f"out must be the name of an HTML file, such as report.html, got {out}")
    if out is not None and not Path(out).parent.is_dir():
        raise VicinalError(f"out must be in a folder that exists, got {out}")
    source = open_source([paths] if isinstance(paths, str | Path) else paths)
    file = source.folder / "report.html" if out is None else Path(out)
    page = render_page(source)
    try:
        write_text(file, page)
    except OSError as error:
        raise VicinalError(
            f"{file} cannot be written: {error.strerror}; give another file with out, such as report.html"
        ) from None
    return file


def render_page(source: ReportSource) -> str:
    """Returns the HTML of a report."""
    from jinja2 import Environment, StrictUndefined

    sections = _within_limit([section for make in SECTIONS if (section := make(source)) is not None])
    folder = files("vicinal.report")
    script = (folder / "script.js").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((folder / "template.html").read_text(encoding="utf-8"))
    return template.render(
        source=source,
        sections=sections,
        style=(folder / "style.css").read_text(encoding="utf-8"),
        script=script,
        policy=_content_policy(script),
        data=_script_json({section.name: section.data for section in sections if section.data}),
        version=vicinal.__version__,
    )


def _within_limit(sections: Sequence[Section]) -> list[Section]:
    """Returns sections of at most `MAX_BYTES`: a sentence stands in place of the largest optional ones."""
    kept = {section.name: section for section in sections}
    sizes = {name: len(section.html.encode()) + len(_script_json(section.data)) for name, section in kept.items()}
    for name in sorted(OPTIONAL.keys() & sizes.keys(), key=lambda name: -sizes[name]):
        if sum(sizes.values()) <= MAX_BYTES:
            break
        sentence = f"Left out, to keep this file small; `vicinal analyze {OPTIONAL[name]}` draws it."
        kept[name] = Section(name, kept[name].title, missing_list([sentence]))
        sizes[name] = 0
    return list(kept.values())


def _content_policy(script: str) -> str:
    """Returns a policy under which the browser loads nothing from elsewhere, and runs no script but the given one."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _script_json(data: Any) -> str:
    """Returns JSON that is safe inside of a script element: it cannot contain the end of the element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")
