import base64
import json
import re

import numpy as np
import pytest

from trained_arms import source_of, trained_source
from vicinal.analysis.learned_tables import masks_of
from vicinal.analysis.learned_tables.mask_history import masks_over_epochs
from vicinal.report.sections import masks as section_module
from vicinal.report.sections.masks import masks_section
from vicinal.report.source import ReportArm


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return trained_source(tmp_path_factory.mktemp("runs"))


def frame_names(html):
    return re.findall(r'data-label="([^"]*)"', html)


def linked_data(html):
    return json.loads(base64.b64decode(re.search(r'base64,([^"]*)">masks', html)[1]))


def mixture(sigma, alpha, side):
    """Returns the masks of mixtures by their formula: `(heads, 2 side - 1, 2 side - 1)`."""
    rows = np.arange(1 - side, side)
    squared = rows[:, None] ** 2 + rows**2
    spread = 2 * (sigma**2 + 1e-5)[..., None, None]
    return 1 + (alpha[..., None, None] * np.exp(-squared / spread)).sum(0)


def test_masks_of_epochs_follow_the_formula_of_the_logged_parameters(source):
    run = source.arms[1].shown
    history = run.priors
    found = masks_over_epochs(run.model(), history, count=3)
    assert list(found) == [history.epochs[index] for index in (0, len(history.epochs) // 2, -1)]
    for epoch, masks in found.items():
        index = history.epochs.index(epoch)
        for layer in masks.layers:
            logged = history.layers[layer.name]
            expected = mixture(logged["sigma"][index], logged["alpha"][index], layer.grid.height)
            assert np.allclose(layer.scale, expected, atol=1e-5)
    assert np.ptp(found[0].layers[0].scale) == 0 < np.ptp(found[history.epochs[-1]].layers[0].scale)


def test_priors_are_as_before_after_masks_of_epochs(source):
    run = source.arms[1].shown
    model = run.model()
    before = masks_of(model)
    masks_over_epochs(model, run.priors, count=2)
    for one, other in zip(before.layers, masks_of(model).layers, strict=True):
        assert np.array_equal(one.scale, other.scale)


def test_frames_are_epochs_and_kernels_and_all_are_in_the_html(source):
    html = str(masks_section(source).html)
    names = frame_names(html)
    epochs = [f"epoch {epoch}" for epoch in source.arms[1].shown.priors.epochs[:-1]]
    assert names[:-2] == [*epochs, "trained model"]
    assert [name.partition(":")[0] for name in names[-2:]] == ["kernel 1", "kernel 2"]
    assert html.count('class="frame-slider"') == 2
    assert html.count('class="tiles"') == len(names)
    assert html.count('class="frame chosen"') == 2


def test_data_are_the_masks_of_the_trained_model(source):
    data = linked_data(str(masks_section(source).html))
    for layer in masks_of(source.arms[1].shown.model()).layers:
        assert np.allclose(data["tables"][layer.name]["scale"], layer.scale, atol=6e-5)
        assert np.allclose(data["parameters"]["trained model"][layer.name]["sigma"], layer.options["sigma"], atol=6e-5)


def test_alternative_texts_state_the_extremes(source):
    html = str(masks_section(source).html)
    scales = [layer.scale for layer in masks_of(source.arms[1].shown.model()).layers]
    low, high = min(scale.min() for scale in scales), max(scale.max() for scale in scales)
    assert f"trained model: factor of the logits from {low:.3g} to {high:.3g}" in html


def test_names_are_escaped(source):
    html = str(masks_section(source).html)
    assert "arm &lt;gmm" in html
    assert "arm <gmm" not in html


def test_arms_without_a_prior_give_a_sentence(source):
    section = masks_section(source_of(source.arms[:1], source.folder))
    assert "No arm has a prior" in section.html


def test_no_finished_run_gives_no_section(source):
    assert masks_section(source_of([ReportArm("", "none", ())], source.folder)) is None


def test_a_model_that_cannot_be_opened_gives_a_sentence(source, tmp_path):
    for name in ("config.yaml", "results.json", "environment.json"):
        (tmp_path / name).write_bytes((source.arms[1].shown.folder / name).read_bytes())
    broken = ReportArm("", "broken", (type(source.arms[1].shown)(tmp_path),))
    html = str(masks_section(source_of([broken, source.arms[1]], tmp_path)).html)
    assert re.search(r'class="missing">broken: .+</p>', html)
    assert "arm &lt;gmm" in html


def test_arms_beyond_the_limit_are_named(source, monkeypatch):
    monkeypatch.setattr(section_module, "MAX_ARMS", 1)
    again = ReportArm("", "second", source.arms[1].runs)
    html = str(masks_section(source_of([source.arms[1], again], source.folder)).html)
    assert "left out: second." in html
    assert html.count("<h3>") == 1


def test_large_tables_are_shown_at_fewer_epochs(source, monkeypatch):
    monkeypatch.setattr(section_module, "MAX_PIXELS", 1)
    names = frame_names(str(masks_section(source).html))
    assert names[0] == "trained model"


def test_a_free_table_has_the_trained_model_only(tmp_path):
    found = trained_source(tmp_path, priors=("elm", "gab"), steps=4)
    html = str(masks_section(found).html)
    first, second = html.split("<h3>")[1:]
    assert frame_names(first) == ["trained model"]
    assert frame_names(second)[0] == "epoch 0"
    assert "all heads are the same" in second
