"""The page of a survey: which of timm's models take a prior, family by family, in Markdown."""

from collections.abc import Iterable, Sequence

import torch

from vicinal._torchvision import ensure_torchvision
from vicinal.attachment.coverage import Finding, RefusedLayers
from vicinal.inspection import RefusalKind

ensure_torchvision()

import timm  # noqa: E402

__all__ = ["coverage_page"]


def coverage_page(findings: Sequence[Finding], limit: int) -> str:
    """Returns the findings of a survey as a page of Markdown.

    Args:
        findings: one for each model.
        limit: number of parameters above which models were not examined.
    """
    examined = [finding for finding in findings if not finding.skipped]
    attention = [finding for finding in examined if finding.served or finding.missed]
    without = [finding for finding in examined if not finding.served and not finding.missed]
    lines = _summary(findings, examined, attention, without, limit)
    lines += ["| family | models | take a prior | classes | left alone, and why |", "|---|---|---|---|---|"]
    for family, members in _by_family(attention + [finding for finding in without if finding.refused]).items():
        takers = [finding for finding in members if finding.served]
        classes = _totals((name.split(",")[0], finding) for finding in takers for name in finding.served)
        reasons = _totals((_short_reason(layers), finding) for finding in members for layers in finding.refused)
        lines.append(f"| {family} | {len(members)} | {len(takers)} | {_cell(classes)} | {_cell(reasons)} |")
    missed = [finding for finding in attention if finding.missed]
    if missed:
        lines += ["", "## Attention over a grid that takes none", "", "| model | class and reason |", "|---|---|"]
        lines += [
            f"| {finding.model} | {'; '.join(f'{layers.module}: {layers.reason}' for layers in finding.missed)} |"
            for finding in missed
        ]
    failed = [finding for finding in findings if finding.skipped and finding.parameters <= limit]
    if failed:
        lines += ["", "## Not examined", "", "| model | why |", "|---|---|"]
        lines += [f"| {finding.model} | {finding.skipped} |" for finding in failed]
    return "\n".join(lines) + "\n"


def _summary(
    findings: Sequence[Finding],
    examined: Sequence[Finding],
    attention: Sequence[Finding],
    without: Sequence[Finding],
    limit: int,
) -> list[str]:
    """Returns the lines above the table."""
    served = [finding for finding in attention if finding.served]
    whole = [finding for finding in served if not finding.missed]
    windows = [finding for finding in served if finding.windows]
    return [
        "# Which models take a prior",
        "",
        f"Written by `vicinal models --coverage` with timm {timm.__version__} and torch {torch.__version__}: every"
        f" model of up to {limit / 1e6:.0f} M parameters is made at its own image size, and `attach`'s checks are run"
        " on every attention module.",
        "",
        f"- {len(findings)} models: {len(examined)} examined, {len(findings) - len(examined)} not (too large, mostly).",
        f"- {len(attention)} have attention over a grid. {len(served)} of them take a prior"
        f" ({len(served) - len(windows)} on global grids only, {len(windows)} on windows too);"
        f" in {len(whole)} every such layer does.",
        f"- {len(without)} have none: no attention, or only over channels, a class token, pooled keys and the like.",
        "",
        "Numbers of models in brackets.",
        "",
    ]


def _short_reason(layers: RefusedLayers) -> str:
    """Returns class and kind of refusal, without numbers of tokens, so that layers of all sizes count as one."""
    if layers.queries == 1:
        reason = "one query"
    elif layers.kind is RefusalKind.POOLED and layers.queries != layers.keys:
        reason = "fewer keys than queries" if layers.keys < layers.queries else "more keys than queries"
    else:
        reason = layers.kind.value
    return f"{layers.module}: {reason}"


def _totals(pairs: Iterable[tuple[str, Finding]]) -> dict[str, set[str]]:
    """Returns the names of the models that each text is about."""
    models: dict[str, set[str]] = {}
    for text, finding in pairs:
        models.setdefault(text, set()).add(finding.model)
    return models


def _cell(models: dict[str, set[str]]) -> str:
    return "<br>".join(f"{text} ({len(names)})" for text, names in models.items())


def _by_family(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    families: dict[str, list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: (finding.family, finding.model)):
        families.setdefault(finding.family, []).append(finding)
    return families
