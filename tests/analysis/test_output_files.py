"""Models, images and output folders without the command line."""

import numpy as np
import pytest
from PIL import Image

import vicinal
from vicinal import VicinalError
from vicinal.analysis import ImageSelection, open_models
from vicinal.analysis.image_selection import denormalize
from vicinal.analysis.output_files import distinct_names, file_stem, output_folder, replace_outputs, temporary_file
from vicinal.analysis.receptive_field import write_receptive_fields


@pytest.fixture
def photos(tmp_path):
    (tmp_path / "photos").mkdir()
    generator = np.random.default_rng(0)
    for number in range(5):
        pixels = generator.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    return tmp_path / "photos"


def test_a_notebook_opens_models_and_images_and_writes_fields(photos, tmp_path):
    folder = vicinal.save(
        vicinal.create_model("vit-micro", img_size=16, depth=1, global_pool="token"), tmp_path / "model"
    )
    (opened,) = open_models([folder], device="cpu")
    assert (opened.name, opened.img_size, opened.run) == ("model (vit-micro)", (16, 16), None)
    images = ImageSelection(photos, count=3, batch_size=2)
    assert [len(batch) for batch in images.tensors(opened)] == [2, 1]
    fields = write_receptive_fields([opened], images, output_folder([opened], tmp_path / "out"))
    assert fields[opened.name].images == 3
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"erf.png", "erf.npz", "erf.json"}


def test_pixels_are_those_of_the_file(photos, tmp_path):
    folder = vicinal.save(
        vicinal.create_model("vit-micro", img_size=16, depth=1, global_pool="token"), tmp_path / "model"
    )
    (opened,) = open_models([folder], device="cpu")
    names, images = ImageSelection(photos / "2.png").first(opened, 4)
    assert names == ["2"]
    with Image.open(photos / "2.png") as image:
        expected = np.asarray(image) / 255
    np.testing.assert_allclose(denormalize(images, opened.preprocessing)[0], expected, atol=1e-5)


@pytest.mark.parametrize("options", [{"count": 0}, {"batch_size": 0}, {"seed": -1}, {"seed": 2**63}])
def test_numbers_out_of_range_are_refused(options):
    ((name, value),) = options.items()
    with pytest.raises(VicinalError, match=f"{name} must be .* got {value}"):
        ImageSelection("photos", **options)


def test_files_of_an_earlier_call_are_replaced_and_others_kept(tmp_path):
    for name in ("a-1.png", "mine.txt"):
        (tmp_path / name).write_text("old")
    with replace_outputs([tmp_path], "a.json", "a-*.png"):
        (tmp_path / "a.json").write_text("new")
    assert (tmp_path / "a-1.png").exists()  # nothing says that it is of an earlier call
    with replace_outputs([tmp_path], "a.json", "a-*.png"):
        pass
    assert {file.name for file in tmp_path.iterdir()} == {"mine.txt"}


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    (tmp_path / "x").write_text("old")
    with pytest.raises(TypeError), temporary_file(tmp_path / "x") as temporary:
        temporary.write_text(3)
    assert (tmp_path / "x").read_text() == "old"
    with temporary_file(tmp_path / "x") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "x").read_text() == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


def test_names_of_files_differ():
    assert distinct_names(["a b", "a-b", "A B", "c"]) == ["a b", "a-b (2)", "A B (3)", "c"]
    assert [file_stem(name) for name in ("a/b (c)", "..", "x=1+y_2")] == ["a-b-c", "x", "x=1+y_2"]
