import csv
import json

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import vicinal
from vicinal.analysis.fit_note import NoteKind
from vicinal.analysis.learned_tables import draw_fits, draw_mixture_r2, fit_model

SIGMAS = ((1.5, 2.5), (2.0, 1.2), (3.0, 2.0))


def planted(depth=2, prior="rpe", global_pool="token", **options):
    """A model of 3 heads on a grid of 8 x 10 whose tables are Gaussians: `SIGMAS` of each head, the amplitude
    -(layer + 1); the last layer is flat."""
    model = vicinal.create_model(
        "vit-micro",
        prior=prior,
        img_size=(32, 40),
        patch_size=4,
        depth=depth,
        embed_dim=24,
        num_heads=3,
        global_pool=global_pool,
        **options,
    )
    y, x = torch.arange(-7, 8)[:, None], torch.arange(-9, 10)[None]
    for layer, block in enumerate(model.blocks):
        own = block.attn.prior.parts[-1] if "+" in prior else block.attn.prior
        tables = [-(layer + 1) * torch.exp(-(x**2) / (2 * a**2) - y**2 / (2 * b**2)) for a, b in SIGMAS]
        with torch.no_grad():
            own.flat_bias.copy_(torch.stack(tables).flatten() * (layer + 1 < depth))
    return model


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    return fit_model(planted(3), name="small", kernels=2)


@pytest.mark.parametrize("view", ["center", "offsets"])
def test_every_head_gives_what_was_planted(view):
    report = fit_model(planted(3), name="small", view=view)
    assert [(row.layer, row.head) for row in report.rows] == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, None)]
    assert {row.table.values.shape for row in report.rows} == {(1, 8, 10) if view == "center" else (1, 15, 19)}
    for row in report.rows[:6]:
        sigma_x, sigma_y = SIGMAS[row.head - 1]
        assert row.gaussian.r2 > 0.999
        assert (row.gaussian.sigma_x, row.gaussian.sigma_y) == pytest.approx((sigma_x, sigma_y), rel=0.01)
        assert row.gaussian.amplitude == pytest.approx(-row.layer, rel=0.01)
        assert (row.gaussian.center_x, row.gaussian.center_y) == pytest.approx((0, 0), abs=0.01)
    assert report.rows[6].gaussian.kinds == (NoteKind.FLAT,)


def test_the_mean_over_heads_is_one_table():
    report = fit_model(planted(), per_head=False)
    first = report.rows[0]
    assert [row.head for row in report.rows] == [None, None]
    y, x = np.arange(-4, 4)[:, None], np.arange(-5, 5)[None]
    expected = np.mean([-np.exp(-(x**2) / (2 * a**2) - y**2 / (2 * b**2)) for a, b in SIGMAS], axis=0)
    np.testing.assert_allclose(first.table.values[0], expected, rtol=1e-5)
    assert first.gaussian.fits
    assert report.model == "vicinal_vit_micro"


def test_heads_that_share_a_table_are_fitted_once():
    model = vicinal.create_model("vit-micro", prior="gab:sigma=2", img_size=32, depth=2, global_pool="token")
    report = fit_model(model)
    assert [(row.layer, row.head) for row in report.rows] == [(1, None), (2, None)]
    assert report.rows[0].gaussian.sigma_x == pytest.approx(2, rel=0.01)


def test_the_best_mixture_of_a_trained_mask_is_its_own():
    model = vicinal.create_model(
        "vit-micro", prior="gmm:kernels=2,init=spread", img_size=32, depth=1, global_pool="token"
    )
    report = fit_model(model, kernels=2)
    prior = model.blocks[0].attn.prior
    for row in report.rows:
        one, two = row.mixtures
        assert one.r2 <= two.r2
        assert two.r2 > 0.999
        own = sorted(prior.sigma[:, row.head - 1].tolist())
        np.testing.assert_allclose(two.sigma, own, rtol=0.05)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([0], {1}),
        ([-1], {3}),
        (["blocks.1.attn"], {2}),
        ([0, "blocks.2.attn"], {1, 3}),
        (None, {1, 2, 3}),
    ],
)
def test_layers_are_chosen_by_name_or_index(layers, expected):
    report = fit_model(planted(3), layers=layers, per_head=False)
    assert {row.layer for row in report.rows} == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [2]}, "unknown layer 2: there are 2 "),
        ({"layers": ["blocks.7.attn"]}, r"unknown layer 'blocks.7.attn'; did you mean 'blocks.\d.attn'"),
        ({"layers": "blocks.0.attn"}, "layers must be a list"),
        ({"layers": []}, "layers must be a list"),
        ({"kernels": 0}, "kernels .* got 0"),
        ({"view": "centers"}, "unknown view 'centers'; did you mean 'center'"),
        ({"img_size": 20}, "does not run on images of 3 x 20 x 20"),
    ],
)
def test_bad_input_is_told(options, message):
    with pytest.raises(vicinal.VicinalError, match=message):
        fit_model(planted(), **options)


