import gzip

import numpy as np
import pytest
from datasets import Dataset
from test_hf_datasets import png

import vicinal
from photo_folders import config, paint
from vicinal.cli.main import main
from vicinal.data import TransformedImages, open_dataset
from vicinal.data.unreadable import find_unreadable
from vicinal.errors import VicinalError

BROKEN = ["cat/003.png", "dog/000.png", "dog/011.png"]


@pytest.fixture
def photos(tmp_path):
    folder = paint(tmp_path / "photos", 20)
    whole = (folder / BROKEN[1]).read_bytes()
    for name, content in zip(BROKEN, (b"words", whole[: len(whole) // 2], b""), strict=True):
        (folder / name).write_bytes(content)
    return folder


def test_every_unreadable_file_is_listed_at_once(photos, capsys):
    assert main(["datasets", f"folder:{photos}", "--check"]) == 2
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert lines[0].startswith("vicinal: 3 of 40 images cannot be read")
    assert [next(name for name in BROKEN if name in line) for line in lines[1:]] == BROKEN
    for name in BROKEN:
        (photos / name).unlink()
    assert main(["datasets", f"folder:{photos}", "--check"]) == 0
    assert capsys.readouterr().out.startswith("all 37 images can be read\n")
    assert main(["datasets", "--check"]) == 2
    assert "--check needs the name of a dataset" in capsys.readouterr().err


def test_the_rest_is_the_dataset_without_them(photos, square):
    skipping = open_dataset(f"folder:{photos}", skip_unreadable=True)
    parts = skipping.train, skipping.test
    images = [TransformedImages(part, square(8)).__getitems__([(0, i) for i in range(len(part))]) for part in parts]
    with pytest.raises(VicinalError, match=r"(cat|dog).0\d\d\.png"):
        TransformedImages(open_dataset(f"folder:{photos}").train, square(8))  # its cache is another one
    assert skipping.train.skipped.keys() == find_unreadable(skipping.own.splits["train"]).keys() | {3, 20, 31}
    for name in BROKEN:
        (photos / name).unlink()
    clean = open_dataset(f"folder:{photos}")
    for part, other, (tensors, labels) in zip(parts, (clean.train, clean.test), images, strict=True):
        assert part.files() == other.files()
        expected = TransformedImages(other, square(8)).__getitems__([(0, i) for i in range(len(other))])
        assert np.array_equal(tensors, expected[0])
        assert np.array_equal(labels, expected[1])


def test_the_second_run_does_not_read_all_images_again(photos, monkeypatch):
    first = open_dataset(f"folder:{photos}", skip_unreadable=True)
    monkeypatch.setattr("vicinal.data.unreadable.find_unreadable", lambda split: 1 / 0)
    assert open_dataset(f"folder:{photos}", skip_unreadable=True).train.skipped == first.train.skipped
    (photos / "dog" / "000.png").write_bytes(b"other words")
    with pytest.raises(ZeroDivisionError):
        open_dataset(f"folder:{photos}", skip_unreadable=True)


def test_rows_of_parquet_files_are_left_out(tmp_path):
    images = [b"words" if row in (2, 7) else png(row) for row in range(20)]
    Dataset.from_dict({"image": images, "label": [0, 1] * 10}).to_parquet(tmp_path / "train.parquet")
    source = open_dataset(f"parquet:{tmp_path}", skip_unreadable=True)
    assert len(source.train) + len(source.test) == 18
    assert list(source.train.skipped_files()) == ["train/image 2", "train/image 7"]


def test_a_split_without_a_readable_image_is_an_error(tmp_path):
    for name in ("train/cat", "train/dog", "test/cat"):
        paint((tmp_path / name).parent, 3, classes=((tmp_path / name).name,))
    for file in (tmp_path / "test").rglob("*.png"):
        file.write_bytes(b"words")
    with pytest.raises(VicinalError, match="none of the 3 test images can be read"):
        open_dataset(f"folder:{tmp_path}", skip_unreadable=True)


def test_a_run_records_what_it_left_out(photos, tmp_path, capsys):
    with pytest.raises(VicinalError, match=r"(cat|dog).0\d\d\.png"):
        vicinal.train(config(photos, tmp_path / "strict", epochs=1))
    run = vicinal.train(config(photos, tmp_path / "run", epochs=1, skip_unreadable=True))
    header = " ".join(capsys.readouterr().out.split())  # lines are wrapped
    assert f"skipped 3 images left out that cannot be read: {run.folder / 'skipped.csv'}" in header
    rows = [line.split(",")[0] for line in (run.folder / "skipped.csv").read_text().splitlines()]
    assert rows == ["name", *BROKEN]
    record = gzip.decompress((run.folder / "data.csv.gz").read_bytes()).decode().splitlines()
    assert [line.split(",")[1] for line in record if line.startswith("skipped,")] == BROKEN
    assert len(record) == 41
    assert main(["eval", str(run.folder)]) == 0
    (run.folder / "results.json").unlink()
    paint(photos, 1)  # 000.png can be read again
    with pytest.raises(VicinalError, match=r"dog/000\.png"):
        vicinal.resume(run.folder)
