import dataclasses

import numpy as np
import pytest
import torch
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from attention_by_hand import cait, swin, vit
from vicinal import VicinalError
from vicinal.analysis.attention_maps import (
    attention_maps,
    attention_statistics,
    draw_maps,
    draw_rollout,
    draw_statistics,
    rollout,
)
from vicinal.analysis.plot_style import GRAY

PICTURES = np.random.default_rng(0).random((3, 32, 48, 3))
IMAGES = torch.tensor(PICTURES, dtype=torch.float32).movedim(-1, 1)


def panels(figure):
    """Axes that show a picture, by their title's order; the color bar has none."""
    return [axes for axes in figure.axes if any(isinstance(child, AxesImage) for child in axes.get_children())]


def overlay(axes):
    """What is laid over a picture, if anything is."""
    shown = axes.get_images()
    return shown[1].get_array().data if len(shown) == 2 else None


def test_maps_are_a_row_for_each_layer_with_the_picture_and_a_column_for_each_head(tmp_path):
    maps = attention_maps(vit(), IMAGES, query=(1, 4), name="a $vit")
    figure = draw_maps(maps, PICTURES[2], image=2)
    shown = panels(figure)
    assert [axes.get_title() for axes in shown] == [
        title for layer in range(3) for title in (f"blocks.{layer}.attn", "head 1", "head 2", "head 3", "head 4")
    ]
    assert figure.get_suptitle() == "a $vit, blocks.0.attn to blocks.2.attn: attention of the patch at row 1, column 4"
    np.testing.assert_array_equal(shown[5].get_images()[0].get_array(), PICTURES[2])
    for layer in range(3):
        for head in range(4):
            attention = maps[layer].values[2, head].numpy()
            np.testing.assert_allclose(overlay(shown[5 * layer + 1 + head]), attention / attention.mean(), rtol=1e-5)
    for axes in shown:
        (mark,) = (patch for patch in axes.patches if isinstance(patch, Rectangle))
        assert mark.get_bbox().bounds == pytest.approx((4 * 8, 8, 8, 8))
        assert axes.get_images()[-1].get_extent() == [0, 48, 32, 0]
    heights = {round(axes.get_position().y0, 6) for axes in shown}
    assert len(heights) == 3
    figure.savefig(tmp_path / "maps.png", dpi=40)


