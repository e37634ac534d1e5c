"""Measures receptive fields of several models, and writes fields, figures and plots to a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vicinal.analysis.image_selection import ImageSelection
from vicinal.analysis.opened_model import OpenedModel
from vicinal.analysis.output_files import file_stem, replace_outputs
from vicinal.analysis.plot_style import save_figure
from vicinal.analysis.receptive_field.measure import receptive_field
from vicinal.analysis.receptive_field.plot import draw_field, draw_fields
from vicinal.analysis.receptive_field.position_change import Positions
from vicinal.analysis.receptive_field.result import Mode, ReceptiveField
from vicinal.errors import VicinalError
from vicinal.files import write_json

__all__ = ["fields_as_list", "write_receptive_fields"]

OUTPUTS = ("erf.png", "erf.npz", "erf.json", "erf-*.png", "erf-*.npz")


def write_receptive_fields(
    models: Sequence[OpenedModel],
    images: ImageSelection,
    folder: Path,
    *,
    layer: int | str | None = None,
    at: tuple[int, int] | None = None,
    mode: Mode = "clip",
    positions: Sequence[Positions] = ("trained",),
) -> dict[str, ReceptiveField]:
    """Measures the receptive field of each model with each kind of positions, and writes them to a folder.

    `erf.json` has all figures, `erf.npz` and `erf.png` the field; for several fields `erf-LABEL.npz` and `.png` have
    one each, and `erf.png` compares them.

    Args:
        models: as `open_models` returns them.
        images: images for each model.
        folder: where to write; files of an earlier call are replaced.
        layer: as for `receptive_field`.
        at: as for `receptive_field`.
        mode: as for `receptive_field`.
        positions: one or more kinds, see `changed_positions`.

    Returns:
        The fields by label: the name of the model, with the kind of positions if there are several.

    Raises:
        VicinalError: if a field cannot be measured or a file not be written.
    """
    if not positions:
        raise VicinalError("positions must be one or more of trained, random and zero, got none")
    found: dict[str, ReceptiveField] = {}
    for opened in models:
        for each in dict.fromkeys(positions):
            label = opened.name if len(positions) == 1 else f"{opened.name}, {each} positions"
            found[label] = receptive_field(
                opened.model,
                images.tensors(opened),
                layer=layer,
                at=at,
                mode=mode,
                positions=each,
                seed=images.seed,
                name=opened.name,
                batch_size=images.batch_size,
            )
    _write(found, folder)
    return found


def fields_as_list(fields: dict[str, ReceptiveField]) -> list[dict[str, Any]]:
    """Returns the figures of fields by label, ready for JSON: the content of `erf.json`."""
    return [{"label": label, **field.as_dict()} for label, field in fields.items()]


def _write(fields: dict[str, ReceptiveField], folder: Path) -> None:
    """Draws all fields first, then replaces the files."""
    stems = {label: "erf" if len(fields) == 1 else f"erf-{file_stem(label)}" for label in fields}
    figures = {stems[label]: draw_field(field) for label, field in fields.items()}
    if len(fields) > 1:
        figures["erf"] = draw_fields(fields)
    with replace_outputs([folder], *OUTPUTS):
        for label, field in fields.items():
            field.save(folder / f"{stems[label]}.npz")
        for stem, figure in figures.items():
            save_figure(figure, folder / f"{stem}.png")
        write_json(folder / "erf.json", fields_as_list(fields))
