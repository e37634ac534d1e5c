"""The model outside Python: ONNX, run by onnxruntime."""

import warnings

import pytest
import torch
from torch import nn

import vicinal
from small_models import cait, images, swin, vit

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")


def vit_of_two_layers():
    return vit(depth=2)


@pytest.mark.parametrize(
    "make", [vit_of_two_layers, *(pytest.param(make, marks=pytest.mark.slow) for make in (swin, cait))]
)
def test_onnx_gives_the_same_for_any_batch(make, tmp_path):
    model = make().eval()
    for module in model.modules():  # outputs of the size of 1, not of a head that starts near 0
        if isinstance(module, nn.Linear) and module.out_features == 5:
            nn.init.normal_(module.weight)
    vicinal.attach(model, "gmm:init=spread+gab")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the exporter's own
        program = torch.onnx.export(
            model, (images(model),), dynamo=True, verbose=False, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)
        )
    file = tmp_path / "model.onnx"
    program.save(file)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    x = images(model, 5)
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = model(x).detach()
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(torch.from_numpy(got), expected, atol=1e-4, rtol=1e-4)
