"""Under `torch.compile(dynamic=True)` and `torch.export` an attached model keeps symbolic image sizes."""

import pytest
import timm
import torch

import vicinal

SIZES = [(64, 64), (48, 80), (80, 32)]  # the first is square, which Dynamo takes for a rule


def vit(**options):
    torch.manual_seed(0)
    options = {"embed_dim": 24, "num_heads": 2, "depth": 1, "num_classes": 5, "pos_embed": "none"} | options
    # Without padding, timm puts sizes into texts of errors, which makes them constants of a graph.
    return timm.models.vision_transformer.VisionTransformer(
        img_size=64, patch_size=16, dynamic_img_size=True, dynamic_img_pad=True, **options
    )


def graphs(model, sizes, run):
    """Returns how many graphs a model is compiled to, and what it returns at each size."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    outputs = [run(compiled, torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))) for size in sizes]
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], outputs


@pytest.mark.slow
@pytest.mark.parametrize("prior", ["gmm:init=spread+conv"])
def test_inference_at_three_sizes_takes_two_graphs(prior):
    model = vit().eval()
    vicinal.attach(model, prior)

    @torch.no_grad()
    def run(function, x):
        torch.testing.assert_close(function(x), model(x), atol=1e-5, rtol=1e-4)

    assert graphs(model, [*SIZES, SIZES[0]], run)[0] <= 2


@pytest.mark.slow
def test_training_at_three_sizes_takes_two_graphs():
    model = vit()
    vicinal.attach(model, "gmm:init=spread+conv")

    def gradients(function, x):
        model.zero_grad()
        function(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    def run(function, x):
        for one, other in zip(gradients(function, x), gradients(model, x), strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)

    assert graphs(model, SIZES, run)[0] <= 2


@pytest.mark.slow
def test_a_prior_adds_no_graphs_to_swin():
    def make():
        torch.manual_seed(0)
        return timm.models.swin_transformer.SwinTransformer(
            img_size=64, strict_img_size=False, depths=(2,), embed_dim=24, num_heads=(2,), window_size=4, num_classes=5
        ).eval()

    @torch.no_grad()
    def run(function, x):
        return function(x)

    sizes = [(64, 64), (32, 128), (96, 64)]
    without, _ = graphs(make(), sizes, run)
    model = make()
    vicinal.attach(model, "gmm:init=spread", img_size=64)
    count, outputs = graphs(model, sizes, run)
    assert count <= without
    for size, output in zip(sizes, outputs, strict=True):
        x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(output, run(model, x), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("prior", ["gmm:init=spread", "rpe:init=normal"])
@torch.no_grad()
def test_an_exported_model_takes_other_sizes(prior):
    model = vit().eval()
    vicinal.attach(model, prior)
    height, width = (torch.export.Dim(name, min=2, max=16) * 16 for name in ("rows", "columns"))
    program = torch.export.export(model, (torch.randn(2, 3, 48, 80),), dynamic_shapes=({2: height, 3: width},)).module()
    for size in [(48, 80), (80, 32), (64, 64)]:
        x = torch.randn(2, 3, *size)
        torch.testing.assert_close(program(x), model(x), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the exporter
@torch.no_grad()
def test_an_onnx_model_takes_other_sizes(tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = vit().eval()
    vicinal.attach(model, "gmm:init=spread+gab")
    height, width = (torch.export.Dim(name, min=2, max=16) * 16 for name in ("rows", "columns"))
    program = torch.onnx.export(
        model, (torch.randn(2, 3, 48, 80),), dynamo=True, dynamic_shapes=({2: height, 3: width},), verbose=False
    )
    program.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    for size in [(48, 80), (80, 32), (64, 64)]:
        x = torch.randn(2, 3, *size)
        (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(output), model(x), atol=1e-4, rtol=1e-3)
