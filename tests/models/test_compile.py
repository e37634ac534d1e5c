"""Compiled backbones train as they do uncompiled: the gradients of all parameters, the prior's included."""

import pytest
import torch

from small_backbones import SMALL, small


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_gradients_are_the_same_when_compiled(name):
    torch.compiler.reset()
    model = small(name, prior="gmm:init=paper+rpe", drop_path_rate=0)
    images = torch.randn(2, 3, 32, 32)

    def gradients(run):
        model.zero_grad()
        out = run(images)
        out.square().sum().backward()
        return out.detach(), {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    out, expected = gradients(model)
    compiled_out, compiled = gradients(torch.compile(model, fullgraph=True))
    torch.testing.assert_close(compiled_out, out, rtol=1e-4, atol=1e-5)
    assert any(".prior." in key for key in expected)
    for key, gradient in expected.items():
        torch.testing.assert_close(compiled[key], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max()) + 1e-7)
