import pytest
import torch
from timm.models.beit import Beit
from timm.models.edgenext import EdgeNeXt
from timm.models.levit import Levit
from timm.models.resnet import BasicBlock, ResNet
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import nn

import vicinal
from vicinal import VicinalError
from vicinal.analysis.receptive_field import changed_positions, is_rotary

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 2, "num_classes": 3}
WINDOWS = {"img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2)}
LEVIT = {"img_size": 64, "embed_dim": (16, 16), "key_dim": 4, "depth": (1, 1), "num_heads": (2, 2), "num_classes": 3}


def hugging_face(name, **options):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = getattr(transformers, f"{name}Config")(image_size=32, num_labels=3, **options)
    return getattr(transformers, f"{name}ForImageClassification")(config)


def torchvision_vit():
    from torchvision.models import VisionTransformer as TorchvisionVit

    return TorchvisionVit(image_size=32, patch_size=8, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8)


def beit():
    return Beit(**SMALL, use_rel_pos_bias=True, use_abs_pos_emb=False, init_values=None)


def edgenext():
    attends = {"global_block_counts": (0, 0, 0, 1), "use_pos_emb": (False, False, False, True)}
    return EdgeNeXt(dims=(8, 8, 8, 8), depths=(1, 1, 1, 1), heads=(1, 1, 1, 1), num_classes=3, **attends)


# what makes a model, and how many of its parts say where patches are
MODELS = {
    "ViT": (lambda: VisionTransformer(**SMALL), 1),
    "fixed": (lambda: vicinal.create_model("t2t", depth=1), 1),
    "relative table": (lambda: VisionTransformerRelPos(**SMALL, rel_pos_type="bias"), 2),
    "relative MLP": (lambda: VisionTransformerRelPos(**SMALL, rel_pos_type="mlp"), 8),
    "Swin": (lambda: SwinTransformer(**WINDOWS), 4),
    "Swin v2": (lambda: SwinTransformerV2(**WINDOWS), 12),
    "BEiT": (beit, 2),
    "EdgeNeXt": (edgenext, 2),
    "LeViT": (lambda: Levit(**LEVIT), 3),
    "prior": (lambda: vicinal.create_model("vit-micro", prior="conv+gmm:init=spread", depth=2, global_pool="token"), 3),
    "prior alone": (lambda: vicinal.create_model("vit-relpos", prior="gab", depth=2), 4),
    "torchvision": (torchvision_vit, 1),
    "Hugging Face ViT": (
        lambda: hugging_face("ViT", hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8),
        1,
    ),
    "Hugging Face Swin v2": (
        lambda: hugging_face("Swinv2", patch_size=4, window_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 2]),
        12,
    ),
}


