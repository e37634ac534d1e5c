"""Accuracy against cost: parameters and training speed of each arm."""

from typing import Any

import numpy as np
from markupsafe import Markup

from vicinal.errors import VicinalError
from vicinal.files import csv_text
from vicinal.report.html import Cell, data_link, html_table
from vicinal.report.plots import MARKERS, line_look, report_style, svg_legend, svg_panels
from vicinal.report.section import Section
from vicinal.report.source import ReportArm, ReportSource, counted
from vicinal.training.run_folder import Run

__all__ = ["cost_section"]


def cost_section(source: ReportSource) -> Section | None:
    """Returns accuracy against the number of parameters and images per second; None if no run is finished."""
    arms = [arm for arm in source.arms if arm.finished]
    if not arms:
        return None
    split = source.split
    figures = [(arm, *_figures(arm, split)) for arm in arms]
    rows = [
        [
            Cell(arm.label),
            Cell(str(len(arm.finished)), len(arm.finished)),
            Cell("none" if accuracy is None else f"{accuracy:.2f}", accuracy),
            Cell(_count(parameters), parameters),
            Cell(_count(speed), speed),
        ]
        for arm, accuracy, parameters, speed in figures
    ]
    header = ["arm", "runs", f"{split} top-1 %", "parameters", "training images/s"]
    runs = counted(sum(len(arm.finished) for arm in arms), "finished run")
    about = f"Means over {runs}, {source.images}; images per second depend on what else the machine did."
    table: list[list[Any]] = [
        header,
        *([cell.value if cell.value is not None else cell.text for cell in row] for row in rows),
    ]
    link = data_link("cost.csv", csv_text(table), "cost.csv")
    html = html_table(header, rows, caption=f"Accuracy and cost of each arm, {source.images}, {runs}")
    has_costs = any(cost is not None for _, _, *costs in figures for cost in costs)
    if len(arms) > 1 and has_costs and all(accuracy is not None for _, accuracy, _, _ in figures):
        html = _plot(figures, split, Markup("{} Data: {}").format(about, link)) + html
    else:
        html += Markup("<p>{} Data: {}</p>").format(about, link)
    return Section("cost", "Accuracy against cost", html)


def _plot(figures: list[Any], split: str, caption: Markup) -> Markup:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = []
    with report_style():
        for place, label in ((2, "parameters"), (3, "training images per second")):
            if all(each[place] is None for each in figures):
                continue
            panel = Figure(figsize=(3.6, 2.9), layout="constrained")
            axes = panel.subplots()
            for number, each in enumerate(figures):
                if each[place] is not None:
                    look = {"color": line_look(number)["color"], "marker": MARKERS[number % len(MARKERS)]}
                    axes.plot([each[place]], [each[1]], linestyle="none", markersize=8, **look)
            axes.set(xlabel=label, ylabel=f"{split} top-1 in %")
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            axes.ticklabel_format(axis="y", useOffset=False)
            axes.margins(0.15)
            axes.grid()
            panels.append(panel)
        alt = "Accuracy against cost. " + " ".join(
            f"{arm.label}: {accuracy:.2f}%, {_count(parameters)} parameters, {_count(speed)} images per second."
            for arm, accuracy, parameters, speed in figures
        )
        return svg_panels(panels, alt, caption, svg_legend([arm.label for arm, *_ in figures], markers=True))


def _count(value: float | None) -> str:
    return "not known" if value is None else f"{value:,.0f}"


def _figures(arm: ReportArm, split: str) -> tuple[float | None, int | None, float | None]:
    """Returns the mean accuracy in %, the number of parameters, and the median training speed."""
    accuracies = [100 * run.results[split]["top1"] for run in arm.finished if run.results and split in run.results]
    speeds = [row["images_per_second"] for run in arm.finished for row in run.metrics if row.get("images_per_second")]
    assert arm.shown is not None
    return (
        float(np.mean(accuracies)) if accuracies else None,
        _parameters(arm.shown),
        float(np.median(np.array(speeds, dtype=float))) if speeds else None,
    )


def _parameters(run: Run) -> int | None:
    """Returns the number of parameters of a run's model; None if the model cannot be loaded."""
    try:
        return sum(parameter.numel() for parameter in run.model().parameters())
    except VicinalError:
        return None