def test_a_model_without_tables_cannot_be_fitted():
    with pytest.raises(vicinal.VicinalError, match="has no table"):
        fit_model(vicinal.create_model("vit-micro", img_size=32, depth=1, global_pool="token"))


def test_text_json_and_csv_say_the_same(report, tmp_path):
    report.save(tmp_path / "fit.json")
    report.save(tmp_path / "fit.csv")
    from_json = json.loads((tmp_path / "fit.json").read_text())
    assert from_json == json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert (from_json["model"], from_json["view"]) == ("small", "center")
    with open(tmp_path / "fit.csv", newline="") as file:
        from_csv = list(csv.DictReader(file))
    text = report.table().splitlines()
    assert text[1].split() == [
        "l",
        "layer",
        "role",
        "head",
        "R^2",
        "sigma_X",
        "sigma_Y",
        "amplitude",
        "constant",
        "x",
        "y",
    ]
    for row, one, other, line in zip(report.rows, from_json["fits"], from_csv, text[2:9], strict=True):
        words = line.split()
        assert words[:4] == [str(row.layer), row.table.name, "bias", str(row.head or "all")]
        assert (one["layer"], one["head"], one["kind"]) == (row.layer, row.head, "rpe")
        assert (other["layer"], other["name"]) == (str(row.layer), row.table.name)
        if row.layer == 3:
            assert one["r2"] is None
            assert other["r2"] == ""
            assert words[4:7] == ["-", "-", "-"]
            assert line.endswith(row.gaussian.note)
            assert (one["note_kinds"], other["note_kinds"]) == (["flat"], "flat")
            continue
        assert one["r2"] == float(other["r2"]) == row.gaussian.r2
        assert one["sigma_x"] == float(other["sigma_x"]) == row.gaussian.sigma_x
        assert words[4:7] == [f"{x:.3f}" for x in (row.gaussian.r2, row.gaussian.sigma_x, row.gaussian.sigma_y)]
        assert [mixture["r2"] for mixture in one["mixtures"]] == [
            float(other["r2_of_1_kernels"]),
            float(other["r2_of_2_kernels"]),
        ]
        assert float(other["r2_by_distance"]) == row.mixtures[0].ceiling
    assert text[10].startswith("R^2 of mixtures")
    assert text[11].split() == ["l", "layer", "role", "head", "K=1", "K=2", "any"]
    assert len(text) == 12 + 7


def test_layers_without_mixtures_have_no_columns_for_them(tmp_path):
    report = fit_model(planted(), per_head=False)
    report.save(tmp_path / "fit.csv")
    assert "kernels" not in (tmp_path / "fit.csv").read_text()
    assert "mixtures" not in report.table()
    with pytest.raises(vicinal.VicinalError, match="kernels=5"):
        draw_mixture_r2(report)


def shown(figure):
    """Every word of a figure."""
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text)]


def test_fits_are_drawn_table_by_table(report, tmp_path):
    figure = draw_fits(report)
    assert isinstance(figure, Figure)
    figure.savefig(tmp_path / "fits.png")
    words = shown(figure)
    assert "small, rpe (bias): tables fitted by a 2-D Gaussian" in words
    assert {"layer 1", "layer 2", "layer 3", "head 1", "head 3", "flat", "table", "fit", "residual"} <= set(words)
    assert any(word.startswith("layer 1, blocks.0.attn, head") for word in words)
    pictures = [
        image.get_array() for axes in figure.findobj(lambda x: hasattr(x, "get_images")) for image in axes.get_images()
    ]
    drawn = [picture for picture in pictures if picture.shape == (8, 10)]
    assert len(drawn) == 7 + 2 * 3  # every table; and table, fit and residual of the two layers that are not flat
    for row in report.rows:
        assert any(np.array_equal(picture, row.table.values[0]) for picture in drawn)


