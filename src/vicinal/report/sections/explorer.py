"""The explorer: where a patch attends, for an image, a layer and a head, arm beside arm."""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from vicinal.analysis.attention_maps import AttentionStatistics, attention_statistics
from vicinal.analysis.image_selection import denormalize
from vicinal.analysis.plot_style import SEQUENTIAL
from vicinal.errors import VicinalError
from vicinal.files import csv_text
from vicinal.report.attention_data import (
    Budget,
    LayerAttention,
    ReadableModel,
    choose_budget,
    find_readable,
    read_attention,
)
from vicinal.report.html import Cell, data_link, html_table, missing_list
from vicinal.report.plots import png_uri
from vicinal.report.section import Section
from vicinal.report.shown_model import ShownModel, open_shown
from vicinal.report.source import ReportArm, ReportSource
from vicinal.report.tiles import ColorScale

__all__ = ["explorer_section"]

TITLE = "Attention of a patch"
IMAGES = 8
MAX_ARMS = 4
MAX_BYTES = 2_500_000
"""Of the attention, as base64 text."""
MAX_SIDE = 128
"""Pixels of an image in the page; larger ones are reduced."""
OPACITY = 0.7  # of attention over the image
OUTLINE = (213, 94, 0)  # vermilion, which viridis does not have


@dataclass(frozen=True, eq=False)
class ArmAttention:
    """The attention of an arm's model."""

    arm: ReportArm
    layers: list[LayerAttention]
    statistics: AttentionStatistics


def explorer_section(source: ReportSource) -> Section | None:
    """Returns the explorer of the baseline and up to three other arms; None if no run is finished."""
    finished = [arm for arm in source.arms if arm.shown is not None]
    if not finished:
        return None
    of_condition = [arm for arm in finished if arm.condition == finished[0].condition]
    readable, missing = _readable(of_condition[:MAX_ARMS])
    count = len(readable[0].shown.names) if readable else 0
    budget = choose_budget(readable, count, MAX_BYTES) if readable else None
    if readable and budget is None:
        missing.append("The attention of one layer is too large for this page; `vicinal analyze attention` draws it.")
    arms = []
    if budget is not None:
        for model in readable:
            try:
                arms.append(_read(model, budget))
            except VicinalError as error:
                missing.append(f"{model.shown.arm.label}: {error}")
    if not arms or budget is None:
        return Section("explorer", TITLE, missing_list(missing))
    first = readable[0].shown
    pictures, names = _pictures(first, budget.images), first.names[: budget.images]
    html = _controls(arms, names, budget, first.split)
    html += _still(arms, pictures[0], f"image {names[0]}, the first of {budget.images} {first.split} images")
    html += _distances(arms, first.split)
    notes = [*_left_out_arms(finished, of_condition), *_budget_notes(readable, budget, count)]
    html += Markup("").join(Markup('<p class="note">{}</p>').format(note) for note in notes)
    return Section("explorer", TITLE, html + missing_list(missing), _script_data(arms, names, pictures))


def _readable(arms: Sequence[ReportArm]) -> tuple[list[ReadableModel], list[str]]:
    """Returns the models that can be read on the images of the first one, and why others cannot."""
    readable: list[ReadableModel] = []
    missing = []
    for arm in arms:
        try:
            model = find_readable(open_shown(arm, IMAGES))
            if readable and model.shown.names != readable[0].shown.names:
                raise VicinalError("its images are not those of the first arm")
            readable.append(model)
        except VicinalError as error:
            missing.append(f"{arm.label}: {error}")
    return readable, missing


def _read(model: ReadableModel, budget: Budget) -> ArmAttention:
    """Returns the attention of a model, and its distances on all images at hand."""
    shown = model.shown
    statistics = attention_statistics(
        shown.opened.model, shown.images, name=shown.arm.label, inspection=model.inspection, batch_size=1
    )
    return ArmAttention(shown.arm, list(read_attention(model, budget)), statistics)


def _left_out_arms(finished: Sequence[ReportArm], of_condition: Sequence[ReportArm]) -> list[str]:
    notes = []
    if left_out := of_condition[MAX_ARMS:]:
        names = ", ".join(arm.label for arm in left_out)
        notes.append(f"The first {MAX_ARMS} arms are shown; left out: {names}.")
    if others := list(dict.fromkeys(arm.condition for arm in finished if arm not in of_condition)):
        notes.append(f"Arms of the condition {of_condition[0].condition} are shown; left out: {', '.join(others)}.")
    return notes


