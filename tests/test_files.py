import csv
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vicinal import files

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@given(content=JSON)
def test_json_is_read_back_as_it_was(folder, content):
    file = folder / "a.json"
    files.write_json(file, content)
    assert json.loads(file.read_text()) == content


def test_json_has_null_for_what_is_not_finite(tmp_path):
    files.write_json(tmp_path / "a.json", {"loss": math.nan, "row": (1.5, math.inf, [-math.inf])})
    assert (
        tmp_path / "a.json"
    ).read_text() == '{\n "loss": null,\n "row": [\n  1.5,\n  null,\n  [\n   null\n  ]\n ]\n}\n'


def test_csv_is_read_back_and_none_is_an_empty_cell(tmp_path):
    files.write_csv(tmp_path / "a.csv", ("name", "loss"), [('comma, quote " and\nline', 0.1), ("none", None)])
    with open(tmp_path / "a.csv", newline="") as stream:
        rows = list(csv.reader(stream))
    assert rows == [["name", "loss"], ['comma, quote " and\nline', "0.1"], ["none", ""]]


def test_line_ends_and_unicode_are_kept(tmp_path):
    files.write_text(tmp_path / "a.txt", "one\r\ntwo\né")
    assert (tmp_path / "a.txt").read_bytes() == "one\r\ntwo\né".encode()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    files.write_text(file, "old")

    def full(descriptor):
        raise OSError("no space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        files.write_text(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
