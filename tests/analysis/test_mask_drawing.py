"""What is drawn of masks is what they hold, and all words are on the page."""

import math

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

import vicinal
from vicinal.analysis.learned_tables import (
    LayerMask,
    Masks,
    draw_convolutions,
    draw_history,
    draw_masks,
    draw_mixture,
    masks_of,
)
from vicinal.analysis.plot_style import PALETTE
from vicinal.attachment import get_priors
from vicinal.errors import VicinalError
from vicinal.training.prior_history import PriorHistory


def masks_with(prior, depth=2):
    """The masks of a small model whose priors are somewhere else than at their start, on a grid of 4 x 6 patches."""
    model = vicinal.create_model(
        "vit-micro", prior=prior, img_size=(16, 24), patch_size=4, depth=depth, global_pool="token"
    )
    with torch.no_grad():
        for each in get_priors(model).values():
            for parameter in each.parameters():
                parameter.add_(0.5 * torch.randn_like(parameter))
    return masks_of(model, name="a model")


def masks_by_hand(layers):
    """Masks of any layers, of so many heads on such a grid."""
    generator = np.random.default_rng(0)
    made = [
        LayerMask(
            name=f"blocks.{number}.attn",
            prior="gmm",
            grid=grid,
            over="offsets",
            scale=generator.normal(size=(heads, *grid.table_shape)),
            bias=None,
            convolution=generator.dirichlet(np.ones(grid.patches), heads).reshape(heads, grid.height, grid.width),
            options={},
            mixtures={},
        )
        for number, (heads, grid) in enumerate(layers)
    ]
    return Masks("a model", 1.0, tuple(made))


def pictures(figure):
    """All small pictures, in the order they were drawn, without the color bar's own."""
    return [image for axes in figure.axes if axes.get_label() != "<colorbar>" for image in axes.images]


def words(figure):
    return [text.get_text() for text in figure.findobj(Text) if text.get_visible() and text.get_text()]


def assert_words_are_on_the_page(figure):
    figure.set_dpi(50)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    parts = [figure, *figure.subfigs]
    for each in (each for part in parts for each in (*part.texts, *part.legends)):
        box, page = each.get_window_extent(canvas.get_renderer()), figure.bbox
        assert page.x0 <= box.x0 <= box.x1 <= page.x1, each
        assert page.y0 <= box.y0 <= box.y1 <= page.y1, each


@pytest.mark.parametrize("prior", ["gmm", "rpe", "conv", "decay", "elm:share_heads=false"])
def test_every_layer_and_head_is_drawn_on_one_scale(prior):
    masks = masks_with(prior)
    figure = draw_masks(masks)
    drawn = pictures(figure)
    values = [
        layer.scale[head] if layer.bias is None else np.exp(layer.bias[head])
        for layer in masks.layers
        for head in range(layer.heads)
    ]
    assert len(drawn) == 2 * masks.layers[0].heads == len(values)
    for image, expected in zip(drawn, values, strict=True):
        assert np.array_equal(image.get_array(), expected)
    assert len({id(image.norm) for image in drawn}) == 1
    assert {"blocks.0.attn", "blocks.1.attn", "head 1", "head 2"} <= set(words(figure))
    assert any(text.startswith(f"a model, {prior}: factor of ") for text in words(figure))
    if drawn[0].get_cmap().name == "RdBu_r":  # the middle of the colors changes nothing
        assert drawn[0].norm(1.0) == pytest.approx(0.5)
    assert_words_are_on_the_page(figure)


@pytest.mark.parametrize("prior", ["elm", "gab", "gmm:share_heads=true"])
def test_heads_that_are_the_same_are_drawn_once(prior):
    masks = masks_with(prior, depth=8)
    for figure in (draw_masks(masks), draw_convolutions(masks)):
        assert len(pictures(figure)) == 8
        assert "head 1" not in words(figure)
        assert {f"blocks.{number}.attn" for number in range(8)} <= set(words(figure))
        assert_words_are_on_the_page(figure)


