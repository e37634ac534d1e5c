"""Models of Hugging Face transformers and of torchvision, against the formula from their own weights."""

import pytest
import torch
from torch import nn

import vicinal
from by_hand import attention_io, logits_by_hand, project
from vicinal import Grid, VicinalError

SPECS = ["gmm:init=spread", "gab", "gmm:init=spread+gab"]
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def lively(model):
    """Weights of the size of 1, so that attention is far from uniform, and biases that are not 0."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.5 if "position" in name else parameter[0].numel() ** -0.5)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model.eval()


class TestHuggingFace:
    """Served by the class swap, whatever function computes their attention."""

    @pytest.fixture
    def transformers(self):
        return pytest.importorskip("transformers", reason="transformers is not installed")

    @pytest.fixture
    def make(self, transformers):
        small = {
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "image_size": 32,
            "patch_size": 8,
        }
        swin = {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 12,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        }

        def make(name, **options):
            config = getattr(transformers, f"{name}Config")(**(swin if name.startswith("Swin") else small) | options)
            return lively(getattr(transformers, f"{name}ForImageClassification")(config))

        return make

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
    def test_equal_to_the_formula(self, make, name, grid, implementation, spec):
        options = {"use_relative_position_bias": True} if name == "Beit" else {}
        model = make(name, attn_implementation=implementation, **options)
        table = vicinal.attach(model, spec)
        assert [layer.grid for layer in table.layers] == [grid] * 2
        for layer in table.layers:
            module = model.get_submodule(layer.name)
            args, kwargs, out = attention_io(module, lambda: model(PIXELS))
            given = [*args, *kwargs.values()]
            logits, bias, v = logits_by_hand(module, given[0], module.prior)
            masks = [x for x in given[1:] if isinstance(x, torch.Tensor) and x.dim() == 4]
            assert len(masks) == (name == "Beit")
            weights = (logits + bias + sum(mask.double() for mask in masks)).softmax(-1)
            torch.testing.assert_close(out[0].double(), project(module, weights, v), atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize("spec", SPECS)
    @torch.no_grad()
    def test_swin_with_shifted_windows(self, make, spec):
        model = make("Swin")
        table = vicinal.attach(model, spec)
        assert {layer.grid for layer in table.layers} == {Grid(4, 4)}
        shifted = 0
        for layer in table.layers:
            module = model.get_submodule(layer.name)
            args, kwargs, out = attention_io(module, lambda: model(PIXELS))
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            logits, bias, v = logits_by_hand(module, given[0], module.prior)
            logits = logits + bias + module.relative_position_bias().double()
            if len(given) > 1:
                shifted += 1
                logits = logits + given[1].double().repeat(2, 1, 1)[:, None]
            torch.testing.assert_close(out[0].double(), project(module, logits.softmax(-1), v), atol=1e-5, rtol=1e-4)
        assert shifted == 2  # one in each stage

    @pytest.mark.parametrize("name", ["ViT", "Swin", "Swinv2"])
    def test_identity_changes_nothing_and_names_stay(self, make, name):
        model = make(name)
        before, keys = model(PIXELS).logits, set(model.state_dict())
        table = vicinal.attach(model, "gmm")
        torch.testing.assert_close(model(PIXELS).logits, before, atol=1e-5, rtol=1e-4)
        assert keys < set(model.state_dict())
        assert all(".prior." in key for key in set(model.state_dict()) - keys)
        assert vicinal.detach(model) == len(table.layers)
        assert torch.equal(model(PIXELS).logits, before)

    def test_trains_and_is_read(self, make):
        model = make("ViT").train()
        vicinal.attach(model, "gmm:init=spread")
        with vicinal.tap(model, queries="class") as t:
            loss = model(PIXELS, labels=torch.tensor([0, 1])).loss
        loss.backward()
        assert all(parameter.grad is not None for name, parameter in model.named_parameters())
        torch.testing.assert_close(t.last.sum(-1), torch.ones(2, 4))

    def test_another_way_to_compute_attention_is_noticed(self, make):
        model = make("ViT", attn_implementation="sdpa")
        vicinal.attach(model, "gmm")
        model.set_attn_implementation("eager")
        with pytest.raises(VicinalError, match="the prior did not reach the attention of ViTAttention"):
            model(PIXELS)

    def test_fewer_keys_than_queries_are_left_alone(self, transformers):
        config = transformers.PvtV2Config(
            image_size=64, hidden_sizes=[8, 16, 20, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4]
        )
        table = vicinal.attach(transformers.PvtV2ForImageClassification(config), "gmm")
        assert [layer.grid for layer in table.layers] == [Grid(2, 2)]  # the last stage has all its keys
        assert "256 queries see 4 keys, which have no common grid" in table.left_alone.values()
        assert len(table.left_alone) == 3


def shifted_windows_by_hand(module, x):
    """Output of torchvision's window attention under a prior: `(batch, height, width, dim)` in and out."""
    batch, height, width, dim = x.shape
    side, (down, right) = module.window_size[0], module.shift_size
    down, right = down if height > side else 0, right if width > side else 0
    rolled = x.roll((-down, -right), (1, 2))
    out = torch.zeros_like(x, dtype=torch.float64)
    for top in range(0, height, side):
        for left in range(0, width, side):
            window = rolled[:, top : top + side, left : left + side].reshape(batch, side * side, dim)
            logits, bias, v = logits_by_hand(module, window, module.prior)
            logits = logits + bias + module.get_relative_position_bias().double()
            # Patches that the roll brought together do not see each other.
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

    @staticmethod
    def vit():
        from torchvision.models import VisionTransformer

        return lively(VisionTransformer(32, 8, 2, 4, 24, 48, num_classes=5))

    @staticmethod
    def swin():
        from torchvision.models.swin_transformer import SwinTransformer

        return lively(SwinTransformer([2, 2], 12, [2, 2], [2, 4], [4, 4], num_classes=5, stochastic_depth_prob=0.0))

    @pytest.mark.parametrize("spec", SPECS)
    @torch.no_grad()
    def test_vit_equals_the_formula(self, spec):
        model = self.vit()
        table = vicinal.attach(model, spec)
        assert [layer.grid for layer in table.layers] == [Grid(4, 4, 1)] * 2
        for layer in table.layers:
            module = model.get_submodule(layer.name)
            (x, *_), _, (out, _) = attention_io(module, lambda: model(PIXELS))
            logits, bias, v = logits_by_hand(module, x, module.prior)
            expected = project(module, (logits + bias).softmax(-1), v)
            torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize("spec", SPECS)
    @torch.no_grad()
    def test_swin_equals_the_formula(self, spec):
        model = self.swin()
        table = vicinal.attach(model, spec, img_size=32)
        assert len(table.layers) == 4
        for layer in table.layers:
            module = model.get_submodule(layer.name)
            (x,), _, out = attention_io(module, lambda: model(PIXELS))
            torch.testing.assert_close(out.double(), shifted_windows_by_hand(module, x), atol=1e-5, rtol=1e-4)
        assert any(any(model.get_submodule(layer.name).shift_size) for layer in table.layers)

    @pytest.mark.parametrize("spec", SPECS)
    @torch.no_grad()
    def test_maxvit_equals_the_formula(self, spec):
        from torchvision.models import MaxVit

        model = lively(MaxVit((32, 32), 12, 4, [12], [1], head_dim=6, stochastic_depth_prob=0.0, num_classes=5))
        table = vicinal.attach(model, spec, img_size=32)
        assert [layer.place for layer in table.layers] == ["4 windows of 4 x 4"] * 2
        for layer in table.layers:
            module = model.get_submodule(layer.name)
            (x,), _, out = attention_io(module, lambda: model(PIXELS))
            q, k, v = module.to_qkv(x).double().unflatten(-1, (3, module.n_heads, -1)).permute(3, 0, 1, 4, 2, 5)
            scale, bias = module.prior()
            logits = q @ k.mT * module.scale_factor * (1 if scale is None else scale) + (0 if bias is None else bias)
            weights = (logits + module.get_relative_positional_bias()).softmax(-1)
            expected = nn.functional.linear(
                (weights @ v).transpose(2, 3).flatten(3), module.merge.weight.double(), module.merge.bias.double()
            )
            torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)

    def test_an_image_smaller_than_a_window_is_served(self):
        model = self.swin()
        table = vicinal.attach(model, "gmm", img_size=(12, 8))
        assert [layer.place for layer in table.layers] == ["2 windows of 4 x 4"] * 2 + ["4 x 4"] * 2

    @pytest.mark.parametrize("make", ["vit", "swin"])
    def test_identity_changes_nothing_and_detach_gives_everything_back(self, make):
        model = getattr(self, make)()
        before, keys = model(PIXELS), set(model.state_dict())
        vicinal.attach(model, "gmm", img_size=32)
        torch.testing.assert_close(model(PIXELS), before, atol=1e-5, rtol=1e-4)
        assert keys < set(model.state_dict())
        vicinal.detach(model)
        assert torch.equal(model(PIXELS), before)
        assert not any(module._forward_hooks for module in model.modules())

    @pytest.mark.slow
    def test_vit_compiles_in_one_graph_and_trains(self):
        model = self.vit()
        vicinal.attach(model, "gmm:init=spread+gab")
        model(PIXELS).square().sum().backward()
        wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        model.zero_grad()
        torch.compile(model, fullgraph=True)(PIXELS).square().sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], atol=1e-3, rtol=1e-3, msg=name)


