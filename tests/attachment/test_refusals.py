"""What has no place in the image takes no prior: queries of decoders, channels, pooled keys, and more."""

import pytest
import torch
from timm.layers import AttentionPool2d, AttentionPoolLatent
from timm.models.cait import Cait
from timm.models.gcvit import GlobalContextVit
from timm.models.xcit import Xcit
from torch import nn

import vicinal
from hugging_face_models import SMALL, eomt, library, surveyed
from small_models import lively, vit
from vicinal import VicinalError
from vicinal.cells import Cells
from vicinal.inspection.refusal import RefusalKind


def kinds(inspection, part=""):
    """Returns kinds of refusal, None for a site that takes a prior, by name."""
    return {
        site.name: None if site.refusal is None else site.refusal.kind for site in inspection.sites if part in site.name
    }


def test_object_queries_of_detr_are_no_patches():
    """100 queries are no 10 x 10 patches, and neither do they have places when they read the image."""
    inspection = vicinal.inspect(surveyed("detr"), img_size=(256, 320))
    assert [site.place for site in inspection.served] == ["8 x 10"] * 2
    assert all(site.name.startswith("encoder") for site in inspection.served)
    assert set(kinds(inspection, "decoder").values()) == {RefusalKind.SILENT}
    assert len(kinds(inspection, "decoder")) == 4
    cross = [site for site in inspection.sites if site.logits[-2:] == (100, 80)]
    assert len(cross) == 2
    for site in cross:
        assert isinstance(site.keys, Cells)
        assert (site.keys.rows, site.keys.columns) == (8, 10)


@pytest.mark.parametrize("name", ["rt_detr", "d_fine"])
def test_queries_chosen_by_content_are_no_patches(name):
    inspection = vicinal.inspect(surveyed(name), img_size=(256, 320))
    assert [site.place for site in inspection.served] == ["8 x 10"]
    assert inspection.served[0].name.startswith("encoder")
    decoder = kinds(inspection, "decoder")
    assert len(decoder) == 2
    assert None not in decoder.values()


