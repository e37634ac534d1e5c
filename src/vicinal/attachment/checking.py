"""Does a prior reach the logits it should? Asked of every module, on noise, when a prior is attached.

The model's output would not tell: LayerScale hides a wrong mask there. And an identity prior alone is blind to the
grid, so a prior with another number at every offset is compared with one that is looked up pair by pair.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vicinal.attachment.finding import PRODUCTS, SOFTMAXES, Call, same_attention
from vicinal.attachment.placing import Site
from vicinal.attachment.swapping import swap, swap_back
from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.priors.base import Prior

__all__ = ["check_module", "check_order", "probe_cells"]


class Uneven(Prior):
    """Another scale and bias at every offset and head."""

    def __init__(self, heads: int, grid: Grid, device: torch.device) -> None:
        super().__init__(heads, grid)
        generator = torch.Generator().manual_seed(0)
        shape = (heads, *grid.table_shape)
        self.register_buffer("times", (0.5 + torch.rand(shape, generator=generator)).to(device))
        self.register_buffer("plus", torch.randn(shape, generator=generator).to(device))

    def scale(self) -> Tensor:
        """Between 0.5 and 1.5."""
        return self.times  # type: ignore[return-value]

    def bias(self) -> Tensor:
        """Normal."""
        return self.plus  # type: ignore[return-value]


class _PairByPair(TorchFunctionMode):
    """The same prior, looked up pair by pair of tokens, in plain attention."""

    def __init__(self, prior: Uneven, site: Site) -> None:
        super().__init__()
        self.site, grid = site, prior.grid
        self.scale = torch.ones(prior.heads, grid.tokens, grid.tokens, device=prior.device)
        self.bias = torch.zeros_like(self.scale)
        patch = torch.arange(grid.patches, device=prior.device)
        row, column = patch // grid.width, patch % grid.width
        offset = row[None] - row[:, None] + grid.height - 1, column[None] - column[:, None] + grid.width - 1
        self.scale[:, grid.prefix :, grid.prefix :] = prior.scale()[:, *offset]
        self.bias[:, grid.prefix :, grid.prefix :] = prior.bias()[:, *offset]
        if site.heads_axis == -4:
            self.scale, self.bias = self.scale[:, None], self.bias[:, None]
        self.step = "done" if site.call.fused else "multiply"

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in SOFTMAXES and self.step == "add":
            self.step = "done"
            return func(args[0] + self.bias, *args[1:], **kwargs)
        result = func(*args, **kwargs)
        if func in PRODUCTS and self.step == "multiply" and same_attention(result, self.site.call.logits):
            self.step = "add"
            result = result * self.scale
        return result

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **rest: Any
    ) -> Tensor:
        scale: float = rest.get("scale") or query.shape[-1] ** -0.5
        logits = query @ key.mT * scale * self.scale + self.bias
        if attn_mask is not None:
            logits = logits.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else logits + attn_mask
        out: Tensor = logits.softmax(-1) @ value
        return out


def check_module(site: Site) -> None:
    """Raise if an identity prior changes the module's output, or an uneven one does not change it as it should."""
    module, (args, kwargs) = site.module, site.call.inputs
    generator = torch.Generator().manual_seed(0)
    names = [*range(len(args)), *kwargs]
    given = [*args, *kwargs.values()]
    tokens = next(i for i, x in enumerate(given) if isinstance(x, Tensor) and x.is_floating_point())
    given[tokens] = torch.randn(given[tokens].shape, generator=generator).to(given[tokens])
    keywords = dict(zip(names[len(args) :], given[len(args) :], strict=True))

    def run() -> Tensor:
        out = module(*given[: len(args)], **keywords)
        return cast("Tensor", out[0] if isinstance(out, tuple) else out)

    device = site.call.queries.device if site.call.queries is not None else torch.device("cpu")
    uneven = Uneven(site.heads, site.grid, device)
    with torch.no_grad(), _no_zeros(module):
        plain = run()
        with _PairByPair(uneven, site):
            expected = run()
        outputs = []
        for prior in (Prior(site.heads, site.grid), uneven):
            swap(module, prior, site.heads_axis, site.call.fused)
            try:
                outputs.append(run())
            finally:
                swap_back(module)
    rounding = 1e-5 * float(plain.abs().max())
    effect = float((expected - plain).abs().max())
    if float((outputs[0] - plain).abs().max()) > rounding:
        raise VicinalError("a prior that changes nothing changes its output")
    if effect <= rounding or float((outputs[1] - expected).abs().max()) > rounding + 0.01 * effect:
        raise VicinalError("a prior does not reach its logits as the formula says")


@contextlib.contextmanager
def _no_zeros(module: nn.Module) -> Iterator[None]:
    """Noise for parameters that start at zero, such as a last layer: behind those nothing could be seen."""
    zeros = [parameter for parameter in module.parameters() if not parameter.any()]
    for parameter in zeros:
        parameter.normal_(generator=torch.Generator(parameter.device).manual_seed(0))
    try:
        yield
    finally:
        for parameter in zeros:
            parameter.zero_()


