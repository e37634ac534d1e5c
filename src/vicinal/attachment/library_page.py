"""The page of a survey of a library other than timm: which layers take a prior, architecture by architecture."""

from collections.abc import Sequence

import torch

from vicinal.attachment.survey import Finding
from vicinal.text_table import text_table

__all__ = ["library_page", "library_table"]


def library_page(findings: Sequence[Finding], library: str, command: str, unreached: int = 0) -> str:
    """Returns the findings of a survey as a page of Markdown.

    Args:
        findings: one for each architecture.
        library: name of the library.
        command: what made the survey.
        unreached: number of architectures for which there was no time.
    """
    examined = [finding for finding in findings if not finding.skipped]
    served = [finding for finding in examined if finding.served]
    version = next((finding.version for finding in findings), "")
    lines = [
        f"# Which models of {library} take a prior",
        "",
        f"Written by `{command}` with {library} {version} and torch {torch.__version__}: every architecture is made"
        " small, with random weights, and `attach`'s checks are run on every attention module.",
        "",
        f"- {len(findings) + unreached} architectures: {len(examined)} examined, {len(findings) - len(examined)} not"
        + (f", {unreached} not reached yet." if unreached else "."),
        f"- {len(served)} take a prior, in {sum(finding.layers for finding in served)} layers.",
        "",
        "Numbers of layers in brackets.",
        "",
        "| architecture | model | image | layers that take a prior | layers that do not, and why |",
        "|---|---|---|---|---|",
    ]
    for finding in examined:
        size = " x ".join(map(str, finding.image))
        taking = "<br>".join(f"{text} ({count})" for text, count in finding.served.items())
        refusing = "<br>".join(f"{each.module}: {each.reason} ({each.count})" for each in finding.refused)
        lines.append(f"| {finding.model} | {finding.family} | {size} | {taking} | {refusing} |")
    failed = [finding for finding in findings if finding.skipped]
    if failed:
        lines += ["", "## Not built", "", "| architecture | model | why |", "|---|---|---|"]
        lines += [f"| {each.model} | {each.family} | {each.skipped.replace('|', '/')} |" for each in failed]
    return "\n".join(lines) + "\n"


def library_table(findings: Sequence[Finding]) -> str:
    """Returns the findings as lines of text: how many layers take a prior, and why others do not."""
    rows = [("architecture", "served", "refused", "why")]
    for finding in findings:
        if finding.skipped:
            rows.append((finding.model, "-", "-", f"not built: {finding.skipped}"))
            continue
        refused = sum(each.count for each in finding.refused)
        kinds = dict.fromkeys(f"{each.module}: {each.kind.value}" for each in finding.refused)
        rows.append((finding.model, str(finding.layers), str(refused), "; ".join(kinds)))
    return text_table(rows)
