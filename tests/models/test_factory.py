from urllib.error import URLError

import pytest
import timm
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

import vicinal
from vicinal import VicinalError
from vicinal.attachment import get_priors


@pytest.mark.parametrize("name", ["vit-micro", "vicinal_vit_micro", "vit_tiny_patch16_224"])
def test_none_is_no_prior(name, tmp_path):
    model = vicinal.create_model(name, prior=None, img_size=32)
    assert get_priors(model) == {}
    for prior in (None, "none"):
        vicinal.save(vicinal.create_model(name, prior=prior, img_size=32), tmp_path / str(prior))
    assert (tmp_path / "None" / "config.json").read_text() == (tmp_path / "none" / "config.json").read_text()


def test_none_is_no_prior_through_timm():
    assert get_priors(timm.create_model("vicinal_vit_micro", prior=None)) == {}


def test_any_timm_model_with_a_prior():
    model = vicinal.create_model("swin_tiny_patch4_window7_224", prior="gab", num_classes=3, depths=(1, 1), img_size=56)
    assert model.patch_embed.img_size == (56, 56)
    assert len(get_priors(model)) == 2
    assert model.eval()(torch.zeros(1, 3, 56, 56)).shape == (1, 3)


def test_timms_models_keep_their_size_and_may_keep_their_classes():
    model = vicinal.create_model("deit_tiny_patch16_224", num_classes=None)
    assert model.patch_embed.img_size == (224, 224)
    assert model.num_classes == 1000


def test_arguments_that_a_model_does_not_take_are_left_out_or_told():
    assert vicinal.create_model("vgg11", img_size=64, num_classes=2).num_classes == 2  # neither img_size nor drop path
    assert vicinal.create_model("efficientvit_m0", img_size=64, drop_path_rate=0.0).num_classes == 10
    with pytest.raises(VicinalError, match="unexpected keyword argument 'drop_path_rate'"):
        vicinal.create_model("vgg11", drop_path_rate=0.3)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("xcit_nano_12_p16_224", 64),  # notes its patches as one number
        ("pvt_v2_b0", (64, 96)),  # patches of 7 pixels every 4: they overlap
        ("pvt_v2_b0", 70),
        ("efficientvit_m0", 64),  # takes one number only
    ],
)
def test_timms_families_are_made_for_the_sizes_they_take(name, size):
    model = vicinal.create_model(name, img_size=size)
    height, width = size if isinstance(size, tuple) else (size, size)
    assert model.training
    assert model.pretrained_cfg["input_size"] == (3, height, width)
    assert model.eval()(torch.zeros(1, 3, height, width)).shape == (1, 10)


def test_a_look_at_whether_a_model_runs_changes_nothing():
    torch.manual_seed(0)
    looked_at = vicinal.create_model("resnet18", img_size=64)
    after = torch.rand(())
    torch.manual_seed(0)
    untouched = timm.create_model("resnet18", num_classes=10, drop_path_rate=0.1)
    assert torch.equal(after, torch.rand(()))
    for name, value in untouched.state_dict().items():
        assert torch.equal(value, looked_at.state_dict()[name])


def test_drop_path_reaches_timms_models():
    model = vicinal.create_model("deit_tiny_patch16_224", img_size=32, drop_path_rate=0.4, depth=2)
    assert model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.4)


