"""Tables of a study as text and Markdown, with the notes that a reader needs to judge them."""

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vicinal.studies.statistics import PairedDifference, smallest_p
from vicinal.studies.verdict import MIN_SEEDS, Verdict
from vicinal.text_table import markdown_table, text_table

if TYPE_CHECKING:
    from vicinal.studies.result import ArmRow, StudyResult

__all__ = ["METRIC_NAMES", "pairs_text", "study_text"]

WIDTH = 100
METRIC_NAMES = {"top1": "top-1", "balanced_accuracy": "balanced accuracy", "f1": "macro F1"}


def study_text(result: "StudyResult", *, markdown: bool = False) -> str:
    """Returns question, table and notes.

    Args:
        result: of a study or a comparison.
        markdown: as Markdown instead of text for a terminal.
    """
    runs = f"{result.finished_runs} of {result.planned_runs} runs finished"
    heading = (
        f"{METRIC_NAMES[result.metric]} on {result.split} images in %, mean ± standard deviation over seeds; {runs}"
    )
    parts = [result.question] if result.question else []
    parts += [heading, _table(result, markdown=markdown)]
    notes = [textwrap.fill(note, WIDTH, subsequent_indent="  ") for note in _notes(result)]
    return "\n\n".join([*parts, "\n".join(f"- {note}" if markdown else note for note in notes)]).rstrip()


def pairs_text(result: "StudyResult") -> str:
    """Returns a table of all pairs of runs with the same seed, and McNemar's test of their two models."""
    rows = [["condition", "arm", "seed", "arm %", "baseline %", "only arm", "only baseline", "McNemar p"]]
    for pair in result.pair_rows():
        counts = [str(pair[name]) if pair["mcnemar_p"] is not None else "-" for name in ("only_arm", "only_baseline")]
        p = "-" if pair["mcnemar_p"] is None else format_p(pair["mcnemar_p"])
        values = [f"{pair[name]:.2f}" for name in ("value", "baseline")]
        rows.append([pair["condition"] or "-", pair["arm"], str(pair["seed"]), *values, *counts, p])
    note = (
        "only arm, only baseline: images that one of the two models classifies correctly and the other does not. "
        "McNemar's test is about these two models, not about their training; it is not pooled over seeds."
    )
    return f"{text_table(rows, right=range(2, 8))}\n\n{textwrap.fill(note, WIDTH)}"


def format_p(p: float) -> str:
    """Returns a p value with three digits behind the point, or as `< 0.001`."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _table(result: "StudyResult", *, markdown: bool) -> str:
    has_conditions = any(row.condition for row in result.rows)
    has_published = any(row.published for row in result.rows)
    p_name = "p (Holm)" if result.explorations > 1 else "p"
    header = ["arm", "seeds", METRIC_NAMES[result.metric], "difference", "95% interval", p_name, "wins", "verdict"]
    rows = [["condition"] * has_conditions + header + ["published"] * has_published]
    last = None
    for row in result.rows:
        condition = [row.condition if row.condition != last else ""] * has_conditions
        published = [f"{row.published.value:.2f}" if row.published else ""] * has_published
        rows.append([*condition, *_cells(row, result.baseline), *published])
        last = row.condition
    right = {index for index, name in enumerate(rows[0]) if name not in ("condition", "arm", "verdict")}
    return (markdown_table if markdown else text_table)(rows, right=right)


def _cells(row: "ArmRow", baseline: str) -> list[str]:
    name = f"{row.arm} *" if row.primary else row.arm
    summary = row.summary
    mean = "-" if summary.mean is None else f"{summary.mean:.2f}"
    spread = "" if summary.sd is None else f" ± {summary.sd:.2f}"
    cells = [name, str(summary.n), mean + spread]
    found = row.difference
    if found is None:
        return [*cells, "", "", "", "", "baseline" if row.arm == baseline else ""]
    if found.mean is None:
        return [*cells, "", "", "", "", "no pairs yet"]
    p = found.p if row.adjusted_p is None else row.adjusted_p
    wins = f"{found.wins}/{found.n}" + (f", {found.ties} equal" if found.ties else "")
    return [*cells, f"{found.mean:+.2f}", _interval(row, found), format_p(p), wins, _verdict_text(row)]


def _interval(row: "ArmRow", found: PairedDifference) -> str:
    low, high, mark = found.low, found.high, ""
    if row.planned is not None and found.n < MIN_SEEDS:
        (low, high), mark = row.planned, " by sigma"
    return "-" if low is None or high is None else f"[{low:+.2f}, {high:+.2f}]{mark}"


def _verdict_text(row: "ArmRow") -> str:
    return "" if row.verdict is None else row.verdict.text


def _notes(result: "StudyResult") -> Iterator[str]:
    """Yields sentences about what the table can and cannot show."""
    compared = [row for row in result.rows if row.difference is not None and row.difference.n > 0]
    primary = next((row for row in compared if row.primary), None)
    if primary is not None:
        yield "* the primary comparison, named before the runs and tested as it is."
    yield from _p_notes(result, compared)
    detectable = {_label(row): row.difference.detectable for row in compared if row.difference is not None}
    shown = ", ".join(f"{name} {value:.2f}" for name, value in detectable.items() if value is not None)
    if shown:
        yield f"Smallest true difference that this spread and number of seeds would have shown (80 % power): {shown}."
    if result.sigma is not None:
        sigma = result.sigma
        yield (
            f"by sigma: interval by the standard deviation of the paired difference in the study {sigma.study}, "
            f"{sigma.value:g} points over {sigma.n} seeds; it is not a verdict."
        )
    if result.also_differs:
        yield f"Arms also differ in: {', '.join(result.also_differs)}."
    for source in sorted({row.published.source for row in result.rows if row.published}):
        yield f"published, other protocol: {source}."
    for name, difference in result.mixed.items():
        yield f"made otherwise: {name}, {difference}."
    for name, message in result.failures.items():
        yield f"failed: {name}: {message}"


def _p_notes(result: "StudyResult", compared: "list[ArmRow]") -> Iterator[str]:
    """Yields sentences about p values: what they are, and what the number of seeds allows."""
    if not compared:
        return
    count = result.explorations
    if count > 1:
        other = "other " if any(row.primary for row in compared) else ""
        yield f"p: exact sign flips; of the {count} {other}comparisons, which are exploration, after Holm's correction."
    else:
        yield "p: exact sign flips of the paired differences."
    pairs = min(row.difference.n for row in compared if row.difference is not None)
    if pairs < MIN_SEEDS:
        counted = "1 seed" if pairs == 1 else f"{pairs} seeds"
        yield f"{counted}: no p can be below {smallest_p(pairs):g}; a verdict needs {MIN_SEEDS} seeds or more."
    if any(row.verdict is Verdict.MAP_ONLY for row in compared):
        yield (
            f"map only: {count} comparisons are too many for {pairs} seeds to show any of them; name one as "
            "primary, or run more seeds."
        )


def _label(row: "ArmRow") -> str:
    return " ".join(filter(None, (row.condition, row.arm)))
