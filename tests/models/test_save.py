import subprocess
import sys

import pytest
import safetensors.torch
import timm
import torch

import vicinal
from saved_models import IMAGES, config_of, save_trained, trained, write_config
from small_backbones import SMALL


@pytest.fixture
def saved(tmp_path):
    return save_trained(tmp_path / "model")


@pytest.mark.parametrize("prior", ["none", "gmm", "elm", "gab", "rpe", "rpe-mlp", "decay:learnable=true", "conv+gmm"])
def test_a_saved_model_is_the_same_again(prior, tmp_path):
    model = trained(prior=prior)
    loaded = vicinal.load(vicinal.save(model, tmp_path / "model"))
    assert torch.equal(loaded(IMAGES), model(IMAGES))
    assert not loaded.training


@pytest.mark.parametrize("name", SMALL)
def test_every_backbone_is_the_same_again_here_and_through_timm(name, tmp_path):
    model = trained(name, prior="gmm:kernels=2,init=paper")
    folder = vicinal.save(model, tmp_path / "model")
    assert torch.equal(vicinal.load(folder)(IMAGES), model(IMAGES))
    assert torch.equal(timm.create_model(f"local-dir:{folder}", pretrained=True).eval()(IMAGES), model(IMAGES))


def test_a_fresh_process_gives_the_same_output_bit_for_bit(tmp_path):
    model = trained("pit", prior="gmm:init=paper+gab")
    folder = vicinal.save(model, tmp_path / "model")
    torch.save(IMAGES, tmp_path / "images.pt")
    code = (
        "import sys, torch, vicinal; torch.set_num_threads(int(sys.argv[4]));"
        "out = vicinal.load(sys.argv[1])(torch.load(sys.argv[2])); torch.save(out.detach(), sys.argv[3])"
    )
    arguments = [folder, tmp_path / "images.pt", tmp_path / "out.pt", str(torch.get_num_threads())]
    subprocess.run([sys.executable, "-c", code, *map(str, arguments)], check=True)
    assert torch.equal(torch.load(tmp_path / "out.pt"), model(IMAGES))


def test_config_says_everything_in_timms_layout(tmp_path):
    model = trained(prior="gmm:kernels=3", global_pool="avg", num_classes=2)
    preprocessing = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "interpolation": "bilinear", "crop_pct": 0.9}
    folder = vicinal.save(model, tmp_path / "model", class_names=["cat", "dog"], preprocessing=preprocessing)
    config = config_of(folder)
    assert config["architecture"] == "vicinal_vit_mini"
    assert config["num_classes"] == 2
    assert config["global_pool"] == "avg"
    assert config["label_names"] == ["cat", "dog"]
    assert config["model_args"]["prior"] == "gmm:kernels=3"
    assert config["pretrained_cfg"]["input_size"] == [3, 32, 32]
    loaded = vicinal.load(folder)
    data = timm.data.resolve_model_data_config(loaded)
    assert tuple(data["mean"]) == (0.1, 0.2, 0.3)
    assert data["interpolation"] == "bilinear"
    assert data["crop_pct"] == 0.9
    assert loaded.pretrained_cfg["label_names"] == ["cat", "dog"]
    again = config_of(vicinal.save(loaded, tmp_path / "again"))
    assert again == config


def test_priors_of_several_kinds_in_several_layers(tmp_path):
    model = vicinal.create_model("vit_tiny_patch16_224", img_size=(64, 96), num_classes=5, depth=4)
    vicinal.attach(model, "gmm", layers=[0], kernels=2, sigma=torch.tensor([1.0, 3.0]), alpha=0.3)
    vicinal.attach(model, "conv+gab", layers="last 2")
    model.eval()
    images = torch.randn(2, 3, 64, 96)
    loaded = vicinal.load(vicinal.save(model, tmp_path / "model"))
    assert torch.equal(loaded(images), model(images))
    priors = {name: module.spec for name, module in loaded.named_modules() if getattr(module, "spec", None)}
    assert set(priors) >= {"blocks.0.attn.prior", "blocks.2.attn.prior", "blocks.3.attn.prior"}
    assert "blocks.1.attn.prior" not in priors


def test_a_model_of_timms_own_making(tmp_path):
    model = timm.create_model("deit_tiny_patch16_224", img_size=64, num_classes=4, in_chans=1)
    vicinal.attach(model, "gab")
    loaded = vicinal.load(vicinal.save(model.eval(), tmp_path / "model"))
    images = torch.randn(2, 1, 64, 64)
    assert torch.equal(loaded(images), model(images))


def test_what_timm_saved_itself(tmp_path):
    model = timm.create_model("test_vit", num_classes=4).eval()
    timm.models.save_for_hf(model, tmp_path / "model", model_args={"num_classes": 4}, safe_serialization=True)
    images = torch.randn(2, 3, 160, 160)
    torch.testing.assert_close(vicinal.load(tmp_path / "model")(images), model(images))  # by another kernel
    config = config_of(tmp_path / "model")
    declared = config.pop("pretrained_cfg") | {"mean": [0.1, 0.2, 0.3]}
    write_config(tmp_path / "model", config | declared)  # the older layout, all in one
    loaded = vicinal.load(tmp_path / "model")
    assert loaded.pretrained_cfg["mean"] == [0.1, 0.2, 0.3]
    torch.testing.assert_close(loaded(images), model(images))


