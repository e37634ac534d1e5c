"""Taps of compiled models."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import vicinal
from small_models import cait, images, swin, vit

FEWER_LAYERS = {vit: {"depth": 2}, swin: {"depths": (2, 1)}, cait: {}}  # compiling takes as long as there are layers


@pytest.mark.parametrize(
    ("make", "spec", "queries"),
    [
        pytest.param(vit, None, "class", marks=pytest.mark.slow),
        pytest.param(vit, "gmm:init=spread", "class", marks=pytest.mark.slow),
        pytest.param(vit, "gmm:init=spread+gab", "mean", marks=pytest.mark.slow),
        (swin, "gmm:init=spread", "mean"),
        pytest.param(cait, None, "class", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_is_read_in_one_graph(make, spec, queries):
    model = make(**FEWER_LAYERS[make])
    if spec:
        vicinal.attach(model, spec)
    x, t = images(model, 3), vicinal.tap(model, queries=queries)
    with t:
        plain = model(x)
    expected = t.last
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    torch.testing.assert_close(compiled(x), plain)  # compiled before the tap is open
    for _ in range(2):
        with t:
            out = compiled(x)
        torch.testing.assert_close(out, plain)
        torch.testing.assert_close(t.last, expected)
        assert not t.last.requires_grad
    out.square().sum().backward()
    torch.testing.assert_close(compiled(x), plain)
    assert graphs.frame_count == 2  # with and without


@torch.no_grad()
def test_weights_of_a_compiled_model_are_reduced_too():
    model = vit().eval()
    x, t = images(model), vicinal.tap(model, None, reduce=lambda layer, weights: weights.square().sum(-1))
    with t:
        model(x)
    expected = t.weights
    with t:
        torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(t.weights, expected)
