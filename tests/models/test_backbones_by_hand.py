"""Every backbone computes what its paper says, from the weights, in float64."""

import pytest
import torch

import backbones_by_hand as by_hand
import vicinal


@pytest.mark.parametrize(
    ("name", "pool"),
    [
        ("vit", "token"),
        ("vit", "avg"),
        ("pit", "token"),
        ("pit", "avg"),
        ("cait", "token"),
        ("t2t", "avg"),
        ("swin", "avg"),
    ],
)
@torch.no_grad()
def test_output_is_that_of_the_formula(name, pool):
    model = vicinal.create_model(name, global_pool=pool).double().eval()
    for parameter in model.parameters():  # norms and biases have a say too
        parameter += 0.02 * torch.randn_like(parameter)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(model(images), getattr(by_hand, name)(model, images), rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_at_64_pixels_t2t_has_a_second_token_transformer():
    model = vicinal.create_model("t2t", img_size=64).double().eval()
    images = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    assert len(model.patch_embed.transformers) == 2
    torch.testing.assert_close(model(images), by_hand.t2t(model, images), rtol=1e-9, atol=1e-9)
