"""Old names work, warn where a user writes them, and are the new things."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vicinal.data
from vicinal.data import ImageSplit, Preprocessing, evaluation_tensor, open_dataset, split


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Facts", "DatasetInfo"),
        ("Images", "TransformedImages"),
        ("Pictures", "ImageSplit"),
        ("Source", "ImageDataset"),
        ("derive", "derive_seed"),
        ("open_source", "open_dataset"),
    ],
)
def test_names_of_data(old, new):
    with pytest.warns(DeprecationWarning, match=f"vicinal.data.{old} .* vicinal.data.{new}") as warned:
        found = getattr(vicinal.data, old)
    assert found is getattr(vicinal.data, new)
    assert warned[0].filename == __file__


def test_unknown_names_of_a_room_are_attribute_errors():
    with pytest.raises(AttributeError, match=r"'vicinal.data' has no attribute 'Picture'"):
        vicinal.data.Picture  # noqa: B018


def test_an_import_warns_in_the_users_file():
    names = {"__name__": "__main__"}
    code = compile("\nfrom vicinal.data import open_source", "users_file.py", "exec")
    with pytest.warns(DeprecationWarning, match="vicinal.data.open_source") as warned:
        exec(code, names)
    assert names["open_source"] is open_dataset
    assert {(each.filename, each.lineno) for each in warned} == {("users_file.py", 2)}


def test_attributes_of_data():
    digits = open_dataset("digits")
    with pytest.warns(DeprecationWarning, match="info"):
        assert digits.facts is digits.info
    with pytest.warns(DeprecationWarning, match="info"):
        assert vicinal.data.SETS["svhn"].facts is vicinal.data.SETS["svhn"].info
    with pytest.warns(DeprecationWarning, match="image"):
        assert np.array_equal(digits.test.picture(3), digits.test.image(3))
    with pytest.warns(DeprecationWarning, match="split_size"):
        assert digits.test.whole == digits.test.split_size == 1797


def test_parameters_of_data(tmp_path):
    digits, preprocessing = open_dataset("digits"), Preprocessing(8, 8, 1, (0.5,), (0.5,))
    with pytest.warns(DeprecationWarning, match="dataset=") as warned:
        assert len(split(source=digits, val_size=0).val) == 0
    assert warned[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="split="):
        images = vicinal.data.TransformedImages(pictures=digits.test, preprocessing=preprocessing, cache_dir=tmp_path)
    assert isinstance(images.split, ImageSplit)
    with pytest.warns(DeprecationWarning, match="image="):
        assert evaluation_tensor(picture=Image.new("L", (8, 8)), preprocessing=preprocessing).shape == (1, 8, 8)


def test_old_spellings_of_saved_models_are_read_without_a_warning_and_saved_in_the_new_one(tmp_path):
    old = Path(__file__).parent / "compatibility" / "models" / "vit-conv-neighbours"
    folder = shutil.copytree(old, tmp_path / "old")
    config = json.loads((folder / "config.json").read_text())
    config["model_args"]["prior"] = [
        {"prior": "conv:growth=0.4", "options": {"centers": "neighbours"}, "layers": ["blocks.0.attn"]},
        {"prior": "conv:centers=neighbours,growth=0.4", "layers": ["blocks.1.attn"]},
    ]
    (folder / "config.json").write_text(json.dumps(config))
    for number, source in enumerate((old, folder)):
        written = vicinal.save(vicinal.load(source), tmp_path / str(number)) / "config.json"
        assert "neighbors" in written.read_text()
        assert "neighbours" not in written.read_text()


def test_an_old_spelling_warns_where_a_user_gives_it_to_a_model():
    with pytest.warns(DeprecationWarning, match="conv:centers=neighbors") as warned:
        vicinal.create_model("vit-micro", prior="conv:centers=neighbours", img_size=8, depth=1)
    assert warned[0].filename == __file__
