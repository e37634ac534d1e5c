import os
import shutil

import numpy as np
import pytest
from PIL import Image

from vicinal.data import open_dataset
from vicinal.errors import VicinalError


def test_a_folder_has_a_class_for_each_subfolder_and_a_fifth_is_held_out(folder, noise):
    source = open_dataset(f"folder:{folder}")
    assert source.class_names == ["cat", "dog"]
    assert (len(source.train), len(source.test)) == (12, 3)
    assert np.bincount(source.test.labels).tolist() == [2, 1]
    seen = sorted([*source.train.rows, *source.test.rows])
    assert seen == list(range(15))
    for part in (source.train, source.test):
        for index, row in enumerate(part.rows):
            assert part.labels[index] == (row >= 10)
            number = row if row < 10 else row - 10  # one digit, so the order of names is that of numbers
            assert np.array_equal(np.asarray(part.image(index)), noise(12, 16, number))


@pytest.mark.parametrize("test", ["test", "val"])
def test_folders_of_splits_are_used(folder, test, tmp_path):
    root = tmp_path / "splits"
    shutil.copytree(folder, root / "train")
    (root / test).mkdir()
    shutil.copytree(folder / "dog", root / test / "dog")
    source = open_dataset(f"folder:{root}")
    assert len(source.train) == 15
    assert getattr(source, test).files()[0] == [f"{test}/dog/{number}.png" for number in range(5)]
    assert source.class_names == ["cat", "dog"]
    assert set(getattr(source, test).labels) == {1}


def test_a_class_can_be_called_train(folder):
    (folder / "cat").rename(folder / "train")
    assert open_dataset(f"folder:{folder}").class_names == ["dog", "train"]


def question(folder):
    with pytest.raises(VicinalError, match=r"\?$") as raised:
        open_dataset(f"folder:{folder}")
    return str(raised.value)


@pytest.mark.parametrize("name", ["Train", "training", "test", "Valid", "dev_set"])
def test_a_class_with_the_name_of_a_split_is_a_question(folder, name):
    (folder / "cat").rename(folder / name)
    assert f"is {name} a class or a split?" in question(folder)


def test_splits_without_classes_are_a_question(folder):
    (folder / "cat").rename(folder / "train")
    (folder / "dog").rename(folder / "test")
    assert "has test and train without class folders" in question(folder)


def test_a_folder_of_images_next_to_splits_is_a_question(folder, tmp_path):
    root = tmp_path / "splits"
    shutil.copytree(folder, root / "train")
    (root / "annotations").mkdir()
    (root / "annotations" / "list.txt").write_text("words")
    assert open_dataset(f"folder:{root}").class_names == ["cat", "dog"]
    shutil.copytree(folder / "cat", root / "holdout")
    assert "has holdout next to train" in question(root)
    shutil.rmtree(root / "holdout")
    shutil.copytree(folder / "cat", root / "test")
    assert f"{root / 'test'} has no class folders" in question(root)


def test_names_are_relative_and_sizes_are_those_of_the_files(folder):
    source = open_dataset(f"folder:{folder}")
    for part in (source.train, source.test):
        names, sizes = part.files()
        assert sizes == [(folder / name).stat().st_size for name in names]
        assert [name.split("/")[0] for name in names] == [source.class_names[label] for label in part.labels]


def test_all_formats_and_nested_folders_count_and_other_files_do_not(folder, noise):
    (folder / "dog" / "more").mkdir()
    Image.fromarray(noise(4, 4)).save(folder / "dog" / "more" / "LARGE.JPG")
    Image.fromarray(noise(4, 4)).save(folder / "dog" / "x.bmp")
    for name in ("notes.txt", ".hidden.png", "Thumbs.db"):
        (folder / "dog" / name).write_text("words")
    (folder / ".git").mkdir()
    source = open_dataset(f"folder:{folder}")
    assert len(source.train) + len(source.test) == 17


def test_the_key_changes_with_the_files_and_only_then(folder, noise):
    key = open_dataset(f"folder:{folder}").train.key
    assert open_dataset(f"folder:{folder}").train.key == key
    os.utime(folder / "cat" / "3.png", (1, 1))
    touched = open_dataset(f"folder:{folder}").train.key
    (folder / "cat" / "3.png").rename(folder / "cat" / "33.png")
    assert len({key, touched, open_dataset(f"folder:{folder}").train.key}) == 3


def test_bad_folders_are_errors(folder, tmp_path):
    def message(path):
        with pytest.raises(VicinalError) as raised:
            open_dataset(f"folder:{path}")
        return str(raised.value)

    assert message(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'} does not exist; expected a folder of images"
    assert "0.png is a file; expected a folder" in message(folder / "cat" / "0.png")
    assert "has no subfolders; expected one for each class" in message(folder / "cat")
    (folder / "empty").mkdir()
    assert message(folder).startswith(f"{folder / 'empty'} is empty")
    (folder / "empty" / "a.txt").write_text("words")
    assert f"{folder / 'empty'} has 1 files but no image, only files such as a.txt" in message(folder)
    shutil.rmtree(folder / "empty")
    shutil.rmtree(folder / "dog")
    assert "at least two classes, got cat" in message(folder)


def test_a_class_to_test_that_is_not_trained_is_an_error(folder, tmp_path):
    root = tmp_path / "splits"
    shutil.copytree(folder, root / "train")
    shutil.copytree(folder / "dog", root / "test" / "wolf")
    with pytest.raises(VicinalError, match=r"wolf .* cat, dog"):
        open_dataset(f"folder:{root}")


def test_too_few_images_are_an_error(folder):
    for number in range(1, 10):
        (folder / "cat" / f"{number}.png").unlink()
    for number in range(1, 5):
        (folder / "dog" / f"{number}.png").unlink()
    with pytest.raises(VicinalError, match=r"too few images: 2 .*, 0 "):
        open_dataset(f"folder:{folder}")


def test_a_damaged_file_is_named_when_it_is_read(folder):
    (folder / "dog" / "2.png").write_bytes(b"\x89PNG")
    source = open_dataset(f"folder:{folder}")
    with pytest.raises(VicinalError, match=r"dog.2\.png"):
        [source.train.read(row) for row in range(15)]
