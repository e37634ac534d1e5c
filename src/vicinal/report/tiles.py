"""Small pictures on one color scale: a sheet of layers and heads, and the legend of the scale."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from vicinal.report.plots import png_uri

if TYPE_CHECKING:
    from matplotlib.colors import Normalize

__all__ = ["ColorScale", "frame_block", "tile_row", "tile_sheet"]

# In CSS pixels:
TILE, GAP = 56, 3
LETTER_WIDTH, LINE_HEIGHT = 7, 16
LEGEND_WIDTH = 240


@dataclass(frozen=True, eq=False)
class ColorScale:
    """Numbers as colors."""

    scale: "Normalize"
    colors: str
    """Name of matplotlib's colormap."""
    unit: str
    """What the numbers are, such as `logits times`."""

    @cached_property
    def palette(self) -> NDArray[np.uint8]:
        """The colors of `levels`, `(256, 3)`; the last one is not used."""
        from matplotlib import colormaps

        found: NDArray[np.uint8] = colormaps[self.colors](np.linspace(0, 1, 255), bytes=True)[:, :3]
        return np.concatenate([found, found[-1:]])

    def levels(self, values: NDArray[np.float64]) -> NDArray[np.uint8]:
        """Returns numbers of colors from 0 to 254, of the shape of `values`; beyond the ends, those of the ends."""
        places = np.clip(np.ma.filled(self.scale(np.clip(values, self.scale.vmin, self.scale.vmax)), 0.0), 0, 1)
        found: NDArray[np.uint8] = np.round(254 * places).astype(np.uint8)
        return found

    def legend(self) -> Markup:
        """Returns the colors with the numbers at both ends and in the middle."""
        strip = png_uri(np.arange(255, dtype=np.uint8)[None], self.palette)
        low, middle, high = (float(self.scale.inverse(place)) for place in (0.0, 0.5, 1.0))
        return Markup(
            '<div class="legend"><img src="{}" alt="" width="{}" height="12"><p><span>{:.3g}</span><span>{:.3g}</span>'
            "<span>{:.3g}</span></p><p>{}</p></div>"
        ).format(strip, LEGEND_WIDTH, low, middle, high, self.unit)


def tile_sheet(pictures: Mapping[str, NDArray[np.float64]], color: ColorScale, alt: str) -> Markup:
    """Returns a sheet with a row for each layer and a column for each head.

    Args:
        pictures: by layer, `(heads, rows, columns)`.
        color: scale of all pictures.
        alt: alternative text.
    """
    left = LETTER_WIDTH * max(map(len, pictures)) + 8
    columns = max(map(len, pictures.values()))
    parts = [
        Markup('<text x="{}" y="11" text-anchor="middle">{}</text>').format(
            left + (head + 0.5) * TILE, f"head {head + 1}" if columns < 9 else head + 1
        )
        for head in range(columns)
    ]
    top = LINE_HEIGHT
    for layer, values in pictures.items():
        heads, rows, across = values.shape
        height = round(TILE * rows / across)
        parts.append(Markup('<text x="0" y="{}">{}</text>').format(top + height / 2 + 4, layer))
        strip = color.levels(np.concatenate(list(values), axis=1))  # one file is smaller than one for each head
        parts.append(
            Markup('<image x="{}" y="{}" width="{}" height="{}" preserveAspectRatio="none" href="{}"/>').format(
                left, top, heads * TILE, height, png_uri(strip, color.palette)
            )
        )
        lines = " ".join(f"M{left + head * TILE} {top}v{height}" for head in range(1, heads))
        parts.append(Markup('<path class="tile-line" stroke-width="{}" d="{}"/>').format(GAP, lines))
        top += height + GAP
    width = left + columns * TILE
    return Markup(
        '<svg class="tiles" width="{0}" height="{1}" viewBox="0 0 {0} {1}" role="img" aria-label="{2}">{3}</svg>'
    ).format(width, top, alt, Markup("").join(parts))


def tile_row(pictures: Mapping[str, NDArray[np.float64]], color: ColorScale, alt: str) -> Markup:
    """Returns pictures with their names, which wrap into as many rows as the page needs.

    Args:
        pictures: by name, `(rows, columns)`.
        color: scale of all pictures.
        alt: alternative text.
    """
    parts = [
        Markup('<span class="tile"><img src="{}" alt="" width="{}"><span>{}</span></span>').format(
            png_uri(color.levels(values), color.palette), round(1.5 * TILE), name
        )
        for name, values in pictures.items()
    ]
    return Markup('<div class="tile-row" role="img" aria-label="{}">{}</div>').format(alt, Markup("").join(parts))


def frame_block(label: str, frames: Sequence[tuple[str, Markup]], caption: str, color: ColorScale) -> Markup:
    """Returns pictures one of which the script shows at a time, chosen by a slider; without it, all are shown.

    Args:
        label: of the slider.
        frames: name and picture of each. The last one is shown first.
        caption: below all of them.
        color: scale of all pictures.
    """
    shown = Markup("").join(
        Markup('<div class="frame{}" data-label="{}"><p class="frame-name">{}</p>{}</div>').format(
            " chosen" if index == len(frames) - 1 else "", name, name, picture
        )
        for index, (name, picture) in enumerate(frames)
    )
    slider = Markup(
        '<p class="slider needs-script"><label>{} <input type="range" class="frame-slider" min="0" max="{}" step="1" '
        'value="{}" aria-valuetext="{}"></label> <output>{}</output></p>'
    ).format(label, len(frames) - 1, len(frames) - 1, frames[-1][0], frames[-1][0])
    return Markup(
        '<figure class="frames">{}<div class="scroll" tabindex="0" role="region" aria-label="{}">{}</div>{}'
        "<figcaption>{}</figcaption></figure>"
    ).format(slider if len(frames) > 1 else "", caption, shown, color.legend(), caption)
