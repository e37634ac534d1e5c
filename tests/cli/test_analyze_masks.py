"""`vicinal analyze masks` on small models."""

import json

import pytest
import torch

import vicinal
from vicinal.attachment import get_priors
from vicinal.cli.main import main


def saved(folder, prior, moved=()):
    """A model whose mixtures are moved from zero in some layers."""
    model = vicinal.create_model("vit-micro", prior=prior, img_size=16, depth=3, global_pool="token")
    with torch.no_grad():
        for number, each in enumerate(get_priors(model).values()):
            for parameter in each.parameters() if number in moved else ():
                parameter.add_(1)
    return str(vicinal.save(model, folder))


def mixtures(folder):
    return sorted(file.name for file in folder.glob("mixture*"))


def test_mixtures_that_are_zero_are_drawn_only_where_asked_for(tmp_path, capsys):
    model, out = saved(tmp_path / "x", "gmm", moved=[1]), tmp_path / "out"
    assert main(["analyze", "masks", model, "--layers", "0", "-1", "--out", str(out)]) == 0
    assert mixtures(out) == ["mixture-blocks.0.attn.png", "mixture-blocks.2.attn.png"]
    assert main(["analyze", "masks", model, "--out", str(out)]) == 0
    assert mixtures(out) == ["mixture-blocks.1.attn.png"]  # and none from before
    assert main(["analyze", "masks", saved(tmp_path / "zero", "gmm"), "--out", str(out), "--json"]) == 0
    assert mixtures(out) == []
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["model"] == "zero (vit-micro)"


def test_every_mixture_of_a_composition_is_drawn(tmp_path):
    assert main(["analyze", "masks", saved(tmp_path / "x", "gmm+gmm", moved=[1]), "--out", str(tmp_path)]) == 0
    assert mixtures(tmp_path) == ["mixture-blocks.1.attn-gmm-1.png", "mixture-blocks.1.attn-gmm-2.png"]
    assert main(["analyze", "masks", saved(tmp_path / "y", "gmm+gab", moved=[0]), "--out", str(tmp_path)]) == 0
    assert mixtures(tmp_path) == ["mixture-blocks.0.attn.png"]


def test_a_history_that_is_not_there_is_told(tmp_path, capsys):
    run = tmp_path / "run"
    saved(run / "model", "gmm")
    (run / "config.yaml").write_text(vicinal.TrainConfig(prior="gmm").to_yaml())
    words = ["analyze", "masks", str(run), "--json"]
    assert main(words) == 0
    assert capsys.readouterr().err == "the run has no priors.csv, so there is no history to draw\n"
    (run / "priors.csv").write_text("epoch,layer,option,kernel,head,value\n")
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["model"] == "run (vit-micro)"
    assert err == f"{run / 'priors.csv'} has no rows, so there is no history to draw\n"


@pytest.mark.parametrize(
    ("prior", "words", "message"),
    [
        ("none", [], "has no prior"),
        ("rpe", ["--layers", "0"], "rpe, which is not a mixture"),
        ("gmm", ["--layers", "3"], "unknown layer 3: there are 3 "),
        ("gmm", ["--layers", "\u00b2"], "unknown layer '\u00b2'"),
        ("gmm", ["--layers=--5"], "unknown layer '--5'"),
        ("gmm:init=spread", ["--logit", "1e308"], "got 1e+308"),
        ("gmm", ["--logit", "nan"], "--logit must be a number, got 'nan'"),
    ],
)
def test_bad_words_are_short_messages_and_leave_no_folder(tmp_path, capsys, prior, words, message):
    assert main(["analyze", "masks", saved(tmp_path / "x", prior), *words, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
