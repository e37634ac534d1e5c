"""Names of splits mean the same in folders, Parquet files and on the Hub."""

import shutil

import datasets
import pytest
from datasets import DatasetDict
from test_hf_datasets import table

from vicinal.data import open_dataset, split
from vicinal.errors import VicinalError


@pytest.fixture(params=["folder", "parquet", "hub"])
def make(request, tmp_path, monkeypatch, folder):
    """Makes a dataset with splits of the given names; returns what `open_dataset` takes."""

    def of_folders(names):
        for name, count in names.items():
            for number in range(count):
                label = ("cat", "dog", "bee")[number % 3]
                (tmp_path / "data" / name / label).mkdir(parents=True, exist_ok=True)
                shutil.copy(folder / "cat" / "0.png", tmp_path / "data" / name / label / f"{number}.png")
        return f"folder:{tmp_path / 'data'}"

    def of_parquet(names):
        (tmp_path / "data").mkdir(exist_ok=True)
        for name, count in names.items():
            table([0, 1, 2] * (count // 3)).to_parquet(tmp_path / "data" / f"{name}-00000-of-00001.parquet")
        return f"parquet:{tmp_path / 'data'}"

    def on_the_hub(names):
        answer = DatasetDict({name: table([0, 1, 2] * (count // 3)) for name, count in names.items()})
        monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **options: answer)
        return "hub:me/pictures"

    return {"folder": of_folders, "parquet": of_parquet, "hub": on_the_hub}[request.param]


def sizes(name):
    splits = split(open_dataset(name), val_size=3)
    return len(splits.train), len(splits.val), len(splits.test)


def refusal(name):
    with pytest.raises(VicinalError) as raised:
        open_dataset(name)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("train", "val", "test"),
    [
        ("train", "val", "test"),
        ("Train", "Valid", "TEST"),
        ("training", "validation", "testing"),
        ("Train_Set", "dev", "Test"),
    ],
)
def test_all_three_splits_are_used_as_they_are(make, train, val, test):
    assert sizes(make({train: 30, val: 9, test: 6})) == (30, 9, 6)


@pytest.mark.parametrize("names", [("Train", "Valid"), ("training", "validation"), ("train", "val")])
def test_a_validation_split_is_validation_and_without_a_test_split_nothing_is_called_test(make, names):
    source = open_dataset(make(dict(zip(names, (30, 9), strict=True))))
    assert len(source.class_names) == 3
    splits = split(source)
    assert (len(splits.train), len(splits.val), len(splits.test)) == (30, 9, 0)


def test_with_train_and_test_validation_is_held_out_of_train(make):
    assert sizes(make({"Training": 30, "Testing": 6})) == (27, 3, 6)


def test_one_split_is_divided(make):
    assert sizes(make({"train": 30})) == (21, 3, 6)


@pytest.mark.parametrize("names", [{"val": 9}, {"test": 6}, {"Validation": 9, "test": 6}])
def test_without_a_training_split_there_is_nothing_to_train_on(make, names):
    assert "no training split" in refusal(make(names))


def test_two_names_of_one_split_are_a_question(make):
    message = refusal(make({"train": 30, "val": 9, "validation": 6}))
    assert "val and validation" in message
    assert message.endswith("?")


def test_several_splits_without_a_known_name_are_a_question(make, tmp_path):
    name = make({"first": 9, "second": 6})
    if name.startswith("folder:"):  # class folders, with folders inside
        assert open_dataset(name).class_names == ["first", "second"]
    else:
        assert refusal(name).endswith("?")
