"""Attention under `torch.func` and forward-mode AD: derivatives against finite differences, and nothing left behind."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, jvp, stack_module_state, vmap

import vicinal
from vicinal import Grid, attend, build_prior
from vicinal.attention import attend_packed

# torch's own rules for forward mode are scripted when they are first used
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
GRID = Grid(3, 4, prefix=1)


def model(prior="gmm:init=spread"):
    options = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "num_heads": 2, "depth": 2, "num_classes": 3}
    return vicinal.create_model("vit", prior=prior, **options).eval().double()


def difference(function, x, tangent, step=1e-5):
    """Returns the derivative of a function along a tangent, by central differences."""
    return (function(x + step * tangent) - function(x - step * tangent)) / (2 * step)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("spec", ["gmm:init=spread", "conv", "elm"])
def test_forward_mode_keeps_the_tangent(spec, recorded):
    prior = build_prior(spec, heads=2, grid=GRID).double()
    qkv, tangent = torch.randn(2, 2, 13, 48, dtype=torch.float64)

    def run(x):
        return attend_packed(x, heads=2, prior=prior)

    with torch.set_grad_enabled(recorded), forward_ad.dual_level():
        found = forward_ad.unpack_dual(run(forward_ad.make_dual(qkv, tangent))).tangent
    assert found is not None
    torch.testing.assert_close(found, difference(run, qkv, tangent), atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("recorded", [True, False])
def test_without_a_prior_forward_mode_is_refused_by_torch(recorded):
    x = torch.randn(1, 13, 48)
    with torch.set_grad_enabled(recorded), forward_ad.dual_level(), pytest.raises(NotImplementedError):
        attend_packed(forward_ad.make_dual(x, torch.ones_like(x)), heads=2)


@pytest.mark.parametrize("recorded", [True, False])
def test_derivatives_along_the_parameters_of_a_model(recorded):
    network, images = model(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    before = network(images).detach()
    name = "blocks.0.attn.prior.flat_sigma"
    sigma = dict(network.named_parameters())[name].detach()
    tangent = torch.randn_like(sigma)

    def run(values):
        return functional_call(network, {name: values}, (images,))

    with torch.set_grad_enabled(recorded):
        found = jvp(run, (sigma,), (tangent,))[1]
        torch.testing.assert_close(found, difference(run, sigma, tangent), atol=1e-8, rtol=1e-5)
        torch.testing.assert_close(network(images), before)


def test_an_ensemble_in_inference_leaves_the_model_as_it_was():
    networks, images = [model() for _ in range(3)], torch.randn(2, 3, 8, 8, dtype=torch.float64)
    state = stack_module_state(networks)
    with torch.no_grad():
        expected = torch.stack([network(images) for network in networks])
        for _ in range(2):
            found = vmap(lambda *state: functional_call(networks[0], state, (images,)))(*state)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(networks[0](images), expected[0])


def test_values_of_fake_tensors_are_not_kept():
    prior = build_prior("gmm:init=spread", heads=2, grid=GRID)
    q, k, v = torch.randn(3, 1, 2, 13, 8)
    with torch.no_grad():
        expected = attend(q, k, v, prior=prior)
        with torch._subclasses.FakeTensorMode() as mode:
            fake = {name: mode.from_tensor(x) for name, x in prior.named_parameters()}
            functional_call(prior, fake, ())
        assert torch.equal(attend(q, k, v, prior=prior), expected)
