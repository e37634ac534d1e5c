import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from vicinal import VicinalError
from vicinal.analysis.receptive_field import ReceptiveField, draw_field, draw_fields


def a_field(size=(32, 32), grid=(8, 8), at=(4, 4), seed=0, **options):
    values = np.random.default_rng(seed).random(size) ** 4
    about = {"model": "vit-mini", "layer": "blocks.5", "images": 1, "mode": "clip", "positions": "trained"}
    return ReceptiveField(field=values / values.sum(), grid=grid, at=at, stem=grid, **about | options)


def saved(figure, folder):
    assert isinstance(figure, Figure)
    figure.savefig(folder / "picture.png")
    with Image.open(folder / "picture.png") as picture:
        return picture.size


def words(figure):
    found = [figure.get_suptitle(), *(text.get_text() for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.get_axes():
        found += [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]
    return "\n".join(found)


@pytest.mark.parametrize(
    "field",
    [a_field(), a_field((16, 48), (4, 12), (0, 11)), a_field((224, 224), (56, 56), (3, 50), mode="abs", images=5000)],
    ids=["square", "rectangle", "fine grid"],
)
def test_a_field_is_drawn_twice_with_its_squares(field, tmp_path):
    figure = draw_field(field)
    assert saved(figure, tmp_path)[0] > 600
    text = words(figure)
    assert f"vit-mini, blocks.5: receptive field of the patch at row {field.at[0]}, column {field.at[1]}" in text
    assert "linear scale" in text
    assert "logarithmic scale" in text
    assert f"50% of the energy, {field.square(0.5):g} pixels" in text
    assert f"99% of the energy, {field.square(0.99):g} pixels" in text
    assert ("mean of 5,000 images" if field.images == 5000 else "one image") in text
    shown = figure.get_axes()[0].get_images()[0].get_array()
    np.testing.assert_allclose(shown, field.field * field.field.size)


def test_outlines_lie_around_the_patch_inside_of_the_image():
    field = a_field(at=(7, 0))
    patch, half, most = figure_patches(draw_field(field))
    assert patch == (0, 28, 4, 4)
    side = field.square(0.5)
    assert half == pytest.approx((0, 30 - side / 2, 2 + side / 2, 2 + side / 2))
    assert most == pytest.approx((0, 0, 32, 32), abs=2)


def figure_patches(figure):
    return [(*each.get_xy(), each.get_width(), each.get_height()) for each in figure.get_axes()[0].patches]


def test_changed_positions_are_said():
    assert "positions random" in draw_field(a_field(positions="random")).get_suptitle()
    assert "positions" not in draw_field(a_field()).get_suptitle()
    rotary = a_field(positions="zero", rotary_stay=True)
    assert "positions zero except rotary ones" in draw_field(rotary).get_suptitle()
    titles = [axes.get_title() for axes in draw_fields({"a": rotary, "b": a_field()}).subfigs[0].get_axes()[:2]]
    assert titles == ["a\nblocks.5, rotary positions kept", "b\nblocks.5"]


def test_high_images_make_no_high_figures():
    high, wide = a_field((256, 64), (16, 4), (8, 2)), a_field((64, 256), (4, 16), (2, 8))
    for figure in (draw_field(high), draw_fields({"high": high, "wide": wide})):
        assert figure.get_figheight() < 10


@pytest.mark.parametrize("size", [(256, 64), (64, 256)])
def test_a_color_bar_is_as_long_as_its_label(size):
    figure = draw_field(a_field(size, (size[0] // 16, size[1] // 16), (1, 1)))
    figure.draw_without_rendering()
    bars = [axes.child_axes[0] for axes in figure.get_axes() if axes.child_axes]
    assert len(bars) == 2
    for bar in bars:
        assert bar.yaxis.label.get_window_extent().height < bar.get_window_extent().height


def test_lines_that_coincide_are_all_seen():
    figure = draw_fields({str(number): a_field() for number in range(6)})
    for axes in figure.subfigs[1].get_axes():
        widths = [line.get_linewidth() for line in axes.get_lines()[:6]]
        assert sorted(set(widths), reverse=True) == widths


@pytest.mark.parametrize("count", [1, 6])
def test_fields_are_compared_on_one_scale(count, tmp_path):
    fields = {f"model $x_{number}$": a_field(seed=number) for number in range(count)}
    figure = draw_fields(fields)
    saved(figure, tmp_path)
    parts = figure.subfigs
    images = [axes.get_images()[0] for axes in parts[0].get_axes() if axes.get_images()]
    assert len(images) == count
    assert len({image.norm.vmax for image in images}) == 1
    titles = [axes.get_title() for axes in parts[0].get_axes()[:count]]
    assert titles == [f"{name}\nblocks.5" for name in fields]
    across, inside = parts[1].get_axes()
    assert len(across.get_lines()) == count
    first = fields["model $x_0$"]
    sides, shares = inside.get_lines()[0].get_data()
    assert shares[-1] == pytest.approx(1)
    assert sides[np.searchsorted(shares, 0.5)] == first.square(0.5)
    places, energy = across.get_lines()[0].get_data()
    assert energy == pytest.approx(first.by_patch.sum(0) * 8)
    assert places[4] == 0


def test_fields_of_other_sizes_and_with_dark_pixels_are_compared(tmp_path):
    dark = np.zeros((15, 21))
    dark[6:9, 9:12] = 1 / 9
    about = {"grid": (15, 21), "at": (7, 10), "stem": (15, 21), "images": 1, "mode": "clip", "positions": "trained"}
    fields = {
        "convolution": ReceptiveField(field=dark, model="c", layer="0", **about),
        "a model of a name that is long enough to be broken into several lines": a_field((64, 32), (16, 8)),
    }
    saved(draw_fields(fields), tmp_path)
    saved(draw_field(fields["convolution"]), tmp_path)


def test_no_fields_are_refused():
    with pytest.raises(VicinalError, match="no receptive fields to draw"):
        draw_fields({})