def lively(model):
    """Weights of the size of 1, positions too."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 1.0)
    return model.eval()


def output(model, images):
    with torch.no_grad():
        found = model(images)
    return found if isinstance(found, torch.Tensor) else found.logits


@pytest.fixture(params=MODELS)
def case(request):
    make, count = MODELS[request.param]
    model = lively(make())
    size = 64 if request.param == "LeViT" else 32
    return model, torch.randn(2, 3, size, size), count


@pytest.mark.parametrize("positions", ["random", "zero"])
def test_positions_are_others_inside_and_the_same_behind(case, positions):
    model, images, count = case
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = [id(parameter) for parameter in model.parameters()]
    expected, state = output(model, images), torch.get_rng_state()
    with changed_positions(model, positions) as changed:
        inside = output(model, images)
        assert len(changed) == count
    assert not torch.allclose(inside, expected)
    assert torch.equal(output(model, images), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(RuntimeError, match="stop"), changed_positions(model, positions):
        raise RuntimeError("stop")
    assert torch.equal(output(model, images), expected)


@pytest.mark.parametrize("prior", ["none", "gmm:init=paper", "conv", "elm:init=paper", "gab+decay"])
def test_without_positions_a_vit_does_not_know_the_order_of_patches(prior):
    model = lively(vicinal.create_model("vit-micro", prior=prior, depth=2, global_pool="avg"))
    images = torch.randn(2, 3, 32, 32)
    patches = images.unfold(2, 4, 4).unfold(3, 4, 4).flatten(2, 3)
    mixed = patches[:, :, torch.randperm(64)].unflatten(2, (8, 8)).transpose(3, 4).reshape(2, 3, 32, 32)
    assert not torch.allclose(output(model, mixed), output(model, images), atol=1e-3)
    with changed_positions(model, "zero"):
        torch.testing.assert_close(output(model, mixed), output(model, images), atol=1e-3, rtol=1e-3)


def test_swin_v2_adds_the_same_to_all_pairs_without_positions():
    model = lively(SwinTransformerV2(**WINDOWS))
    seen = []
    mlp = model.layers[0].blocks[0].attn.cpb_mlp
    mlp.register_forward_hook(lambda _, __, out: seen.append(out))
    with changed_positions(model, "zero"):
        output(model, torch.randn(1, 3, 32, 32))
    assert torch.equal(seen[0], torch.zeros_like(seen[0]))


def test_random_positions_are_as_wide_as_the_model_starts_them():
    fixed = vicinal.create_model("t2t", depth=1)
    cases = [
        (VisionTransformer(**SMALL | {"embed_dim": 96}), 0.02),
        (vicinal.create_model("vit", depth=1), 1.0),
        (fixed, float(fixed.pos_embed.std())),
    ]
    for model, deviation in cases:
        with changed_positions(model, "random"):
            assert float(model.pos_embed.detach().std()) == pytest.approx(deviation, rel=0.05)


def test_a_random_prior_is_a_new_one_of_the_same_kind():
    model = vicinal.create_model("vit-micro", prior="gmm:kernels=3,init=paper", depth=2, global_pool="token")
    own = [block.attn.prior for block in model.blocks]
    with torch.no_grad():
        own[0].flat_sigma.fill_(3)
    with changed_positions(model, "random", seed=5):
        drawn = [block.attn.prior for block in model.blocks]
        assert drawn[0].kernels == 3
        assert drawn[1].layer == 1
        assert float(drawn[0].sigma.detach().std()) > 1
        assert not torch.equal(drawn[0].sigma, drawn[1].sigma)
    assert [block.attn.prior for block in model.blocks] == own


def test_the_seed_decides():
    model = VisionTransformer(**SMALL)
    drawn = []
    for seed in (0, 0, 1):
        torch.rand(1)
        with changed_positions(model, "random", seed=seed):
            drawn.append(model.pos_embed.clone())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_trained_positions_stay():
    model = VisionTransformer(**SMALL)
    before = model.pos_embed.clone()
    with changed_positions(model, "trained") as changed:
        assert torch.equal(model.pos_embed, before)
    assert changed == []


def test_other_parameters_and_tables_of_indices_stay():
    model = SwinTransformer(**WINDOWS)
    before = {name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
    with changed_positions(model, "random") as changed:
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            assert torch.equal(value, before[name]) == (name not in changed)
    assert all(name.endswith("relative_position_bias_table") for name in changed)


def test_positions_that_come_back_in_later_layers_are_changed_too():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    small = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 8}
    settings = {"image_size": [32, 32], "patch_size": 8, "num_detection_tokens": 2, "use_mid_position_embeddings": True}
    model = transformers.YolosModel(transformers.YolosConfig(**small, **settings))
    with changed_positions(model, "zero") as changed:
        names = {name.rpartition(".")[2] for name in changed}
    assert names == {"position_embeddings", "mid_position_embeddings"}


def test_rotary_positions_are_noticed():
    from timm.models.eva import Eva

    assert is_rotary(Eva(**SMALL | {"num_heads": 1}, use_rot_pos_emb=True))
    assert not is_rotary(VisionTransformer(**SMALL))


def test_a_model_without_positions_is_refused():
    from timm.models.eva import Eva

    network = ResNet(BasicBlock, (1, 1, 1, 1), channels=(4, 4, 8, 8), num_classes=3)
    with pytest.raises(VicinalError, match=r"ResNet has no position embeddings"):
        changed_positions(network, "zero").__enter__()
    rotary = Eva(**SMALL | {"num_heads": 1}, use_abs_pos_emb=False, use_rot_pos_emb=True)
    with pytest.raises(VicinalError, match="rotary positions cannot be changed"):
        changed_positions(rotary, "random").__enter__()
    with pytest.raises(VicinalError, match="unknown positions 'nil'"):
        changed_positions(network, "nil").__enter__()