class TestMultiheadAttention:
    """`nn.MultiheadAttention` on its own, in all its ways of being called."""

    class Model(nn.Module):
        def __init__(self, call, **options):
            super().__init__()
            self.patches = nn.Conv2d(3, 8, 8, 8)
            self.attention = nn.MultiheadAttention(8, 2, **options)
            self.call, self.batch_first = call, options.get("batch_first", False)

        def forward(self, x):
            x = self.patches(x).flatten(2).mT
            x = x if self.batch_first else x.transpose(0, 1)
            return self.attention(x, x, x, **self.call)[0]

    @pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"bias": False}, {"kdim": 8, "vdim": 8}])
    @pytest.mark.parametrize(
        "call",
        [
            {"need_weights": False},
            {"need_weights": True},
            {"need_weights": False, "attn_mask": torch.eye(16).bool()},
            {"need_weights": True, "attn_mask": torch.randn(16, 16)},
            {"need_weights": False, "attn_mask": torch.randn(4, 16, 16)},
            {"need_weights": False, "key_padding_mask": torch.arange(32).view(2, 16) % 5 == 0},
        ],
    )
    @torch.no_grad()
    def test_identity_changes_nothing_however_it_is_called(self, options, call):
        model = self.Model(call, **options).eval()
        before = model(PIXELS)
        swap(model.attention, vicinal.Prior(2, Grid(4, 4)), -3, True)
        torch.testing.assert_close(model(PIXELS), before, atol=1e-6, rtol=1e-5)

    @pytest.mark.parametrize("need_weights", [True, False])
    def test_another_image_size_is_an_error_that_says_so(self, need_weights):
        model = self.Model({"need_weights": need_weights})
        vicinal.attach(model, "gmm", img_size=32)
        with pytest.raises(VicinalError, match=r"attached for 16 tokens \(4 x 4\), given 64"):
            model(torch.randn(2, 3, 64, 64))

    def test_an_encoder_layer_does_not_pass_the_prior_by(self):
        class Encoder(nn.Module):
            def __init__(self):
                super().__init__()
                self.patches = nn.Conv2d(3, 8, 8, 8)
                self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

            def forward(self, x):
                return self.layer(self.patches(x).flatten(2).mT)

        model = lively(Encoder())
        vicinal.attach(model, "gab:amplitude=3", img_size=32)
        with torch.no_grad():
            quick = model(PIXELS)
        torch.testing.assert_close(quick, model(PIXELS), atol=1e-5, rtol=1e-4)
        vicinal.detach(model)
        assert (model(PIXELS) - quick).abs().max() > 0.01

    def test_keys_beyond_the_tokens_are_left_alone(self):
        model = self.Model({"need_weights": False}, add_zero_attn=True)
        with pytest.raises(VicinalError, match="16 queries see 17 keys"):
            vicinal.attach(model, "gmm", img_size=32)
