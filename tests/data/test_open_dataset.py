import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from vicinal.cache_folder import cache_folder
from vicinal.data import open_dataset
from vicinal.data.open_dataset import DIGITS_FILE
from vicinal.errors import VicinalError


@pytest.mark.parametrize("file", [DIGITS_FILE, "no such file"])
def test_digits_are_those_of_scikit_learn(monkeypatch, file):
    monkeypatch.setattr(sys.modules["vicinal.data.open_dataset"], "DIGITS_FILE", file)  # hidden by a function
    source, digits = open_dataset("digits"), load_digits()
    assert source.channels == len(source.info.mean) == 1
    assert (len(source.train), len(source.test)) == (1438, 359)
    for part in (source.train, source.test):
        assert np.array_equal(part.labels, digits.target[part.rows])
        for index in (0, 1, 300):
            picture = part.image(index)
            assert picture.mode == "L"
            assert np.abs(np.asarray(picture) / 255 - digits.images[part.rows[index]] / 16).max() < 0.5 / 255
    pixels = digits.images / 16
    assert source.info.mean[0] == pytest.approx(pixels.mean(), abs=1e-3)
    assert source.info.std[0] == pytest.approx(pixels.std(), abs=1e-3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cifar1O", "unknown dataset 'cifar1O'; did you mean 'cifar10'? Known: digits, cifar10,"),
        ("digit", "did you mean 'digits'?"),
        ("uoft-cs/cifar10", "did you mean 'hub:uoft-cs/cifar10'?"),
        ("something else", "unknown dataset 'something else'. Known: digits, cifar10"),
        ("csv:x", "unknown dataset 'csv:x'"),
        ("folder:", "'folder:' must be written as folder:PATH"),
        ("hub:", "'hub:' must be written as hub:ID"),
    ],
)
def test_mistyped_names_are_errors(name, expected):
    with pytest.raises(VicinalError) as raised:
        open_dataset(name)
    assert expected in str(raised.value)


def test_a_folder_without_the_word_is_suggested(folder):
    with pytest.raises(VicinalError, match=f"did you mean 'folder:{folder}'"):
        open_dataset(str(folder))


def test_where_the_cache_is(monkeypatch):
    assert cache_folder(Path("given")) == Path("given")
    monkeypatch.setenv("VICINAL_CACHE", "/own")
    assert cache_folder() == Path("/own")
    monkeypatch.delenv("VICINAL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/vicinal")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "vicinal"


def test_importing_the_package_does_not_import_what_only_some_sets_need():
    code = (
        "import sys, vicinal.data; print([name for name in ('datasets', 'sklearn', 'pyarrow') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
