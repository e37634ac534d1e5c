"""The results table: sortable, with its notes, in forms to copy, and its data."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from vicinal.analysis.result import without_nan
from vicinal.files import csv_text
from vicinal.report.html import Cell, copy_block, data_link, html_table
from vicinal.report.section import Section
from vicinal.report.source import ReportSource
from vicinal.studies.result import ArmRow, StudyResult
from vicinal.studies.tables import METRIC_NAMES, format_p, study_notes
from vicinal.studies.verdict import MIN_SEEDS

__all__ = ["latex_table", "results_section", "rows_csv"]


def results_section(source: ReportSource) -> Section | None:
    """Returns the table of all arms; None without a comparison."""
    result = source.result
    if result is None:
        return None
    rows = [_cells(row) for row in result.rows]
    header = _header(result)
    if not any(row.condition for row in result.rows):
        header, rows = header[1:], [row[1:] for row in rows]
    if not any(row.published for row in result.rows):
        header, rows = header[:-1], [row[:-1] for row in rows]
    caption = (
        f"{METRIC_NAMES[result.metric]} on {source.images} in %; {result.finished_runs} of {result.planned_runs} "
        f"runs finished; differences to {result.baseline}, paired by seed"
    )
    html = html_table(header, rows, caption=caption)
    notes = Markup("").join(Markup("<li>{}</li>").format(note) for note in study_notes(result))
    html += Markup('<ul class="note">{}</ul>').format(notes)
    results_csv = rows_csv(list(result.csv_rows()))
    forms = {"Markdown": result.markdown(), "CSV": results_csv, "LaTeX": latex_table(header, rows, caption)}
    html += copy_block("results-copy", forms)
    html += _pairs(result)
    links = [data_link("results.csv", results_csv, "results.csv")]
    if pairs := result.pair_rows():
        links.append(data_link("pairs.csv", rows_csv(pairs), "pairs.csv"))
    html += Markup("<p>Data: {}</p>").format(Markup(", ").join(links))
    return Section("results", "Results", html)


def latex_table(header: list[str], rows: list[list[Cell]], caption: str) -> str:
    """Returns a table in LaTeX, with booktabs' rules."""
    numeric = [any(row[index].value is not None for row in rows) for index in range(len(header))]
    lines = [
        r"\begin{tabular}{" + "".join("r" if each else "l" for each in numeric) + "}",
        r"\toprule",
        " & ".join(map(_latex, header)) + r" \\",
        r"\midrule",
        *(" & ".join(_latex(cell.text) for cell in row) + r" \\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
        f"% {' '.join(caption.split())}",
    ]
    return "\n".join(lines)


def _latex(text: str) -> str:
    """Returns text with the characters escaped that LaTeX reads as commands."""
    special = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "<": "$<$",
        ">": "$>$",
    }
    return "".join(special.get(char, f"\\{char}" if char in "&%$#_{}" else char) for char in text)


def _header(result: StudyResult) -> list[str]:
    p_name = "p (Holm)" if result.explorations > 1 else "p"
    mean = f"{METRIC_NAMES[result.metric]} ± sd"
    return [
        "condition",
        "arm",
        "seeds",
        mean,
        "difference",
        "95% interval",
        p_name,
        "wins",
        "detectable",
        "verdict",
        "published",
    ]


def _cells(row: ArmRow) -> list[Cell]:
    summary, found = row.summary, row.difference
    spread = "" if summary.sd is None else f" ± {summary.sd:.2f}"
    mean = Cell("none yet") if summary.mean is None else Cell(f"{summary.mean:.2f}{spread}", summary.mean)
    cells = [
        Cell(row.condition),
        Cell(f"{row.arm} *" if row.primary else row.arm),
        Cell(str(summary.n), summary.n),
        mean,
    ]
    if found is None or found.mean is None:
        cells += [Cell("")] * 5 + [Cell("baseline" if found is None else "no pairs yet")]
    else:
        p = found.p if row.adjusted_p is None else row.adjusted_p
        by_sigma = row.planned if found.n < MIN_SEEDS else None
        low, high = by_sigma or (found.low, found.high)
        interval = "none" if low is None or high is None else f"{low:+.2f} to {high:+.2f}"
        ties = f", {found.ties} equal" if found.ties else ""
        cells += [
            Cell(f"{found.mean:+.2f}", found.mean),
            Cell(f"{interval} by sigma" if by_sigma else interval, low),
            Cell(format_p(p), p),
            Cell(f"{found.wins} of {found.n}{ties}", found.wins / found.n),
            Cell("none" if found.detectable is None else f"{found.detectable:.2f}", found.detectable),
            Cell(row.verdict.text if row.verdict else ""),
        ]
    return [*cells, Cell(f"{row.published.value:.2f}", row.published.value) if row.published else Cell("")]


def _pairs(result: StudyResult) -> Markup:
    """Returns the table of all pairs of runs, closed until it is opened."""
    rows = [
        [
            Cell(pair["condition"]),
            Cell(pair["arm"]),
            Cell(str(pair["seed"]), pair["seed"]),
            Cell(f"{pair['value']:.2f}", pair["value"]),
            Cell(f"{pair['baseline']:.2f}", pair["baseline"]),
            *(
                Cell("not known" if (value := pair[name]) is None else str(value), value)
                for name in ("only_arm", "only_baseline")
            ),
            Cell("not known" if pair["mcnemar_p"] is None else format_p(pair["mcnemar_p"]), pair["mcnemar_p"]),
        ]
        for pair in result.pair_rows()
    ]
    if not rows:
        return Markup("")
    header = ["condition", "arm", "seed", "arm %", "baseline %", "only arm right", "only baseline right", "McNemar p"]
    if not any(row[0].text for row in rows):
        header, rows = header[1:], [row[1:] for row in rows]
    about = "McNemar's test is about two models, not about training."
    caption = f"Pairs of runs with the same seed on {result.split} images. {about}"
    return Markup("<details><summary>Every pair of runs</summary>{}</details>").format(
        html_table(header, rows, caption=caption)
    )


def rows_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text of a CSV file with a line for each row."""
    return csv_text([list(rows[0]), *([without_nan(value) for value in row.values()] for row in rows)])
