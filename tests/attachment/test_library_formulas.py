"""Models of Hugging Face transformers and of torchvision, against the formula from their own weights, in float64."""

import inspect
import sys

import pytest
import torch
from torch import nn

import vicinal
from by_hand import assert_same, attention_io, logits_by_hand, prior_by_hand, project, raster
from hugging_face_models import image_classifier
from small_models import lively
from vicinal import Grid

SPECS = ["gmm:init=spread", "gab", "gmm:init=spread+gab"]
PIXELS = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def softmax_dtype(module, implementation):
    """Returns the dtype of the softmax in the model's own code: some compute it in float32 whatever they are given."""
    plain = sys.modules[module.plain_class.__module__].eager_attention_forward
    single = implementation == "eager" and "dtype=torch.float32" in inspect.getsource(plain)
    return torch.float32 if single else torch.float64


class TestHuggingFace:
    """Served by the class swap, whatever function computes their attention."""

    @pytest.mark.parametrize("spec", SPECS)
    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    @pytest.mark.parametrize(
        ("name", "grid"),
        [
            ("ViT", Grid(4, 4, 1)),
            ("DeiT", Grid(4, 4, 2)),
            ("Dinov2", Grid(4, 4, 1)),
            ("Dinov2WithRegisters", Grid(4, 4, 5)),
            ("Beit", Grid(4, 4, 1)),
        ],
    )
    @torch.no_grad()
    def test_equal_to_the_formula(self, name, grid, implementation, spec):
        options = {"use_relative_position_bias": True} if name == "Beit" else {}
        model = image_classifier(name, attn_implementation=implementation, **options).double()
        table = vicinal.attach(model, spec)
        assert [layer.grid for layer in table.layers] == [grid] * 2
        for layer in table.layers:
            module = model.get_submodule(layer.name)
            args, kwargs, out = attention_io(module, lambda: model(PIXELS))
            given = [*args, *kwargs.values()]
            logits, bias, v = logits_by_hand(module, given[0], module.prior, raster(4, 4, grid.prefix))
            masks = [x for x in given[1:] if isinstance(x, torch.Tensor) and x.dim() == 4]
            assert len(masks) == (name == "Beit")
            weights = (logits + bias + sum(masks)).softmax(-1, dtype=softmax_dtype(module, implementation))
            assert_same(out[0], project(module, weights.double(), v))

    @pytest.mark.parametrize("spec", SPECS)
    @torch.no_grad()
    def test_swin_with_shifted_windows(self, spec):
        model = image_classifier("Swin").double()
        table = vicinal.attach(model, spec)
        assert {layer.grid for layer in table.layers} == {Grid(4, 4)}
        shifted = 0
        for layer in table.layers:
            module = model.get_submodule(layer.name)
            args, kwargs, out = attention_io(module, lambda: model(PIXELS))
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            logits, bias, v = logits_by_hand(module, given[0], module.prior, raster(4, 4))
            logits = logits + bias + module.relative_position_bias()
            if len(given) > 1:
                shifted += 1
                logits = logits + given[1].repeat(2, 1, 1)[:, None]
            assert_same(out[0], project(module, logits.softmax(-1), v))
        assert shifted == 2  # one in each stage


def shifted_windows_by_hand(module, x):
    """Output of torchvision's window attention under a prior: `(batch, height, width, dim)` in and out."""
    batch, height, width, dim = x.shape
    side, (down, right) = module.window_size[0], module.shift_size
    down, right = down if height > side else 0, right if width > side else 0
    rolled = x.roll((-down, -right), (1, 2))
    out = torch.zeros_like(x)
    for top in range(0, height, side):
        for left in range(0, width, side):
            window = rolled[:, top : top + side, left : left + side].reshape(batch, side * side, dim)
            logits, bias, v = logits_by_hand(module, window, module.prior, raster(side, side))
            logits = logits + bias + module.get_relative_position_bias()
            # Patches that the roll brought together do not attend to each other.
            rows = (torch.arange(top, top + side) >= height - down).long() if down else torch.zeros(side)
            columns = (torch.arange(left, left + side) >= width - right).long() if right else torch.zeros(side)
            region = (2 * rows[:, None] + columns).flatten()
            logits = logits.masked_fill(region[:, None] != region, -100.0)
            out[:, top : top + side, left : left + side] = project(module, logits.softmax(-1), v).view(
                batch, side, side, dim
            )
    return out.roll((down, right), (1, 2))


class TestTorchvision:
    """ViT calls `nn.MultiheadAttention`, Swin a function of its own."""

    @pytest.mark.parametrize("spec", SPECS)
    @torch.no_grad()
    def test_vit_equals_the_formula(self, spec):
        from torchvision.models import VisionTransformer

        model = lively(VisionTransformer(32, 8, 2, 4, 24, 48, num_classes=5)).double()
        table = vicinal.attach(model, spec)
        assert [layer.grid for layer in table.layers] == [Grid(4, 4, 1)] * 2
        for layer in table.layers:
            module = model.get_submodule(layer.name)
            (x, *_), _, (out, _) = attention_io(module, lambda: model(PIXELS))
            logits, bias, v = logits_by_hand(module, x, module.prior, raster(4, 4, 1))
            assert_same(out, project(module, (logits + bias).softmax(-1), v))

    @pytest.mark.parametrize("spec", SPECS)
    @torch.no_grad()
    def test_swin_equals_the_formula(self, spec):
        from torchvision.models.swin_transformer import SwinTransformer

        model = SwinTransformer([2, 2], 12, [2, 2], [2, 4], [4, 4], num_classes=5, stochastic_depth_prob=0.0)
        model = lively(model).double()
        table = vicinal.attach(model, spec, img_size=32)
        assert len(table.layers) == 4
        for layer in table.layers:
            module = model.get_submodule(layer.name)
            (x,), _, out = attention_io(module, lambda: model(PIXELS))
            assert_same(out, shifted_windows_by_hand(module, x))
        assert any(any(model.get_submodule(layer.name).shift_size) for layer in table.layers)

    @pytest.mark.parametrize("spec", SPECS)
    @torch.no_grad()
    def test_maxvit_equals_the_formula(self, spec):
        from torchvision.models import MaxVit

        model = MaxVit((32, 32), 12, 4, [12], [1], head_dim=6, stochastic_depth_prob=0.0, num_classes=5)
        model = lively(model).double()
        table = vicinal.attach(model, spec, img_size=32)
        assert [layer.place for layer in table.layers] == ["4 windows of 4 x 4"] * 2
        for layer in table.layers:
            module = model.get_submodule(layer.name)
            (x,), _, out = attention_io(module, lambda: model(PIXELS))
            q, k, v = module.to_qkv(x).unflatten(-1, (3, module.n_heads, -1)).permute(3, 0, 1, 4, 2, 5)
            scale, bias = prior_by_hand(module.prior, raster(4, 4))
            logits = scale * (q @ k.mT * module.scale_factor) + bias
            weights = (logits + module.get_relative_positional_bias()).softmax(-1)
            expected = nn.functional.linear(
                (weights @ v).transpose(2, 3).flatten(3), module.merge.weight, module.merge.bias
            )
            assert_same(out, expected)
