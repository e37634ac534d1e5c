import pytest
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from PIL import Image

from vicinal.analysis.plot_style import BLACK, DPI, distinct_colors, factor_scale, save_figure, wrap_title


@pytest.mark.parametrize(
    ("low", "high", "logarithmic", "limits", "colors"),
    [
        (0.5, 2.0, False, (0.0, 2.0), "RdBu_r"),
        (-1.0, 1.5, False, (-1.0, 3.0), "RdBu_r"),
        (1.0, 1.0, False, (0.0, 2.0), "RdBu_r"),
        (1.5, 3.0, False, (1.5, 3.0), "viridis"),
        (0.1, 0.9, False, (0.1, 0.9), "viridis"),
        (0.25, 2.0, True, (0.25, 4.0), "RdBu_r"),
        (1.0, 1.0, True, (0.5, 2.0), "RdBu_r"),
        (0.1, 0.9, True, (0.1, 0.9), "viridis"),
    ],
)
def test_white_is_one_if_one_is_inside(low, high, logarithmic, limits, colors):
    scale, found = factor_scale(low, high, logarithmic=logarithmic)
    assert (scale.vmin, scale.vmax) == pytest.approx(limits)
    assert type(scale) is (LogNorm if logarithmic else Normalize)
    assert found == colors
    if colors == "RdBu_r":
        assert scale(1.0) == pytest.approx(0.5)


@pytest.mark.parametrize("count", [1, 6, 7, 20])
def test_colors_are_distinct_and_not_black(count):
    colors = distinct_colors(count)[:count]
    assert len(set(colors)) == count
    assert BLACK not in colors


def test_figures_have_one_resolution(tmp_path):
    save_figure(Figure(figsize=(2, 1)), tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as image:
        assert image.size == (2 * DPI, DPI)
    assert [file.name for file in tmp_path.iterdir()] == ["x.png"]


def test_titles_are_wrapped_to_the_width():
    assert wrap_title("a " * 20, 2).split("\n") == ["a " * 12 + "a", "a " * 6 + "a"]
