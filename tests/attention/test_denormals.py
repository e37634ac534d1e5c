"""No denormal number arises in attention under a narrow prior, in the default state of the CPU.

CPUs multiply denormal numbers (in fp32, those below 1.2e-38) many times slower than normal ones.
"""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from attention_helpers import gradients, inputs
from vicinal import Grid, attach, attend, build_prior
from vicinal.attention import attention_weights

GRID = Grid(16, 16)
SIGMAS = [0.3, 0.5, 1.0, 2.0]


def denormals(x):
    """Returns how many numbers of x are denormal in its dtype."""
    return int(((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).sum())


class DenormalCount(TorchDispatchMode):
    """Counts denormal numbers in the results of all operations inside, by operation."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        for x in result if isinstance(result, tuple | list) else (result,):
            # New buffers, and views of them, hold arbitrary numbers.
            if isinstance(x, torch.Tensor) and x.is_floating_point() and "empty" not in name and not func.is_view:
                self.counts[name] = self.counts.get(name, 0) + denormals(x)
        self.counts = {name: count for name, count in self.counts.items() if count}
        return result


@pytest.fixture(autouse=True)
def _default_state():
    """Denormal numbers are computed, not flushed: the smallest one, doubled, is a number."""
    assert (torch.full((16,), 2.0**-149) * 2 > 0).all()
    assert torch.tensor(2.0**-149).item() > 0


def test_the_count_finds_denormals_in_plain_pytorch():
    q, k, v = inputs(GRID, batch=1, heads=6, dim=32)
    bias = build_prior("conv", heads=6, grid=GRID, sigma=0.5)()[1].detach()
    with DenormalCount() as found:
        gradients((q @ k.mT * 32**-0.5 + bias).softmax(-1) @ v, (q, k, v))
    assert found.counts["_softmax"] > 1000


@pytest.mark.parametrize("gradient_scale", [1.0, 1e-10])
@pytest.mark.parametrize("backend", ["auto", "recompute", "plain"])
@pytest.mark.parametrize("sigma", SIGMAS)
def test_training_under_narrow_windows(sigma, backend, gradient_scale):
    torch.manual_seed(0)
    q, k, v = inputs(GRID, batch=3, heads=6, dim=32)
    prior = build_prior("conv", heads=6, grid=GRID, sigma=sigma)
    assert denormals(attention_weights(q, k, prior=prior)) == 0
    with DenormalCount() as found:
        out = attend(q, k, v, prior=prior, backend=backend)
        tensors = [q, k, v, prior.flat_sigma, prior.flat_mu]
        found_gradients = torch.autograd.grad(out, tensors, torch.randn_like(out) * gradient_scale)
    assert [denormals(x) for x in (out, *found_gradients)] == [0] * 6
    assert found.counts == {}


@pytest.mark.parametrize("backend", ["recompute", "plain"])
def test_training_in_bfloat16(backend):
    q, k, v = inputs(GRID, batch=2, heads=6, dim=32, dtype=torch.bfloat16)
    prior = build_prior("conv", heads=6, grid=GRID, sigma=0.5)
    with DenormalCount() as found:
        gradients(attend(q, k, v, prior=prior, backend=backend), (q, k, v, *prior.parameters()))
    assert found.counts == {}


@pytest.mark.parametrize("backend", ["recompute", "plain"])
@pytest.mark.parametrize("sigma", [0.3, 0.5])
def test_narrow_multiplying_priors(sigma, backend):
    q, k, v = inputs(GRID, batch=2, heads=2, dim=16)
    prior = build_prior("gmm", heads=2, grid=GRID, kernels=1, sigma=sigma, alpha=3.0)
    assert denormals(prior.scale().detach()) > 0
    assert denormals(prior.values()[0].detach()) == 0
    out = attend(q, k, v, prior=prior, backend=backend)
    with DenormalCount() as found:
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert found.counts == {}


@pytest.mark.parametrize("backend", ["auto", "recompute", "plain"])
def test_masks_of_minus_100_and_of_minus_infinity(backend):
    q, k, v = inputs(GRID, batch=2, heads=6, dim=16)
    prior = build_prior("conv", heads=6, grid=GRID, sigma=0.5)
    mask = torch.where(torch.rand(2, 1, 256, 256) < 0.3, -100.0, 0.0)
    mask[0, 0, 3] = -100.0
    mask[1, 0, :, ::5] = -torch.inf
    mask[1, 0, 7] = -torch.inf  # a query without a key
    with DenormalCount() as found:
        out = attend(q, k, v, prior=prior, mask=mask, backend=backend)
        found_gradients = gradients(out, (q, k, v))
    assert found.counts == {}
    assert (out[1, :, 7] == 0).all()
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    logits = exact[0] @ exact[1].mT / 4 + prior.double()()[1] + mask
    weights = logits.softmax(-1).masked_fill((mask == -torch.inf).all(-1, keepdim=True), 0.0)
    truth = weights.detach() @ exact[2]
    torch.testing.assert_close(out.double(), truth, atol=1e-5, rtol=1e-5)
    assert all(x.isfinite().all() for x in found_gradients)


@pytest.mark.parametrize("spec", ["conv:sigma=0.5", "gmm:kernels=1,sigma=0.5,alpha=3", "gmm+conv:sigma=0.5"])
@pytest.mark.parametrize("batch", [1, 40])
def test_inference(spec, batch, monkeypatch):
    q, k, v = (x.detach() for x in inputs(GRID, batch=batch, heads=2, dim=16))
    prior = build_prior(spec, heads=2, grid=GRID)
    with torch.no_grad():
        values, _ = prior.values(), prior()  # the formula of gmm makes denormal numbers
        for name in ("values", "cached_values"):
            monkeypatch.setattr(prior, name, lambda: values)
        with DenormalCount() as found:
            out = attend(q, k, v, prior=prior)
    assert denormals(out) == 0
    assert found.counts == {}


@pytest.mark.parametrize("sigma", SIGMAS)
def test_training_under_a_frozen_narrow_window_recomputes(sigma, monkeypatch):
    q, k, v = inputs(GRID, batch=2, heads=6, dim=16)
    prior = build_prior("conv", heads=6, grid=GRID, sigma=sigma).requires_grad_(False)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *_, **__: pytest.fail("fused"))
    with DenormalCount() as found:
        gradients(attend(q, k, v, prior=prior), (q, k, v))
    assert found.counts == {}


@pytest.mark.parametrize("backend", ["recompute", "plain"])
@pytest.mark.parametrize("sigma", [0.3, 1.0])
def test_weights_that_are_left_out_are_below_rounding(sigma, backend):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs(GRID, batch=2, heads=6, dim=16))
        prior = build_prior("conv", heads=6, grid=GRID, sigma=sigma).to(dtype)
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        wide = build_prior("conv", heads=6, grid=GRID, sigma=sigma).double()
        truth = (exact[0] @ exact[1].mT / 4 + wide()[1]).softmax(-1) @ exact[2]
        out = attend(q, k, v, prior=prior, backend=backend)
        torch.testing.assert_close(out.double(), truth, atol=tolerance, rtol=0)
        ours = gradients(out, [q, k, v, *prior.parameters()])
        theirs = gradients(truth, [*exact, *wide.parameters()])
        for a, b in zip(ours, theirs, strict=True):
            size = max(1.0, b.abs().max().item())
            torch.testing.assert_close(a.double(), b, atol=tolerance * size, rtol=0)


@pytest.mark.parametrize("backend", ["recompute", "plain"])
def test_factors_of_zero_still_get_a_gradient(backend):
    grid = Grid(3, 3)
    q, k, v = inputs(grid)
    prior = build_prior("elm", heads=2, grid=grid)
    (parameter,) = prior.parameters()
    with torch.no_grad():
        parameter.zero_()
    assert (prior()[0] == 0).all()
    (found,) = gradients(attend(q, k, v, prior=prior, backend=backend), [parameter])
    exact = build_prior("elm", heads=2, grid=grid).double()
    exact.load_state_dict(prior.state_dict())
    truth = ((q.double() @ k.double().mT / 2) * exact()[0]).softmax(-1) @ v.double()
    (expected,) = gradients(truth, list(exact.parameters()))
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_two_steps_of_an_attached_model():
    import timm

    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, patch_size=4, embed_dim=48, depth=2, num_heads=3, num_classes=10
    )
    attach(model, "conv", img_size=64, sigma=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        with DenormalCount() as found:
            loss = F.cross_entropy(model(torch.randn(4, 3, 64, 64)), torch.arange(4))
            loss.backward()
        optimizer.step()
        assert found.counts == {}
        counts = {name: denormals(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        assert len(counts) > 20
        assert not any(counts.values()), counts
