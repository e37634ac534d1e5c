import numpy as np
import pytest
import torch
from timm.models.resnet import BasicBlock, ResNet
from timm.models.tnt import TNT
from torch import nn

import vicinal
from lively_models import lively, vit
from vicinal import VicinalError
from vicinal.analysis.receptive_field import receptive_field


def test_no_more_than_the_layer_asked_for_is_run():
    model, layers = vit(), []
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, number=number: layers.append(number))
    runs = []
    for images in (1, 50):
        layers.clear()
        receptive_field(model, torch.randn(images, 3, 8, 8), layer=0, batch_size=10)
        runs.append((layers.count(0), layers.count(1)))
    (first, second), (first_of_all, second_of_all) = runs
    assert first_of_all == first + 4  # batches
    assert second_of_all == second  # on noise, to find the layer


def test_layers_are_found_by_index_and_by_name():
    model, images = vit(depth=3), torch.randn(2, 3, 8, 8)
    names = {layer: receptive_field(model, images, layer=layer).layer for layer in (None, 0, -2, "patch_embed")}
    assert names == {None: "blocks.2", 0: "blocks.0", -2: "blocks.1", "patch_embed": "patch_embed"}
    assert receptive_field(model, images, layer="patch_embed").outside_center_patch == pytest.approx(0)


def test_a_convolutional_network_has_its_blocks_and_no_pooled_map():
    model = lively(ResNet(BasicBlock, (1, 1, 1, 1), channels=(4, 4, 8, 8), num_classes=3))
    found = receptive_field(model, torch.randn(2, 3, 64, 64))
    assert (found.layer, found.grid, found.stem, found.patch) == ("layer4.0", (2, 2), (16, 16), (32, 32))
    assert receptive_field(model, torch.randn(2, 3, 64, 64), layer=0).layer == "layer1.0"


def test_a_compiled_or_wrapped_model_is_looked_into():
    model, images = vit(), torch.randn(2, 3, 8, 8)
    expected = receptive_field(model, images)
    compiled = receptive_field(torch.compile(model), images)
    wrapped = receptive_field(nn.Sequential(nn.Identity(), model), images)
    assert (compiled.layer, wrapped.layer) == ("blocks.1", "1.blocks.1")
    assert np.array_equal(compiled.field, expected.field)
    assert np.array_equal(wrapped.field, expected.field)


def test_class_attention_is_no_block():
    model = vicinal.create_model("cait", depth=2, depth_token_only=2, img_size=16)
    assert receptive_field(model, torch.randn(2, 3, 16, 16)).layer == "blocks.1"


def test_tokens_that_are_not_row_by_row_are_found():
    from timm.models.hiera import Hiera

    apart = {"patch_kernel": (4, 4), "patch_padding": (0, 0)}  # else a patch is as much its neighbour's
    stages = {"stages": (1, 1, 1), "q_pool": 2, "mask_unit_attn": (True, True, False)}
    model = Hiera(img_size=(64, 64), embed_dim=16, **stages, **apart)
    images = torch.randn(2, 3, 64, 64)
    for layer, at in ((0, (5, 10)), (0, (12, 3)), (1, (1, 6)), (2, (3, 0))):
        by_patch = receptive_field(model.eval(), images, layer=layer, at=at, mode="abs").by_patch
        assert np.unravel_index(by_patch.argmax(), by_patch.shape) == at


def test_a_class_token_behind_the_patches_is_none_of_them():
    class Behind(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches, self.token = nn.Conv2d(3, 8, 6, stride=4, padding=1), nn.Parameter(torch.randn(1, 1, 8))
            self.blocks = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True))

        def forward(self, x):
            x = self.patches(x).flatten(2).mT
            return self.blocks(torch.cat([x, self.token.expand(len(x), 1, 8)], 1))

    model, images = Behind().eval(), torch.randn(4, 3, 16, 16)
    for at in ((0, 0), (1, 2), (3, 3)):
        by_patch = receptive_field(model, images, at=at, mode="abs").by_patch
        assert np.unravel_index(by_patch.argmax(), by_patch.shape) == at


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_axes_of_equal_length_are_told_apart(last):
    class Turned(nn.Module):
        def forward(self, x):
            return x.permute(0, 2, 3, 1) if last else x

    model = nn.Sequential(nn.Conv2d(3, 8, 2, stride=2), nn.Sequential(Turned()))
    found = receptive_field(model, torch.randn(2, 3, 16, 16), layer="1.0", at=(2, 5), mode="abs")
    assert found.by_patch[2, 5] == pytest.approx(1)


def test_a_block_of_two_outputs_is_read_from_that_of_its_patches():
    small = {"patch_size": 8, "embed_dim": 16, "inner_dim": 8, "num_heads_inner": 2, "num_heads_outer": 2, "depth": 2}
    found = receptive_field(lively(TNT(img_size=32, **small, num_classes=3)), torch.randn(2, 3, 32, 32), at=(1, 2))
    assert (found.layer, found.grid) == ("blocks.1", (4, 4))


class Cut(nn.Module):
    """16 x 16 patches as 16 windows of 4 x 4, as NesT holds them."""

    def forward(self, x):
        x = x.permute(0, 2, 3, 1).unflatten(1, (4, 4)).unflatten(3, (4, 4)).transpose(2, 3)
        return x.flatten(1, 2).flatten(2, 3)


class Shuffled(nn.Module):
    """Another order of patches in each run, as in pretraining by masking."""

    def forward(self, x):
        x = x.flatten(2).mT
        return torch.stack([each[torch.randperm(each.shape[0])] for each in x])


class Latents(nn.Module):
    """As many tokens as patches, of which each sees the whole image."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        return self.mix @ x.flatten(2).mT


@pytest.mark.parametrize(
    ("last", "patch", "message"),
    [
        (Cut, 4, "changes other places more; name another layer"),
        (Shuffled, 16, "another output each time for the same images"),
        (Latents, 16, "changes many tokens alike"),
    ],
)
def test_what_only_looks_like_a_map_is_refused(last, patch, message):
    model = nn.Sequential(nn.Conv2d(3, 8, patch, stride=patch), nn.Sequential(last()))
    with pytest.raises(VicinalError, match=message):
        receptive_field(model, torch.randn(2, 3, 64, 64), layer="1.0")


def test_attention_weights_are_no_map():
    model = vit(img_size=32, patch_size=8)
    model.blocks[0].attn.fused_attn = False
    with pytest.raises(VicinalError, match=r"blocks.0.attn.attn_drop of the patch at 5 12"):
        receptive_field(model, torch.randn(1, 3, 32, 32), layer="blocks.0.attn.attn_drop", at=(5, 12))


def test_a_patch_is_the_one_asked_for():
    model, images = vit(img_size=16, depth=1), torch.randn(4, 3, 16, 16)
    assert receptive_field(model, images).at == (2, 2)
    for at in ((0, 0), (1, 3)):
        found = receptive_field(model, images, at=at)
        assert found.at == at
        assert np.unravel_index(found.by_patch.argmax(), (4, 4)) == at
        assert found.center == (4 * at[0] + 2, 4 * at[1] + 2)
