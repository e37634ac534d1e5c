"""Training curves: mean over seeds, with the range of all seeds."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from vicinal.files import csv_text
from vicinal.report.html import data_link
from vicinal.report.plots import line_look, report_style, svg_legend, svg_panels
from vicinal.report.section import Section
from vicinal.report.source import ReportArm, ReportSource, counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    runs = counted(sum(len(arm.runs) for arm in drawn), "run")
    splits = "training and validation images" if len(panels) > 1 else "training images; no validation split"
    left = f" {counted(len(arms) - len(drawn), 'more arm')} not drawn." if len(arms) > len(drawn) else ""
    caption = Markup("Lines: mean over seeds; bands: range of all seeds; {}, {}.{} Data: {}").format(
        runs, splits, left, data_link("curves.csv", _csv(arms), "curves.csv")
    )
    alt = "Training curves. " + " ".join(_alt(arm) for arm in drawn)
    with report_style():
        figures = [_panel(name, drawn) for name in panels]
        html = svg_panels(figures, alt, caption, svg_legend([arm.label for arm in drawn]))
    return Section("curves", "Training curves", html)


def _panel(name: str, arms: Sequence[ReportArm]) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(3.3, 2.7), layout="constrained")
    axes = figure.subplots()
    for number, arm in enumerate(arms):
        _draw(axes, arm, name, number)
    axes.set_xlabel("step")
    axes.set_title(PANELS[name])
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="y")
    return figure


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
    style = line_look(number)
    axes.plot(steps, values.mean(0), **style, linewidth=1.8, marker="o" if length == 1 else None, markersize=4)
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
        (arm.condition, arm.arm, seed, *(row.get(name) for name in columns))
        for arm in arms
        for run in arm.runs
        for seed in [run.config.seed]
        for row in run.metrics
    ]
    return csv_text([("condition", "arm", "seed", *columns), *rows])
