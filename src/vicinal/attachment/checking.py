"""Does a prior reach the logits it should? Asked of every module, on noise, when a prior is attached.

The model's output would not tell: LayerScale hides a wrong mask there. And an identity prior alone is blind to the
grid, so a prior with another number at every offset is compared with one that is looked up pair by pair.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vicinal.attachment.finding import IN_TURN, PRODUCTS, SOFTMAXES, by_head, same_attention
from vicinal.attachment.multihead import multi_head
from vicinal.attachment.placing import Site
from vicinal.attachment.swapping import swap, swap_back
from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.priors.base import Prior

__all__ = ["check_module"]


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
        self.turn = 0
        self.step = "done" if site.call.fused else "multiply"

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            parts = replace(multi_head(*args, **kwargs), need_weights=False)
            return parts.run(lambda q, k, v, mask, **_: self._attention(q, k, v, mask), None)
        if func in SOFTMAXES and self.step == "add":
            logits = by_head(torch.add, args[0], self.bias, self.site.heads_axis, self.turn)
            self.turn += 1
            more = self.site.heads_axis == IN_TURN and self.turn < self.site.heads
            self.step = "multiply" if more else "done"
            return func(logits, *args[1:], **kwargs)
        result = func(*args, **kwargs)
        if func in PRODUCTS and self.step == "multiply" and same_attention(result, self.site.call.logits):
            self.step = "add"
            result = by_head(torch.mul, result, self.scale, self.site.heads_axis, self.turn)
        return result

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **rest: Any
    ) -> Tensor:
        scale: float = rest.get("scale") or query.shape[-1] ** -0.5
        logits = by_head(torch.mul, query @ key.mT * scale, self.scale, self.site.heads_axis)
        logits = by_head(torch.add, logits, self.bias, self.site.heads_axis)
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
    if any(parameter.dtype.itemsize < 4 for parameter in module.parameters()):  # too coarse to compare
        module = copy.deepcopy(module).float()
        wide = {id(x): x.float() for x in given if isinstance(x, Tensor) and x.is_floating_point()}
        given = [wide.get(id(x), x) for x in given]
    tokens = next(x for x in given if isinstance(x, Tensor) and x.is_floating_point())
    noise = torch.randn(tokens.shape, generator=generator).to(tokens)
    given = [noise if x is tokens else x for x in given]
    keywords = dict(zip(names[len(args) :], given[len(args) :], strict=True))

    def run() -> Tensor:
        out = module(*given[: len(args)], **keywords)
        return cast("Tensor", out[0] if isinstance(out, tuple) else out)

    device = site.call.queries.device if site.call.queries is not None else torch.device("cpu")
    uneven = Uneven(site.heads, site.grid, device)
    with torch.no_grad(), _nothing_hidden(module):
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
    if effect <= rounding:
        raise VicinalError("its output does not depend on what patches see of each other")
    if float((outputs[1] - expected).abs().max()) > rounding + 0.01 * effect:
        raise VicinalError("a prior does not reach its logits as the formula says")


@contextlib.contextmanager
def _nothing_hidden(module: nn.Module) -> Iterator[None]:
    """Noise for weights that start at or near zero, such as a LayerScale: behind them nothing could be seen."""
    hiding = {
        parameter: parameter.clone()
        for name, parameter in module.named_parameters()
        if not name.endswith("bias") and parameter.abs().max() < 1e-3  # a bias hides nothing
    }
    for parameter in hiding:
        parameter.normal_(generator=torch.Generator(parameter.device).manual_seed(0))
    try:
        yield
    finally:
        for parameter, value in hiding.items():
            parameter.copy_(value)
