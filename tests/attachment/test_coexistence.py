"""Attached models beside each other, modules used twice, inference mode, threads, and tracing."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import vicinal
from by_hand import assert_same, attention_io, logits_by_hand, prior_by_hand, project, raster
from small_models import cait, images, lively, swin, vit
from test_token_orders import Block
from vicinal import Grid
from vicinal.inspection.refusal import RefusalKind


@torch.no_grad()
def test_two_copies_of_one_class_keep_priors_of_their_own():
    plain = lively(vit()).double()
    one, other = copy.deepcopy(plain), copy.deepcopy(plain)
    x = images(plain).double()
    before = plain(x)
    vicinal.attach(one, "gab")
    vicinal.attach(other, "gmm:init=spread", layers=[1])
    assert torch.equal(plain(x), before)
    for model, layers in ((one, [0, 1, 2]), (other, [1])):
        for number in layers:
            module = model.blocks[number].attn
            (tokens,), _, out = attention_io(module, lambda model=model: model(x))
            logits, bias, v = logits_by_hand(module, tokens, module.prior, raster(4, 4, 1))
            assert_same(out, project(module, (logits + bias).softmax(-1), v))
    assert (one(x) - before).abs().max() > 1e-3
    vicinal.detach(one)
    assert torch.equal(one(x), before)
    assert type(other.blocks[1].attn) is not type(plain.blocks[1].attn)


class Twice(nn.Module):
    """One block that runs twice in a forward, on all tokens and then on those of every `step`-th row."""

    def __init__(self, step=1):
        super().__init__()
        self.patches, self.block, self.step = nn.Conv2d(3, 24, 4, 4), Block(24, 4), step

    def forward(self, x):
        x = self.block(self.patches(x).flatten(2).mT)
        x = x.unflatten(1, (8, 8))[:, :: self.step].flatten(1, 2)
        return self.block(x)


@torch.no_grad()
def test_a_module_that_runs_twice_on_the_same_tokens_has_one_prior_in_both():
    model = lively(Twice()).double()
    (layer,) = vicinal.attach(model, "gmm:init=spread+gab", img_size=32).layers
    assert layer.grid == Grid(8, 8)
    calls = []
    model.block.register_forward_hook(lambda _, args, out: calls.append((args[0], out)))
    model(torch.randn(2, 3, 32, 32, dtype=torch.float64))
    assert len(calls) == 2
    for x, out in calls:
        module = model.block
        q, k, v = module.qkv(module.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        scale, bias = prior_by_hand(module.prior, raster(8, 8))
        weights = (scale * (q @ k.mT * 6**-0.5) + bias).softmax(-1)
        assert_same(out, x + module.proj((weights @ v).transpose(1, 2).flatten(2)))


def test_a_module_that_runs_twice_on_different_tokens_is_refused():
    (site,) = vicinal.inspect(Twice(step=2), img_size=32).sites
    assert site.refusal.kind is RefusalKind.SEVERAL


@torch.no_grad()
def test_one_block_at_two_depths_is_one_site():
    model = lively(vit(depth=3))
    model.blocks[2] = model.blocks[0]
    table = vicinal.attach(model, "gab")
    assert [layer.name for layer in table.layers] == ["blocks.0.attn", "blocks.1.attn"]
    assert model.blocks[2].attn.prior is model.blocks[0].attn.prior
    x = images(model)
    apart = lively(vit(depth=3))
    apart.load_state_dict({name: value for name, value in model.state_dict().items() if ".prior." not in name})
    vicinal.attach(apart, "gab")
    torch.testing.assert_close(model(x), apart(x), atol=1e-5, rtol=1e-4)
    assert vicinal.detach(model) == 2


@pytest.mark.parametrize("make", [vit, swin, cait])
def test_a_model_made_in_inference_mode_is_served_outside_and_runs_inside(make):
    with torch.inference_mode():
        model = lively(make())
    twin = lively(make())
    x = images(twin)
    with torch.inference_mode():
        before = model(x)
    table = vicinal.attach(model, "gab")
    assert table == vicinal.attach(twin, "gab")
    with torch.inference_mode():
        out = model(x)
        torch.testing.assert_close(out, twin(x))
    assert (out - before).abs().max() > 1e-4
    assert vicinal.detach(model) == len(table.layers)
    with torch.inference_mode():
        assert torch.equal(model(x), before)


@pytest.mark.parametrize("make", [vit, swin, cait])
def test_an_attached_model_gives_the_same_in_inference_mode_and_trains_afterwards(make):
    model = make().eval()
    vicinal.attach(model, "gmm:init=spread+gab")
    x = images(model)
    with torch.no_grad():
        expected = model(x)
    for _ in range(2):  # the first fills the prior's cache
        with torch.inference_mode():
            out = model(x)
        torch.testing.assert_close(out, expected)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        if ".prior." in name:
            assert torch.isfinite(parameter.grad).all()


@pytest.mark.parametrize("make", [vit, swin, cait])
def test_threads_give_what_one_thread_gives(make):
    models = [make().eval() for _ in range(2)]
    for model, spec in zip(models, ("gab", "gmm:init=spread"), strict=True):
        vicinal.attach(model, spec)
    x = images(models[0])
    with torch.no_grad():
        expected = [model(x) for model in models]
    barrier = threading.Barrier(4)

    @torch.no_grad()
    def run(number):
        barrier.wait()
        return all(torch.equal(models[number % 2](x), expected[number % 2]) for _ in range(5))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))


def test_one_thread_inspects_while_another_runs_another_model():
    model, other = vit().eval(), vit().eval()
    vicinal.attach(model, "gab")
    x = images(model)
    with torch.no_grad():
        expected = model(x)

    @torch.no_grad()
    def run():
        return all(torch.equal(model(x), expected) for _ in range(20))

    with ThreadPoolExecutor(2) as pool:
        runs, inspection = pool.submit(run), pool.submit(vicinal.inspect, other)
        assert runs.result()
        assert len(inspection.result().served) == 3


@pytest.mark.parametrize("make", [vit, swin, cait])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit's own
@torch.no_grad()
def test_a_traced_model_gives_the_same_as_an_eager_one(make):
    model = lively(make())
    x, other = images(model), images(model)
    torch.testing.assert_close(torch.jit.trace(model, x)(other), model(other))
    before = model(other)
    vicinal.attach(model, "gmm:init=spread+gab")
    traced = torch.jit.trace(model, x)
    torch.testing.assert_close(traced(other), model(other))
    assert (model(other) - before).abs().max() > 1e-3


@pytest.mark.parametrize("make", [vit, swin, cait])
@torch.no_grad()
def test_a_deep_copy_has_a_prior_of_its_own(make):
    model = lively(make())
    vicinal.attach(model, "gab")
    twin = copy.deepcopy(model)
    x = images(model)
    before = model(x)
    assert torch.equal(twin(x), before)
    for name, parameter in twin.named_parameters():
        if ".prior." in name:
            parameter.add_(1.0)
    assert (twin(x) - before).abs().max() > 1e-4
    assert torch.equal(model(x), before)
    vicinal.detach(model)
    assert (model(x) - before).abs().max() > 1e-4
    assert vicinal.detach(twin) > 0
    assert torch.equal(twin(x), model(x))
