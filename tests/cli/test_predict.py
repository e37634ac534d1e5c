import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vicinal
from vicinal.cli.main import main

NAMES = ["cat", "dog", "horse"]


@pytest.fixture
def run(tmp_path):
    model = vicinal.create_model(
        "vit-micro", prior="gab", img_size=(8, 12), depth=1, num_classes=3, global_pool="token"
    )
    preprocessing = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)}
    vicinal.save(model, tmp_path / "runs" / "x" / "model", class_names=NAMES, preprocessing=preprocessing)
    return str(tmp_path / "runs" / "x")


def paint(file, size=(12, 8), mode="RGB", seed=0):
    """A random picture; returns its pixels."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(file)
    return pixels


def probabilities_of(run, pixels):
    values = (torch.from_numpy(pixels).double() / 255 - torch.tensor([0.4, 0.5, 0.6])) / torch.tensor([0.2, 0.3, 0.4])
    model = vicinal.load(run + "/model")
    with torch.no_grad():
        return model.double()(values.permute(2, 0, 1)[None])[0].softmax(0)


def test_the_likeliest_classes_are_named_with_their_probabilities(run, tmp_path, capsys):
    pixels = [paint(tmp_path / f"{seed}.png", seed=seed) for seed in range(5)]
    words = ["predict", run, *(str(tmp_path / f"{seed}.png") for seed in range(5)), "--batch-size", "2"]
    assert main([*words, "--json", "--top", "9"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["image"] for each in found] == words[2:7]
    for each, picture in zip(found, pixels, strict=True):
        expected = probabilities_of(run, picture)
        assert [one["class"] for one in each["predictions"]] == expected.argsort(descending=True).tolist()
        for one in each["predictions"]:
            assert one["name"] == NAMES[one["class"]]
            assert one["probability"] == pytest.approx(expected[one["class"]].item(), abs=1e-5)

    assert main([*words, "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0::3] == words[2:7]
    best = found[0]["predictions"][0]
    assert lines[1] == f"  {100 * best['probability']:6.2f}%  {best['name']}"
    assert len(lines) == 15


def test_pictures_of_any_size_and_mode_are_taken_from_files_and_folders(run, tmp_path, capsys):
    folder = tmp_path / "pictures"
    paint(folder / "b" / "gray.jpg", (40, 30), "L")
    paint(folder / "b" / "see-through.PNG", (5, 90), "RGBA")
    paint(folder / "a.gif", (64, 64), "P")
    paint(folder / "c.tiff", (12, 8), "CMYK")
    paint(folder / "c.jpg", (12, 8)).tofile(folder / ".hidden.png")
    (folder / "notes.txt").write_text("no picture")
    paint(tmp_path / "one.webp", (9, 9))
    assert main(["predict", run, str(folder), str(tmp_path / "one.webp"), "--json", "--top", "1"]) == 0
    found = [each["image"] for each in json.loads(capsys.readouterr().out)]
    inside = ["a.gif", "b/gray.jpg", "b/see-through.PNG", "c.jpg", "c.tiff"]
    assert found == [*(str(folder / name) for name in inside), str(tmp_path / "one.webp")]


def test_without_names_classes_are_numbers(tmp_path, capsys):
    model = vicinal.create_model("vit-micro", img_size=8, depth=1, num_classes=2, in_chans=1, global_pool="token")
    vicinal.save(model, tmp_path / "model")
    paint(tmp_path / "x.png")
    words = ["predict", str(tmp_path / "model"), str(tmp_path / "x.png")]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "%  class 0\n" in out
    assert "%  class 1\n" in out
    assert main([*words, "--json", "--explain", str(tmp_path / "gray")]) == 0
    assert json.loads(capsys.readouterr().out)[0]["predictions"][0].keys() == {"class", "probability"}
    assert (tmp_path / "gray" / "x.png").exists()


def test_what_cannot_be_read_does_not_stop_the_rest(run, tmp_path, capsys):
    folder = tmp_path / "pictures"
    for name in ("a.png", "c.png"):
        paint(folder / name)
    (folder / "b.png").write_text("no picture")
    whole = tmp_path / "whole.jpg"
    paint(whole, (200, 200))
    (folder / "cut.jpg").write_bytes(whole.read_bytes()[:900])
    (tmp_path / "empty").mkdir()
    words = ["predict", run, str(folder), str(tmp_path / "gone.png"), str(tmp_path / "empty"), "--json"]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert [each["image"] for each in json.loads(out)] == [str(folder / "a.png"), str(folder / "c.png")]
    problems = err.splitlines()
    assert problems[0] == "vicinal: some images could not be read and are left out:"
    assert len(problems) == 5
    for name in ("gone.png", "empty", "b.png", "cut.jpg"):
        assert sum(name in problem for problem in problems) == 1


def test_explanations_are_drawn_and_overwrite_nothing(run, tmp_path, capsys):
    folder, out = tmp_path / "pictures", tmp_path / "drawn" / "here"
    for name in ("cat.png", "other/cat.jpg", "dog.png"):
        paint(folder / name)
    out.mkdir(parents=True)
    (out / "dog.png").write_text("what was there")
    assert main(["predict", run, str(folder), "--explain", str(out), "--batch-size", "1"]) == 0
    assert f"drew 3 into {out}" in capsys.readouterr().err
    assert sorted(file.name for file in out.iterdir()) == ["cat-2.png", "cat.png", "dog-2.png", "dog.png"]
    assert (out / "dog.png").read_text() == "what was there"
    for name in ("cat.png", "cat-2.png", "dog-2.png"):
        with Image.open(out / name) as image:
            assert image.format == "PNG"
            assert image.width > image.height


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top", "0"], "--top and --batch-size must be at least 1, got 0 and 32"),
        (["--batch-size", "0"], "--top and --batch-size must be at least 1, got 5 and 0"),
        (["--explain", "file"], "--explain must be a folder that can be created, got file: File exists"),
    ],
)
def test_bad_input_is_a_short_message(run, tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    paint(tmp_path / "x.png")
    assert main(["predict", run, "x.png", *words]) == 2
    assert capsys.readouterr() == ("", f"vicinal: {message}\n")


def test_patterns_and_lists_of_paths_are_taken(run, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "pictures"
    for name in ("a.png", "b.png", "c.jpg", "deep/d.png"):
        paint(folder / name)

    def predicted(*words, lines=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        assert main(["predict", run, *words, "--json"]) == 0
        found = [each["image"] for each in json.loads(capsys.readouterr().out)]
        return [str(Path(file).relative_to(folder)) for file in found]

    assert predicted(f"{folder}/*.png") == ["a.png", "b.png"]
    assert predicted(f"{folder}/**/[cd].*") == ["c.jpg", "deep/d.png"]
    assert predicted("-", lines=f"{folder}/c.jpg\r\n\n{folder}/deep\n") == ["c.jpg", "deep/d.png"]
    assert predicted(f"{folder}/b.png", "-", lines=f"{folder}/a.png") == ["b.png", "a.png"]
    paint(folder / "[x].png")
    assert predicted(f"{folder}/[x].png") == ["[x].png"]  # a file comes before a pattern
    assert main(["predict", run, f"{folder}/*.bmp"]) == 2
    assert "no file matches" in capsys.readouterr().err


def test_python_gives_what_the_command_prints(run, tmp_path, capsys):
    pixels = paint(tmp_path / "x" / "a.png"), paint(tmp_path / "x" / "b.png", (30, 40), seed=1)
    assert main(["predict", run, str(tmp_path / "x"), "--json", "--top", "2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert vicinal.predict(run, tmp_path / "x", top=2) == printed
    assert vicinal.predict(run, [str(tmp_path / "x" / "*.png")], top=2) == printed
    mixed = vicinal.predict(run, [pixels[0], Image.fromarray(pixels[1])], top=2, device="cpu")
    assert [each["image"] for each in mixed] == ["", ""]
    for one, other in zip(mixed, printed, strict=True):
        for found, expected in zip(one["predictions"], other["predictions"], strict=True):
            assert found["name"] == expected["name"]
            assert found["probability"] == pytest.approx(expected["probability"], abs=1e-6)
    (alone,) = vicinal.predict(run, pixels[0], top=2)
    assert [each["name"] for each in alone["predictions"]] == [each["name"] for each in mixed[0]["predictions"]]
    (tmp_path / "x" / "c.png").write_text("no picture")
    for images, message in ((tmp_path / "x", "c.png is not an image"), (tmp_path / "y", "there is no file")):
        with pytest.raises(vicinal.VicinalError, match=message):
            vicinal.predict(run, images)
    with pytest.raises(vicinal.VicinalError, match="top and batch_size must be at least 1, got 0 and 32"):
        vicinal.predict(run, [], top=0)


def test_no_pictures_are_an_error(run, tmp_path, capsys):
    assert main(["predict", run]) == 2
    assert capsys.readouterr().err == "vicinal: there are no images: none was given\n"
    assert main(["predict", run, str(tmp_path / "runs")]) == 2
    assert "there are no images: the folder" in capsys.readouterr().err
    assert main(["predict", run + "y", "x.png"]) == 2
    assert f"did you mean {run}?" in capsys.readouterr().err