def _budget_notes(models: Sequence[ReadableModel], budget: Budget, count: int) -> list[str]:
    """Returns sentences about images, heads and layers that are left out."""
    notes = []
    if budget.images < count:
        notes.append(f"{budget.images} of {count} images are in the explorer, to keep this file small.")
    if not budget.heads:
        notes.append("Heads are left out to keep this file small: the explorer has the mean over heads.")
    if any(budget.layers < len(model.layers) for model in models):
        notes.append(f"The last {budget.layers} layers are in the explorer, to keep this file small.")
    for model in models:
        if model.left_out:
            reason = next(iter(model.left_out.values()))
            notes.append(f"{model.shown.arm.label}: {len(model.left_out)} layers have no such attention ({reason}).")
    return notes


def _pictures(shown: ShownModel, count: int) -> list[NDArray[np.uint8]]:
    """Returns the images, `(height, width)` or `(height, width, 3)` each, of at most `MAX_SIDE` pixels."""
    pixels = np.round(255 * denormalize(shown.images[:count], shown.opened.preprocessing)).astype(np.uint8)
    step = math.ceil(max(pixels.shape[1:3]) / MAX_SIDE)
    small = pixels[:, ::step, ::step]
    return list(small[..., 0] if small.shape[-1] == 1 else small)


def _controls(arms: Sequence[ArmAttention], names: Sequence[str], budget: Budget, split: str) -> Markup:
    """Returns what the script needs: lists to choose from, and a place for each arm's picture."""
    heads = [f"head {head + 1}" for head in range(max(layer.heads for layer in arms[0].layers))] if budget.heads else []
    layers = [layer.name for layer in arms[0].layers]
    lists = [
        _select("image", "Image", list(names), 0),
        _select("layer", "Layer", layers, len(layers) - 1),
        _select("head", "Head", ["mean over heads", *heads], 0),
    ]
    picture = Markup(
        '<figure><img class="explorer-picture" alt=""><figcaption><strong>image</strong></figcaption></figure>'
    )
    views = picture + Markup("").join(
        Markup(
            '<figure class="explorer-view" data-arm="{}"><canvas role="img" aria-label="{}"></canvas><figcaption>'
            '<strong>{}</strong><br><span class="explorer-note"></span></figcaption></figure>'
        ).format(arm.arm.label, f"Attention of {arm.arm.label}", arm.arm.label)
        for arm in arms
    )
    return Markup(
        '<div class="needs-script explorer"><p>Move over a patch, touch it, or use the arrow keys: the colors show how '
        "much the outlined patch attends to each patch. {} {} images; one run of each arm.</p>"
        '<div class="explorer-controls">{}</div><div class="explorer-views" role="application" tabindex="0" '
        'aria-label="Patch that attends; the arrow keys move it" aria-describedby="explorer-status">{}</div>{}'
        '<p class="explorer-status" id="explorer-status" role="status"></p></div>'
    ).format(len(names), split, Markup("").join(lists), views, _legend())


def _select(kind: str, label: str, options: Sequence[str], chosen: int) -> Markup:
    items = Markup("").join(
        Markup('<option value="{}"{}>{}</option>').format(index, Markup(" selected") if index == chosen else "", name)
        for index, name in enumerate(options)
    )
    return Markup('<label>{} <select class="explorer-{}">{}</select></label>').format(label, kind, items)


def _legend() -> Markup:
    strip = png_uri(np.arange(255, dtype=np.uint8)[None], _color(1).palette)
    return Markup(
        '<div class="legend"><img src="{}" alt="" width="240" height="12"><p><span>0%</span>'
        '<span class="explorer-top"></span></p><p>attention to a patch, one scale for all arms</p></div>'
    ).format(strip)


def _color(top: float) -> ColorScale:
    from matplotlib.colors import Normalize

    return ColorScale(Normalize(0, 100 * top), SEQUENTIAL, "attention to a patch in %")