class Decoder(nn.Module):
    """36 queries on a memory of 6 x 6 patches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        options = {"d_model": 32, "nhead": 4, "dim_feedforward": 64, "batch_first": True}
        self.patches, self.queries = nn.Conv2d(3, 32, 8, 8), nn.Parameter(torch.randn(36, 32))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**options), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**options), 2)

    def forward(self, x):
        memory = self.encoder(self.patches(x).flatten(2).mT)
        return self.decoder(self.queries.expand(len(x), -1, -1), memory)


def test_as_many_queries_as_patches_are_no_patches():
    inspection = vicinal.inspect(Decoder().eval(), img_size=48)
    assert [site.place for site in inspection.served] == ["6 x 6"] * 2
    assert set(kinds(inspection, "encoder").values()) == {None}
    assert set(kinds(inspection, "self_attn")) > {f"decoder.layers.{number}.self_attn" for number in (0, 1)}
    assert list(kinds(inspection, "decoder").values()) == [RefusalKind.SILENT] * 4
    table = vicinal.attach(Decoder().eval(), "gab", img_size=48)
    assert [layer.name for layer in table.layers] == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]


def test_queries_of_eomt_have_no_places_beside_patches():
    inspection = vicinal.inspect(eomt(), img_size=32)
    assert [site.place for site in inspection.served] == ["4 x 4 + 5 prefix"] * 2 + ["4 x 4 + 15 prefix"] * 2
    for site in inspection.served:
        prefix = site.grid.prefix
        assert site.queries.index[0].tolist() == [-1] * prefix + list(range(16))


@torch.no_grad()
def test_global_queries_that_meet_windows_of_another_image_are_refused():
    """timm repeats global queries image by image next to windows that stand image after image."""
    model = GlobalContextVit(
        img_size=128, embed_dim=16, depths=(2, 2, 2, 2), num_heads=(2, 2, 2, 2), num_classes=5, drop_path_rate=0.0
    )
    model = lively(model)
    x = torch.randn(3, 3, 128, 128)
    assert (model(x)[0] - model(x[:1])[0]).abs().max() > 1e-3  # an image's output depends on its neighbors
    inspection = vicinal.inspect(model, img_size=128)
    assert [(site.name, site.place) for site in inspection.served] == [
        ("stages.0.blocks.0.attn", "64 windows of 4 x 4"),
        ("stages.1.blocks.0.attn", "16 windows of 4 x 4"),
        ("stages.2.blocks.0.attn", "8 x 8"),
        ("stages.2.blocks.1.attn", "8 x 8"),  # a single window has global queries of its own image
        ("stages.3.blocks.0.attn", "4 x 4"),
        ("stages.3.blocks.1.attn", "4 x 4"),
    ]
    assert [site.name for site in inspection.refused] == ["stages.0.blocks.1.attn", "stages.1.blocks.1.attn"]


def test_video_is_refused_without_a_crash():
    transformers = library()
    config = transformers.VideoMAEConfig(**SMALL | {"num_frames": 4})
    model = transformers.VideoMAEModel(config).eval()
    inspection = vicinal.inspect(model, example=torch.zeros(1, 4, 3, 32, 32))
    assert len(inspection.sites) == 2
    assert inspection.served == []
    with pytest.raises(VicinalError, match="VideoMAEModel"):
        vicinal.attach(model, "gmm", example=torch.zeros(1, 4, 3, 32, 32))


def test_patches_masked_at_random_are_refused():
    transformers = library()
    model = transformers.ViTMAEModel(transformers.ViTMAEConfig(**SMALL)).eval()
    inspection = vicinal.inspect(model, img_size=32)
    assert len(inspection.sites) == 2
    assert inspection.served == []


@torch.no_grad()
def test_a_softmax_that_nobody_uses_is_no_attention():
    model = surveyed("sam2")
    inspection = vicinal.inspect(model, img_size=256)
    assert len(inspection.sites) == 8
    assert all("backbone.blocks" in site.name for site in inspection.sites)
    places = {site.name.split(".attn")[0]: site.place for site in inspection.served}
    assert places == {
        "backbone.blocks.0": "64 windows of 8 x 8",
        "backbone.blocks.1": "64 windows of 16 queries, 64 keys",
        "backbone.blocks.2": "64 windows of 4 x 4",
        "backbone.blocks.3": "64 windows of 4 queries, 16 keys",
        "backbone.blocks.4": "16 x 16",
        "backbone.blocks.5": "4 windows of 14 x 14",
        "backbone.blocks.6": "4 windows of 49 queries, 196 keys",
        "backbone.blocks.7": "4 windows of 7 x 7",
    }
    assert inspection.refused == []
    x = torch.randn(1, 3, 256, 256)
    before = model(x).last_hidden_state
    assert len(vicinal.attach(model, "gmm", inspection=inspection).layers) == 8
    torch.testing.assert_close(model(x).last_hidden_state, before, atol=1e-5, rtol=1e-4)


def test_channels_are_refused_and_the_model_stays_as_it_was():
    model = Xcit(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=4, num_classes=5)
    before = [type(module) for module in model.modules()]
    inspection = vicinal.inspect(model)
    class_layers = kinds(inspection, "cls_attn")
    assert list(class_layers.values()) == [RefusalKind.SILENT] * 2
    channels = [kind for name, kind in kinds(inspection).items() if name not in class_layers]
    assert len(channels) == 2
    assert set(channels) <= {RefusalKind.SPREAD, RefusalKind.IRREGULAR}
    with pytest.raises(VicinalError, match="Xcit"):
        vicinal.attach(model, "gmm")
    assert [type(module) for module in model.modules()] == before


def test_a_class_token_that_reads_the_image_is_refused_and_its_keys_have_places():
    model = Cait(img_size=(32, 48), patch_size=8, embed_dim=24, depth=1, num_heads=4, num_classes=5)
    inspection = vicinal.inspect(model)
    assert kinds(inspection, "token_only") == {f"blocks_token_only.{n}.attn": RefusalKind.SILENT for n in (0, 1)}
    for site in inspection.refused:
        assert site.keys.index.tolist() == [[-1, *range(24)]]


class Pooled(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.patches, self.pool = nn.Conv2d(3, 24, 8, 8), pool

    def forward(self, x):
        return self.pool(self.patches(x))


def test_attention_pooling_is_refused():
    torch.manual_seed(0)
    inspection = vicinal.inspect(Pooled(AttentionPool2d(24, feat_size=4, num_heads=4)), img_size=32)
    assert kinds(inspection) == {"pool": RefusalKind.IRREGULAR}  # the mean of all patches is one of its tokens
    pool = nn.Sequential(nn.Flatten(2), Transposed(), AttentionPoolLatent(24, num_heads=4))
    assert kinds(vicinal.inspect(Pooled(pool), img_size=32)) == {"pool.2": RefusalKind.SILENT}


class Transposed(nn.Module):
    def forward(self, x):
        return x.mT


def test_attention_of_which_only_the_class_token_is_kept_is_refused():
    class ClassToken(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.project = nn.Parameter(torch.randn(1, 1, 24)), nn.Linear(24, 72)

        def forward(self, x):
            x = torch.cat([self.token.expand(len(x), -1, -1), x.flatten(2).mT], 1)
            q, k, v = self.project(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(q, k, v)[:, :, 0]

    (site,) = vicinal.inspect(Pooled(ClassToken()), img_size=32).sites
    assert site.refusal.kind is RefusalKind.UNUSED
    assert site.queries.index.tolist() == [[-1, *range(16)]]


class SelfAttention(nn.Module):
    """Attention over the places of a map, by a function of queries, keys and values."""

    def __init__(self, attention):
        super().__init__()
        self.project, self.attention = nn.Linear(24, 72), attention

    def forward(self, x):
        q, k, v = self.project(x.flatten(2).mT).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.attention(q, k, v)


def grouped(q, k, v):
    return nn.functional.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)


def causal(q, k, v):
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("attention", [causal, grouped])
def test_causal_and_grouped_query_attention_are_refused(attention):
    inspection = vicinal.inspect(Pooled(SelfAttention(attention)), img_size=32)
    assert kinds(inspection) == {"pool": RefusalKind.UNSUPPORTED}


def test_a_fast_forward_refuses_causal_attention_when_it_runs():
    model = vit().eval()
    vicinal.attach(model, "gab")
    with pytest.raises(VicinalError, match="causal"):
        model(torch.randn(2, 3, 32, 32), is_causal=True)


def test_a_model_without_weights_is_refused():
    with torch.device("meta"):
        model = vit()
    for look in (vicinal.inspect, vicinal.tap, lambda model: vicinal.attach(model, "gmm")):
        with pytest.raises(VicinalError, match=r"VisionTransformer.*to_empty"):
            look(model)


@pytest.mark.parametrize("option", ["add_zero_attn", "add_bias_kv"])
def test_keys_beyond_the_tokens_are_refused(option):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(3, 24, 8, 8)
            self.attention = nn.MultiheadAttention(24, 2, batch_first=True, **{option: True})

        def forward(self, x):
            x = self.patches(x).flatten(2).mT
            return self.attention(x, x, x, need_weights=False)[0]

    (site,) = vicinal.inspect(Model(), img_size=32).sites
    assert site.refusal.kind is RefusalKind.UNSUPPORTED
    assert "keys beyond the tokens" in site.reason
    assert site.logits[-2:] == (16, 17)
    assert site.keys.index.tolist() == [[*range(16), -1]]