def test_means_over_heads_follow_each_other_and_a_class_token_has_no_mark():
    figure = draw_maps(attention_maps(vit(), IMAGES[:1], heads="mean"), PICTURES[0])
    titles = [axes.get_title() for axes in panels(figure)]
    assert titles == ["image", "blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
    assert "attention of the class token, mean over heads" in figure.get_suptitle()
    assert not any(axes.patches for axes in panels(figure))


def test_one_layer_and_one_head_are_drawn_and_gray_pictures_too(tmp_path):
    gray = PICTURES[0][..., :1]
    figure = draw_maps(attention_maps(vit(), IMAGES[:1], layers="last", heads=2), gray)
    assert [axes.get_title() for axes in panels(figure)] == ["image", "head 3"]
    figure.savefig(tmp_path / "one.png", dpi=40)


def test_each_grid_has_its_own_patch_marked():
    picture = np.zeros((32, 32, 3))
    figure = draw_maps(attention_maps(swin(), torch.randn(1, 3, 32, 32), heads=[0], query=(5, 9)), picture)
    marks = [axes.patches[0].get_bbox().bounds for axes in panels(figure)]
    assert marks == [(18, 10, 2, 2)] * 3 + [(16, 8, 4, 4)] * 2  # the picture, and two layers of each grid


def test_rollouts_are_drawn_next_to_their_pictures(tmp_path):
    found = rollout(vit(), IMAGES, name="a vit")
    figure = draw_rollout(found, PICTURES, ["cat", "dog", "a long name of a picture that has no end.png"])
    shown = panels(figure)
    assert [axes.get_title() for axes in shown[:4]] == ["cat", "", "dog", ""]
    assert len(shown[4].get_title()) == 26
    assert shown[4].get_title().endswith("no end.png")
    for number in range(3):
        np.testing.assert_array_equal(shown[2 * number].get_images()[0].get_array(), PICTURES[number])
        attention = found.map[number].numpy()
        np.testing.assert_allclose(overlay(shown[2 * number + 1]), attention / attention.mean(), rtol=1e-5)
    assert "a vit: rollout of 3 layers, blocks.0.attn to blocks.2.attn, query: " in figure.get_suptitle()
    figure.savefig(tmp_path / "rollout.png", dpi=40)


def test_a_picture_under_a_map_is_light_and_faint():
    """What is bright or dark in it must not pass for attention: it has a quarter of its contrast."""
    figure = draw_maps(attention_maps(vit(), IMAGES[:1], layers="last", heads="mean"), PICTURES[0])
    picture, under = (axes.get_images()[0].get_array() for axes in panels(figure))
    np.testing.assert_allclose(under, 0.75 + 0.25 * picture.mean(2))


def test_statistics_have_a_dot_for_each_head_and_a_line_through_their_means(tmp_path):
    found = attention_statistics(vit(), IMAGES, name="a vit")
    figure = draw_statistics(found)
    far, wide = figure.axes[:2]
    for axes, name in ((far, "distance_pixels"), (wide, "relative_entropy")):
        values = [getattr(layer, name) for layer in found.layers]
        dots, line = axes.get_lines()[:2]
        np.testing.assert_allclose(dots.get_ydata(), np.concatenate(values))
        np.testing.assert_allclose(dots.get_xdata(), np.repeat([1, 2, 3], 4))
        np.testing.assert_allclose(line.get_ydata(), np.mean(values, 1))
        assert "blocks.0.attn" in axes.get_xlabel()
    assert "a vit" in figure.get_suptitle()
    assert "pixels" in far.get_ylabel()
    assert [axis.get_ylabel() for axis in (*far.child_axes, *wide.child_axes)] == ["patches of 8 pixels", "nats"]
    figure.savefig(tmp_path / "statistics.png", dpi=40)


def test_models_are_compared_whatever_their_layers(tmp_path):
    models = [vit(), cait()]
    found = [attention_statistics(model, IMAGES, name=name) for model, name in zip(models, "ab", strict=True)]
    found.append(attention_statistics(swin(), torch.randn(1, 3, 32, 32), name="c"))
    figure = draw_statistics(*found)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "c", "uniform attention"]
    colors = [handle.get_color() for handle in legend.legend_handles]
    assert len(set(colors)) == 4
    assert not figure.axes[0].child_axes  # patches of several sizes have no common axis
    figure.savefig(tmp_path / "statistics.png", dpi=40)


def test_no_two_models_look_the_same():
    found = attention_statistics(vit(depth=1), IMAGES[:1])
    figure = draw_statistics(*(dataclasses.replace(found, model=str(number)) for number in range(16)))
    *models, _ = figure.legends[0].legend_handles
    assert len({(each.get_color(), each.get_marker()) for each in models}) == 16
    dots = [line for line in figure.axes[1].lines if line.get_linestyle() == "None"]
    assert [(each.get_color(), each.get_marker()) for each in dots] == [
        (each.get_color(), each.get_marker()) for each in models
    ]
    assert all(round(place) == 1 for each in dots for place in each.get_xdata())  # in the place of the first layer
    means = [line for line in figure.axes[1].lines if line.get_marker() == "" and line.get_color() != GRAY]
    assert len({(line.get_color(), line.get_linestyle()) for line in means}) == 16


def test_bad_input_says_what_to_do():
    maps = attention_maps(vit(), IMAGES, layers="last")
    with pytest.raises(VicinalError, match="there are no maps to draw"):
        draw_maps([], PICTURES[0])
    with pytest.raises(VicinalError, match=r"image .* from 0 to 2, got 3"):
        draw_maps(maps, PICTURES[0], image=3)
    with pytest.raises(VicinalError, match=r"picture .* float32 \(3, 32, 48\)"):
        draw_maps(maps, IMAGES[0].numpy())
    with pytest.raises(VicinalError, match=r"picture .* to 255"):
        draw_maps(maps, (PICTURES[0] * 255).round())
    with pytest.raises(VicinalError, match=r"must be 3, .* got 1 and 1"):
        draw_rollout(rollout(vit(), IMAGES), PICTURES[:1])
    with pytest.raises(VicinalError, match="there are no statistics to draw"):
        draw_statistics()