def test_pretrained_weights_are_loaded_through_timm(monkeypatch):
    donor = timm.create_model("vit_tiny_patch16_224", img_size=224, num_classes=21843)
    asked = []

    def download(name, **_):
        asked.append(name)
        return {key: values.clone() for key, values in donor.state_dict().items()}

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", download)
    model = vicinal.create_model("vit_tiny_patch16_224", pretrained=True, prior="gmm", img_size=64, num_classes=5)
    assert asked == ["timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"]
    assert torch.equal(model.blocks[3].mlp.fc1.weight, donor.blocks[3].mlp.fc1.weight)
    assert model.pos_embed.shape[1] == 17
    assert model.head.out_features == 5
    assert len(get_priors(model)) == 12


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("not in the cache"), URLError("name not known")])
def test_pretrained_weights_that_cannot_be_had_are_told(monkeypatch, error):
    def download(*_, **__):
        raise error

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", download)
    with pytest.raises(VicinalError, match=r"weights of vit_tiny_patch16_224 .* --random-weights"):
        vicinal.create_model("vit_tiny_patch16_224", pretrained=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "vitt"}, "unknown model 'vitt'; did you mean 'vit'"),
        ({"name": 7}, "'vit', got 7"),
        ({"name": "hf-hub:me/mine"}, r"vicinal.load\('hf-hub:me/mine'\)"),
        ({"name": "vit", "img_size": 30}, "4 x 4 pixels, got 30 x 30; use 28 or 32"),
        ({"name": "vit", "img_size": (32, 2)}, "; use 4 in place of 2"),
        (
            {"name": "vit", "img_size": 70},
            "8 x 8 pixels, got 70 x 70; use 64 or 72 in place of 70",
        ),
        ({"name": "swin", "img_size": 33}, "2 x 2 pixels, got 33 x 33; use 32 or 34"),
        ({"name": "vit", "img_size": 0}, "img_size .* got 0"),
        ({"name": "vit", "img_size": (32, 32, 3)}, "img_size .* got .32, 32, 3."),
        ({"name": "vit", "patch_size": 0}, "patch_size of vit .* got 0"),
        ({"name": "t2t", "patch_size": 2}, "patch_size of T2T .* 4, 8 or 16, got 2"),
        (
            {"name": "swin", "global_pool": "token"},
            "global_pool of swin .* 'avg'.*got 'token': it has no class token",
        ),
        (
            {"name": "cait", "global_pool": "avg"},
            "global_pool of cait .* 'token'.*got 'avg': its class layers",
        ),
        ({"name": "pit", "global_pool": "max"}, "global_pool of pit .* 'token'.* or 'avg'.*got 'max'"),
        ({"name": "vit", "pretrained": True}, "vit has no pretrained weights"),
        ({"name": "vit", "prior": "gm"}, "unknown prior 'gm'; did you mean 'gmm'"),
        ({"name": "vit", "color": 3}, "cannot create vit: TypeError.*color"),
        ({"name": "vit", "num_heads": 7}, "cannot create vit.*divisible"),
        ({"name": "resnet18", "prior": "gmm"}, "nothing to attach to"),
        (
            {"name": "deit_tiny_patch16_224", "img_size": 100},
            "16 x 16 pixels, got 100 x 100; use 96 or 112",
        ),
        (
            {"name": "vit_tiny_patch16_224", "img_size": (64, 100)},
            "16 x 16 pixels, got 64 x 100; use 96 or 112 in place of 100",
        ),
        (
            {"name": "convit_tiny", "img_size": (32, 64), "depth": 1, "local_up_to_layer": 1},
            r"convit_tiny does not run on images of 32 x 64 pixels \(RuntimeError: .* 224 x 224",
        ),
        (
            {"name": "efficientformer_l1", "img_size": 64},
            r"does not run on images of 64 x 64 pixels .* 224 x 224",
        ),
        (
            {"name": "deit_tiny_patch16_224", "global_pool": "foo"},
            "cannot create deit_tiny_patch16_224: AssertionError",
        ),
    ],
)
def test_bad_input_is_told(arguments, message):
    with pytest.raises(VicinalError, match=message):
        vicinal.create_model(**arguments)


def test_another_patch_size_helps():
    with pytest.raises(VicinalError, match="or patch_size=3"):
        vicinal.create_model("vit-mini", img_size=27)
    assert vicinal.create_model("vit-mini", img_size=27, patch_size=3).patch_embed.grid_size == (9, 9)


def test_micro_takes_the_digits():
    model = vicinal.create_model("vit-micro", prior="gmm", img_size=8, in_chans=1)
    assert model.patch_embed.grid_size == (4, 4)
    assert model(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
