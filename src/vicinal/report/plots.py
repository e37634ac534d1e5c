"""Figures of a report as inline SVG, whose colors follow those of the page, and images as data in the page."""

import base64
import hashlib
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from vicinal.analysis import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["INK", "MARKERS", "line_look", "png_uri", "report_style", "svg_legend", "svg_panels"]

INK = "#010203"
"""Color of text and axes in matplotlib, replaced by that of the page."""
MUTED = "#808080"
MARKERS = "osD^vP*X"
PIXELS_PER_POINT = 96 / 72
DASHES = {"-": "", "-.": "8 3 2 3", ":": "2 3", "--": "6 4"}
PAGE_COLORS = {
    INK: "currentColor",
    **{
        getattr(plot_style, name).lower(): f"var(--plot-{name.lower().replace('_', '-')})"
        for name in ("BLUE", "ORANGE", "GREEN", "PURPLE", "VERMILION", "SKY_BLUE", "GRAY")
    },
}
"""Colors of matplotlib and the page's color for each; the style sheet has brighter ones for dark pages."""


@contextmanager
def report_style() -> Iterator[None]:
    """Sets the style of figures inside of `with`: no background, text as text, one color for text and axes."""
    import matplotlib

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "vicinal",
        "text.parse_math": False,  # names of arms and classes can contain a dollar sign
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.unicode_minus": True,
        "axes.titlesize": 10,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "legend.frameon": False,
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
        "grid.color": MUTED,
        "grid.alpha": 0.3,
    }
    with matplotlib.rc_context(settings):
        yield


def line_look(number: int) -> dict[str, Any]:
    """Returns color and line style of one of several lines, counted from 0; black is the page's color of text."""
    look = plot_style.line_style(number)
    return {**look, "color": INK if look["color"] == plot_style.BLACK else look["color"]}


def svg_panels(figures: Sequence["Figure"], alt: str, caption: str, legend: str = "") -> Markup:
    """Returns several small figures as one, which stand side by side, or below each other on a narrow page.

    Args:
        figures: drawn inside of `report_style`, narrow enough for a phone: at most 3.6 inches.
        alt: what a reader who does not see them has to know.
        caption: split, number of images or runs, and where the data is; below the panels.
        legend: that of `svg_legend`, above the panels.
    """
    panels = Markup("").join(map(_svg, figures))
    below = Markup("<figcaption>{}</figcaption>").format(caption)
    return Markup('<figure class="plot">{}<div class="panels" role="img" aria-label="{}">{}</div>{}</figure>').format(
        legend, alt, panels, below
    )


def svg_legend(labels: Sequence[str], *, markers: bool = False) -> Markup:
    """Returns a list of labels with the line, or the marker, that `line_look` gives each of them."""
    from matplotlib.markers import MarkerStyle
    from matplotlib.transforms import Affine2D

    items, width = [], 14 if markers else 28
    for number, label in enumerate(labels):
        look = line_look(number)
        color = PAGE_COLORS[look["color"].lower()]
        if markers:
            style = MarkerStyle(MARKERS[number % len(MARKERS)])
            to_pixels = style.get_transform() + Affine2D().scale(10, -10).translate(7, 7)
            outline = np.asarray(style.get_path().transformed(to_pixels).to_polygons()[0], dtype=float)
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in outline)
            shape = Markup('<polygon points="{}" style="fill: {}"/>').format(points, color)
        else:
            dashes = DASHES[look["linestyle"]]
            shape = Markup('<path d="M0 7H28" style="stroke: {}; stroke-width: 2.5; stroke-dasharray: {}"/>').format(
                color, dashes or "none"
            )
        items.append(
            Markup('<li><svg viewBox="0 0 {} 14" width="{}" aria-hidden="true">{}</svg> {}</li>').format(
                width, width, shape, label
            )
        )
    return Markup('<ul class="plot-legend">{}</ul>').format(Markup("").join(items))


def _svg(figure: "Figure") -> Markup:
    """Returns a figure as an SVG element of its natural size, with ids that no other figure has."""
    file = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the browser has fonts with more characters
        figure.savefig(
            file, format="svg", bbox_inches="tight", pad_inches=0.02, metadata={"Date": None, "Creator": None}
        )
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    prefix = f"f{hashlib.sha256(text.encode()).hexdigest()[:8]}-"  # matplotlib uses the same ids in every figure
    found = re.match(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', text)
    assert found is not None
    width = PIXELS_PER_POINT * float(found[1].split()[2])
    opening = (
        f'<svg viewBox="{escape(found[1])}" width="{width:.0f}" aria-hidden="true" xmlns="http://www.w3.org/2000/svg" '
        'xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    return Markup(opening + re.sub("<[^>]*>", lambda tag: _page_tag(tag[0], prefix), text[found.end() :]))


def _page_tag(tag: str, prefix: str) -> str:
    """Returns a tag of matplotlib's SVG with the colors of the page, and with a prefix before every id."""
    tag = re.sub(r'\bid="', f'id="{prefix}', tag)
    tag = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{prefix}", tag)
    for color, replacement in PAGE_COLORS.items():
        tag = tag.replace(color, replacement)
    return tag


def png_uri(pixels: NDArray[np.uint8], palette: NDArray[np.uint8] | None = None) -> str:
    """Returns an image as a data URI of a PNG file.

    Args:
        pixels: `(height, width)` or `(height, width, 3)`.
        palette: colors of the numbers in `pixels`, `(256, 3)`; gray by default.
    """
    from PIL import Image

    file, image = io.BytesIO(), Image.fromarray(pixels)
    if palette is not None:
        image.putpalette(palette.tobytes())
    image.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