def probe_cells(site: Site, size: tuple[int, int], stride: tuple[int, int]) -> list[tuple[int, int]]:
    """Cells of a map to disturb: corners of rectangles, far from its diagonal, of a half and a quarter of a window."""
    window = site.grid.height, site.grid.width
    steps = [(0, 0)]
    for part in (2, 4):
        down, right = (max(1, side // part) for side in window)
        steps += [(0, right), (down, 0), (0, right * stride[1]), (down * stride[0], 0)]
    anchors = ((size[0] // 8, size[1] * 5 // 8), (size[0] * 5 // 8, size[1] // 8))
    cells = []
    for anchor in anchors:
        corner = [
            place // side * side if site.windows > 1 else place for place, side in zip(anchor, window, strict=True)
        ]
        cells += [((corner[0] + down) % size[0], (corner[1] + right) % size[1]) for down, right in steps]
    return list(dict.fromkeys(cells))


def check_order(
    sites: Sequence[Site], disturbed: Callable[[tuple[int, int], list[tuple[int, int]]], list[Call]]
) -> dict[str, str]:
    """Which modules do not hold their tokens row by row, and why; by name.

    Args:
        sites: modules to ask.
        disturbed: given the size of a map and some of its cells, runs the model on an image and on copies with one cell
            disturbed each, and returns the calls.
    """
    wrong = {}
    trusted = set()  # classes that were seen to hold their tokens row by row
    for site in sites:
        size = (round(site.grid.height * site.windows**0.5), round(site.grid.width * site.windows**0.5))
        if size[0] * size[1] != site.grid.patches * site.windows:
            wrong[site.name] = f"its {site.windows} windows of {site.grid} patches tile no map"
            continue
        stride = (size[0] // site.grid.height, size[1] // site.grid.width)
        cells = probe_cells(site, size, stride)
        call = next(x for x in disturbed(size, cells) if x.module is site.module and x.queries is not None)
        places = _most_changed(call, site, len(cells))
        agreement = _agreement(site, cells, places, size, stride)
        kind = type(site.module)
        if agreement is None and kind not in trusted:
            wrong[site.name] = "its tokens hardly depend on the image, so their order cannot be seen"
        elif agreement is not None and agreement < (0.5 if kind in trusted else 0.8):
            wrong[site.name] = "its tokens are not those of the image, row by row"
        elif agreement is not None and agreement >= 0.8:
            trusted.add(kind)
    return wrong


def _most_changed(call: Call, site: Site, cells: int) -> list[tuple[int, int]]:
    """(window, token) that each disturbance changes most, compared with how much the others change it."""
    assert call.queries is not None
    queries = call.queries.movedim(site.heads_axis, -3).float()  # (..., heads, tokens, dim)
    queries = queries.reshape(cells + 1, site.windows, site.heads, site.grid.tokens, -1)
    change = (queries[1:] - queries[:1]).square().sum((2, 4))[:, :, site.grid.prefix :].flatten(1)
    change = change / (change.mean(0) + 1e-6 * change.max())
    return [divmod(int(index), site.grid.patches) for index in change.nan_to_num().argmax(1)]


def _agreement(
    site: Site,
    cells: list[tuple[int, int]],
    places: list[tuple[int, int]],
    size: tuple[int, int],
    stride: tuple[int, int],
) -> float | None:
    """Share of steps between disturbed cells that are steps on the grid; None if there is too little to tell.

    Windows may be shifted, or dilated by `stride`.
    """
    if len(set(places)) <= len(cells) / 4:
        return None
    tokens = [divmod(token, site.grid.width) for _, token in places]
    side = min(site.grid.height, site.grid.width)
    # Convolutions and pooling before attention move what changes most by up to a cell. On a small grid, all alike.
    reach = 0 if side < 5 else 1
    if site.windows == 1:
        return _share_within([_difference(*each, size) for each in zip(cells, tokens, strict=True)], reach)
    pairs = [(i, j) for i in range(len(cells)) for j in range(i) if places[i][0] == places[j][0]]
    if len(pairs) < 2:
        return None
    outside = [[cells[i][axis] - cells[j][axis] for axis in (0, 1)] for i, j in pairs]
    shares = []
    for factor in ((1, 1), stride):
        inside = [[factor[axis] * (tokens[i][axis] - tokens[j][axis]) for axis in (0, 1)] for i, j in pairs]
        differences = [_difference(x, y, size) for x, y in zip(outside, inside, strict=True)]
        shares.append(_share_within(differences, reach if side < 10 else 2 * reach))
    return max(shares)


def _difference(left: Sequence[int], right: Sequence[int], size: tuple[int, int]) -> tuple[int, int]:
    """`left - right` on a map whose edges meet, the short way round."""
    row, column = ((a - b + n // 2) % n - n // 2 for a, b, n in zip(left, right, size, strict=True))
    return row, column


def _share_within(differences: list[tuple[int, int]], reach: int) -> float:
    """Share of differences that are about the same small one."""
    (row, column), _ = Counter(differences).most_common(1)[0]
    if max(abs(row), abs(column)) > 1:
        row = column = 0
    near = sum(max(abs(a - row), abs(b - column)) <= reach for a, b in differences)
    return near / len(differences)
