"""`vicinal analyze attention` on small models with random weights."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

import vicinal
from vicinal.analysis.attention_maps import rollout
from vicinal.analysis.output_files import file_stem
from vicinal.cli.main import main
from vicinal.data import Preprocessing, decode, evaluation_tensor


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    made = {
        "vit": vicinal.create_model("vit-micro", img_size=32, depth=2, global_pool="token"),
        "swin": vicinal.create_model("swin", img_size=32, depths=(2, 2)),
        "cait": vicinal.create_model("cait", img_size=32, depth=1),
        "xcit": vicinal.create_model("xcit_nano_12_p16_224", img_size=64, depth=1),
    }
    return {name: str(vicinal.save(model, folder / name)) for name, model in made.items()}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for place in ("a/ship.png", "b/ship.png", "b/cat 1.png"):
        (folder / place).parent.mkdir(exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(folder / place)
    return folder


@pytest.fixture
def analyze(photos, tmp_path):
    """Runs the command and gives its exit code."""

    def call(model, *words, out=tmp_path / "out"):
        given = [model, "--images", str(photos), "--out", str(out), *words]
        return main(["analyze", "attention", *given])

    return call


def rows_of(file):
    with open(file, newline="") as stream:
        return list(csv.DictReader(stream))


def names_in(folder):
    return {file.name for file in folder.iterdir()}


def test_heads_are_measured_and_pictures_drawn_with_their_numbers(models, photos, analyze, tmp_path, capsys):
    assert analyze(models["vit"], "--pictures", "3", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["images"] == 3
    pictures = ["ship", "cat 1", "ship (2)"]
    assert names_in(tmp_path / "out") == {
        *("attention.png", "attention.csv", "attention.json", "maps.csv", "rollout.png", "rollout.csv"),
        *("maps-ship.png", "maps-ship-2.png", "maps-cat-1.png"),
    }
    for name in ("maps", "rollout"):
        assert list(dict.fromkeys(row["image"] for row in rows_of(tmp_path / "out" / f"{name}.csv"))) == pictures
    model = vicinal.load(models["vit"])
    preprocessing = Preprocessing.of_model(model.pretrained_cfg)
    files = [photos / place for place in ("a/ship.png", "b/cat 1.png", "b/ship.png")]
    images = torch.stack([evaluation_tensor(decode(file, "", 3), preprocessing) for file in files])
    expected = rollout(model, images).values.flatten().tolist()
    written = [float(row["attention"]) for row in rows_of(tmp_path / "out" / "rollout.csv")]
    assert written == pytest.approx(expected, rel=1e-4)


def test_layers_without_a_map_are_left_out(models, analyze, tmp_path, capsys):
    """XCiT attends over channels, and reads the image with class layers at its end."""
    assert analyze(models["xcit"], "--count", "1") == 0
    assert "left out: 1 layer" in capsys.readouterr().out
    assert {row["layer"] for row in rows_of(tmp_path / "out" / "maps.csv")} == {
        "cls_attn_blocks.0.attn",
        "cls_attn_blocks.1.attn",
    }
    assert analyze(models["xcit"], "--count", "1", "--layers", "0") == 2
    assert "the attention of blocks.0.attn has no map" in capsys.readouterr().err


def test_json_is_all_that_is_printed_where_there_is_no_rollout(models, analyze, tmp_path, capsys):
    assert analyze(models["swin"], "--count", "1", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)[0]["model"] == "swin"
    assert err.startswith("no rollout of swin: rollout needs layers on one grid")
    assert err.endswith("such as 2, 3\n")
    assert not (tmp_path / "out" / "rollout.png").exists()


def test_what_is_advised_can_be_asked_for(models, analyze, tmp_path, capsys):
    assert analyze(models["swin"], "--count", "1", "--layers", "2", "3", "--query", "mean") == 0
    assert capsys.readouterr().err == ""
    (what,) = {row["layer"] for row in rows_of(tmp_path / "out" / "rollout.csv")}
    assert what.startswith("rollout of 2 layers, layers.1.blocks.0.attn")
    assert analyze(models["cait"], "--count", "1", "--layers", "-1", "--query", "0", "0") == 2
    assert "use query='class'" in capsys.readouterr().err
    assert analyze(models["cait"], "--count", "1", "--layers", "-1", "--query", "class") == 0
    assert {row["query"] for row in rows_of(tmp_path / "out" / "maps.csv")} == {"class"}


def test_heads_and_a_patch_can_be_chosen(models, analyze, tmp_path):
    assert analyze(models["vit"], "--count", "1", "--layers", "-1", "--heads", "0", "2", "--query", "1", "3") == 0
    rows = rows_of(tmp_path / "out" / "maps.csv")
    assert {(row["layer"], row["head"], row["query"]) for row in rows} == {
        ("blocks.1.attn", "1", "1 3"),
        ("blocks.1.attn", "3", "1 3"),
    }


def test_nothing_is_left_of_an_earlier_call(models, analyze, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.png").write_text("")
    assert analyze(models["vit"], "--pictures", "3") == 0
    assert analyze(models["swin"], "--pictures", "1", "--count", "1") == 0
    (picture,) = {file_stem(row["image"]) for row in rows_of(tmp_path / "out" / "maps.csv")}
    assert names_in(tmp_path / "out") == {
        *("mine.png", "attention.png", "attention.csv", "attention.json", "maps.csv", f"maps-{picture}.png"),
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "2"], "unknown layer 2: there are 2 "),
        (["--heads", "0", "4"], "unknown head 4: blocks.0.attn has 4, 0 to 3"),
        (["--query", "0", "8"], "a column from 0 to 7, got 0 8"),
        (["--pictures", "-1"], "pictures must be a whole number >= 0, got -1"),
        (["--seed", "-1"], "seed must be a whole number from 0 to 2^63 - 1, got -1"),
    ],
)
def test_bad_words_are_told_before_anything_is_measured_or_written(
    models, analyze, tmp_path, capsys, monkeypatch, words, message
):
    monkeypatch.setattr("vicinal.analysis.attention_maps.outputs.attention_statistics", None)
    assert analyze(models["vit"], *words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
