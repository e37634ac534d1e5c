"""Accuracy against cost: parameters and training speed of each arm."""

from typing import Any

import numpy as np

from vicinal.analysis.plot_style import line_style
from vicinal.report.html import Cell, html_table
from vicinal.report.plots import report_style, svg_figure
from vicinal.report.section import Section
from vicinal.report.source import ReportArm, ReportSource
from vicinal.training.run_folder import Run

__all__ = ["cost_section"]


def cost_section(source: ReportSource) -> Section | None:
    """Returns accuracy against the number of parameters and images per second; None if no run is finished."""
    arms = [arm for arm in source.arms if arm.finished]
    if not arms:
        return None
    split = "test" if all("test" in (run.results or {}) for arm in arms for run in arm.finished) else "val"
    figures = [(arm, *_figures(arm, split)) for arm in arms]
    rows = [
        [
            Cell(arm.label),
            Cell(str(len(arm.finished)), len(arm.finished)),
            Cell("none" if accuracy is None else f"{accuracy:.2f}", accuracy),
            Cell(f"{parameters:,}", parameters),
            Cell("not known" if speed is None else f"{speed:,.0f}", speed),
        ]
        for arm, accuracy, parameters, speed in figures
    ]
    header = ["arm", "runs", f"{split} top-1 %", "parameters", "training images/s"]
    caption = f"Means over finished runs, {split} images; images per second depend on what else the machine did"
    html = html_table(header, rows, caption=caption)
    if len(arms) > 1 and all(accuracy is not None for _, accuracy, _, _ in figures):
        html = _plot(figures, split) + html
    return Section("cost", "Accuracy against cost", html)


def _plot(figures: list[Any], split: str) -> Any:
    from matplotlib.figure import Figure

    with report_style():
        figure = Figure(figsize=(8, 3.4), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for number, (arm, accuracy, parameters, speed) in enumerate(figures):
            look = {"color": line_style(number)["color"], "marker": "osD^vP*X"[number % 8], "linestyle": "none"}
            axes[0].plot([parameters / 1e6], [accuracy], label=arm.label, **look)
            if speed is not None:
                axes[1].plot([speed], [accuracy], **look)
        axes[0].set(xlabel="parameters in millions", ylabel=f"{split} top-1 in %")
        axes[1].set(xlabel="training images per second")
        for each in axes:
            each.grid()
            each.margins(0.15)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(figures)))
        alt = "Accuracy against cost. " + " ".join(
            f"{arm.label}: {accuracy:.2f}% with {parameters:,} parameters." for arm, accuracy, parameters, _ in figures
        )
        return svg_figure(figure, alt, f"Means over finished runs, {split} images. The table below has the numbers.")


def _figures(arm: ReportArm, split: str) -> tuple[float | None, int, float | None]:
    """Returns the mean accuracy in %, the number of parameters, and the median training speed."""
    accuracies = [100 * run.results[split]["top1"] for run in arm.finished if run.results and split in run.results]
    speeds = [row["images_per_second"] for run in arm.finished for row in run.metrics if row.get("images_per_second")]
    assert arm.shown is not None
    return (
        float(np.mean(accuracies)) if accuracies else None,
        _parameters(arm.shown),
        float(np.median(np.array(speeds, dtype=float))) if speeds else None,
    )


def _parameters(run: Run) -> int:
    return sum(parameter.numel() for parameter in run.model().parameters())
