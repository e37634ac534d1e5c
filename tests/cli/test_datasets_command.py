import numpy as np
import pytest
from PIL import Image

from vicinal.cli.datasets import run
from vicinal.data import SETS
from vicinal.errors import VicinalError


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VICINAL_CACHE", str(tmp_path / "cache"))


def test_lists_every_set_and_the_other_spellings(capsys):
    run([])
    out = capsys.readouterr().out
    for name, known in SETS.items():
        assert f"\n{name:17}" in out
        assert known.page in out
    assert "\ndigits                10      1,438     359     8         1  scikit-learn" in out
    for spelling in ("folder:PATH", "parquet:PATH", "hub:ID@CONFIG"):
        assert spelling in out


def test_looks_into_the_digits(capsys):
    run(["digits"])
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["classes"] == "10: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    assert lines["images"] == "train 1,294, val 144 (out of train), test 359 (a fifth, the same for every seed)"
    assert lines["sizes"].startswith("8 x 8 pixels")
    assert lines["channels"] == "1"
    assert "no flips" in lines["augmentation"]


def test_looks_into_a_folder(tmp_path, capsys):
    for name, count in (("cat", 20), ("dog", 30)):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.zeros((10 + number, 40, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets" / name / f"{number}.png")
    run([f"folder:{tmp_path / 'pets'}"])
    out = capsys.readouterr().out
    assert "2: cat, dog" in out
    assert "train 36, val 4 (out of train), test 10 (a fifth, the same for every seed)" in out
    assert "16 (cat) to 24 (dog) images per class" in out
    assert " x 40 pixels, height x width, of 40 sampled images; train at: 64" in out


def test_says_which_split_is_which(tmp_path, capsys):
    for split, count in (("Training", 9), ("Valid", 4)):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (4, 4)).save(tmp_path / split / name / f"{number}.png")
    run([f"folder:{tmp_path}"])
    assert "train 18 (Training), val 8 (Valid), test 0\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cifar1"], "unknown dataset 'cifar1'; did you mean 'cifar10'"),
        (["folder:nowhere"], "nowhere does not exist; expected a folder of images"),
        (["--data-dir", "x"], "--data-dir needs the name of a dataset"),
        (["cifar10", "--data-dir", "nowhere"], "nowhere does not exist; expected a folder of Parquet files"),
    ],
)
def test_bad_input_is_an_error(words, message):
    with pytest.raises(VicinalError, match=message):
        run(words)
