"""`vicinal models`: lists models, and surveys which of them take a prior."""

import dataclasses
import fnmatch
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from vicinal.cli._flags import call_with_flags
from vicinal.errors import VicinalError
from vicinal.text_table import text_table

if TYPE_CHECKING:
    from vicinal.attachment.survey import Survey
    from vicinal.models.backbones import Backbone

__all__ = ["run"]


def models(
    pattern: Annotated[str | None, tyro.conf.Positional] = None,
    /,
    coverage: bool = False,
    library: Literal["timm", "transformers", "smp"] = "timm",
    out: Path | None = None,
    notes: Path | None = None,
    limit: float = 100.0,
    memory: float = 12.0,
    seconds: float = 600.0,
    minutes: float = math.inf,
) -> None:
    """Lists models, or surveys which of them take a prior.

    Args:
        pattern: Pattern of names, such as 'deit*'; without one, our backbones and timm's families are listed.
        coverage: Create each matching model of a library, inspect which of its attention layers take a prior, and write
            a page.
        library: timm, transformers (small models with random weights) or smp, which is segmentation_models_pytorch.
        out: File of that page; by default docs/coverage.md for all of timm, docs/coverage-LIBRARY.md for all of another
            library, and the same names in runs/ for the models of a pattern.
        notes: File of the findings by model; by default runs/coverage.jsonl or runs/coverage-LIBRARY.jsonl. Models
            found there are not inspected again, unless the version of the library has changed.
        limit: Maximum number of parameters in millions; larger timm models are skipped.
        memory: Maximum memory in GiB of creating and inspecting one model.
        seconds: Maximum time of creating and inspecting one model.
        minutes: Time after which no further model is created. The page counts those that were reached; the same command
            continues with the others.
    """
    if coverage:
        stem = "coverage" if library == "timm" else f"coverage-{library}"
        out = out or Path("runs" if pattern else "docs") / f"{stem}.md"
        notes = notes or Path("runs") / f"{stem}.jsonl"
        survey = _survey(library, pattern or "*", notes, round(limit * 1e6), round(memory * 2**30), seconds)
        print(cover(library, dataclasses.replace(survey, minutes=minutes), out, round(limit * 1e6)))
    else:
        print(names(pattern) if pattern else overview())


def overview() -> str:
    """Returns tables of our backbones, and of timm's families with the number of models in each."""
    from vicinal.attachment.coverage import families
    from vicinal.models import BACKBONES

    rows = [["model", "parameters", "patch", "pooling", "at 32 px, 10 classes"]]
    for backbone in BACKBONES.values():
        patches = f"{backbone.patch_for((32, 32))}, {backbone.patch_for((64, 64))}"
        pools = ", ".join(backbone.pools)
        rows.append([backbone.name, f"{_parameters(backbone):,}", patches, pools, backbone.summary])
    lines = [text_table(rows, right=[1]), "", "patch: below 64 px, and from 64 px on; pooling: the default first", ""]
    counts = Counter(families().values())
    families_table = [["timm family", "models"], *([family, str(count)] for family, count in sorted(counts.items()))]
    lines.append(text_table(families_table, right=[1]))
    return "\n".join([*lines, "", "vicinal models 'swin*' lists names; --coverage says which of them take a prior"])


def _parameters(backbone: "Backbone") -> int:
    import torch

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in backbone.create().parameters())


def names(pattern: str) -> str:
    """Returns the names that match a pattern, one per line, our backbones first."""
    from vicinal.attachment.coverage import families
    from vicinal.models import BACKBONES

    found = [*fnmatch.filter(BACKBONES, pattern), *sorted(fnmatch.filter(families(), pattern))]
    if not found:
        raise VicinalError(f"no model is named {pattern!r}; try a pattern such as '*{pattern.strip('*')}*'")
    return "\n".join(found)


def cover(library: str, survey: "Survey", out: Path, limit: int) -> str:
    """Inspects every model, with a progress bar, writes the page, and returns the text to print.

    Args:
        library: name of the library.
        survey: the survey of its models.
        out: file of the page.
        limit: number of parameters above which models are skipped.
    """
    from tqdm import tqdm

    findings = []
    with tqdm(survey, unit="model") as bar:
        for finding in bar:
            findings.append(finding)
            bar.set_postfix_str(finding.model)
    out.parent.mkdir(parents=True, exist_ok=True)
    taking = sum(bool(finding.served) for finding in findings)
    left = f"; {len(survey) - len(findings)} not reached" if len(findings) < len(survey) else ""
    summary = f"{taking} of {len(findings)} models take a prior{left}; wrote {out}"
    if library == "timm":
        from vicinal.attachment.coverage_page import coverage_page

        out.write_text(coverage_page(findings, limit, len(survey) - len(findings)), encoding="utf-8")
        return summary
    from vicinal.attachment.library_page import library_page, library_table

    name = "segmentation_models_pytorch" if library == "smp" else library
    command = f"vicinal models --coverage --library {library}"
    out.write_text(library_page(findings, name, command, len(survey) - len(findings)), encoding="utf-8")
    return f"{library_table(findings)}\n\n{summary}"


def _survey(library: str, pattern: str, notes: Path, limit: int, memory: int, seconds: float) -> "Survey":
    if library == "transformers":
        from vicinal.attachment.coverage_transformers import transformers_survey

        return transformers_survey(pattern, notes, memory=memory, seconds=seconds)
    if library == "smp":
        from vicinal.attachment.coverage_smp import smp_survey

        return smp_survey(pattern, notes, memory=memory, seconds=seconds)
    from vicinal.attachment.coverage import timm_survey

    return timm_survey(pattern, notes, limit=limit, memory=memory, seconds=seconds)


def run(args: Sequence[str]) -> None:
    """Parses the arguments after `vicinal models`, and prints or writes."""
    call_with_flags(models, "vicinal models", args)
