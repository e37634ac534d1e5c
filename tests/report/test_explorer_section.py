import base64
import json
import re

import numpy as np
import pytest
import torch
from timm.models.cait import Cait
from timm.models.swin_transformer import SwinTransformer

import vicinal
from trained_arms import NOISE, noise_folder, source_of, trained_source
from vicinal.analysis.attention_maps import attention_maps, attention_statistics
from vicinal.analysis.image_selection import ImageSelection
from vicinal.analysis.opened_model import open_models
from vicinal.report import attention_data
from vicinal.report.attention_data import Budget, choose_budget, find_readable, quantize, read_attention
from vicinal.report.sections import explorer as section_module
from vicinal.report.sections.explorer import explorer_section
from vicinal.report.shown_model import ShownModel
from vicinal.report.source import ReportArm


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return trained_source(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def section(source):
    return explorer_section(source)


def weights_of(layer, images):
    """Decodes a layer as the script does: `(images, maps, queries, keys)`."""
    (rows, columns), (down, across) = layer["queryGrid"], layer["grid"]
    shape = images, layer["maps"], rows * columns
    maxima = np.frombuffer(base64.b64decode(layer["maxima"]), "<u2").reshape(shape)
    levels = np.frombuffer(base64.b64decode(layer["levels"]), np.uint8).reshape(*shape, down * across)
    return levels / 255 * maxima[..., None] / 65535


def test_stored_attention_is_that_of_the_tap(source, section):
    for arm, stored in zip(source.arms, section.data["arms"], strict=True):
        (opened,) = open_models([arm.shown.folder], device="cpu")
        _, images = ImageSelection(count=8).first(opened, 8)
        with torch.no_grad(), vicinal.tap(opened.model, range(4)) as tapped:
            opened.model(images)
        assert stored["label"] == arm.label
        assert [layer["name"] for layer in stored["layers"]] == list(tapped.weights)
        for layer, weights in zip(stored["layers"], tapped.weights.values(), strict=True):
            exact = weights[..., -16:, -16:].numpy()  # patches; a class token comes first, if there is one
            step = exact.max() / 255 / 2 + 1 / 65535
            assert np.abs(weights_of(layer, 8) - exact).max() <= step


def test_quantized_weights_are_near_and_their_maxima_are_kept():
    weights = np.random.default_rng(0).dirichlet(np.ones(20) / 5, size=(3, 2, 20))
    levels, maxima = quantize(weights)
    assert levels.dtype == np.uint8
    assert maxima.dtype == np.uint16
    assert (levels.max(-1) == 255).all()
    assert np.abs(maxima / 65535 - weights.max(-1)).max() <= 0.5 / 65535
    assert np.abs(levels / 255 * maxima[..., None] / 65535 - weights).max() <= 0.5 / 255 + 1 / 65535
    nothing, top = quantize(np.zeros((1, 4)))
    assert not nothing.any()
    assert not top.any()


def shown(model, images, arm=None):
    return ShownModel(arm, type("Opened", (), {"model": model})(), "test", tuple(map(str, range(len(images)))), images)


def swin():
    torch.manual_seed(0)
    return SwinTransformer(
        img_size=32, patch_size=2, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), num_classes=5
    ).eval()


def test_attention_of_windows_is_at_its_place_in_the_image():
    model, images = swin(), torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    readable = find_readable(shown(model, images))
    for query in ((0, 0), (5, 9), (15, 14)):
        expected = attention_maps(model, images, query=query, inspection=readable.inspection)
        for layer, known in zip(read_attention(readable, Budget(2, True, 4)), expected, strict=True):
            row, column = known.query
            found = layer.weights[:, :, row * layer.query_grid[1] + column].reshape(2, -1, *layer.grid)
            assert layer.name == known.layer
            assert np.abs(found - known.values.numpy()).max() <= 0.5 / 255 + 1 / 65535


def test_layers_in_which_no_patch_attends_are_left_out():
    torch.manual_seed(0)
    model = Cait(img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=5).eval()
    readable = find_readable(shown(model, torch.zeros(1, 3, 16, 16)))
    assert [layer.name for layer in readable.layers] == ["blocks.0.attn", "blocks.1.attn"]
    assert "no patch does" in readable.left_out["blocks_token_only.0.attn"]


