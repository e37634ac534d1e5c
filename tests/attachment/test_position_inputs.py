"""Inputs beside the image that decide where tokens sit must be given in each call, as in the example."""

import copy

import pytest
import timm
import torch
from torch import nn

import vicinal
from vicinal import VicinalError
from vicinal.attachment import get_priors

PRIOR = "gab:amplitude=1.5,sigma=2"


def vit_mae():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTMAEConfig(
        image_size=64, patch_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        mask_ratio=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.ViTMAEModel(config).eval()


def hooks(model):
    return [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]


@torch.no_grad()
def test_vit_mae_is_not_shuffled_unnoticed():
    model, images, noise = vit_mae(), torch.randn(2, 3, 64, 64), torch.arange(16.0)[None]
    vicinal.attach(model, PRIOR, example={"pixel_values": images[:1], "noise": noise})
    expected = model(images, noise=noise.expand(2, -1)).last_hidden_state
    assert expected.isfinite().all()
    for call in (lambda: model(images), lambda: model(pixel_values=images), lambda: model.embeddings(images)):
        with pytest.raises(VicinalError, match="without noise, which decides where its tokens sit"):
            call()
    for other in (noise.flip(-1).expand(2, -1), torch.rand(2, 16)):
        with pytest.raises(VicinalError, match="another noise than that of the example"):
            model(images, noise=other)
    with pytest.raises(VicinalError, match="without noise"):
        copy.deepcopy(model)(images)
    vicinal.detach(model)
    assert hooks(model) == []
    assert model(images).last_hidden_state.isfinite().all()


def test_a_second_prior_in_other_layers_checks_the_same_input_once():
    model, images, noise = vit_mae(), torch.randn(1, 3, 64, 64), torch.arange(16.0)[None]
    example = {"pixel_values": images, "noise": noise}
    vicinal.attach(model, PRIOR, example=example, layers="first")
    before = len(hooks(model))
    vicinal.attach(model, "gmm", example=example, layers="last")
    assert len(get_priors(model)) == 2
    assert len(hooks(model)) == before


class WithInputs(nn.Module):
    """A ViT with a text that shifts all tokens, and an order of patches, without which they stay in theirs."""

    def __init__(self):
        super().__init__()
        self.stem, self.words = nn.Conv2d(3, 24, 16, 16), nn.Embedding(9, 24)
        self.attn, self.head = timm.layers.Attention(24, 2), nn.Linear(24, 5)

    def forward(self, x, text, order=None):
        x = self.stem(x).flatten(2).mT + self.words(text).mean(1, keepdim=True)
        x = x if order is None else x.gather(1, order[..., None].expand(-1, -1, 24))
        return self.head((x + self.attn(x)).mean(1))


@torch.no_grad()
def test_only_inputs_that_decide_places_are_checked():
    torch.manual_seed(0)
    model, images, text = WithInputs().eval(), torch.randn(2, 3, 64, 64), torch.tensor([[1, 5, 3]])
    vicinal.attach(model, PRIOR, example={"x": images[:1], "text": text})
    model(images, torch.tensor([[2], [4]]))
    vicinal.detach(model)
    order = torch.arange(16).flip(0)[None]
    vicinal.attach(model, PRIOR, example={"x": images[:1], "text": text, "order": order})
    model(images, torch.tensor([[2], [4]]), order.expand(2, -1))
    model(images, torch.tensor([[2], [4]]), order=order.expand(2, -1))
    with pytest.raises(VicinalError, match="without order"):
        model(images, torch.tensor([[2], [4]]))
    with pytest.raises(VicinalError, match="another order"):
        model(images, torch.tensor([[2], [4]]), torch.arange(16).expand(2, -1))


@torch.no_grad()
def test_a_compiled_model_checks_that_the_input_is_given():
    model, images, noise = vit_mae(), torch.randn(1, 3, 64, 64), torch.arange(16.0)[None]
    vicinal.attach(model, PRIOR, example={"pixel_values": images, "noise": noise})
    expected = model(images, noise=noise).last_hidden_state
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(images, noise=noise).last_hidden_state, expected)
