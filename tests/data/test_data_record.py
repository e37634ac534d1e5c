import csv
import gzip
import io

import numpy as np

from vicinal.data import DataRecord, open_dataset, split


def test_a_record_lists_every_image_with_its_split_and_class(folder, tmp_path):
    source = open_dataset(f"folder:{folder}")
    splits = split(source, val_size=3)
    record = DataRecord.of({"train": splits.train, "val": splits.val, "test": splits.test}, source.class_names)
    record.write(tmp_path)
    rows = list(csv.DictReader(io.StringIO(gzip.decompress((tmp_path / "data.csv.gz").read_bytes()).decode())))
    assert sorted(row["name"] for row in rows) == sorted(
        f"{name}/{n}.png" for name, count in (("cat", 10), ("dog", 5)) for n in range(count)
    )
    for row in rows:
        assert int(row["bytes"]) == (folder / row["name"]).stat().st_size
        assert row["class"] == row["name"].split("/")[0]
    assert [row["split"] for row in rows] == ["train"] * 9 + ["val"] * 3 + ["test"] * 3
    assert DataRecord.read(tmp_path).difference(record) is None
    assert DataRecord.read(folder) is None


def test_names_with_commas_quotes_and_other_letters_survive(folder, tmp_path):
    (folder / "cat" / "0.png").rename(folder / "cat" / 'a, "b" Ж\u2028.png')
    source = open_dataset(f"folder:{folder}")
    record = DataRecord.of({"train": source.train}, source.class_names)
    record.write(tmp_path)
    assert DataRecord.read(tmp_path).difference(record) is None
    assert record.count_known(source.train, ["train"]) == len(source.train)
    assert record.count_known(source.train, ["val"]) == record.count_known(source.test, ["train"]) == 0


def test_another_seed_and_another_order_are_differences(folder):
    source = open_dataset(f"folder:{folder}")

    def record(seed):
        splits = split(source, val_size=3, seed=seed)
        return DataRecord.of({"train": splits.train, "val": splits.val}, source.class_names)

    moved = len(set(split(source, val_size=3).val.rows) ^ set(split(source, val_size=3, seed=1).val.rows))
    assert record(0).difference(record(1)).startswith(f"{moved} in another split (")
    whole = source.train
    back = whole.take(np.arange(len(whole))[::-1].copy())
    both = [DataRecord.of({"train": each}, source.class_names) for each in (whole, back)]
    assert both[0].difference(both[1]) == "the same images in another order"