def size_of(models, budget):
    """Counts the base64 text of what is stored."""
    layers = [layer.as_dict() for model in models for layer in read_attention(model, budget)]
    return sum(len(layer["levels"]) + len(layer["maxima"]) for layer in layers)


def test_images_are_left_out_first_then_heads_then_layers():
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    models = [find_readable(shown(vicinal.create_model("vit-micro", img_size=(32, 32)).eval(), images))] * 2
    everything = size_of(models, Budget(4, True, 4))
    cases = {
        everything * 1.001: Budget(4, True, 4),
        everything * 0.8: Budget(3, True, 4),
        everything * 0.51: Budget(2, True, 4),
        everything * 0.49: Budget(4, False, 4),
        everything * 0.13: Budget(2, False, 4),
        everything * 0.1: Budget(2, False, 3),
        everything * 0.04: Budget(2, False, 1),
    }
    for limit, expected in cases.items():
        chosen = choose_budget(models, 4, limit)
        assert chosen == expected
        assert size_of(models, chosen) <= limit + 100  # base64 ends in up to two signs more for each text
    assert choose_budget(models, 4, everything * 0.01) is None


def test_a_small_budget_is_respected_and_stated(source, monkeypatch):
    monkeypatch.setattr(section_module, "MAX_BYTES", 5000)
    found = explorer_section(source)
    assert sum(len(layer["levels"]) for arm in found.data["arms"] for layer in arm["layers"]) <= 5000
    assert "2 of 8 images are in the explorer" in found.html
    assert "the mean over heads" in found.html
    assert "layers are in the explorer" in found.html
    monkeypatch.setattr(section_module, "MAX_BYTES", 10)
    assert "too large for this page" in explorer_section(source).html


def test_the_table_has_mean_attention_distances(source, section):
    (opened,) = open_models([source.arms[1].shown.folder], device="cpu")
    _, images = ImageSelection(count=8).first(opened, 8)
    shown_values = np.array([float(text) for text in re.findall(r'data-value="([^"]*)"', section.html)])
    for layer in attention_statistics(opened.model, images).layers:
        assert np.abs(shown_values - np.mean(layer.distance_patches)).min() < 1e-5
    assert "8 test images" in section.html


def test_pictures_of_the_central_patch_are_there_without_the_script(source, section):
    still = str(section.html).partition('class="without-script"')[2]
    for arm, stored in zip(source.arms, section.data["arms"], strict=True):
        last = stored["layers"][-1]
        rows, columns = last["queryGrid"]
        weights = weights_of(last, 8)[0, :, rows // 2 * columns + columns // 2].mean(0)
        assert f"with {weights.max():.2%}" in still
        assert still.count('<img src="data:image/png') >= len(source.arms)
        assert arm.label.replace("<", "&lt;").replace(">", "&gt;") in still


def test_names_are_escaped_and_data_is_json(section):
    json.dumps(section.data, allow_nan=False)
    assert "arm <" not in section.html


def test_sections_are_the_same_in_every_call(source, section):
    again = explorer_section(source)
    assert again.html == section.html
    assert again.data == section.data


def test_arms_and_conditions_beyond_the_first_are_named(source, monkeypatch):
    monkeypatch.setattr(section_module, "MAX_ARMS", 1)
    other = ReportArm("other", "none", source.arms[0].runs)
    found = explorer_section(source_of([*source.arms, other], source.folder))
    assert "left out: arm &lt;gmm:kernels=2&gt;." in found.html
    assert "left out: other." in found.html
    assert len(found.data["arms"]) == 1


def test_data_that_moved_give_a_sentence(source, tmp_path):
    moved = trained_source(tmp_path, ("none",), dataset=noise_folder(tmp_path / "data", ("train", "test")), **NOISE)
    assert explorer_section(moved).data
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    found = explorer_section(moved)
    assert not found.data
    assert 'class="missing">arm &lt;none&gt;: ' in found.html
    both = explorer_section(source_of([*moved.arms, *source.arms], tmp_path))
    assert len(both.data["arms"]) == 2


def test_an_error_of_a_library_is_not_hidden(source, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("broken")

    monkeypatch.setattr(attention_data, "attention_reader", fail)
    with pytest.raises(RuntimeError, match="broken"):
        explorer_section(source)


def test_no_finished_run_gives_no_section(source):
    assert explorer_section(source_of([], source.folder)) is None
