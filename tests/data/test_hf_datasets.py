import io
import os
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets import Image as ImageFeature
from datasets.exceptions import DatasetNotFoundError
from PIL import Image

from vicinal.data import open_dataset
from vicinal.data.open_dataset import open_own_splits
from vicinal.errors import VicinalError

COPIES = Path(__file__).parents[3] / "shared" / "data"


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 3), (number, 0, 0)).save(file, "png")
    return file.getvalue()


def table(labels: list, *, image: str = "image", label: str = "label", first: int = 0, kind=None, **more) -> Dataset:
    """ImageSplit whose red is their number."""
    columns = {image: [{"bytes": png(first + number), "path": None} for number in range(len(labels))], label: labels}
    features = {image: ImageFeature(), label: kind or ClassLabel(names=["a", "b", "c"])}
    for name, (values, feature) in more.items():
        columns[name], features[name] = values, feature
    return Dataset.from_dict(columns, features=Features(features))


def numbers(pictures) -> list[int]:
    return [pictures.image(index).getpixel((0, 0))[0] for index in range(len(pictures))]


def test_a_folder_of_parquet_files_has_a_split_for_each_name(tmp_path):
    table([0, 1, 2]).to_parquet(tmp_path / "train-00000-of-00002.parquet")
    table([2, 1], first=3).to_parquet(tmp_path / "train-00001-of-00002.parquet")
    table([1, 1, 0], first=10).to_parquet(tmp_path / "test-00000-of-00001.parquet")
    source = open_dataset(f"parquet:{tmp_path}")
    assert source.class_names == ["a", "b", "c"]
    assert source.train.labels.tolist() == [0, 1, 2, 2, 1]
    assert source.train.labels.dtype == np.int64
    assert source.test.labels.tolist() == [1, 1, 0]
    assert numbers(source.train) == [0, 1, 2, 3, 4]
    assert numbers(source.test) == [10, 11, 12]
    assert source.train.image(0).size == (4, 3)


def test_files_in_folders_of_splits_belong_to_these(tmp_path):
    for first, split in enumerate(("Train", "Valid")):
        (tmp_path / split).mkdir()
        table([0, 1, 2], first=10 * first).to_parquet(tmp_path / split / "pictures.parquet")
    source = open_dataset(f"parquet:{tmp_path}")
    assert numbers(source.train) == [0, 1, 2]
    assert numbers(source.val) == [10, 11, 12]


def test_files_are_listed_by_path_or_row_with_their_sizes(tmp_path):
    images = [{"bytes": png(number), "path": f"there/{number}.png"} for number in range(4)]
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["a", "b"])})
    Dataset.from_dict({"image": images, "label": [0, 1, 0, 1]}, features=features).to_parquet(
        tmp_path / "train.parquet"
    )
    parquet.write_table(pa.table({"image": [b"12", None], "label": [0, 1]}), tmp_path / "plain.parquet")
    part = open_dataset(f"parquet:{tmp_path / 'train.parquet'}", cache_dir=tmp_path).own.splits["train"]
    assert part.take(np.array([2, 0])).files() == (["train/2.png", "train/0.png"], [len(png(2)), len(png(0))])
    plain = open_own_splits(f"parquet:{tmp_path / 'plain.parquet'}").splits["train"]
    assert plain.files() == (["train/image 0", "train/image 1"], [2, 0])


def test_one_file_has_a_fifth_held_out(tmp_path):
    table([0, 1] * 10).to_parquet(tmp_path / "everything.parquet")
    source = open_dataset(f"parquet:{tmp_path / 'everything.parquet'}")
    assert np.bincount(source.test.labels).tolist() == [2, 2]
    assert sorted(numbers(source.train) + numbers(source.test)) == list(range(20))
    assert open_dataset(f"parquet:{tmp_path}").test.rows.tolist() == source.test.rows.tolist()


def test_columns_are_found_by_what_they_hold(tmp_path):
    masks = [{"bytes": png(200), "path": None}] * 10
    more = {"mask": (masks, ImageFeature()), "target": ([9] * 10, Value("int64"))}
    table([0, 1] * 5, image="img", label="breed", **more).to_parquet(tmp_path / "train.parquet")
    source = open_dataset(f"parquet:{tmp_path}")
    assert max(numbers(source.train)) < 200
    assert set(source.train.labels) == {0, 1}


