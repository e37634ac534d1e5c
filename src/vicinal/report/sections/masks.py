"""Learned masks: what each prior does to attention, by layer and head, over epochs and over kernels."""

import json
from collections.abc import Mapping

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from vicinal.analysis.learned_tables import LayerMask, Masks, masks_of
from vicinal.analysis.learned_tables.mask_history import masks_over_epochs
from vicinal.analysis.learned_tables.mask_plot import bias_sheet, scale_sheet
from vicinal.analysis.output_files import file_stem
from vicinal.analysis.plot_sheet import same_heads
from vicinal.analysis.plot_style import DIVERGING
from vicinal.attachment import get_priors
from vicinal.errors import VicinalError
from vicinal.report.html import data_link, missing_list
from vicinal.report.section import Section
from vicinal.report.shown_model import ShownModel, open_shown
from vicinal.report.source import ReportArm, ReportSource
from vicinal.report.tiles import ColorScale, frame_block, tile_row, tile_sheet

__all__ = ["masks_section"]

MAX_ARMS = 6
MAX_EPOCHS = 6
MAX_PIXELS = 500_000
"""Of all pictures of an arm's tables; with more, fewer epochs are shown."""
TRAINED = "trained model"

Tables = Mapping[str, NDArray[np.float64]]
"""By layer, `(heads, rows, columns)`."""


def masks_section(source: ReportSource) -> Section | None:
    """Returns the masks of each arm that has a prior; None if no run is finished."""
    arms = [arm for arm in source.arms if arm.shown is not None]
    if not arms:
        return None
    parts: list[Markup] = []
    missing, left_out = [], []
    for arm in arms:
        try:
            shown = open_shown(arm)
            if all(prior.spec == "none" for prior in get_priors(shown.opened.model).values()):
                continue
            if len(parts) < MAX_ARMS:
                parts.append(_arm(shown))
            else:
                left_out.append(arm.label)
        except VicinalError as error:
            missing.append(f"{arm.label}: {error}")
    if not parts and not missing:
        missing.append("No arm has a prior, so there are no masks.")
    if left_out:
        missing.append(f"Masks of the first {MAX_ARMS} arms with a prior are shown; left out: {', '.join(left_out)}.")
    return Section("masks", "Learned masks", Markup("").join(parts) + missing_list(missing))


def _arm(shown: ShownModel) -> Markup:
    """Returns the masks of an arm."""
    frames = _frames(shown)
    masks = frames[TRAINED]
    priors = dict.fromkeys(layer.prior for layer in masks.layers)
    title = Markup("<h3>{}</h3>").format(f"{shown.arm.label} ({', '.join(priors)})")
    about = f"{shown.arm.label}: {_run_name(shown.arm)}"
    blocks = []
    for role in ("scale", "bias"):
        tables = {
            name: {layer.name: values for layer in each.layers if (values := layer.tables.get(role)) is not None}
            for name, each in frames.items()
        }
        if tables[TRAINED]:
            blocks.append(_role(about, role, tables, frames))
    mixtures = dict.fromkeys(part for layer in masks.layers for part in layer.mixtures)
    blocks += [_kernels(about, masks.layers, part) for part in mixtures]
    row = Markup('<div class="frames-row">{}</div>').format(Markup("").join(blocks))
    return title + row + _data(shown.arm, frames)


def _run_name(arm: ReportArm) -> str:
    return "" if arm.shown is None else f"the model of {arm.shown.folder.name}, 1 of {len(arm.finished)} finished runs"


