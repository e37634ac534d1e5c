"""Figures of a report as inline SVG, whose text follows the colors of the page, and images as data in the page."""

import base64
import io
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["INK", "png_uri", "report_style", "svg_figure"]

INK = "#010203"
"""Color of text and axes in matplotlib, replaced by that of the page."""
MUTED = "#808080"
_numbers = itertools.count()


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


def svg_figure(figure: "Figure", alt: str, caption: str = "") -> Markup:
    """Returns a figure as inline SVG with an alternative text.

    Args:
        figure: drawn inside of `report_style`.
        alt: what a reader who does not see it has to know.
        caption: split, number of images or runs, and where its data is; shown below the figure.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    prefix = f"f{next(_numbers)}-"  # matplotlib uses the same ids in every figure
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{prefix}", text)
    text = text.replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', _opening(alt), text, count=1)
    html = f'<figure class="plot">{text}'
    return Markup(html + (f"<figcaption>{escape(caption)}</figcaption>" if caption else "") + "</figure>")


def _opening(alt: str) -> str:
    label = str(escape(alt)).replace("\\", "\\\\")
    return rf'<svg viewBox="\1" role="img" aria-label="{label}" xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'


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
