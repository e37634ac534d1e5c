"""The rule that chooses a path on GPUs, given facts; a model on a CPU that is told to be on CUDA."""

import dataclasses

import pytest
import timm
import torch

import vicinal
from attention_helpers import assert_all_close, gradients, inputs
from vicinal import Grid, attend, build_prior
from vicinal.attention import dispatch, gpu_path
from vicinal.attention.gpu_path import Call, GpuPath, PriorKind, call_facts, choose_gpu_path
from vicinal.attention.native import library

TRAINING = Call("cuda", torch.bfloat16, 64, PriorKind.SCALE, learned=True, gradient=True)


def path(**facts):
    return choose_gpu_path(dataclasses.replace(TRAINING, **facts))


@pytest.fixture
def on_cuda(monkeypatch):
    """Makes `attend` choose as if tensors were on CUDA; returns the list of paths that it chose."""
    chosen = []

    def choose(call):
        chosen.append(choose_gpu_path(dataclasses.replace(call, device_type="cuda")))
        return chosen[-1]

    monkeypatch.setattr(library, "_ready", False)  # the native library is for CPUs
    monkeypatch.setattr(dispatch, "runs_on_gpu", lambda q: True)
    monkeypatch.setattr(dispatch, "choose_gpu_path", choose)
    return chosen


def test_training_recomputes():
    assert path() is GpuPath.RECOMPUTE
    assert path(kind=PriorKind.BIAS) is GpuPath.RECOMPUTE
    assert path(kind=PriorKind.BIAS, dropout=True) is GpuPath.RECOMPUTE


@pytest.mark.parametrize("compiling", [True, False])
@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("dropout", [True, False])
def test_quadratic_biases_are_channels_on_cuda(compiling, gradient, dropout):
    facts = {"kind": PriorKind.QUADRATIC, "compiling": compiling, "gradient": gradient, "dropout": dropout}
    assert path(**facts) is GpuPath.QUADRATIC
    assert path(**facts, device_type="mps") is not GpuPath.QUADRATIC


def test_compiled_models_use_flex_attention_where_it_has_a_kernel():
    assert path(compiling=True) is path(compiling=True, kind=PriorKind.BIAS) is GpuPath.FLEX
    assert path(compiling=True, gradient=False) is GpuPath.FLEX
    for refused in ({"dropout": True}, {"device_type": "mps"}, {"dtype": torch.float64}, {"head_width": 8}):
        assert path(compiling=True, **refused) is GpuPath.PLAIN


def test_a_bias_without_a_gradient_is_a_mask_of_a_fused_kernel():
    for facts in ({"gradient": False}, {"learned": False}, {"gradient": False, "device_type": "mps"}):
        assert path(kind=PriorKind.BIAS, **facts) is GpuPath.FUSED
    assert path(kind=PriorKind.NONE, compiling=True) is GpuPath.FUSED
    assert path(gradient=False) is GpuPath.RECOMPUTE  # a scale is not a mask


@pytest.mark.parametrize("kind", PriorKind)
def test_export_and_transforms_get_the_formula(kind):
    assert path(kind=kind, compiling=True, exporting=True) is GpuPath.PLAIN
    assert path(kind=kind, transformed=True) is GpuPath.PLAIN


@pytest.mark.parametrize(
    ("spec", "kind", "learned"),
    [
        ("conv", PriorKind.QUADRATIC, True),
        ("conv+conv", PriorKind.QUADRATIC, True),
        ("conv+gab", PriorKind.BIAS, True),
        ("decay", PriorKind.BIAS, False),
        ("gmm+conv", PriorKind.SCALE, True),
        ("none", PriorKind.NONE, False),
    ],
)
def test_facts_of_a_call(spec, kind, learned):
    grid = Grid(4, 4, prefix=1)
    q, _, v = inputs(grid, dim=8, v_dim=5)
    call = call_facts(q, v, build_prior(spec, heads=2, grid=grid), None, 0.1, 0.5)
    assert call == Call("cpu", torch.float32, 5, kind, learned=learned, gradient=True, dropout=True)


def test_a_grid_that_channels_do_not_hold_is_another_bias():
    for grid, dtype in ((Grid(64, 64), torch.float32), (Grid(32, 32, prefix=1), torch.bfloat16)):
        q = torch.zeros(1, 2, grid.tokens, 8, dtype=dtype)
        call = call_facts(q, q, build_prior("conv", heads=2, grid=grid), None, 0.0, 0.5)
        assert (call.kind, call.learned) == (PriorKind.BIAS, True)


def test_channels_are_not_used_where_tf32_would_round_them(monkeypatch):
    grid = Grid(4, 4)
    q, _, v = inputs(grid)
    prior = build_prior("conv", heads=2, grid=grid)
    monkeypatch.setattr(gpu_path, "_tf32_is_on", lambda: True)
    assert call_facts(q, v, prior, None, 0.0, 0.5).kind is PriorKind.BIAS
    assert call_facts(q.bfloat16(), v, prior, None, 0.0, 0.5).kind is PriorKind.QUADRATIC


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("conv", GpuPath.QUADRATIC),
        ("gmm:init=spread", GpuPath.RECOMPUTE),
        ("gab", GpuPath.RECOMPUTE),
        ("decay", GpuPath.FUSED),
        ("none", GpuPath.FUSED),
    ],
)
def test_attend_follows_the_rule_and_equals_the_formula(spec, expected, on_cuda):
    grid = Grid(3, 4, prefix=1)
    q, k, v = inputs(grid, dtype=torch.float64)
    prior = build_prior(spec, heads=2, grid=grid).double()
    tensors = [q, k, v, *prior.parameters()]
    out, plain = attend(q, k, v, prior=prior), attend(q, k, v, prior=prior, backend="plain")
    assert on_cuda == [expected]
    torch.testing.assert_close(out, plain, atol=1e-12, rtol=1e-12)
    assert_all_close(gradients(out, tensors), gradients(plain, tensors), atol=1e-11, rtol=1e-11)


def test_a_model_trains_on_channels_as_on_the_formula(on_cuda):
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=3)
    vicinal.attach(model, "conv", img_size=64)
    model.double()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    on_cuda.clear()
    parameters = dict(model.named_parameters())
    found = gradients(model(images), list(parameters.values()))
    assert on_cuda == [GpuPath.QUADRATIC] * 2
    on_cuda.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "choose_gpu_path", lambda call: GpuPath.PLAIN)
        expected = gradients(model(images), list(parameters.values()))
    assert any("flat_sigma" in name for name in parameters)
    assert_all_close(found, expected, atol=1e-10, rtol=1e-9)


def test_transforms_on_a_gpu_take_the_formula(on_cuda):
    grid = Grid(2, 2)
    q, k, v = (x.detach() for x in inputs(grid))
    prior = build_prior("conv", heads=2, grid=grid)
    out = torch.func.vmap(lambda q, k, v: attend(q[None], k[None], v[None], prior=prior)[0])(q, k, v)
    assert on_cuda == [GpuPath.PLAIN]
    torch.testing.assert_close(out, attend(q, k, v, prior=prior, backend="plain"))