def _frames(shown: ShownModel) -> dict[str, Masks]:
    """Returns masks by the name of their frame: those of a few epochs, if known, and of the trained model, last."""
    model, run = shown.opened.model, shown.arm.shown
    trained = masks_of(model)
    pixels = sum(values.size for layer in trained.layers for values in layer.tables.values())
    count = min(MAX_EPOCHS, MAX_PIXELS // pixels)
    history = None if run is None else run.priors
    earlier = masks_over_epochs(model, history, count=count) if history is not None and count > 1 else {}
    if earlier and _same(earlier[max(earlier)], trained):  # else the saved model is the EMA
        del earlier[max(earlier)]
    return {**{f"epoch {epoch}": masks for epoch, masks in earlier.items()}, TRAINED: trained}


def _same(one: Masks, other: Masks) -> bool:
    return all(
        np.allclose(values, b.tables[role])
        for a, b in zip(one.layers, other.layers, strict=True)
        for role, values in a.tables.items()
    )


def _role(about: str, role: str, tables: Mapping[str, Tables], frames: Mapping[str, Masks]) -> Markup:
    """Returns the scales or the biases of an arm over epochs, all on one scale."""
    merged = {f"{name} {layer}": values for name, each in tables.items() for layer, values in each.items()}
    sheet = scale_sheet("", merged) if role == "scale" else bias_sheet("", merged)
    color = ColorScale(sheet.scale, sheet.colors, sheet.unit)
    what = "factor of the logits" if role == "scale" else "factor of attention, exp(bias)"
    one_for_all = all(same_heads(values) for values in merged.values())
    pictures = []
    for name, each in tables.items():
        values = each if role == "scale" else {layer: np.exp(bias) for layer, bias in each.items()}
        alt = f"Masks, {about}, {name}: {what} {_extremes(values)}. {_parameters(frames[name].layers)}"
        pictures.append((name, _sheet(values, color, alt, one_for_all)))
    place = (
        "offset between query and key"
        if frames[TRAINED].layers[0].over == "offsets"
        else "patch, for the central query"
    )
    heads = "; all heads are the same" if one_for_all else ""
    caption = f"{about}. {what.capitalize()} by {place}{heads}; no images are used."
    return frame_block("Epoch", pictures, caption, color)


def _kernels(about: str, layers: tuple[LayerMask, ...], part: str) -> Markup:
    """Returns the kernels of a mixture one by one: `alpha_k exp(-r^2 / (2 sigma_k^2))`."""
    from matplotlib.colors import Normalize

    tables: dict[str, dict[str, NDArray[np.float64]]] = {}
    for layer in layers:
        if part in layer.mixtures:
            rows, columns = (np.arange(1 - side, side) for side in (layer.grid.height, layer.grid.width))
            distance = np.hypot(*np.meshgrid(rows, columns, indexing="ij"))
            kernels = layer.mixtures[part].kernels_at(distance.ravel())
            for number, values in enumerate(kernels, start=1):
                tables.setdefault(f"kernel {number}", {})[layer.name] = values.reshape(-1, *distance.shape)
    reach = max(float(np.abs(values).max()) for each in tables.values() for values in each.values()) or 1.0
    color = ColorScale(Normalize(-reach, reach), DIVERGING, "added to the factor of the logits")
    one_for_all = all(same_heads(values) for each in tables.values() for values in each.values())
    pictures = []
    for index, (name, values) in enumerate(tables.items()):
        mixtures = [layer.mixtures[part] for layer in layers if part in layer.mixtures]
        sigma, alpha = (
            np.concatenate([getattr(each, option)[index] for each in mixtures]) for option in ("sigma", "alpha")
        )
        figures = f"sigma {_range(np.abs(sigma))} patches, alpha {_range(alpha)}"
        alt = f"{name} of {about}: {_extremes(values)}; {figures}."
        pictures.append((f"{name}: {figures}", _sheet(values, color, alt, one_for_all)))
    whose = f" of {part}" if part else ""
    caption = (
        f"{about}. Kernels{whose} of the trained model one by one, by offset between query and key; no images are used."
    )
    return frame_block("Kernel", pictures, caption, color)


def _sheet(values: Tables, color: ColorScale, alt: str, one_for_all: bool) -> Markup:
    if one_for_all:
        return tile_row({layer: heads[0] for layer, heads in values.items()}, color, alt)
    return tile_sheet(values, color, alt)


def _parameters(layers: tuple[LayerMask, ...]) -> str:
    """Returns the range of each learned parameter over layers and heads, as a sentence."""
    names = dict.fromkeys(name for layer in layers for name in layer.options)
    values = {
        name: np.concatenate([layer.options[name].ravel() for layer in layers if name in layer.options])
        for name in names
    }
    texts = [f"{name} {_range(np.abs(each) if name.endswith('sigma') else each)}" for name, each in values.items()]
    return f"{', '.join(texts)}." if texts else ""


def _extremes(tables: Tables) -> str:
    return f"from {_range(np.concatenate([values.ravel() for values in tables.values()]))}"


def _range(values: NDArray[np.float64]) -> str:
    return f"{values.min():.3g} to {values.max():.3g}"


def _data(arm: ReportArm, frames: Mapping[str, Masks]) -> Markup:
    """Returns a link to the tables of the trained model and the parameters of all frames."""
    content = {
        "tables": {
            layer.name: {role: _rounded(v) for role, v in layer.tables.items()} for layer in frames[TRAINED].layers
        },
        "parameters": {
            name: {layer.name: {option: _rounded(v) for option, v in layer.options.items()} for layer in masks.layers}
            for name, masks in frames.items()
        },
    }
    name = f"masks-{file_stem(arm.label)}.json"
    return Markup("<p>Data: {}</p>").format(data_link(name, json.dumps(content), name))


def _rounded(values: NDArray[np.float64]) -> list[object]:
    """Returns numbers with four digits behind the point, which makes the page smaller."""
    return list(np.round(values.astype(np.float64), 4).tolist())
