"""Evidence of a probe, computed from an explicit layout instead of a model.

A token hears the image around its place. Its squared response to a ramp is the mean of the squared ramp where it hears,
which is linear in the position, times its gain, times noise. Nothing here is shared with `decide`.
"""

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from token_layouts import TokenLayout
from vicinal.inspection.attention_mode import Operation, Step
from vicinal.inspection.attention_observer import AttentionCall
from vicinal.inspection.probe import Evidence

__all__ = ["IMAGES", "PROBES", "Axes", "Hearing", "centers_of", "make_evidence", "noise_for", "random_axes", "respond"]

IMAGES = 6
PROBES = 2
# For each leading axis of the logits its factors, slowest first: "images", "windows" or "heads", and the size.
Axes = tuple[tuple[tuple[str, int], ...], ...]


@dataclass(frozen=True)
class Hearing:
    """How well tokens hear their places."""

    noise: float = 0.0
    """Relative rms noise on each squared response, drawn for each probe, the same in all heads."""
    head_noise: float = 0.0
    """As `noise`, drawn for each head on its own."""
    common: float = 0.0
    """Share of the response of a token with a place that comes from the whole image."""
    gain: float = 0.5
    """Standard deviation of the logarithm of a token's gain; drawn for each head and probe."""
    blur: tuple[float, float] = (0.0, 0.0)
    """A token hears its place plus or minus this, as parts of the image's height and width."""
    leak: float = 0.0
    """Response of tokens without a place, to the whole image, relative to the others."""


def noise_for(cells: float, layout: TokenLayout, heads: int = 1, common: float = 0.0) -> tuple[float, float]:
    """Returns `noise` and `head_noise` by which the centers of tokens lie `cells` (rms) beside those of their cells.

    Half of the variance is drawn for each head. A center is `down / (down + up)`, whose noise is `x (1 - x) sqrt(2)`
    times that of the responses: 0.26 rms over the image. Sums over probes and heads average it.
    """
    total = cells * (1 - common) * math.sqrt(PROBES) / (0.26 * max(layout.rows, layout.columns))
    return total * math.sqrt(0.5), total * math.sqrt(0.5 * heads)


def centers_of(layout: TokenLayout) -> Tensor:
    """Returns the center of each token's cell as parts of the image, `(windows, tokens, 2)`; NaN without a place."""
    row, column = layout.index // layout.columns, layout.index % layout.columns
    centers = torch.stack([(row + 0.5) / layout.rows, (column + 0.5) / layout.columns], -1).double()
    return centers.masked_fill(layout.index[..., None] < 0, torch.nan)


def respond(places: Tensor, heads: int, hearing: Hearing, generator: torch.Generator) -> Tensor:
    """Returns squared responses in one probe, `(ramps, windows, heads, tokens)`.

    Args:
        places: where tokens hear, as parts of the image, `(windows, tokens, 2)`; or `(windows, tokens, several, 2)`
            for tokens that hear several places. NaN where a token hears nothing.
        heads: how many heads.
        hearing: how well tokens hear.
        generator: draws gains and noise.
    """
    places = places if places.dim() == 4 else places[:, :, None]
    reach = torch.tensor(hearing.blur, dtype=torch.float64)
    heard = ((places - reach).clamp(min=0) + (places + reach).clamp(max=1)) / 2  # mean of the part inside the image
    center = (1 - hearing.common) * heard.mean(2) + hearing.common * 0.5
    without_place = center.isnan().any(-1)
    center = torch.where(without_place[..., None], 0.5, center)
    loudness = torch.where(without_place, hearing.leak, 1.0)
    row, column = center.unbind(-1)
    mean = (torch.stack([row, 1 - row, column, 1 - column]) * loudness)[:, :, None]  # (ramps, windows, 1, tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    ramps, windows, _, tokens = mean.shape
    gain = (hearing.gain * draw(1, windows, heads, tokens)).exp()
    noise = (
        1 + hearing.noise * draw(ramps, windows, 1, tokens) + hearing.head_noise * draw(ramps, windows, heads, tokens)
    )
    return 1e-4 * mean * gain * noise.clamp(min=0.0)


def make_evidence(queries: list[Tensor], keys: list[Tensor], axes: Axes) -> Evidence:
    """Returns evidence with responses `(ramps, windows, heads, tokens)` of each probe laid out along `axes`."""
    shape = tuple(math.prod(size for _, size in axis) for axis in axes)
    image_axis = next(place for place, axis in enumerate(axes) if any(name == "images" for name, _ in axis))
    fastest = axes[image_axis][-1][0] == "images" and len(axes[image_axis]) > 1
    logits = (*shape, queries[0].shape[-1], keys[0].shape[-1])
    call = AttentionCall(nn.Identity(), 0, Step(Operation.PLAIN, 0), torch.empty(0), torch.empty(0), logits, logits)
    sides = [[_laid_out(one, axes) for one in side] for side in (queries, keys)]
    return Evidence(call, IMAGES, (image_axis, fastest), sides[0], sides[1])


def _laid_out(responses: Tensor, axes: Axes) -> Tensor:
    """Returns `(ramps, windows, heads, tokens)` as `(ramps, *leading, tokens)`, where images are left out."""
    factors = [factor for axis in axes for factor in axis if factor[0] != "images"]
    windows = [size for name, size in factors if name == "windows"]
    heads = [size for name, size in factors if name == "heads"]
    split = responses.reshape(len(responses), *windows, *heads, responses.shape[-1])
    next_axis = {"windows": 1, "heads": 1 + len(windows)}
    order = []
    for name, _ in factors:
        order.append(next_axis[name])
        next_axis[name] += 1
    sizes = [math.prod(size for name, size in axis if name != "images") for axis in axes]
    return split.permute(0, *order, -1).reshape(len(responses), *sizes, responses.shape[-1])


GLOBAL_AXES = ("I H", "IH", "HI", "H I", "I H H")
WINDOW_AXES = ("IW H", "WI H", "I W H", "I H W", "IWH", "IHW", "WHI", "HWI", "W I H", "IW H H", "I W W H")


def random_axes(rng: random.Random, windows: int) -> Axes:
    """Returns leading axes for a number of windows and a random number of heads: in axes of their own or folded."""
    text = rng.choice(WINDOW_AXES if windows > 1 else GLOBAL_AXES)
    sizes = {"I": [IMAGES], "H": [rng.randint(1, 6)], "W": [windows]}
    if text.count("H") == 2:
        sizes["H"] = [rng.randint(2, 3), rng.randint(2, 3)]
    if text.count("W") == 2:
        down = next((n for n in (3, 2) if windows % n == 0), 1)
        sizes["W"] = [windows // down, down]
    names = {"I": "images", "H": "heads", "W": "windows"}
    return tuple(tuple((names[letter], sizes[letter].pop(0)) for letter in axis) for axis in text.split())


def heads_of(axes: Axes) -> int:
    """Returns the number of heads."""
    return math.prod(size for axis in axes for name, size in axis if name == "heads")
