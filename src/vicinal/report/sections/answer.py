"""The answer first: what the comparison has shown, in a sentence, and an estimation plot."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from markupsafe import Markup

from vicinal.analysis.plot_style import BLUE, GRAY, ORANGE
from vicinal.report.html import data_link
from vicinal.report.plots import INK, report_style, svg_panels
from vicinal.report.section import Section
from vicinal.report.sections.results import rows_csv
from vicinal.report.source import ReportSource, counted
from vicinal.studies.result import ArmRow, StudyResult
from vicinal.studies.tables import METRIC_NAMES, format_p
from vicinal.studies.verdict import Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Answer", "answer_section", "answers"]

MAX_PAIR_PLOTS = 6
"""Comparisons whose pairs are drawn; the others are in the plot of differences and in the table."""
MAX_LABEL = 24
"""Characters of a name in a plot."""


class Answer(NamedTuple):
    """What is known of one comparison."""

    claim: str
    figures: str
    kind: str
    """`higher`, `lower` or `open`."""


def answer_section(source: ReportSource) -> Section | None:
    """Returns the answer of a comparison, or the figures of runs that are not compared; None if none is finished."""
    if source.result is None or len({row.arm for row in source.result.rows}) < 2:
        return _run_section(source)
    html = Markup("").join(
        Markup('<p class="answer {}"><strong>{}</strong> {}</p>').format(each.kind, each.claim, each.figures)
        for each in answers(source.result)
    )
    compared = _compared(source.result)
    if compared:
        html += _estimation_plot(source, source.result, compared)
    return Section("answer", "Answer", html)


def answers(result: StudyResult) -> list[Answer]:
    """Returns what a comparison has shown: of the primary comparison, or of each if there is none."""
    compared = _compared(result)
    if not compared:
        return [
            Answer("No answer yet.", "No two runs with the same seed are finished, of an arm and the baseline.", "open")
        ]
    chosen = [row for row in compared if row.primary] or compared
    return [_answer(row, result) for row in chosen]


def _answer(row: ArmRow, result: StudyResult) -> Answer:
    found = row.difference
    assert found is not None
    where = f" ({row.condition})" if row.condition else ""
    interval = "" if found.low is None else f", 95% interval {found.low:+.2f} to {found.high:+.2f}"
    p = found.p if row.adjusted_p is None else row.adjusted_p
    p_text = f"p {format_p(p)}" if p < 0.001 else f"p = {format_p(p)}"
    name = METRIC_NAMES[result.metric]
    figures = f"{found.mean:+.2f} points of {result.split} {name}{interval}, {p_text}, {counted(found.n, 'seed')}."
    if row.verdict is Verdict.HIGHER:
        return Answer(f"{row.arm} is higher than {result.baseline}{where}:", figures, "higher")
    if row.verdict is Verdict.LOWER:
        return Answer(f"{row.arm} is lower than {result.baseline}{where}:", figures, "lower")
    if row.verdict is Verdict.NOT_ENOUGH_SEEDS:
        claim = f"Not enough seeds to tell whether {row.arm} differs from {result.baseline}{where}:"
        return Answer(claim, figures, "open")
    if row.verdict is Verdict.MAP_ONLY:
        claim = f"Too many comparisons to tell whether {row.arm} differs from {result.baseline}{where}:"
        return Answer(claim, figures, "open")
    likely = f" A true difference of {found.detectable:.2f} would have been likely to show." if found.detectable else ""
    return Answer(f"No difference between {row.arm} and {result.baseline} was shown{where}:", figures + likely, "open")


def _compared(result: StudyResult) -> list[ArmRow]:
    return [row for row in result.rows if row.difference is not None and row.difference.n]


def _estimation_plot(source: ReportSource, result: StudyResult, rows: Sequence[ArmRow]) -> Markup:
    """Returns the pairs of each comparison as lines beside the differences with their intervals."""
    drawn = sorted(rows, key=lambda row: not row.primary)[:MAX_PAIR_PLOTS]
    values = [value for row in drawn for pair in row.pairs for value in (pair.value, pair.baseline)]
    margin = 0.06 * (max(values) - min(values)) or 0.5
    limits = min(values) - margin, max(values) + margin
    more = len(rows) - len(drawn)
    left = f" {counted(more, 'more comparison')} only among the differences." if more else ""
    caption = Markup(
        "Lines: each is one seed, from {baseline} to the arm, on {images}; blue is higher, orange lower. Differences: "
        "each dot is one seed, the diamond their mean, the bar its 95% t interval.{left} Data: {link}"
    ).format(
        baseline=result.baseline,
        images=source.images,
        left=left,
        link=data_link("pairs.csv", rows_csv(result.pair_rows()), "pairs.csv"),
    )
    with report_style():
        panels = [_pairs_figure(row, result, limits) for row in drawn]
        panels.append(_differences_figure(rows, result.baseline))
        return svg_panels(panels, " ".join(_alt(row, result.baseline) for row in rows), caption)


def _pairs_figure(row: ArmRow, result: StudyResult, limits: tuple[float, float]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.7, 2.9), layout="constrained")
    axes = figure.subplots()
    for pair in row.pairs:
        color = BLUE if pair.value > pair.baseline else ORANGE if pair.value < pair.baseline else GRAY
        axes.plot([0, 1], [pair.baseline, pair.value], color=color, marker="o", markersize=4, linewidth=1.5)
    axes.set_xlim(-0.35, 1.35)
    axes.set_ylim(*limits)
    axes.set_xticks([0, 1], [_short(name, 7) for name in (result.baseline, row.arm)], fontsize=9)
    axes.set_ylabel(f"{result.split} {METRIC_NAMES[result.metric]} in %")
    title = row.condition or (row.arm if len(row.arm) > 7 else "")
    axes.set_title(_short(title, 22), fontsize=9)
    axes.grid(axis="y")
    return figure


def _differences_figure(rows: Sequence[ArmRow], baseline: str) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6, max(2.9, 0.4 * len(rows) + 1.0)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        found = row.difference
        assert found is not None
        assert found.mean is not None
        values = [pair.value - pair.baseline for pair in row.pairs]
        axes.plot(values, [place - 0.12] * len(values), "o", color=GRAY, markersize=4, alpha=0.8)
        if found.low is not None and found.high is not None:
            axes.plot([found.low, found.high], [place + 0.14] * 2, color=INK, linewidth=2.2)
        axes.plot([found.mean], [place + 0.14], "D", color=BLUE if row.primary else INK, markersize=6)
    labels = [" ".join(filter(None, (row.condition, row.arm))) for row in rows]
    marked = [_short(label, MAX_LABEL) + (" *" if row.primary else "") for label, row in zip(labels, rows, strict=True)]
    axes.set_yticks(range(len(rows)), marked)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.axvline(0, color=INK, linewidth=1, linestyle=":")
    axes.set_xlabel(f"difference to {_short(baseline, MAX_LABEL)}, in points")
    axes.grid(axis="x")
    return figure


def _short(name: str, length: int) -> str:
    """Returns a name with at most `length` characters; its middle is left out."""
    half = (length - 1) // 2
    return name if len(name) <= length else f"{name[: length - 1 - half]}…{name[-half:]}"


def _alt(row: ArmRow, baseline: str) -> str:
    found = row.difference
    assert found is not None
    interval = "no interval" if found.low is None else f"interval {found.low:.2f} to {found.high:.2f}"
    name = " ".join(filter(None, (row.condition, row.arm)))
    return f"{name} minus {baseline}: mean {found.mean:.2f} points, {interval}, {found.wins} of {found.n} seeds higher."


def _run_section(source: ReportSource) -> Section | None:
    """Returns the final figures of runs that are not compared, and their mean for each arm."""
    lines = []
    for arm in source.arms:
        values = [100 * run.results[source.split]["top1"] for run in arm.finished if run.results]
        if len(values) > 1:
            spread = f"{np.mean(values):.2f}% ± {np.std(values, ddof=1):.2f}"
            lines.append((arm.label, f"{source.split} top-1 {spread} over {counted(len(values), 'seed')}"))
        for run in arm.finished if len(values) < 2 else ():
            for split, figures in (run.results or {}).items():
                count = f" ({figures['images']:,} images)" if isinstance(figures.get("images"), int) else ""
                lines.append((run.folder.name, f"{split} top-1 {100 * figures['top1']:.2f}%{count}"))
    if not lines:
        return None
    html = Markup("").join(
        Markup('<p class="answer open"><strong>{}:</strong> {}</p>').format(name, text) for name, text in lines
    )
    return Section("answer", "Result", html)
