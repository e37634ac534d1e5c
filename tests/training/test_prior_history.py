import csv

import numpy as np
import pytest
import safetensors.torch

import vicinal
from small_runs import config
from vicinal.errors import VicinalError
from vicinal.training.prior_history import PriorLog


def test_the_options_of_priors_are_written_down_every_epoch(tmp_path):
    run = vicinal.train(config(tmp_path / "run", prior="gmm:kernels=3+conv:sigma=2", epochs=2))
    with open(run.folder / "priors.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["epoch", "layer", "option", "kernel", "head", "value"]
    modules = {name: module for name, module in run.model().named_modules() if hasattr(module, "prior")}
    heads = next(iter(modules.values())).prior.heads
    assert len(rows) == 3 * len(modules) * heads * (3 + 3 + 1 + 2)
    for row in rows:
        mixture, convolution = modules[row["layer"]].prior.parts
        head, kernel = int(row["head"]) - 1, int(row["kernel"]) - 1 if row["kernel"] else None
        if row["epoch"] == "2":
            values = {
                "gmm.sigma": mixture.sigma,
                "gmm.alpha": mixture.alpha,
                "conv.sigma": convolution.sigma[None],
                "conv.mu_row": convolution.mu[:, 0][None],
                "conv.mu_column": convolution.mu[:, 1][None],
            }[row["option"]]
            assert float(row["value"]) == pytest.approx(values[kernel or 0, head].item(), rel=1e-7)
            assert (kernel is None) == row["option"].startswith("conv")
        elif row["epoch"] == "0" and row["option"] in ("gmm.alpha", "gmm.sigma"):
            start = 0.0 if row["option"] == "gmm.alpha" else (0.5, 2**0.5, 4.0)[kernel]  # half a patch to the grid
            assert float(row["value"]) == pytest.approx(start, abs=1e-6)
    history = run.priors
    assert history.epochs == (0, 1, 2)
    for name, module in modules.items():
        moved = history.layers[name]["gmm.alpha"]
        assert moved.shape == (3, 3, heads)
        assert np.array_equal(moved[-1].astype("f4"), module.prior.parts[0].alpha.detach().numpy())
        assert history.layers[name]["conv.mu_row"].shape == (3, heads)
    assert any(np.abs(each["gmm.alpha"][1]).max() > 0 for each in history.layers.values())


@pytest.mark.parametrize("prior", ["none", "rpe", "elm"])
def test_where_no_option_is_read_there_is_no_file_of_them(tmp_path, prior):
    run = vicinal.train(config(tmp_path / "run", prior=prior, epochs=1))
    assert run.priors is None
    assert not (run.folder / "priors.csv").exists()


def test_with_a_moving_average_the_options_are_those_of_the_trained_network(tmp_path):
    run = vicinal.train(config(tmp_path / "run", prior="gab", ema=0.9, epochs=1))
    last = safetensors.torch.load_file(next((run.folder / "checkpoints").iterdir()))
    for layer, options in run.priors.layers.items():
        assert np.array_equal(options["sigma"][1, :1].astype("f4"), last[f"model.{layer}.prior.flat_sigma"].numpy())


def test_lines_that_were_cut_short_or_are_of_a_repeated_epoch_are_dropped(tmp_path):
    run = vicinal.train(config(tmp_path / "run", prior="gab", epochs=2))
    file = run.folder / "priors.csv"
    written = file.read_text()
    file.write_text(written + "3,blocks.0.attn,sigma,,1,2.5\n1")
    assert run.priors.epochs == (0, 1, 2)
    PriorLog(run.folder, run.model()).start(epochs=2, steps=8)
    assert file.read_text() == written
    file.write_text("epoch,layer\n0,blocks.0.attn\n")
    with pytest.raises(VicinalError, match=r"priors.csv .* epoch,layer,option"):
        assert run.priors
