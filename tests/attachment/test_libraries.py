"""Models of Hugging Face transformers and of torchvision stay what they are: outputs, names, training, compiling."""

import pytest
import torch

import vicinal
from hugging_face_models import image_classifier
from small_models import lively
from vicinal import VicinalError

PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class TestHuggingFace:
    """Served by the class swap, whatever function computes their attention."""

    @pytest.mark.parametrize("name", ["ViT", "Swin", "Swinv2"])
    def test_identity_changes_nothing_and_names_stay(self, name):
        model = image_classifier(name)
        before, keys = model(PIXELS).logits, set(model.state_dict())
        table = vicinal.attach(model, "gmm")
        torch.testing.assert_close(model(PIXELS).logits, before, atol=1e-5, rtol=1e-4)
        assert keys < set(model.state_dict())
        assert all(".prior." in key for key in set(model.state_dict()) - keys)
        assert vicinal.detach(model) == len(table.layers)
        assert torch.equal(model(PIXELS).logits, before)

    def test_trains_and_is_read(self):
        model = image_classifier("ViT").train()
        vicinal.attach(model, "gmm:init=spread")
        with vicinal.tap(model, queries="class") as t:
            loss = model(PIXELS, labels=torch.tensor([0, 1])).loss
        loss.backward()
        assert all(parameter.grad is not None for name, parameter in model.named_parameters())
        torch.testing.assert_close(t.last.sum(-1), torch.ones(2, 4))

    def test_another_way_to_compute_attention_is_noticed(self):
        model = image_classifier("ViT", attn_implementation="sdpa")
        vicinal.attach(model, "gmm")
        model.set_attn_implementation("eager")
        with pytest.raises(VicinalError, match="ViTAttention"):
            model(PIXELS)


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
