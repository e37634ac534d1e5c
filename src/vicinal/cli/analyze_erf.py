"""`vicinal analyze erf`: effective receptive fields."""

from collections.abc import Sequence
from typing import Literal

from vicinal.cli._flags import call_with_flags
from vicinal.cli._images import ImageArgs
from vicinal.cli._models import ModelArgs, layer_name_or_index
from vicinal.cli._output import OutputArgs

__all__ = ["run"]


def erf(
    models: ModelArgs,
    images: ImageArgs,
    output: OutputArgs,
    layer: str | None = None,
    at: tuple[int, int] | None = None,
    mode: Literal["clip", "abs"] = "clip",
    positions: tuple[Literal["trained", "random", "zero"], ...] = ("trained",),
) -> None:
    """Measures effective receptive fields: which pixels the central patch of a layer depends on, and how much.

    The field is the gradient of the patch's mean channel with respect to the pixels, negative part clipped, averaged
    over images. Writes erf.npz (the field), erf.png and erf.json; for several models or positions one file each, and a
    comparison.

    Args:
        layer: Index of a block, negative from the end, or a module's name; the last block by default.
        at: Row and column of the patch; the central one by default.
        mode: Negative gradients count as zero, or by their absolute value.
        positions: Position embeddings, relative tables and priors as trained, initialized again, or zero; several are
            compared.
    """
    selection = images.select()
    opened = models.open(images.device)
    folder = output.folder(opened)

    from vicinal.analysis.receptive_field import fields_table, write_receptive_fields
    from vicinal.analysis.receptive_field.outputs import fields_as_list

    fields = write_receptive_fields(
        opened,
        selection,
        folder,
        layer=None if layer is None else layer_name_or_index(layer),
        at=at,
        mode=mode,
        positions=positions,
    )
    files = "erf.npz" if len(fields) == 1 else f"{len(fields)} times erf-*.png and .npz"
    text = f"{fields_table(fields)}\n\nwrote erf.png, erf.json and {files} to {folder}"
    output.print(fields_as_list(fields), text)
    selection.check_all_read()


def run(args: Sequence[str]) -> None:
    """Parses the arguments after `vicinal analyze erf`, measures, writes and prints."""
    call_with_flags(erf, "vicinal analyze erf", args)
