"""Receptive fields side by side: which pixels the central patch of the last block depends on."""

import numpy as np
from markupsafe import Markup

from vicinal.analysis.receptive_field import ReceptiveField, receptive_field
from vicinal.analysis.receptive_field.plot import COLORMAP, energy_scale, relative_energy
from vicinal.errors import VicinalError
from vicinal.files import csv_text
from vicinal.report.html import Cell, data_link, html_table, missing_list
from vicinal.report.plots import png_uri
from vicinal.report.section import Section
from vicinal.report.shown_model import ShownModel, open_shown
from vicinal.report.source import ReportSource
from vicinal.report.tiles import ColorScale

__all__ = ["fields_section"]

IMAGES = 16
MAX_ARMS = 6
WIDTH = 168  # of a picture, in CSS pixels


def fields_section(source: ReportSource) -> Section | None:
    """Returns the receptive fields of the arms' shown runs; None if no run is finished."""
    arms = [arm for arm in source.arms if arm.shown is not None]
    if not arms:
        return None
    found: list[tuple[ShownModel, ReceptiveField]] = []
    missing = []
    for arm in arms[:MAX_ARMS]:
        try:
            shown = open_shown(arm, IMAGES)
            found.append((shown, receptive_field(shown.opened.model, shown.images, name=arm.label)))
        except VicinalError as error:
            missing.append(f"{arm.label}: {error}")
    if left_out := arms[MAX_ARMS:]:
        names = ", ".join(arm.label for arm in left_out)
        missing.append(f"Receptive fields of the first {MAX_ARMS} arms are shown; left out: {names}.")
    html = _pictures(found) + _table(found) + _data(found) if found else Markup("")
    return Section("fields", "Receptive fields", html + missing_list(missing))


def _pictures(found: list[tuple[ShownModel, ReceptiveField]]) -> Markup:
    """Returns the fields as pictures on one logarithmic scale."""
    energies = [relative_energy(field) for _, field in found]
    color = ColorScale(energy_scale(energies), COLORMAP, "energy, where the mean pixel has 1 (logarithmic)")
    parts = []
    for (shown, field), energy in zip(found, energies, strict=True):
        alt = (
            f"Receptive field of {shown.arm.label}: half of the energy is in a square of {field.square(0.5):g} pixels, "
            f"99% in one of {field.square(0.99):g}; {field.outside_center_patch:.0%} is outside of the patch."
        )
        parts.append(
            Markup('<span class="tile"><img src="{}" alt="{}" width="{}"><span>{}</span></span>').format(
                png_uri(color.levels(energy), color.palette), alt, WIDTH, shown.arm.label
            )
        )
    return Markup('<figure><div class="tile-row">{}</div>{}<figcaption>{}</figcaption></figure>').format(
        Markup("").join(parts), color.legend(), _caption(found)
    )


def _caption(found: list[tuple[ShownModel, ReceptiveField]]) -> str:
    places = dict.fromkeys(f"{field.layer}, row {field.at[0] + 1}, column {field.at[1] + 1}" for _, field in found)
    images = dict.fromkeys(f"{field.images} {shown.split} images" for shown, field in found)
    same = "the same for all arms; " if len({shown.names for shown, _ in found}) == 1 < len(found) else ""
    return (
        f"Influence of each pixel on the central patch of the last block ({'; '.join(places)}), mean over "
        f"{' or '.join(images)}; {same}one run of each arm, the one with the smallest seed."
    )


def _table(found: list[tuple[ShownModel, ReceptiveField]]) -> Markup:
    rows = []
    for shown, field in found:
        fit = field.fit
        widths = [
            Cell(
                f"{'< ' * field.narrow[name]}{value:.1f}" if np.isfinite(value) else "none",
                value if np.isfinite(value) else None,
            )
            for name, value in (("sigma_x", fit.sigma_x), ("sigma_y", fit.sigma_y))
        ]
        squares = [Cell(f"{field.square(share):.1f}", field.square(share)) for share in (0.5, 0.99)]
        outside = Cell(f"{field.outside_center_patch:.1%}", field.outside_center_patch)
        r2 = Cell(f"{fit.r2:.2f}", fit.r2) if np.isfinite(fit.r2) else Cell("none")
        rows.append([Cell(shown.arm.label), *squares, outside, *widths, r2])
    header = ["arm", "50% in", "99% in", "outside of patch", "sigma x", "sigma y", "R²"]
    caption = (
        f"Sides of centered squares with 50% and 99% of the energy, and widths of the nearest Gaussian, in pixels; "
        f"{found[0][1].images} {found[0][0].split} images"
    )
    notes = [f"Gaussian of {shown.arm.label}: {note.text}." for shown, field in found for note in field.fit.notes]
    items = Markup("").join(Markup("<li>{}</li>").format(note) for note in notes)
    return html_table(header, rows, caption=caption) + Markup('<ul class="note">{}</ul>' if notes else "").format(items)


def _data(found: list[tuple[ShownModel, ReceptiveField]]) -> Markup:
    """Returns a link to the energy of each patch of each arm."""
    rows = [
        (
            shown.arm.condition,
            shown.arm.arm,
            field.layer,
            field.images,
            shown.split,
            row + 1,
            column + 1,
            f"{energy:.6g}",
        )
        for shown, field in found
        for (row, column), energy in np.ndenumerate(field.by_patch)
    ]
    header = ("condition", "arm", "layer", "images", "split", "row", "column", "energy")
    return Markup("<p>Data: {}</p>").format(data_link("fields.csv", csv_text([header, *rows]), "fields.csv, by patch"))
