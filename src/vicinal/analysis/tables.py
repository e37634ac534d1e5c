"""The tables of a model: what its attention is multiplied by, or adds, at each offset between two patches.

Priors of this package say it themselves. What other attention adds is read off as it runs, whatever its class: with the
product of queries and keys set to zero, what reaches the softmax is the bias, and where it differs by the offset only,
the same for every image, that is a table.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vicinal.attachment import get_priors
from vicinal.attachment.finding import PRODUCTS, SOFTMAXES, calls_of, heads_third
from vicinal.attachment.placing import LeftAlone, Site, place
from vicinal.attachment.running import ImageSize, Runner, quietly, runner_for
from vicinal.attachment.swapping import without_priors
from vicinal.errors import VicinalError
from vicinal.priors.base import Prior

__all__ = ["LayerTable", "tables_of"]

IMAGES = 2  # different ones, to tell a bias from what depends on the image
SAME = 1e-5  # of the largest value: differences that rounding may make


@dataclass(frozen=True, eq=False)
class LayerTable:
    """What one attention layer is multiplied by, or adds, by place."""

    name: str
    """Of the attention module."""
    kind: str
    """The prior, or the class that holds the bias."""
    role: Literal["scale", "bias"]
    """Whether it multiplies logits or is added to them."""
    over: Literal["offsets", "patches"]
    """`offsets` between any two patches; or `patches` of the grid, as the one in the centre sees them."""
    values: NDArray[Any]
    """`(heads, 2h-1, 2w-1)` over offsets, key - query; `(heads, h, w)` over patches. In double precision."""
    centre: tuple[int, int]
    """Row and column of offset (0, 0)."""

    def around_centre(self) -> "LayerTable":
        """What the patch in the centre of the grid sees of it: `(heads, h, w)`."""
        if self.over == "patches":
            return self
        height, width = ((length + 1) // 2 for length in self.values.shape[1:])
        row, column = height - 1 - height // 2, width - 1 - width // 2
        seen = self.values[:, row : row + height, column : column + width]
        return replace(self, over="patches", values=seen, centre=(height // 2, width // 2))


def tables_of(model: nn.Module, *, img_size: ImageSize | None = None) -> list[LayerTable]:
    """Every table of a model, layer by layer; where a layer has a scale and a bias, the scale first.

    >>> import vicinal
    >>> from vicinal.analysis.tables import tables_of
    >>> model = vicinal.create_model("vit-micro", prior="gmm+rpe:init=normal", depth=2)
    >>> [(table.name, table.role, table.values.shape) for table in tables_of(model)][:2]
    [('blocks.0.attn', 'scale', (4, 15, 15)), ('blocks.0.attn', 'bias', (4, 15, 15))]

    Args:
        model: one with priors, or with relative position biases of its own, such as Swin, BEiT or timm's
            `vit_relpos_*`; it runs twice on noise.
        img_size: height and width of the images; by default what the model declares.
    """
    run = runner_for(model, img_size)
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    with torch.no_grad():
        found = [table for name, prior in get_priors(model).items() for table in _of_prior(name, prior)]
        own, left_alone = _own_biases(run)
        found += own
    if not found:
        others = f"; {_not_looked_into(left_alone)}" if left_alone else ""
        raise VicinalError(
            f"{type(model).__name__} has no table: it carries no prior, and no attention layer of it adds a bias that "
            f"differs by offset{others}. Take a model with one, as `vicinal train --prior rpe` makes, or such as Swin "
            "or BEiT"
        )
    return sorted(found, key=lambda table: order.get(table.name, -1))


def _of_prior(name: str, prior: Prior) -> list[LayerTable]:
    grid, found = prior.grid, []
    for role, values in zip(("scale", "bias"), prior.values(), strict=True):
        if values is None:
            continue
        if prior.per_offset:
            over, centre = "offsets", (grid.height - 1, grid.width - 1)
        else:
            over, centre = "patches", (grid.height // 2, grid.width // 2)
            values = values[:, centre[0] * grid.width + centre[1]].reshape(-1, grid.height, grid.width)
        kind = prior.spec or type(prior).__name__
        found.append(LayerTable(name, kind, role, over, _double(values), centre))  # type: ignore[arg-type]
    return found


def _not_looked_into(layers: list[LeftAlone]) -> str:
    """Which layers may have a bias that was not seen, and why; one for each reason."""
    names: dict[str, list[str]] = {}
    for layer in layers:
        names.setdefault(layer.reason, []).append(layer.name)
    each = (
        f"{its[0]}{f' and {len(its) - 1} more' if len(its) > 1 else ''} ({reason})" for reason, its in names.items()
    )
    return f"not looked into: {', '.join(each)}"


def _own_biases(run: Runner) -> tuple[list[LayerTable], list[LeftAlone]]:
    """Tables of biases that are no priors of ours; and the layers that may have others."""
    with quietly(run.model), without_priors(run.model):
        images = run.noise(IMAGES)
        sites = place(run.model, calls_of(run.model, lambda: run(images)), IMAGES, run.image)
        readers = [_BiasReader(site) for site in sites if isinstance(site, Site)]
        hooks: list[Any] = [reader.site.module.register_forward_pre_hook(reader.open) for reader in readers]
        hooks += [reader.site.module.register_forward_hook(reader.close, always_call=True) for reader in readers]
        try:
            run(images)
        finally:
            for hook in hooks:
                hook.remove()
        found = [reader.found for reader in readers if reader.found is not None]
        return found, [site for site in sites if isinstance(site, LeftAlone)]


class _BiasReader(TorchFunctionMode):
    """Reads what one attention module adds to its logits, which it sets to zero before."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site
        self.seen: list[Tensor] = []
        self.found: LayerTable | None = None

    def open(self, *_: object) -> None:
        """Begin, as the module does."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def close(self, *_: object) -> None:
        """End, as the module does."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.found, self.seen = self._table(), []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            if mask is not None and mask.is_floating_point():
                self.seen.append(mask.expand(self.site.call.logits))
        elif func in SOFTMAXES and self._is_logits(args[0]):
            self.seen.append(args[0])
        result = func(*args, **kwargs)
        return torch.zeros_like(result) if func in PRODUCTS and self._is_logits(result) else result

    def _is_logits(self, values: Tensor) -> bool:
        """Whether values can be the logits, of all images: a bias that is made by a product is smaller."""
        logits = self.site.call.logits
        return values.shape[-3:] == logits[-3:] and values.numel() == torch.Size(logits).numel()

    def _table(self) -> LayerTable | None:
        """What was added, if it depends on the offset only, and on it at all."""
        heads, grid = self.site.heads, self.site.grid
        if not self.seen:
            return None
        added = torch.cat([heads_third(seen, heads, self.site.heads_axis) for seen in self.seen], -3)
        added = added.double().reshape(IMAGES, -1, heads, grid.tokens, grid.tokens)
        pairs = grid.drop_prefix(added.amax(1))  # a window that is cut in two hides pairs; another shows them
        values = grid.fold(pairs[0]) / grid.fold(torch.ones_like(pairs[0]))
        rounding = SAME * float(pairs.abs().max())
        varies = bool((values.amax((1, 2)) - values.amin((1, 2)) > rounding).any())
        if not varies or not bool(((pairs - grid.unfold(values)).abs() <= rounding).all()):
            return None
        return LayerTable(
            self.site.name,
            _kind(self.site.module),
            "bias",
            "offsets",
            _double(values),
            (grid.height - 1, grid.width - 1),
        )


def _kind(module: nn.Module) -> str:
    """The class that holds the bias: a part of the attention that gives it, as in timm, or the attention itself."""
    part = next((child for child in module.children() if hasattr(child, "get_bias")), None)
    if part is not None:
        return type(part).__name__
    return f"{type(module).__module__.rpartition('.')[2]}.{type(module).__name__}"


def _double(values: Tensor) -> NDArray[Any]:
    found: NDArray[Any] = values.double().numpy(force=True)
    return found
