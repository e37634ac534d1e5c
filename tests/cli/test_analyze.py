"""The commands on a run that was trained for a moment, and on models of timm's with random weights."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vicinal
from vicinal.analysis import ImageSelection, open_models
from vicinal.analysis.receptive_field import ReceptiveField
from vicinal.cli.main import main

TIMM = ["--timm", "test_vit", "--img-size", "64", "--random-weights"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "gmm"
    small = {"epochs": 1, "warmup": 0, "train_size": 128, "val_size": 0}
    return vicinal.train(vicinal.TrainConfig(prior="gmm", pool="token", **small, out=folder))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for number in range(3):
        Image.fromarray(generator.integers(0, 255, (80, 100, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return folder


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are written as empty files: drawing takes most of the time of a command."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **options: Path(path).write_bytes(b""))


def said(capsys, *words):
    """The message for bad words."""
    assert main(["analyze", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_help_names_every_instrument_and_loads_nothing_heavy(capsys):
    code = (
        "import sys; from vicinal.cli.main import main\n"
        "for words in ([], ['erf'], ['fit'], ['masks'], ['attention']):\n"
        "    try: main(['analyze', *words, '--help'])\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'timm', 'datasets', 'scipy', 'sklearn', 'matplotlib', 'PIL'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {name} " in done.stdout for name in ("erf", "fit", "masks", "attention"))
    assert "did you mean 'erf'" in said(capsys, "erff", "runs/x")


def test_erf_of_a_run_goes_to_its_folder(run, capsys):
    assert main(["analyze", "erf", str(run.folder), "--count", "6", "--batch-size", "4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("patch 2 2 of 4 x 4, mean of 6 images")
    folder = run.folder / "analysis"
    found = ReceptiveField.load(folder / "erf.npz")
    (figures,) = json.loads((folder / "erf.json").read_text())
    assert found.images == figures["images"] == 6
    assert found.field.sum() == pytest.approx(1)
    assert figures["outside_center_patch"] == pytest.approx(found.outside_center_patch)
    assert f"{found.outside_center_patch:.1%}" in out
    assert (folder / "erf.png").stat().st_size > 10_000


def test_erf_compares_positions_and_models(run, photos, tmp_path, capsys):
    words = ["analyze", "erf", str(run.folder), "--count", "4", "--positions", "trained", "zero", "--json"]
    assert main([*words, "--layer", "0", "--at", "1", "2", "--mode", "abs", "--out", str(tmp_path / "a")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["positions"] for each in found] == ["trained", "zero"]
    assert [each["label"] for each in found] == [
        "gmm (vit-micro), trained positions",
        "gmm (vit-micro), zero positions",
    ]
    assert found[0]["at"] == [1, 2]
    assert found[0]["layer"] == "blocks.0"
    assert {file.name for file in (tmp_path / "a").iterdir()} == {
        "erf.png",
        "erf.json",
        *(f"erf-gmm-vit-micro-{each}-positions.{ending}" for each in ("trained", "zero") for ending in ("png", "npz")),
    }
    alone = ["analyze", "erf", *TIMM, "--images", f"folder:{photos}", "--out", str(tmp_path / "a")]
    assert main(alone) == 0
    assert "mean of 3 images" in capsys.readouterr().out
    assert {file.name for file in (tmp_path / "a").iterdir()} == {"erf.png", "erf.npz", "erf.json"}  # none from before


def test_fit_writes_table_and_pictures(run, tmp_path, capsys):
    assert main(["analyze", "fit", str(run.folder), "--kernels", "2", "--layers", "0", "-1"]) == 0
    assert "K=2" in capsys.readouterr().out
    folder = run.folder / "analysis"
    with open(folder / "fit.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["name"] for row in rows} == {"blocks.0.attn", "blocks.3.attn"}
    fits = json.loads((folder / "fit.json").read_text())["fits"]
    assert len(fits) == len(rows)
    assert {"fit.png", "kernels.png"} <= {file.name for file in folder.iterdir()}
    swin = [
        "--timm",
        "swin_tiny_patch4_window7_224",
        "--random-weights",
        "--heads",
        "mean",
        "--view",
        "centre",
        "--json",
    ]
    assert main(["analyze", "fit", *swin, "--layers", "0", "--out", str(tmp_path)]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["view"] == "center"
    assert report["fits"][0]["role"] == "bias"


def test_masks_are_drawn_with_their_history(run, capsys):
    assert main(["analyze", "masks", str(run.folder)]) == 0
    assert "masks.png, convolution.png, mixture-blocks.0.attn.png" in capsys.readouterr().out
    names = {file.name for file in (run.folder / "analysis").iterdir()}
    assert {"masks.csv", "masks.json", "options.csv", "history.png", "convolution.png"} <= names
    # The last layer's patches reach no output, so its mixture stays zero.
    assert {name for name in names if name.startswith("mixture")} == {
        "mixture-blocks.0.attn.png",
        "mixture-blocks.2.attn.png",
    }
    with open(run.folder / "analysis" / "options.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["layer"] == "blocks.0.attn" and row["option"] == "sigma"]
    sigma = run.model().blocks[0].attn.prior.sigma.flatten().tolist()
    assert sorted(float(row["value"]) for row in rows) == pytest.approx(sorted(sigma), rel=1e-5)


def test_runs_of_one_name_are_told_apart_by_the_folders_above(photos, tmp_path, capsys, monkeypatch, undrawn):
    for place in ("a/x", "b/x"):
        vicinal.save(
            vicinal.create_model("vit-micro", prior="gmm:init=spread", img_size=16, depth=1, global_pool="token"),
            tmp_path / place,
        )
    monkeypatch.chdir(tmp_path)
    runs = ["a/x", "b/x", str(tmp_path / "a" / "x")]
    places = {
        "a/x (vit-micro)": "a-x-vit-micro",
        "b/x (vit-micro)": "b-x-vit-micro",
        "a/x (vit-micro) (2)": "a-x-vit-micro-2",
    }
    look = ["--images", str(photos), "--count", "1", "--pictures", "0"]
    cases = {"attention": (look, {"attention.png"}), "fit": (["--heads", "mean"], set())}
    for instrument, (words, beside) in cases.items():
        assert main(["analyze", instrument, *runs, *words, "--json", "--out", instrument]) == 0
        assert [each["model"] for each in json.loads(capsys.readouterr().out)] == list(places)
        assert {file.name for file in (tmp_path / instrument).iterdir()} == {*places.values(), *beside}
        for name, place in places.items():
            assert json.loads((tmp_path / instrument / place / f"{instrument}.json").read_text())["model"] == name
    monkeypatch.chdir(tmp_path / "a" / "x")
    named = {each: open_models([each], device="cpu")[0].name for each in (".", "../../b/x", "../x/")}
    assert named == dict.fromkeys(named, "x (vit-micro)")
    several = open_models([".", "../../b/x"], ["deit_tiny_patch16_224"] * 2, random_weights=True, device="cpu")
    assert [each.name for each in several] == [
        *("a/x (vit-micro)", "b/x (vit-micro)", "deit_tiny_patch16_224", "deit_tiny_patch16_224 (2)"),
    ]


def test_pictures_of_a_folder_are_drawn_by_chance_and_the_same_for_a_seed(photos):
    def drawn(seed, count=2):
        (opened,) = open_models([], ["vit_tiny_patch16_224"], img_size=64, random_weights=True, device="cpu")
        selection = ImageSelection(photos, count=count, batch_size=2, seed=seed)
        return [name for names, _ in selection.batches(opened) for name in names]

    assert drawn(0) == drawn(0)
    assert {tuple(sorted(drawn(seed))) for seed in range(12)} == {("0", "1"), ("0", "2"), ("1", "2")}
    assert drawn(5, count=3) == ["0", "1", "2"]


def test_files_of_others_are_left_alone(run, tmp_path, undrawn):
    mine = tmp_path / "erf-of-my-own.png"
    mine.write_bytes(b"mine")
    words = ["analyze", "erf", str(run.folder), "--count", "2", "--positions", "trained", "zero", "--out", tmp_path]
    assert main([*map(str, words)]) == 0
    assert mine.read_bytes() == b"mine"


def test_unreadable_pictures_are_named_and_the_rest_is_measured(photos, tmp_path, capsys, undrawn):
    for file in photos.iterdir():
        (tmp_path / "mixed").mkdir(exist_ok=True)
        (tmp_path / "mixed" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "mixed" / "broken.png").write_bytes(b"no picture")
    words = ["erf", *TIMM, "--images", tmp_path / "mixed", "--out", tmp_path / "out"]
    message = said(capsys, *words)
    assert "broken.png" in message
    assert ReceptiveField.load(tmp_path / "out" / "erf.npz").images == 3
    messages = []
    for seed in range(8):
        main([*map(str, ["analyze", *words, "--count", "1", "--seed", seed])])
        messages.append(capsys.readouterr().err)
        assert ReceptiveField.load(tmp_path / "out" / "erf.npz").images == 1  # the next one that can be read
    assert any("broken.png" in message for message in messages)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "broken.png").write_bytes(b"no picture")
    assert "none of the images can be read" in said(
        capsys, "erf", *TIMM, "--images", tmp_path / "none", "--out", tmp_path / "other"
    )


def test_bad_words_are_short_messages(run, photos, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no model is given" in said(capsys, "erf")
    assert "there is no run runs/x" in said(capsys, "masks", "runs/x")
    assert "did you mean" in said(capsys, "erf", "--timm", "vit_tiny_patch16_22", "--out", "a")
    assert "images must be" in said(capsys, "erf", *TIMM, "--out", "a")
    assert "out must be" in said(capsys, "erf", *TIMM, "--images", photos)
    assert f"{tmp_path} has no images in it" in said(
        capsys, "erf", *TIMM, "--images", f"folder:{tmp_path}", "--out", "a"
    )
    assert "there is no file or folder nowhere" in said(
        capsys, "erf", *TIMM, "--images", "folder:nowhere", "--out", "a"
    )
    assert "Vit has no layer 99: it has 4 blocks" in said(capsys, "erf", run.folder, "--layer", "99")
    assert "unknown layer 'blocks.99'; did you mean 'blocks.3.attn'?" in said(
        capsys, "fit", run.folder, "--layers", "blocks.99"
    )
    assert "unknown layer '\u00b2'" in said(capsys, "fit", run.folder, "--layers", "\u00b2")
    assert "count must be a whole number >= 1, got 0" in said(capsys, "attention", run.folder, "--count", "0")
    assert "got -1" in said(capsys, "attention", run.folder, "--seed", "-1")
    assert "unknown dataset 'cifar1'; did you mean 'cifar10'?" in said(
        capsys, "erf", *TIMM, "--images", "cifar1", "--out", "a"
    )
    assert not (tmp_path / "a").exists()


def test_what_cannot_be_written_is_a_short_message(run, tmp_path, capsys, undrawn):
    (tmp_path / "file").write_text("")
    for instrument, where in (("fit", "file"), ("masks", "file/x"), ("attention", "file/x/y")):
        message = said(capsys, instrument, run.folder, "--out", tmp_path / where)
        assert message.startswith(f"vicinal: cannot write {tmp_path / where}: Not a directory; ")
        assert message.count("\n") == 1
    (tmp_path / "masks" / "masks.csv").mkdir(parents=True)
    message = said(capsys, "masks", run.folder, "--out", tmp_path / "masks")
    assert f"cannot write {tmp_path / 'masks' / 'masks.csv'}: " in message
    (tmp_path / "fit").mkdir()
    (tmp_path / "fit" / "gmm-vit-micro").write_text("")
    few = ["--layers", "0", "--heads", "mean"]
    message = said(capsys, "fit", run.folder, run.folder, *few, "--out", tmp_path / "fit")
    assert "gmm-vit-micro: File exists; " in message


def test_a_folder_that_cannot_be_written_to_is_told_before_anything_is_measured(run, tmp_path, capsys, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # root may write anywhere
    for instrument in ("erf", "fit", "masks", "attention"):
        message = said(
            capsys, instrument, run.folder, "--layers" if instrument != "erf" else "--layer", "99", "--out", tmp_path
        )
        assert message.startswith(f"vicinal: cannot write {tmp_path}: Permission denied; ")