def test_a_picture_says_why_a_table_does_not_fit(tmp_path):
    model = planted(2)
    tables = model.blocks[0].attn.prior.flat_bias.data.view(3, 15, 19)
    y, x = torch.arange(-7, 8)[:, None], torch.arange(-9, 10)[None]
    tables[0] = -(x**2) - y**2
    tables[1] = torch.exp(-((x - 9) ** 2) / 18 - y**2 / 8)
    report = fit_model(model)
    figure = draw_fits(report)
    figure.savefig(tmp_path / "fits.png")
    kinds = [(NoteKind.PARABOLA,), (NoteKind.PEAK_OUTSIDE,), ()]
    assert [row.gaussian.kinds for row in report.rows[:3]] == kinds
    words = shown(figure)
    reasons = (" too wide", " peak outside", "")
    below = {f"{row.gaussian.r2:.2f}{why}" for row, why in zip(report.rows, reasons, strict=False)}
    assert below <= set(words)
    assert {"fits", "too wide", "peak outside"} <= set(words)
    assert "poor" not in words


@pytest.mark.parametrize("shape", [(4, 4), (8, 10)])
def test_every_reason_not_to_fit_has_a_word_in_pictures(shape, monkeypatch):
    from vicinal.analysis import gaussian_fit
    from vicinal.analysis.learned_tables.fit_plot import NOTE_MARKS

    random = np.random.default_rng(0)
    y, x = np.indices(shape)
    tables = [random.standard_normal(shape), x + y, x**2 + y**2, np.exp(-(x**2) / 2.0), np.eye(*shape)]
    fits = [gaussian_fit.fit_gaussian(table) for table in tables]
    monkeypatch.setattr(gaussian_fit, "MAX_STEPS", 1)
    fits += [gaussian_fit.fit_gaussian(table) for table in tables]
    kinds = {kind for fit in fits if not fit.fits for kind in fit.kinds}
    assert len(kinds) > 3
    assert kinds <= NOTE_MARKS.keys()


def test_two_tables_of_a_layer_are_drawn_apart(tmp_path):
    report = fit_model(planted(2, "gmm:init=spread+rpe"), kernels=1)
    assert [row.table.role for row in report.rows] == ["scale"] * 3 + ["bias"] * 3 + ["scale"] * 3 + ["bias"]
    words = shown(draw_fits(report))
    assert {"layer 1 scale", "layer 1 bias", "layer 2 scale", "layer 2 bias"} <= set(words)
    draw_mixture_r2(report).savefig(tmp_path / "kernels.png")


def test_a_model_that_is_flat_everywhere_is_drawn(tmp_path):
    report = fit_model(
        vicinal.create_model("vit-micro", prior="rpe", img_size=32, depth=2, global_pool="token"), kernels=1
    )
    draw_fits(report).savefig(tmp_path / "fits.png")
    draw_mixture_r2(report).savefig(tmp_path / "kernels.png")
    assert "none fits" in shown(draw_fits(report))


def test_kernels_are_drawn_as_lines_that_rise(report, tmp_path):
    figure = draw_mixture_r2(report)
    figure.savefig(tmp_path / "kernels.png")
    (axes,) = figure.axes
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    for layer in (1, 2):
        rows = [row for row in report.rows if row.layer == layer]
        expected = [np.mean([row.mixtures[k].r2 for row in rows]) for k in range(2)]
        np.testing.assert_allclose(lines[str(layer)], expected)
    assert f"3: {report.rows[6].gaussian.note}" in lines
    assert "small, rpe (bias): tables fitted by mixtures of Gaussians of the\ndistance" in shown(figure)


def test_the_old_spelling_of_the_view_warns_and_works():
    with pytest.warns(DeprecationWarning, match="center"):
        report = fit_model(planted(), per_head=False, view="centre")
    assert report.view == "center"
    with pytest.warns(DeprecationWarning, match="around_center"):
        assert report.rows[0].table.around_centre() is report.rows[0].table
    with pytest.warns(DeprecationWarning, match="center"):
        assert report.rows[0].table.centre == (4, 5)
