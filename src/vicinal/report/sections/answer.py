"""The answer first: what the comparison has shown, in a sentence, and an estimation plot."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup, escape

from vicinal.analysis.plot_style import BLUE, GRAY, ORANGE
from vicinal.report.plots import INK, report_style, svg_figure
from vicinal.report.section import Section
from vicinal.report.source import ReportSource
from vicinal.studies.result import ArmRow, StudyResult
from vicinal.studies.tables import METRIC_NAMES, format_p
from vicinal.studies.verdict import Verdict

__all__ = ["answer_section", "answer_sentences"]

MAX_PAIR_PLOTS = 6
"""Comparisons whose pairs are drawn; the others are in the plot of differences and in the table."""


def answer_section(source: ReportSource) -> Section | None:
    """Returns the answer of a comparison, or the figures of a single run; None if nothing is finished."""
    if source.result is None:
        return _run_section(source)
    sentences = answer_sentences(source.result)
    html = Markup("").join(Markup('<p class="answer">{}</p>').format(sentence) for sentence in sentences)
    compared = _compared(source.result)
    if compared:
        html += _estimation_plots(source.result, compared)
    return Section("answer", "Answer", html)


def answer_sentences(result: StudyResult) -> list[str]:
    """Returns what a comparison has shown: a sentence for the primary comparison, or for each if there is none."""
    compared = _compared(result)
    if not compared:
        return ["No pair of runs is finished yet, so there is no answer."]
    chosen = [row for row in compared if row.primary] or compared
    return [_sentence(row, result) for row in chosen]


def _sentence(row: ArmRow, result: StudyResult) -> str:
    found = row.difference
    assert found is not None
    assert found.mean is not None
    where = f" ({row.condition})" if row.condition else ""
    interval = "" if found.low is None else f", 95% interval {found.low:+.2f} to {found.high:+.2f}"
    p = found.p if row.adjusted_p is None else row.adjusted_p
    name = METRIC_NAMES[result.metric]
    figures = f"{found.mean:+.2f} points of {result.split} {name}{interval}, p {_p_words(p)}, {_seeds(found.n)}"
    if row.verdict is Verdict.HIGHER:
        return f"{row.arm} is higher than {result.baseline}{where}: {figures}."
    if row.verdict is Verdict.LOWER:
        return f"{row.arm} is lower than {result.baseline}{where}: {figures}."
    if row.verdict is Verdict.NOT_ENOUGH_SEEDS:
        return f"Not enough seeds to tell whether {row.arm} differs from {result.baseline}{where}: {figures}."
    if row.verdict is Verdict.MAP_ONLY:
        return f"A map only, for too many comparisons: {row.arm} against {result.baseline}{where}: {figures}."
    likely = f" A true difference of {found.detectable:.2f} would have been likely to show." if found.detectable else ""
    return f"No difference between {row.arm} and {result.baseline} was shown{where}: {figures}.{likely}"


def _p_words(p: float) -> str:
    return format_p(p) if p < 0.001 else f"= {format_p(p)}"


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def _compared(result: StudyResult) -> list[ArmRow]:
    return [row for row in result.rows if row.difference is not None and row.difference.n]


def _estimation_plots(result: StudyResult, rows: Sequence[ArmRow]) -> Markup:
    """Returns the pairs of each comparison as lines beside the differences with their intervals."""
    from matplotlib.figure import Figure

    drawn = sorted(rows, key=lambda row: not row.primary)[:MAX_PAIR_PLOTS]
    with report_style():
        columns = len(drawn) + 1
        figure = Figure(figsize=(2.1 * len(drawn) + 3.2, max(3.2, 0.34 * len(rows) + 1.4)), layout="constrained")
        axes = figure.subplots(1, columns, width_ratios=[1.0] * len(drawn) + [1.9])
        lowest = min(min(pair.value, pair.baseline) for row in drawn for pair in row.pairs)
        highest = max(max(pair.value, pair.baseline) for row in drawn for pair in row.pairs)
        margin = 0.06 * (highest - lowest) or 0.5
        for index, (row, each) in enumerate(zip(drawn, axes, strict=False)):
            _draw_pairs(each, row, result.baseline)
            each.set_ylim(lowest - margin, highest + margin)
            if index:
                each.tick_params(labelleft=False)
            else:
                each.set_ylabel(f"{result.split} {METRIC_NAMES[result.metric]} in %")
        _draw_differences(axes[-1], rows, result.baseline)
        alt = " ".join(_alt(row, result.baseline) for row in rows)
        more = len(rows) - len(drawn)
        left = f" {more} more comparisons are drawn at the right only." if more else ""
        caption = (
            f"Left: each line is one seed, from {result.baseline} to the arm, on {result.split} images. Right: the "
            f"difference of each seed as a dot, their mean and its 95% t interval.{left}"
        )
        return svg_figure(figure, alt, caption)


def _draw_pairs(axes: Any, row: ArmRow, baseline: str) -> None:
    for pair in row.pairs:
        color = BLUE if pair.value > pair.baseline else ORANGE if pair.value < pair.baseline else GRAY
        axes.plot([0, 1], [pair.baseline, pair.value], color=color, marker="o", markersize=4, linewidth=1.3)
    axes.set_xlim(-0.35, 1.35)
    axes.set_xticks([0, 1], [baseline, row.arm])
    if row.condition:
        axes.set_title(row.condition, fontsize=10)
    axes.grid(axis="y")


def _draw_differences(axes: Any, rows: Sequence[ArmRow], baseline: str) -> None:
    for place, row in enumerate(rows):
        found = row.difference
        assert found is not None
        values = [pair.value - pair.baseline for pair in row.pairs]
        axes.plot(values, [place] * len(values), "o", color=GRAY, markersize=4, alpha=0.7)
        if found.low is not None:
            axes.plot([found.low, found.high], [place + 0.22] * 2, color=INK, linewidth=2.2)
        axes.plot([found.mean], [place + 0.22], "D", color=BLUE if row.primary else INK, markersize=6)
    labels = [" ".join(filter(None, (row.condition, row.arm))) + (" *" if row.primary else "") for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.axvline(0, color=INK, linewidth=1, linestyle=":")
    axes.set_xlabel(f"difference to {baseline}, in points")
    axes.grid(axis="x")


def _alt(row: ArmRow, baseline: str) -> str:
    found = row.difference
    assert found is not None
    interval = "no interval" if found.low is None else f"interval {found.low:.2f} to {found.high:.2f}"
    name = " ".join(filter(None, (row.condition, row.arm)))
    return f"{name} minus {baseline}: mean {found.mean:.2f} points, {interval}, {found.wins} of {found.n} seeds higher."


def _run_section(source: ReportSource) -> Section | None:
    """Returns the final figures of a single run, or the means of runs of one arm."""
    finished = [run for arm in source.arms for run in arm.finished]
    if not finished:
        return None
    lines = []
    for run in finished:
        for split, figures in (run.results or {}).items():
            images = figures.get("images")
            count = f" ({images:,} images)" if isinstance(images, int) else ""
            lines.append(f"{run.folder.name}: {split} top-1 {100 * figures['top1']:.2f}%{count}")
    html = Markup("").join(Markup('<p class="answer">{}</p>').format(escape(line)) for line in lines)
    return Section("answer", "Result", html)