def test_columns_are_found_by_usual_names_without_metadata(tmp_path):
    plain = pa.table({"id": list(range(10)), "jpg": [png(number) for number in range(10)], "cls": ["y", "x"] * 5})
    parquet.write_table(plain, tmp_path / "train.parquet")
    source = open_dataset(f"parquet:{tmp_path}")
    assert source.class_names == ["x", "y"]
    whole = sorted(zip(source.train.rows, source.train.labels, numbers(source.train), strict=True))
    assert all(row == number and label == (row + 1) % 2 for row, label, number in whole)
    nested = pa.table({"image": [{"bytes": png(number), "path": ""} for number in range(10)], "label": [3, 7] * 5})
    parquet.write_table(nested, tmp_path / "train.parquet")
    source = open_dataset(f"parquet:{tmp_path}")
    assert source.class_names == ["3", "7"]
    assert set(source.train.labels) == {0, 1}


def test_the_key_changes_with_the_files(tmp_path):
    file = tmp_path / "train.parquet"
    table([0, 1] * 5).to_parquet(file)
    key = open_dataset(f"parquet:{tmp_path}").train.key
    assert open_dataset(f"parquet:{file}").train.key == key
    os.utime(file, (1, 1))
    assert open_dataset(f"parquet:{tmp_path}").train.key != key


def message(name: str, **options) -> str:
    with pytest.raises(VicinalError) as raised:
        open_dataset(name, **options)
    return str(raised.value)


def test_bad_parquet_is_an_error(tmp_path):
    assert "does not exist" in message(f"parquet:{tmp_path / 'nowhere'}")
    assert "has no Parquet files" in message(f"parquet:{tmp_path}")
    (tmp_path / "train.parquet").write_bytes(b"words")
    assert f"cannot read {tmp_path}" in message(f"parquet:{tmp_path}")
    table([0, 1, -1]).to_parquet(tmp_path / "train.parquet")
    assert "split train has images without a label; the first is image 2" in message(f"parquet:{tmp_path}")
    table([0, 1, 2], kind=Value("int64")).to_parquet(tmp_path / "train.parquet")
    table([0, 5], kind=Value("int64")).to_parquet(tmp_path / "test.parquet")
    assert "split test, image 1 has class 5" in message(f"parquet:{tmp_path}")
    parquet.write_table(pa.table({"label": [0, 1], "text": ["a", "b"]}), tmp_path / "train.parquet")
    (tmp_path / "test.parquet").unlink()
    assert "has no column of images; its columns are label, text" in message(f"parquet:{tmp_path}")


def test_several_columns_of_images_with_unusual_names_are_an_error(tmp_path):
    more = {"right": ([{"bytes": png(0), "path": None}] * 3, ImageFeature())}
    table([0, 1, 2], image="left", **more).to_parquet(tmp_path / "train.parquet")
    assert "several columns of images (left, right)" in message(f"parquet:{tmp_path}")


def test_a_damaged_row_is_named(tmp_path):
    images = [png(0), png(1), b"words", None] * 3
    parquet.write_table(pa.table({"image": images, "label": [0, 1, 0, 1] * 3}), tmp_path / "train.parquet")
    source = open_dataset(f"parquet:{tmp_path}")
    with pytest.raises(VicinalError, match="split train, image 2 "):
        source.train.read(2)
    with pytest.raises(VicinalError, match="split train, image 3 is missing"):
        source.train.read(3)


def test_a_named_set_reads_a_parquet_copy(tmp_path):
    kind = ClassLabel(num_classes=100)
    coarse = {"coarse_label": ([0] * 10, ClassLabel(num_classes=20))}
    for split in ("train", "test"):
        file = tmp_path / f"{split}-00000-of-00001.parquet"
        table(list(range(10)), image="img", label="fine_label", kind=kind, **coarse).to_parquet(file)
    source = open_dataset("cifar100", data_dir=tmp_path)
    assert source.train.labels.tolist() == list(range(10))
    assert source.info.size == 32
    assert source.channels == 3
    assert "has no split 'valid'; it has test, train" in message("tiny-imagenet", data_dir=tmp_path)
    assert "has no column 'label'; it has img, fine_label, coarse_label" in message("cifar10", data_dir=tmp_path)
    assert "'digits'" in message("digits", data_dir=tmp_path)


def test_a_copy_of_another_set_is_told_by_its_classes(tmp_path):
    for split in ("train", "test"):
        table([0, 1, 2]).to_parquet(tmp_path / f"{split}.parquet")
    assert "120 classes of stanford-dogs, got 3" in message("stanford-dogs", data_dir=tmp_path)


