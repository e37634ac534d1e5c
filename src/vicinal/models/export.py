"""Exports a model to ONNX or `torch.export`, and compares the outputs of the file with those of the model."""

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
Function = Callable[[Tensor], Tensor]

TOLERANCE = 1e-4
"""Maximum difference of the outputs, relative to the largest output."""
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
MAX_ONNX_BYTES = 3 * 2**29  # PyTorch writes larger weights to separate files, because protobuf is limited to 2 GiB


@dataclass(frozen=True)
class Exported:
    """An exported file, and its comparison with the model."""

    file: Path
    difference: float
    """Maximum difference of the outputs, relative to the largest output."""
    batches: tuple[int, ...]
    """Batch sizes of the comparison."""


def export(
    model: nn.Module, file: str | Path, format: Format, *, batch_size: int | None = None, overwrite: bool = False
) -> Exported:
    """Writes a model, its prior included, to a file that works without this package.

    >>> import tempfile, torch, vicinal
    >>> from vicinal.models.export import export
    >>> model = vicinal.create_model("vit-micro", prior="gmm", img_size=8, depth=1)
    >>> exported = export(model, tempfile.mkdtemp() + "/model.pt2", "pt2")
    >>> torch.export.load(exported.file).module()(torch.randn(5, 3, 8, 8)).shape
    torch.Size([5, 10])

    The input of the file is `images`, float32 `(batch, channels, height, width)`, and its output `logits`,
    `(batch, classes)`. The file stores `preprocessing` and `class_names` as JSON: in the metadata of an ONNX file, in
    the `extra_files` of a pt2 file. The model is not changed.

    Args:
        model: a model of `create_model` or `load`.
        file: the file to write.
        format: `onnx`, or `pt2` for `torch.export.load`.
        batch_size: fixed batch size of the file; any batch size by default.
        overwrite: replace an existing file.

    Returns:
        The file, and the difference of its outputs from the model's.

    Raises:
        VicinalError: the model cannot be exported, or the outputs differ by more than `TOLERANCE`; no file is written.
    """
    file = Path(file)
    _check(model, file, format, batch_size, overwrite)
    model = copy.deepcopy(model).cpu().float().eval()
    noise = make_runner(model).noise
    batches = (1, 3) if batch_size is None else (batch_size,)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".exporting-") as temporary:
        written = Path(temporary, file.name)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporters
            try:
                # Two images for a dynamic batch size, because tracing makes a size of 1 constant.
                WRITERS[format](model, noise(batch_size or 2), written, batch_size is None)
                function = READERS[format](written)
                expected = [(images, model(images)) for images in (noise(batch, seed=batch) for batch in batches)]
                compared = [(function(images), outputs) for images, outputs in expected]
            except Exception as error:  # exporters raise exceptions of any type
                text = str(error).strip().split("\n")[0]
                raise VicinalError(
                    f"cannot export {type(model).__name__} to {format}: {type(error).__name__}: {text}"
                ) from error
        differences = [(got - outputs).abs().max() / outputs.abs().max() for got, outputs in compared]
        difference = float(torch.stack(differences).max())  # NaN if any difference is
        if not difference <= TOLERANCE:
            raise VicinalError(
                f"outputs of the {format} file must differ from those of the model by at most {TOLERANCE:.0e} of the "
                f"largest, got {difference:.1e}; {file} was not written"
            )
        os.replace(written, file)
    return Exported(file, difference, batches)


def _check(model: nn.Module, file: Path, format: str, batch_size: int | None, overwrite: bool) -> None:
    if format not in get_args(Format):
        raise unknown_name("format", format, get_args(Format))
    if batch_size is not None and batch_size < 1:
        raise VicinalError(f"batch_size must be >= 1, got {batch_size}")
    if file.is_dir():
        raise VicinalError(f"cannot write {file}: it is a folder")
    if not file.parent.is_dir():
        raise VicinalError(f"cannot write {file}: the folder {file.parent} does not exist")
    if file.exists() and not overwrite:
        raise VicinalError(f"{file} exists already; use another file, or overwrite it")
    if format == "onnx":
        missing = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise VicinalError(f"ONNX needs {' and '.join(missing)}: pip install 'vicinal[onnx]'")
        if sum(4 * parameter.numel() for parameter in model.parameters()) > MAX_ONNX_BYTES:
            raise VicinalError("the model is too large for one ONNX file; export it as pt2")


def _metadata(model: nn.Module) -> dict[str, str]:
    """Returns preprocessing and class names, as JSON by name."""
    declared: Any = getattr(model, "pretrained_cfg", None) or {}
    images = {key: declared[key] for key in ("input_size", *PREPROCESSING) if key in declared}
    metadata = {"preprocessing": json.dumps(images)}
    if declared.get("label_names"):
        metadata["class_names"] = json.dumps(list(declared["label_names"]))
    return metadata


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
        node.metadata_props.clear()  # stack traces with local paths
    program.model.metadata_props.update(_metadata(model))
    program.save(file)


def _read_onnx(file: Path) -> Function:
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    session = runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


def _write_pt2(model: nn.Module, images: Tensor, file: Path, any_batch: bool) -> None:
    shapes = ({0: torch.export.Dim.DYNAMIC},) if any_batch else None
    program = torch.export.export(model, (images,), dynamic_shapes=shapes)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # stack traces with local paths
    program.example_inputs = None  # would be stored as a pickle
    torch.export.save(program, file, extra_files=_metadata(model))


def _read_pt2(file: Path) -> Function:
    return torch.export.load(file).module()


WRITERS = {"onnx": _write_onnx, "pt2": _write_pt2}
READERS = {"onnx": _read_onnx, "pt2": _read_pt2}
