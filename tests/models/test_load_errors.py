"""Files that are damaged, missing or hostile are errors that name them."""

import pickle

import pytest
import torch

import vicinal
from saved_models import config_of, save_trained, write_config


@pytest.fixture
def saved(tmp_path):
    return save_trained(tmp_path / "model")


def test_a_truncated_file_is_named(saved):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(vicinal.VicinalError, match=r"model\.safetensors .*\(\d+ bytes\)"):
        vicinal.load(saved)
    file.write_bytes(b"")
    with pytest.raises(vicinal.VicinalError, match=r"model\.safetensors .*\(0 bytes\)"):
        vicinal.load(saved)


class Trap:
    def __reduce__(self):
        return print, ("a pickle was opened",)


def test_a_pickle_is_never_opened(saved, capsys):
    weights = saved / "model.safetensors"
    weights.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(vicinal.VicinalError, match=r"model\.safetensors .* bytes\)"):
        vicinal.load(saved)
    torch.save({"x": Trap()}, weights)
    with pytest.raises(vicinal.VicinalError, match=r"model\.safetensors .* bytes\)"):
        vicinal.load(saved)
    weights.rename(saved / "pytorch_model.bin")
    with pytest.raises(
        vicinal.VicinalError, match=r"has no model\.safetensors; found config\.json, pytorch_model\.bin"
    ):
        vicinal.load(saved)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("argument", ["checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay"])
def test_a_config_cannot_have_other_files_opened(argument, saved, tmp_path, capsys):
    trap = tmp_path / "trap.pth"
    trap.write_bytes(pickle.dumps(Trap()))
    config = config_of(saved)
    config["model_args"][argument] = {"file": str(trap)} if "cfg" in argument else str(trap)
    write_config(saved, config)
    with pytest.raises(vicinal.VicinalError, match=f"model_args .* '{argument}'"):
        vicinal.load(saved)
    config = config_of(saved) | {"architecture": f"local-dir:{tmp_path}"}
    config["model_args"].pop(argument)
    write_config(saved, config)
    with pytest.raises(vicinal.VicinalError, match="has no model 'local-dir"):
        vicinal.load(saved)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "cannot create vicinal_vit_mini.*divisible"),
        ({"embed_dim": 48, "num_heads": 4}, r"blocks.0.attn was saved for 6 heads, .* finds 4 heads"),
        ({"depth": 7}, "does not fit its config.json: blocks.6.*is absent, expected"),
        ({"depth": 5}, r"config.json: blocks\.5\.attn of Vit takes no prior"),
        ({"prior": "gmm:kernels=9"}, "does not fit its config.json: .*prior"),
        ({"prior": "gm"}, "unknown prior 'gm'; did you mean 'gmm'"),
        ({"prior": [{"prior": "gab", "layers": ["blocks.77.attn"]}]}, "leave none|blocks.77"),
        ({"prior": [{"layers": []}]}, "prior"),
        ({"color": 3}, "cannot create vicinal_vit_mini.*color"),
        ({"img_size": [33, 32]}, "got 33 x 32"),
    ],
)
def test_a_config_that_does_not_fit_is_told(change, message, saved):
    config = config_of(saved)
    config["model_args"] |= change
    write_config(saved, config)
    with pytest.raises(vicinal.VicinalError, match=message):
        vicinal.load(saved)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json is not JSON"),
        ("[]", "config.json has no architecture"),
        ('{"architecture": "vitt"}', "timm .* has no model 'vitt'"),
        ('{"architecture": "vicinal_vit", "model_args": 3}', "'model_args' .* got 3"),
    ],
)
def test_a_damaged_config_is_told(text, message, saved):
    (saved / "config.json").write_text(text)
    with pytest.raises(vicinal.VicinalError, match=message):
        vicinal.load(saved)


def test_missing_folders_and_files_are_told(tmp_path):
    with pytest.raises(vicinal.VicinalError, match=r"there is no run .*nowhere; expected the folder of a run"):
        vicinal.load(tmp_path / "nowhere")
    with pytest.raises(vicinal.VicinalError, match=r"has no config\.json; found no files"):
        vicinal.load(tmp_path)
