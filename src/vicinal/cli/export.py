"""`vicinal export`: writes a trained model as a file for other programs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vicinal.cli._flags import call_with_flags
from vicinal.errors import VicinalError
from vicinal.training.model_path import model_folder

__all__ = ["run"]


def export(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    /,
    format: Literal["onnx", "pt2"] = "onnx",
    out: Path | None = None,
    batch_size: int | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a trained model as one file for other programs, and checks that its outputs equal the model's.

    Class names and preprocessing are stored as JSON: in the metadata of an ONNX file, in the extra files of a pt2 file.

    Args:
        run: Folder of a run or of a saved model, or hf-hub:owner/name.
        format: onnx, for onnxruntime and others; or pt2, for torch.export.load.
        out: File to write; by default RUN/model.onnx or RUN/model.pt2.
        batch_size: Fixed number of images in a batch; any number by default.
        overwrite: Replace an existing file.
    """
    source = model_folder(run)
    file = out or _default(run, format)
    if file.suffix in (".onnx", ".pt2") and file.suffix != f".{format}":
        raise VicinalError(
            f"{file} must have the suffix of --format {format}; name it {file.with_suffix(f'.{format}')}"
        )
    if file.exists() and not overwrite:  # before the model is opened
        raise VicinalError(f"{file} exists already; give another --out, or --overwrite")

    from vicinal.models import load
    from vicinal.models.export import TOLERANCE
    from vicinal.models.export import export as export_model

    model = load(source)
    exported = export_model(model, file, format, batch_size=batch_size, overwrite=overwrite)
    batches = " and ".join(str(batch) for batch in exported.batches)
    takes = "any number of images" if batch_size is None else f"{batch_size} image{'s' * (batch_size > 1)}"
    print(f"wrote {file}: {file.stat().st_size / 1e6:.1f} MB, takes {takes} at a time")
    print(
        f"read again and compared with the model on batches of {batches}: outputs differ by at most "
        f"{exported.difference:.1e} of the largest ({TOLERANCE:.0e} is tolerated)"
    )


def _default(run: str, format: str) -> Path:
    if run.startswith("hf-hub:"):
        return Path(f"{run.split('/')[-1].split('@')[0]}.{format}")
    return Path(run, f"model.{format}")


def run(args: Sequence[str]) -> None:
    """Parses the arguments after `vicinal export`, writes the file and prints its size."""
    call_with_flags(export, "vicinal export", args)