def _still(arms: Sequence[ArmAttention], picture: NDArray[np.uint8], caption: str) -> Markup:
    """Returns a picture of each arm: the attention of the central patch in the last layer, mean over heads."""
    maps, parts = [], []
    for each in arms:
        layer = each.layers[-1]
        row, column = (side // 2 for side in layer.query_grid)
        weights = layer.weights[0, :, row * layer.query_grid[1] + column].mean(0)
        maps.append((each, layer, (row, column), weights.reshape(layer.grid)))
    color = _color(max(float(weights.max()) for *_, weights in maps) or 1.0)
    for each, layer, at, weights in maps:
        top = np.unravel_index(int(weights.argmax()), weights.shape)
        alt = (
            f"{each.arm.label}, {layer.name}: the patch in row {at[0] + 1}, column {at[1] + 1} attends most to row "
            f"{top[0] + 1}, column {top[1] + 1}, with {weights.max():.2%}; to all patches with {weights.sum():.1%}."
        )
        drawn = _overlay(picture, color, weights, at, layer.query_grid)
        parts.append(
            Markup('<span class="tile"><img src="{}" alt="{}" width="220"><span>{}</span></span>').format(
                png_uri(drawn), alt, each.arm.label
            )
        )
    text = f"Attention of the central patch (outlined) in {maps[0][1].name}, mean over heads; {caption}."
    return Markup(
        '<figure class="without-script"><div class="tile-row">{}</div>{}<figcaption>{}</figcaption></figure>'
    ).format(Markup("").join(parts), color.legend(), text)


def _overlay(
    picture: NDArray[np.uint8],
    color: ColorScale,
    weights: NDArray[np.float64],
    at: tuple[int, int],
    grid: tuple[int, int],
) -> NDArray[np.uint8]:
    """Returns an image, enlarged, under its attention, `(height, width, 3)`, with the query outlined."""
    gray = picture if picture.ndim == 2 else picture.mean(-1)
    enlarged = np.kron(gray, np.ones((math.ceil(220 / gray.shape[1]),) * 2))
    height, width = enlarged.shape
    colors = color.palette[color.levels(100 * weights)]
    rows, columns = (np.arange(size) * side // size for size, side in zip((height, width), weights.shape, strict=True))
    drawn = (1 - OPACITY) * enlarged[..., None] + OPACITY * colors[rows][:, columns]
    top, bottom = (round((at[0] + step) * height / grid[0]) for step in (0, 1))
    left, right = (round((at[1] + step) * width / grid[1]) for step in (0, 1))
    inner = drawn[top + 2 : bottom - 2, left + 2 : right - 2].copy()
    drawn[top:bottom, left:right] = OUTLINE
    drawn[top + 2 : bottom - 2, left + 2 : right - 2] = inner
    pixels: NDArray[np.uint8] = np.round(drawn).astype(np.uint8)
    return pixels


def _distances(arms: Sequence[ArmAttention], split: str) -> Markup:
    """Returns the mean attention distance of each layer, and the data of each head."""
    first = arms[0].statistics
    by_arm = [{layer.name: layer for layer in each.statistics.layers} for each in arms]
    rows: list[list[Cell | str]] = []
    for layer in first.layers:
        cells = []
        for found in by_arm:
            values = found[layer.name].distance_patches if layer.name in found else ()
            mean = float(np.mean(values)) if values else math.nan
            cells.append(Cell("none") if math.isnan(mean) else Cell(f"{mean:.2f}", mean))
        uniform = layer.uniform_patches
        rows.append([layer.name, *cells, Cell("none") if math.isnan(uniform) else Cell(f"{uniform:.2f}", uniform)])
    header = ["layer", *(each.arm.label for each in arms), "uniform attention"]
    caption = (
        f"Mean distance from a patch to those it attends to, in patches, mean over heads; {first.images} {split} images"
    )
    csv_rows = [row for each in arms for row in each.statistics.csv_rows()]
    data = csv_text([list(csv_rows[0]), *(list(row.values()) for row in csv_rows)])
    link = data_link("attention.csv", data, "attention.csv, by head")
    return html_table(header, rows, caption=caption) + Markup("<p>Data: {}</p>").format(link)


def _script_data(
    arms: Sequence[ArmAttention], names: Sequence[str], pictures: Sequence[NDArray[np.uint8]]
) -> dict[str, Any]:
    return {
        "images": [{"name": name, "uri": png_uri(each)} for name, each in zip(names, pictures, strict=True)],
        "arms": [{"label": each.arm.label, "layers": [layer.as_dict() for layer in each.layers]} for each in arms],
        "palette": base64.b64encode(_color(1).palette.tobytes()).decode(),
    }
