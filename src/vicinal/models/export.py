"""Models outside this package: ONNX, or a program of `torch.export`, each read again and checked after writing."""

import copy
import importlib
import importlib.util
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from vicinal.errors import VicinalError, unknown_name
from vicinal.inspection.model_runner import make_runner
from vicinal.models.save import PREPROCESSING

__all__ = ["TOLERANCE", "Exported", "Format", "export"]

Format = Literal["onnx", "pt2"]
Run = Callable[[Tensor], Tensor]

TOLERANCE = 1e-4
"""How far a file's outputs may be from the model's, as a share of the largest."""
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
ONNX_BYTES = 3 * 2**29  # beyond that PyTorch puts the weights into further files, as 2 GiB is a protobuf's limit


@dataclass(frozen=True)
class Exported:
    """A model's file, and how it compared with the model."""

    file: Path
    difference: float
    """The largest, as a share of the largest output."""
    batches: tuple[int, ...]
    """The numbers of images that it was compared on."""


def export(
    model: nn.Module, file: str | Path, format: Format, *, batch_size: int | None = None, overwrite: bool = False
) -> Exported:
    """Write a model, its prior included, for use without this package.

    >>> import tempfile, torch, vicinal
    >>> from vicinal.models.export import export
    >>> model = vicinal.create_model("vit-micro", prior="gmm", img_size=8, depth=1)
    >>> exported = export(model, tempfile.mkdtemp() + "/model.pt2", "pt2")
    >>> torch.export.load(exported.file).module()(torch.randn(5, 3, 8, 8)).shape
    torch.Size([5, 10])

    The file takes `images`, `(batch, channels, height, width)` in float32, prepared as its `preprocessing` says, and
    gives `logits`, for classes in the order of its `class_names`. Both are JSON, in the metadata of an ONNX file and in
    the `extra_files` of a pt2 file. The model stays as it is.

    Args:
        model: one of `create_model` or `load`.
        file: where to; nothing is written if the file would not give what the model gives.
        format: `onnx`, or `pt2` for `torch.export.load`.
        batch_size: the one number of images that the file takes at a time; any number by default.
        overwrite: replace a file that is there.
    """
    file = Path(file)
    _check(model, file, format, batch_size, overwrite)
    model = copy.deepcopy(model).cpu().float().eval()
    noise = make_runner(model).noise
    batches = (1, 3) if batch_size is None else (batch_size,)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".exporting-") as beside:
        written = Path(beside, file.name)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporters', about themselves
            try:
                # Two images where any number may come, as tracing takes a 1 for a constant.
                WRITERS[format](model, noise(batch_size or 2), written, batch_size is None)
                run = READERS[format](written)
                expected = [(images, model(images)) for images in (noise(batch, seed=batch) for batch in batches)]
                compared = [(run(images), outputs) for images, outputs in expected]
            except Exception as error:  # they raise whatever comes up on the way
                said = str(error).strip().split("\n")[0]
                raise VicinalError(
                    f"cannot export {type(model).__name__} to {format}: {type(error).__name__}: {said}"
                ) from error
        differences = [(got - outputs).abs().max() / outputs.abs().max() for got, outputs in compared]
        difference = float(torch.stack(differences).max())  # NaN if any is
        if not difference <= TOLERANCE:
            raise VicinalError(
                f"the {format} file gives other outputs than the model: they differ by {difference:.1e} of the "
                f"largest, and {TOLERANCE:.0e} is tolerated; {file} was not written"
            )
        os.replace(written, file)
    return Exported(file, difference, batches)


def _check(model: nn.Module, file: Path, format: str, batch_size: int | None, overwrite: bool) -> None:
    if format not in get_args(Format):
        raise unknown_name("format", format, get_args(Format))
    if batch_size is not None and batch_size < 1:
        raise VicinalError(f"batch_size is a number of images >= 1, given {batch_size}")
    if file.is_dir():
        raise VicinalError(f"cannot write {file}: it is a folder")
    if not file.parent.is_dir():
        raise VicinalError(f"cannot write {file}: there is no folder {file.parent}")
    if file.exists() and not overwrite:
        raise VicinalError(f"there is a {file} already; give another file, or overwrite it")
    if format == "onnx":
        missing = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise VicinalError(f"ONNX needs {' and '.join(missing)}: pip install 'vicinal[onnx]'")
        if sum(4 * parameter.numel() for parameter in model.parameters()) > ONNX_BYTES:
            raise VicinalError("the model is too large for one ONNX file; export it as pt2")


def _notes(model: nn.Module) -> dict[str, str]:
    """What a user of the file needs to know: JSON by name."""
    declared: Any = getattr(model, "pretrained_cfg", None) or {}
    images = {key: declared[key] for key in ("input_size", *PREPROCESSING) if key in declared}
    notes = {"preprocessing": json.dumps(images)}
    if declared.get("label_names"):
        notes["class_names"] = json.dumps(list(declared["label_names"]))
    return notes


def _write_onnx(model: nn.Module, images: Tensor, file: Path, any_batch: bool) -> None:
    program = torch.onnx.export(
        model,
        (images,),
        dynamo=True,
        verbose=False,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: "batch"},) if any_batch else None,
    )
    assert program is not None
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # lines of code with the paths they have on this machine
    program.model.metadata_props.update(_notes(model))
    program.save(file)


def _read_onnx(file: Path) -> Run:
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    session = runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


def _write_pt2(model: nn.Module, images: Tensor, file: Path, any_batch: bool) -> None:
    shapes = ({0: torch.export.Dim.DYNAMIC},) if any_batch else None
    program = torch.export.export(model, (images,), dynamic_shapes=shapes)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # lines of code with the paths they have on this machine
    program.example_inputs = None  # would be the one pickle in the file
    torch.export.save(program, file, extra_files=_notes(model))


def _read_pt2(file: Path) -> Run:
    return torch.export.load(file).module()


WRITERS = {"onnx": _write_onnx, "pt2": _write_pt2}
READERS = {"onnx": _read_onnx, "pt2": _read_pt2}
