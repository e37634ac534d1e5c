"""The page of a survey of timm: which of its models take a prior, family by family, in Markdown."""

from collections.abc import Iterable, Sequence

import timm
import torch

from vicinal.attachment.survey import Finding, RefusedLayers
from vicinal.inspection import RefusalKind

__all__ = ["coverage_page"]


def coverage_page(findings: Sequence[Finding], limit: int, unreached: int = 0) -> str:
    """Returns the findings of a survey as a page of Markdown.

    Args:
        findings: one for each model.
        limit: number of parameters above which models were not examined.
        unreached: number of models that the survey had no time for.
    """
    findings = sorted(findings, key=lambda finding: (finding.family, finding.model))
    examined = [finding for finding in findings if not finding.skipped]
    lines = _summary(findings, examined, limit, unreached)
    lines += ["| family | models | spatial layers | take a prior | classes | left alone, and why |"]
    lines += ["|---|---|---|---|---|---|"]
    attention = [finding for finding in examined if finding.spatial or finding.served or finding.refused]
    for family, members in _by_family(attention).items():
        spatial, served = (sum(counts) for counts in zip(*map(_counts, members), strict=True))
        classes = _totals((name.split(",")[0], finding) for finding in members for name in finding.served)
        reasons = _totals((_short_reason(layers), finding) for finding in members for layers in finding.refused)
        lines.append(f"| {family} | {len(members)} | {spatial} | {served} | {_cell(classes)} | {_cell(reasons)} |")
    missed = {
        finding.model: [f"{layers.module}: {layers.reason} ({layers.count})" for layers in finding.missed]
        + [f"{cls}: no attention was found in it ({count})" for cls, count in finding.unseen.items()]
        for finding in examined
    }
    lines += _section("Spatial layers that take none", "class, reason and number of layers", missed)
    unexpected = {
        finding.model: [f"{cls} ({count})" for cls, count in finding.unexpected.items()] for finding in examined
    }
    lines += _section("Layers that take one and are not spatial by the table", "class", unexpected)
    failed = {
        finding.model: [finding.skipped] for finding in findings if finding.skipped and finding.parameters <= limit
    }
    lines += _section("Not examined", "why", failed)
    return "\n".join(lines) + "\n"


def _summary(findings: Sequence[Finding], examined: Sequence[Finding], limit: int, unreached: int) -> list[str]:
    """Returns the lines above the table."""
    attention = [finding for finding in examined if finding.spatial]
    served = [finding for finding in attention if finding.spatial_served]
    whole = [finding for finding in attention if finding.spatial_served == finding.spatial]
    windows = [finding for finding in served if finding.windows]
    layers, taking = sum(finding.spatial for finding in attention), sum(finding.spatial_served for finding in attention)
    return [
        "# Which models take a prior",
        "",
        f"Written by `vicinal models --coverage` with timm {timm.__version__} and torch {torch.__version__}: every"
        f" model of up to {limit / 1e6:.0f} M parameters is made at its own image size, and `attach`'s checks are run"
        " on every attention module.",
        "",
        "A layer is spatial if `src/vicinal/attachment/timm_attention.py` says so of its class. That table was written"
        " from timm's source: patches attend to patches, also where keys are pooled.",
        "",
        f"- {len(findings) + unreached} models: {len(examined)} examined, {len(findings) - len(examined)} not (too"
        " large, mostly)" + (f", {unreached} not reached yet." if unreached else "."),
        f"- {len(attention)} have spatial layers. {len(served)} of them take a prior"
        f" ({len(served) - len(windows)} on global grids only, {len(windows)} on windows too);"
        f" in {len(whole)} every spatial layer does.",
        f"- {taking} of {layers} spatial layers take a prior.",
        f"- {len(examined) - len(attention)} have none: no attention, or only over channels, of a class token and the"
        " like.",
        "",
        "Numbers of models in brackets.",
        "",
    ]


def _section(title: str, column: str, texts: dict[str, list[str]]) -> list[str]:
    """Returns a heading and a table with a row for each model that has texts; no lines if none has."""
    rows = [f"| {model} | {'; '.join(each)} |" for model, each in texts.items() if each]
    return ["", f"## {title}", "", f"| model | {column} |", "|---|---|", *rows] if rows else []


def _counts(finding: Finding) -> tuple[int, int]:
    return finding.spatial, finding.spatial_served


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
    for finding in findings:
        families.setdefault(finding.family, []).append(finding)
    return families
