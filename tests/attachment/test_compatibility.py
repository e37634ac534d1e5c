"""A model with a prior is still a model: what else users do with one."""

import copy
import io
import pickle

import pytest
import torch

import vicinal
from hugging_face_models import yolos
from small_models import cait, images, swin, vit
from test_new_layouts import differential_vit, hiera


class TestWhatElseUsersDo:
    """A model with a prior is still a model."""

    @pytest.fixture(params=["vit", "swin", "cait"])
    def model(self, request):
        model = {"vit": vit, "swin": swin, "cait": cait}[request.param]()
        vicinal.attach(model, "gmm:init=spread+gab")
        return model

    def test_copies_and_pickles(self, model):
        model.eval()
        x = images(model)
        expected = model(x)
        assert torch.equal(copy.deepcopy(model)(x), expected)
        assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(x), expected)
        assert vicinal.detach(copy.deepcopy(model)) > 0

    def test_state_dict_round_trip(self, model):
        twin = {"VisionTransformer": vit, "SwinTransformer": swin, "Cait": cait}[type(model).__name__]()
        vicinal.attach(twin, "gmm:init=spread+gab")
        twin.load_state_dict(model.state_dict())
        x = images(model)
        assert torch.equal(twin.eval()(x), model.eval()(x))

    def test_moving_average(self, model):
        from timm.utils import ModelEmaV3

        average = ModelEmaV3(model, decay=0.5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        average.update(model)
        for (name, a), (_, b) in zip(average.module.named_parameters(), model.named_parameters(), strict=True):
            torch.testing.assert_close(a, b - 0.5, atol=1e-5, rtol=1e-4, msg=name)

    def test_gradient_checkpointing(self, model):
        model.train()
        x = images(model)

        def gradients():
            model.zero_grad()
            torch.manual_seed(0)
            model(x).square().sum().backward()
            return [parameter.grad.clone() for parameter in model.parameters()]

        plain = gradients()
        model.set_grad_checkpointing()
        for a, b in zip(gradients(), plain, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)

    def test_autocast(self, model):
        x = images(model)
        full = model.eval()(x)
        with torch.autocast("cpu", torch.bfloat16):
            half = model(x)
            half.float().sum().backward()
        torch.testing.assert_close(half.float(), full, atol=0.1, rtol=0.1)
        assert all(parameter.grad is not None for parameter in model.parameters())

    def test_exports(self, model):
        x = images(model)
        exported = torch.export.export(model.eval(), (x,)).module()
        torch.testing.assert_close(exported(x), model(x), atol=1e-5, rtol=1e-4)


def shallow_vit():
    return vit(depth=2)  # compiling takes as long as there are layers; in the last one the prior has no gradient


@pytest.mark.parametrize(
    ("make", "backend"),
    [
        (shallow_vit, "aot_eager"),
        pytest.param(vit, "inductor", marks=pytest.mark.slow),
        pytest.param(swin, "inductor", marks=pytest.mark.slow),
        pytest.param(cait, "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiles_in_one_graph_and_trains(make, backend):
    model = make()
    vicinal.attach(model, "gmm:init=spread+gab")
    for name, parameter in model.named_parameters():
        if "gamma" in name:  # layer scale, which starts so small that gradients behind it would drown
            parameter.data.fill_(1)
    x = images(model)
    expected = model(x).square().sum()
    expected.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    loss = torch.compile(model, fullgraph=True, backend=backend)(x).square().sum()
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)
    for name, parameter in model.named_parameters():
        close = 1e-4 * float(wanted[name].abs().max()) + 1e-6  # some are zero by symmetry
        torch.testing.assert_close(parameter.grad, wanted[name], atol=close, rtol=1e-3, msg=name)


def hiera_units():
    return hiera().float(), (64, 64)


def detector():
    return yolos(), (32, 48)


def differential():
    return differential_vit(True, depth=2).float(), (32, 32)


def plain_differential():
    return differential_vit(False, depth=2).float(), (32, 32)


@pytest.mark.parametrize(
    "make",
    [
        hiera_units,
        *(pytest.param(make, marks=pytest.mark.slow) for make in (detector, differential, plain_differential)),
    ],
)
def test_uncommon_attention_compiles_exports_and_copies(make):
    model, size = make()
    vicinal.attach(model, "gmm:init=spread+gab", img_size=size)
    x = torch.randn(2, 3, *size)

    def run(function):
        out = function(x)
        return out.last_hidden_state if hasattr(out, "last_hidden_state") else out

    expected = run(model)
    expected.square().sum().backward()
    wanted = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    out = run(torch.compile(model, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    out.square().sum().backward()
    for name, parameter in model.named_parameters():
        if wanted[name] is not None:
            close = 1e-4 * float(wanted[name].abs().max()) + 1e-6
            torch.testing.assert_close(parameter.grad, wanted[name], atol=close, rtol=1e-3, msg=name)
    with torch.no_grad():
        exported = torch.export.export(model, (x,)).module()
        torch.testing.assert_close(run(exported), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(run(copy.deepcopy(model)), expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(run(pickle.loads(pickle.dumps(model))), expected, atol=1e-5, rtol=1e-4)


def test_forward_intermediates():
    model = vit().eval()
    x = images(model)
    before = model.forward_intermediates(x, intermediates_only=True)
    vicinal.attach(model, "gmm")
    for a, b in zip(model.forward_intermediates(x, intermediates_only=True), before, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
