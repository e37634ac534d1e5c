"""Training curves: mean over seeds, with the range of all seeds."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vicinal.analysis.plot_style import line_style
from vicinal.files import csv_text
from vicinal.report.html import data_link
from vicinal.report.plots import report_style, svg_figure
from vicinal.report.section import Section
from vicinal.report.source import ReportArm, ReportSource

__all__ = ["curves_section"]

PANELS = {"train_loss": "training loss", "val_loss": "validation loss", "val_top1": "validation top-1 in %"}
MAX_LINES = 12
"""Arms that are drawn; more cannot be told apart."""


def curves_section(source: ReportSource) -> Section | None:
    """Returns training loss, validation loss and accuracy over steps; None if no run has finished an epoch."""
    arms = [arm for arm in source.arms if any(run.metrics for run in arm.runs)]
    if not arms:
        return None
    drawn = arms[:MAX_LINES]
    panels = [name for name in PANELS if any(_curves(arm, name) for arm in drawn)]
    from matplotlib.figure import Figure

    with report_style():
        figure = Figure(figsize=(3.6 * len(panels), 3.4), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for panel, each in zip(panels, axes, strict=True):
            for number, arm in enumerate(drawn):
                _draw(each, arm, panel, number)
            each.set_xlabel("step")
            each.set_title(PANELS[panel], fontsize=10)
            each.grid(axis="y")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(drawn)))
        seeds = sum(len(arm.runs) for arm in drawn)
        left = f" {len(arms) - len(drawn)} more arms are not drawn." if len(arms) > len(drawn) else ""
        alt = "Training curves. " + " ".join(_alt(arm) for arm in drawn)
        caption = f"Mean over seeds, and the range of all seeds; {seeds} runs, training and validation images.{left}"
        html = svg_figure(figure, alt, caption)
    html += data_link("curves.csv", _csv(arms), "Data: curves.csv")
    return Section("curves", "Training curves", html)


def _curves(arm: ReportArm, name: str) -> list[list[tuple[float, float]]]:
    """Returns step and value of each epoch, for each run that has the value."""
    factor = 100 if name == "val_top1" else 1
    curves = [
        [(row["step"] or 0, factor * value) for row in run.metrics if (value := row.get(name)) is not None]
        for run in arm.runs
    ]
    return [curve for curve in curves if curve]


def _draw(axes: Any, arm: ReportArm, name: str, number: int) -> None:
    curves = _curves(arm, name)
    if not curves:
        return
    length = min(map(len, curves))  # of runs that are not finished, the part that all have
    steps = [step for step, _ in curves[0][:length]]
    values = np.array([[value for _, value in curve[:length]] for curve in curves])
    style = line_style(number)
    axes.plot(steps, values.mean(0), label=arm.label, **style, marker="o" if length == 1 else None, markersize=4)
    if len(values) > 1:
        axes.fill_between(steps, values.min(0), values.max(0), color=style["color"], alpha=0.18, linewidth=0)


def _alt(arm: ReportArm) -> str:
    last = [curve[-1][1] for curve in _curves(arm, "train_loss")]
    accuracy = [curve[-1][1] for curve in _curves(arm, "val_top1")]
    text = f"{arm.label}: training loss ends at {np.mean(last):.3f}" if last else f"{arm.label}: no finished epoch"
    return text + (f", validation top-1 at {np.mean(accuracy):.1f}%." if accuracy else ".")


def _csv(arms: Sequence[ReportArm]) -> str:
    columns = ("step", *PANELS, "images_per_second")
    rows = [
        (arm.condition, arm.arm, run.config.seed, *(row.get(name) for name in columns))
        for arm in arms
        for run in arm.runs
        for row in run.metrics
    ]
    return csv_text([("condition", "arm", "seed", *columns), *rows])