def test_layouts_of_repositories(tmp_path):
    kind = ClassLabel(num_classes=10)
    for config in ("cropped_digits", "full_numbers"):
        for split in ("train", "test", "extra"):
            (tmp_path / config).mkdir(exist_ok=True)
            table([0, 1], kind=kind).to_parquet(tmp_path / config / f"{split}-00000-of-00001.parquet")
    assert len(open_dataset("svhn", data_dir=tmp_path).train) == 2
    for split in ("train", "test"):
        (tmp_path / "converted" / split).mkdir(parents=True)
        for part in range(2):
            table([0, 1], first=2 * part).to_parquet(tmp_path / "converted" / split / f"000{part}.parquet")
    assert numbers(open_dataset(f"parquet:{tmp_path / 'converted'}").test) == [0, 1, 2, 3]


def test_flowers_are_trained_on_train_and_validation(tmp_path):
    for first, split in enumerate(("train", "validation", "test")):
        kind = ClassLabel(num_classes=102)
        table([5, 6], first=10 * first, kind=kind).to_parquet(tmp_path / f"{split}.parquet")
    source = open_dataset("flowers102", data_dir=tmp_path)
    assert len(set(source.train.labels)) == 2
    assert numbers(source.train) == [0, 1, 10, 11]
    assert source.train.labels.tolist() == [5, 6, 5, 6]
    assert numbers(source.test) == [20, 21]
    (tmp_path / "validation.parquet").unlink()
    assert "has no split 'validation'; it has test, train" in message("flowers102", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("name", "train", "test", "classes"),
    [("cifar10", 20_000, 10_000, 10), ("tiny-imagenet", 10_000, 2_000, 200), ("oxford-iiit-pet", 3_680, 3_669, 37)],
)
def test_real_copies_open(name, train, test, classes):
    if not (COPIES / name).exists():
        pytest.skip("no copies of real sets next to the project")
    source = open_dataset(name, data_dir=COPIES / name)
    assert (len(source.train), len(source.test), len(source.class_names)) == (train, test, classes)
    assert source.train.image(train - 1).mode == "RGB"


def on_the_hub(monkeypatch, answer, asked: list | None = None) -> None:
    """Put something in the place of the Hub."""

    def load_dataset(name, config=None, **options):
        if asked is not None:
            asked.append((name, config))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def test_a_named_set_comes_from_the_hub(monkeypatch):
    asked: list = []
    kind = ClassLabel(num_classes=10)
    splits = {"train": table([0, 1], kind=kind), "test": table([2], first=5, kind=kind), "extra": table([0])}
    on_the_hub(monkeypatch, DatasetDict(splits), asked)
    source = open_dataset("svhn")
    assert asked == [("ufldl-stanford/svhn", "cropped_digits")]
    assert numbers(source.test) == [5]
    assert not source.info.flip
    assert open_dataset("svhn").train.key == source.train.key


def test_any_set_comes_from_the_hub(monkeypatch):
    asked: list = []
    on_the_hub(monkeypatch, DatasetDict({"train": table([0, 1] * 10, image="photo", label="kind")}), asked)
    source = open_dataset("hub:me/pictures@small")
    open_dataset("hub:me/pictures")
    assert asked == [("me/pictures", "small"), ("me/pictures", None)]
    assert (len(source.train), len(source.test)) == (16, 4)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionError("Couldn't reach 'uoft-cs/cifar10' on the Hub"), "--data-dir PATH reads a Parquet copy"),
        (
            DatasetNotFoundError("Dataset 'x' is a gated dataset on the Hub. Visit its page."),
            "accept its terms at http",
        ),
        (DatasetNotFoundError("Dataset 'x' doesn't exist on the Hub"), "the Hub has no dataset uoft-cs/cifar10"),
        (ValueError("Config name is missing.\nPick one: ['a', 'b']"), "Pick one: ['a', 'b']. hub:ID@CONFIG"),
    ],
)
def test_a_hub_that_does_not_answer_is_an_error(monkeypatch, error, expected):
    on_the_hub(monkeypatch, error)
    assert expected in message("cifar10")
    assert "\n" not in message("cifar10")


def test_ids_are_checked(monkeypatch):
    on_the_hub(monkeypatch, AssertionError("not asked"))
    assert "'a/b/c'" in message("hub:a/b/c")