def test_a_prior_that_multiplies_and_adds_has_a_scale_for_each():
    masks = masks_with("gmm+rpe")
    figure = draw_masks(masks)
    drawn = pictures(figure)
    assert len(drawn) == 2 * 2 * masks.layers[0].heads
    assert len({id(image.norm) for image in drawn}) == 2
    assert {"logits times", "attention times"} <= set(words(figure))
    assert_words_are_on_the_page(figure)


def test_twelve_layers_of_twelve_heads_have_room():
    figure = draw_masks(masks_by_hand([(12, vicinal.Grid(14, 14, prefix=1))] * 12))
    assert len(pictures(figure)) == 144
    assert max(figure.get_size_inches()) < 15
    assert_words_are_on_the_page(figure)


def test_layers_of_other_grids_and_head_counts_are_drawn_too():
    masks = masks_by_hand([(2, vicinal.Grid(9, 9)), (4, vicinal.Grid(5, 5)), (4, vicinal.Grid(1, 3))])
    for figure in (draw_masks(masks), draw_convolutions(masks)):
        assert len(pictures(figure)) == 2 + 4 + 4
        assert [words(figure).count(f"head {head + 1}") for head in range(4)] == [1] * 4
        assert_words_are_on_the_page(figure)


def test_the_query_is_marked_as_offset_zero():
    figure = draw_masks(masks_with("gmm:init=spread"))  # tables of 7 x 11 offsets
    axes = figure.axes[1]  # the last row, whose marks serve all
    left, right, bottom, top = axes.images[0].get_extent()
    marks = (
        [label.get_text() for label in axes.get_xticklabels()][:3],
        [label.get_text() for label in axes.get_yticklabels()],
    )
    assert marks == (["-5", "0", "5"], ["-2", "0", "2"])
    assert list(axes.get_xticks()[:3]) == pytest.approx(
        [left + (right - left) * place / 11 for place in (0.5, 5.5, 10.5)]
    )
    assert list(axes.get_yticks()) == pytest.approx([top + (bottom - top) * place / 7 for place in (1.5, 3.5, 5.5)])


def test_kernels_are_drawn_relative_to_even_attention():
    masks = masks_with("conv")
    drawn = pictures(draw_convolutions(masks))
    for image, expected in zip(drawn, (head for layer in masks.layers for head in layer.convolution), strict=True):
        assert np.array_equal(image.get_array(), expected * 4 * 6)
        assert image.get_array().mean() == pytest.approx(1)
    assert drawn[0].norm.vmin == 0
    assert drawn[0].norm.vmax == max(image.get_array().max() for image in drawn)


def test_a_blank_prior_is_drawn_too():
    for prior in ("gmm", "rpe"):
        masks = masks_of(vicinal.create_model("vit-micro", prior=prior, img_size=16, depth=1, global_pool="token"))
        assert_words_are_on_the_page(draw_masks(masks))
        assert_words_are_on_the_page(draw_convolutions(masks))


def test_the_mixture_is_the_sum_of_its_kernels_over_the_distance():
    masks = masks_with("gmm:kernels=3,constant=0.7")
    (mixture,) = masks.layers[1].mixtures.values()
    figure = draw_mixture(masks, "blocks.1.attn")
    assert "a model, gmm:kernels=3,constant=0.7: mixture of layer 2, blocks.1.attn" in words(figure)
    for head, axes in enumerate(figure.axes[:-1]):
        assert axes.get_title() == f"head {head + 1}"
        *kernels, whole, _ = axes.lines
        assert [line.get_color() for line in kernels] == list(PALETTE[:3])
        for number, distance in enumerate(whole.get_xdata()):
            heights = [
                mixture.alpha[kernel, head] * math.exp(-(distance**2) / (2 * (mixture.sigma[kernel, head] ** 2 + 1e-5)))
                for kernel in range(3)
            ]
            assert [line.get_ydata()[number] for line in kernels] == pytest.approx(heights)
            assert whole.get_ydata()[number] == pytest.approx(0.7 + sum(heights))
    assert whole.get_xdata()[-1] == pytest.approx(math.hypot(3, 5))
    for kernel, dots in enumerate(figure.axes[-1].collections):
        expected = np.stack([np.abs(mixture.sigma[kernel]), mixture.alpha[kernel]], 1)
        assert np.array_equal(dots.get_offsets(), expected)
    assert_words_are_on_the_page(figure)


