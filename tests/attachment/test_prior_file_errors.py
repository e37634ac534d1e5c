"""Files and models that do not fit are refused, with the reason, and neither is changed."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import vicinal
from small_models import cait, swin, vit
from vicinal import VicinalError, tensor_file
from vicinal.attachment import get_priors


def saved(folder, prior="gmm:kernels=2", make=vit, **options):
    model = make()
    vicinal.attach(model, prior, **options)
    return vicinal.save_prior(model, folder / "prior.safetensors")


def assert_untouched(model):
    assert get_priors(model) == {}
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert {type(module).__name__ for module in model.modules() if "WithPrior" in type(module).__name__} == set()


def refusal(file, model):
    """Returns the one line in which `load_prior` refuses a file."""
    with pytest.raises(VicinalError) as error:
        vicinal.load_prior(model, file)
    assert_untouched(model)
    assert "\n" not in str(error.value)
    return str(error.value)


DIFFERENT = {
    "fewer layers": ({"depth": 2}, "blocks.2.attn carried a prior when the model was saved, and takes none now"),
    "heads": ({"num_heads": 2}, "the prior of blocks.0.attn was saved for 4 heads, .* and finds 2 heads"),
    "patches": ({"patch_size": 4}, "saved for .*, 4 rows, 4 columns, .* and finds .*, 8 rows, 8 columns"),
    "prefix": ({"reg_tokens": 2}, "saved for .* 1 prefix, 0 suffix, and finds .* 3 prefix"),
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_other_sites_are_refused_and_named(difference, tmp_path):
    options, words = DIFFERENT[difference]
    message = refusal(saved(tmp_path), vit(**options))
    assert re.search(f"does not fit VisionTransformer: .*{words}", message), message


def test_all_differences_are_counted_and_the_first_are_named(tmp_path):
    message = refusal(saved(tmp_path, img_size=32, make=lambda: vit(depth=6)), vit(depth=6, num_heads=2))
    assert message.count("2 heads") == 3
    assert message.endswith("(and 3 more)")


def test_a_layer_that_takes_no_prior_says_why(tmp_path):
    file = saved(tmp_path, make=cait, img_size=32)
    tensors, header = tensor_file.read_tensors(file)
    header["layers"]["blocks_token_only.0.attn"] = header["layers"].pop("blocks.1.attn")
    tensor_file.write_tensors(file, tensors, header)
    assert "takes none now: its queries follow no place of the image" in refusal(file, cait())


def test_another_image_size_than_the_model_takes_is_refused(tmp_path):
    file = saved(tmp_path, make=lambda: vit(img_size=64), img_size=64)
    assert "the model does not run on images of 3 x 64 x 64" in refusal(file, vit(img_size=32))


def test_a_model_with_priors_is_refused_and_keeps_them(tmp_path):
    file, model = saved(tmp_path), vit()
    vicinal.attach(model, "gab", layers=[2])
    with pytest.raises(VicinalError, match=r"^blocks\.2\.attn carries a prior already; vicinal\.detach"):
        vicinal.load_prior(model, file)
    assert [prior.spec for prior in get_priors(model).values()] == ["gab"]
    vicinal.detach(model)
    assert len(vicinal.load_prior(model, file).layers) == 3


def test_a_model_without_priors_has_nothing_to_save(tmp_path):
    with pytest.raises(VicinalError, match=r"VisionTransformer carries no prior; vicinal\.attach one first"):
        vicinal.save_prior(vit(), tmp_path / "prior")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(VicinalError, match=r"model must be a torch\.nn\.Module, got dict"):
        vicinal.load_prior({}, saved(tmp_path))
    with pytest.raises(VicinalError, match=r"model must be a torch\.nn\.Module, got dict"):
        vicinal.save_prior({}, tmp_path / "prior")


def truncate(file):
    file.write_bytes(file.read_bytes()[:-5])


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def pickled(file):
    torch.save({"blocks.0.attn.flat_sigma": torch.ones(8)}, file)


def foreign(file):
    save_file(load_file(file), file, metadata={"format": "pt"})


def with_state(text):
    def write(file):
        tensors = load_file(file)
        save_file(tensors, file, metadata={"state": text, "digest": tensor_file._digest(tensors)})

    return write


def checkpoint(file):
    tensor_file.write_tensors(file, {"model.weight": torch.ones(2)}, {"progress": {}, "optimizer": {}})


DAMAGES = {
    "truncated": (truncate, "it is not a whole safetensors file"),
    "empty": (lambda file: file.write_bytes(b""), "it is not a whole safetensors file"),
    "bit": (flip_a_bit, "the tensors do not match their digest"),
    "pickle": (pickled, "it is not a whole safetensors file"),
    "foreign": (foreign, "a safetensors file without a header of vicinal"),
    "no JSON": (with_state("{"), "damaged: Expecting property name"),
    "list": (with_state("[]"), "it holds no priors"),
    "checkpoint": (checkpoint, "it holds no priors"),
    "newer": (with_state(json.dumps({"content": "prior", "format": 9})), "its format is 9, and this version reads 1"),
    "no layers": (with_state(json.dumps({"content": "prior", "format": 1})), "it names no layers"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_and_foreign_files_are_refused(damage, tmp_path):
    file, (write, words) = saved(tmp_path), DAMAGES[damage]
    write(file)
    message = refusal(file, vit())
    assert message.startswith(f"{file} is not a file of vicinal.save_prior, or is damaged: ")
    assert words in message


def test_missing_files_and_folders_are_named(tmp_path):
    for file in (tmp_path, tmp_path / "none"):
        assert refusal(file, vit()).endswith(f"got {file}, where there is no file")
    model = vit()
    vicinal.attach(model, "gab")
    with pytest.raises(VicinalError, match=r"file must be in a folder that exists, got .*missing/prior"):
        vicinal.save_prior(model, tmp_path / "missing" / "prior")
    with pytest.raises(VicinalError, match="cannot write"):
        vicinal.save_prior(model, tmp_path)


ENTRIES = {
    "spec": ({"prior": 3}, "a spec, options and a site"),
    "malformed spec": ({"prior": "gmm:"}, "malformed prior 'gmm:'"),
    "name": ({"prior": "gmx"}, "unknown prior 'gmx'; did you mean 'gmm'"),
    "option": ({"options": {"kernel": 3}}, "unknown option of prior 'gmm': 'kernel'"),
    "kernels": ({"prior": "gmm:kernels=3"}, r"blocks.0.attn.flat_alpha is (8,), expected (12,)"),
    "other prior": ({"prior": "gab"}, "blocks.0.attn.flat_alpha is (8,), expected absent"),
    "image": ({"image": [32]}, "image must be height and width, got [32]"),
    "image text": ({"image": "32"}, "must be whole numbers"),
    "layer": ({"layer": -1}, "must be whole numbers"),
    "depth": ({"depth": 3.5}, "must be whole numbers"),
    "site": ({"site": {"heads": True}}, "must be whole numbers"),
    "further key": ({"code": "print()"}, "an entry must have prior, options"),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_entries_of_the_header_are_checked(entry, tmp_path):
    file, (change, words) = saved(tmp_path), ENTRIES[entry]
    tensors, header = tensor_file.read_tensors(file)
    header["layers"]["blocks.0.attn"] |= change
    tensor_file.write_tensors(file, tensors, header)
    assert words in refusal(file, vit())


def test_missing_values_are_named(tmp_path):
    file = saved(tmp_path)
    tensors, header = tensor_file.read_tensors(file)
    del tensors["blocks.1.attn.flat_sigma"]
    tensor_file.write_tensors(file, tensors, header)
    assert "blocks.1.attn.flat_sigma is absent, expected (8,)" in refusal(file, vit())


def test_a_prior_that_no_file_can_hold_is_refused(tmp_path):
    @vicinal.register_prior("colored")
    class Colored(vicinal.Prior):
        def __init__(self, heads, grid, layer=0, depth=1, *, color: object = None):
            super().__init__(heads, grid, layer, depth)
            self.tint = nn.Parameter(torch.zeros(heads))

    model = vit()
    vicinal.attach(model, "colored", color={1, 2})
    with pytest.raises(VicinalError, match=r"the options of a prior cannot be written as JSON: .*set"):
        vicinal.save_prior(model, tmp_path / "prior")
    vicinal.detach(model)
    vicinal.attach(model, "colored")
    with pytest.raises(VicinalError, match=r"tint of the prior of blocks\.0\.attn must be a tensor with values"):
        vicinal.save_prior(model.to("meta"), tmp_path / "prior")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_file_before(tmp_path, monkeypatch):
    file = saved(tmp_path)
    before = file.read_bytes()
    monkeypatch.setattr(tensor_file, "replace_file", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    model = vit()
    vicinal.attach(model, "gab")
    with pytest.raises(VicinalError, match=r"cannot write .*: No space left"):
        vicinal.save_prior(model, file)
    assert file.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["prior.safetensors"]


def test_if_one_of_several_priors_fails_none_stays(tmp_path, monkeypatch):
    model = vit(dynamic_img_size=True)
    vicinal.attach(model, "gab", img_size=32, layers=[0])
    vicinal.attach(model, "gmm", img_size=48, layers=[1])
    file = vicinal.save_prior(model, tmp_path / "prior")
    from vicinal.attachment import prior_file

    given, calls = prior_file.add_priors, []

    def fail_second(*args):
        calls.append(args)
        if len(calls) == 2:
            raise VicinalError("the second fails")
        given(*args)

    monkeypatch.setattr(prior_file, "add_priors", fail_second)
    again = vit(dynamic_img_size=True)
    with pytest.raises(VicinalError, match="the second fails"):
        vicinal.load_prior(again, file)
    assert_untouched(again)


def test_inference_mode_is_refused(tmp_path):
    file = saved(tmp_path, make=swin, img_size=32)
    with torch.inference_mode(), pytest.raises(VicinalError, match="inference_mode"):
        vicinal.load_prior(swin(), file)