def test_a_head_that_was_replaced(tmp_path):
    model = trained()
    model.reset_classifier(3)
    loaded = vicinal.load(vicinal.save(model.eval(), tmp_path / "model"))
    assert torch.equal(loaded(IMAGES), model(IMAGES))
    assert loaded(IMAGES).shape == (3, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_number_types_are_kept(dtype, tmp_path):
    model = trained().to(dtype)
    loaded = vicinal.load(vicinal.save(model, tmp_path / "model"))
    images = IMAGES.to(dtype)
    assert loaded(images).dtype == dtype
    assert torch.equal(loaded(images), model(images))


def test_compiled_and_wrapped_models_are_saved_as_themselves(tmp_path):
    model = trained()
    folder = vicinal.save(torch.compile(torch.nn.DataParallel(model)), tmp_path / "model")
    assert torch.equal(vicinal.load(folder)(IMAGES), model(IMAGES))


def test_loading_draws_no_random_numbers(saved):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    vicinal.load(saved)
    assert torch.equal(torch.rand(2), expected)


def test_nothing_is_overwritten_unless_asked(saved, tmp_path):
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    other = trained(prior="gab")
    with pytest.raises(vicinal.VicinalError, match=r"config.json.*overwrite=True"):
        vicinal.save(other, saved)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before
    vicinal.save(other, saved, overwrite=True)
    assert torch.equal(vicinal.load(saved)(IMAGES), other(IMAGES))
    assert sorted(file.name for file in saved.iterdir()) == ["config.json", "model.safetensors"]


def test_a_model_that_cannot_be_saved_leaves_nothing(tmp_path):
    with pytest.raises(vicinal.VicinalError, match=r"class_names .* 10 .*, got 2"):
        vicinal.save(trained(), tmp_path / "model", class_names=["cat", "dog"])
    with pytest.raises(vicinal.VicinalError, match=r"'mean' .* 3 numbers, .*got 1"):
        vicinal.save(trained(), tmp_path / "model", preprocessing={"mean": [0.5]})
    with pytest.raises(vicinal.VicinalError, match=r"preprocessing .* mean, std.*got 'means'"):
        vicinal.save(trained(), tmp_path / "model", preprocessing={"means": [0.5]})
    with pytest.raises(vicinal.VicinalError, match="got Linear"):
        vicinal.save(torch.nn.Linear(3, 3), tmp_path / "model")
    with pytest.raises(vicinal.VicinalError, match=r"config.json: .*type"):
        vicinal.save(trained(act_layer=torch.nn.SiLU), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_unknown_arguments_of_a_timm_model_are_asked_for(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3).eval()
    with pytest.raises(vicinal.VicinalError, match=r"is not this model: blocks\.10.*model_args="):
        vicinal.save(model, tmp_path / "model")
    folder = vicinal.save(model, tmp_path / "model", model_args={"depth": 2})
    torch.testing.assert_close(vicinal.load(folder)(IMAGES), model(IMAGES))


class Hub:
    """Takes what `HfApi` is given, and gives it back as `hf_hub_download` would."""

    def __init__(self, folder, **_):
        self.folder = folder

    def create_repo(self, repo_id, **_):
        return type("Url", (), {"repo_id": repo_id})

    def file_exists(self, **_):
        return False

    def upload_folder(self, *, repo_id, folder_path, **_):
        import shutil

        shutil.copytree(folder_path, self.folder / repo_id)
        return f"https://hub/{repo_id}"

    def download(self, repo_id, file, revision=None):
        assert revision in (None, "v1")
        return str(self.folder / repo_id / file)


def test_to_the_hub_and_back(tmp_path, monkeypatch):
    import huggingface_hub
    import timm.models._hub as timm_hub

    hub = Hub(tmp_path)
    monkeypatch.setattr(timm_hub, "HfApi", lambda **_: hub)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.download)
    model = trained(num_classes=2)
    assert vicinal.push_to_hub(model, "me/mine", class_names=["cat", "dog"]) == "https://hub/me/mine"
    assert sorted(file.name for file in (tmp_path / "me" / "mine").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    assert 'vicinal.load("hf-hub:me/mine")' in (tmp_path / "me" / "mine" / "README.md").read_text()
    for source in ("hf-hub:me/mine", "hf-hub:me/mine@v1"):
        loaded = vicinal.load(source)
        assert torch.equal(loaded(IMAGES), model(IMAGES))
        assert loaded.pretrained_cfg["label_names"] == ["cat", "dog"]


def test_what_the_hub_does_not_have_is_told(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    def absent(name, file, revision=None):
        raise EntryNotFoundError(f"404: no {file}")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", absent)
    with pytest.raises(vicinal.VicinalError, match=r"cannot get config\.json of hf-hub:me/mine"):
        vicinal.load("hf-hub:me/mine")


def test_weights_are_plain_safetensors(saved):
    names = set(safetensors.torch.load_file(saved / "model.safetensors"))
    assert "blocks.0.attn.qkv.weight" in names
    assert any(".prior." in name for name in names)