def test_each_mixture_of_a_composition_has_a_picture():
    masks = masks_with("gmm:kernels=2+gmm:kernels=3")
    for part, kernels in (("gmm-1", 2), ("gmm-2", 3)):
        figure = draw_mixture(masks, 0, part)
        assert f"a model, gmm:kernels=2+gmm:kernels=3: mixture {part} of layer 1, blocks.0.attn" in words(figure)
        for kernel, dots in enumerate(figure.axes[-1].collections):
            assert np.array_equal(dots.get_offsets()[:, 1], masks.layers[0].mixtures[part].alpha[kernel])
        assert len(figure.axes[-1].collections) == kernels
    assert "mixture gmm-1 of layer 1" in " ".join(words(draw_mixture(masks, 0)))
    with pytest.raises(VicinalError, match="unknown part 'gmm-3'"):
        draw_mixture(masks, 0, "gmm-3")


def test_no_two_kernels_have_one_color_however_many_there_are():
    figure = draw_mixture(masks_with("gmm:kernels=9"), 0)
    kernels = figure.axes[0].lines[:9]
    assert len({line.get_color() for line in kernels}) == 9
    dots = [tuple(each.get_facecolor()[0]) for each in figure.axes[-1].collections]
    assert len(set(dots)) == 9
    assert_words_are_on_the_page(figure)
    history = PriorHistory((0, 1), {"blocks.0.attn": {"sigma": np.random.default_rng(0).random((2, 16, 3))}})
    figure = draw_history(history)
    named = {line.get_color() for line in figure.axes[0].lines if line.get_label().startswith("kernel")}
    assert len(named) == 16
    assert_words_are_on_the_page(figure)


def test_a_layer_without_a_mixture_is_told_what_to_use():
    with pytest.raises(VicinalError, match=r"blocks.0.attn .* rpe.* not a mixture"):
        draw_mixture(masks_with("rpe"), 0)
    with pytest.raises(VicinalError, match="unknown layer 5: there are 2 "):
        draw_mixture(masks_with("gmm"), 5)


def test_a_history_shows_each_head_and_their_mean():
    generator = np.random.default_rng(0)
    layers = {
        f"blocks.{number}.attn": {
            "gmm.sigma": generator.normal(size=(4, 3, 5)),
            "gmm.alpha": generator.normal(size=(4, 3, 5)),
            "gab.amplitude": generator.normal(size=(4, 5)),
        }
        for number in range(7)
    }
    figure = draw_history(PriorHistory((0, 1, 2, 3), layers), model="a model, gmm+gab")
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert len(shown) == 3 * 7
    assert [axes.get_title() for axes in shown] == 3 * list(layers)
    for axes, (option, name) in zip(shown, ((o, n) for o in layers["blocks.0.attn"] for n in layers), strict=True):
        values = layers[name][option]
        values = values[:, None] if values.ndim == 2 else values
        values = np.abs(values) if option == "gmm.sigma" else values
        lines = [line for line in axes.lines if len(line.get_xdata())]
        for kernel in range(values.shape[1]):
            *heads, mean = lines[6 * kernel : 6 * kernel + 6]
            assert np.array_equal([line.get_ydata() for line in heads], values[:, kernel].T)
            assert mean.get_ydata() == pytest.approx(values[:, kernel].mean(1))
            assert list(mean.get_xdata()) == [0, 1, 2, 3]
            assert mean.get_linewidth() > heads[0].get_linewidth()
            assert {line.get_color() for line in (mean, *heads)} == {PALETTE[kernel]}
    assert {"gmm.sigma, patches", "gmm.alpha", "gab.amplitude", "epoch", "kernel 3"} <= set(words(figure))
    assert_words_are_on_the_page(figure)
