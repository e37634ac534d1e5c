"""Reads the tables of a model: the factor, or the bias, of its logits at each offset between two patches.

Priors of this package have them. The bias of other attention is read while it runs, whatever its class: with the
product of queries and keys set to zero, the bias alone reaches the softmax, and if it depends on the offset only, and
is the same for every image, it is a table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vicinal.analysis.learned_tables.center_view import center_view
from vicinal.attachment import get_priors
from vicinal.attention.multi_head import multi_head
from vicinal.cells import PairLayout
from vicinal.deprecation import RenamedAttribute
from vicinal.errors import VicinalError
from vicinal.inspection.attention_mode import BADDBMMS, AttentionMode, FusedCall
from vicinal.inspection.model_inspection import inspect_runner, without_priors
from vicinal.inspection.model_runner import ImageSize, ModelRunner, eval_without_side_effects, make_runner
from vicinal.inspection.sites import AttentionSite
from vicinal.priors.base import Prior

__all__ = ["LayerTable", "tables_of"]

NUM_IMAGES = 2  # different ones: a bias is the same for both
MAX_ROUNDING = 1e-5  # of the largest value


@dataclass(frozen=True, eq=False)
class LayerTable:
    """The factor, or the bias, of the logits of one attention layer, by offset or by patch."""

    name: str
    """Name of the attention module."""
    kind: str
    """The spec of the prior, or the name of the class that has the bias."""
    role: Literal["scale", "bias"]
    """Whether the table multiplies logits or is added to them."""
    over: Literal["offsets", "patches"]
    """`offsets` between any two patches; or `patches` of the grid, for the central patch as the query."""
    values: NDArray[Any]
    """`(heads, 2h-1, 2w-1)` over offsets, key - query; `(heads, h, w)` over patches. In double precision."""
    center: tuple[int, int]
    """Row and column of offset (0, 0)."""

    centre = RenamedAttribute("center")
    around_centre = RenamedAttribute("around_center")

    def around_center(self) -> "LayerTable":
        """Returns the table over patches, for the central patch as the query: values `(heads, h, w)`."""
        if self.over == "patches":
            return self
        height, width = ((length + 1) // 2 for length in self.values.shape[1:])
        values = center_view(self.values, height, width, per_offset=True)
        return replace(self, over="patches", values=values, center=(height // 2, width // 2))


def tables_of(model: nn.Module, *, img_size: ImageSize | None = None) -> list[LayerTable]:
    """Returns every table of a model, layer by layer; if a layer has a scale and a bias, the scale first.

    >>> import vicinal
    >>> from vicinal.analysis.learned_tables import tables_of
    >>> model = vicinal.create_model("vit-micro", prior="gmm+rpe:init=normal", depth=2)
    >>> [(table.name, table.role, table.values.shape) for table in tables_of(model)][:2]
    [('blocks.0.attn', 'scale', (4, 15, 15)), ('blocks.0.attn', 'bias', (4, 15, 15))]

    Args:
        model: one with priors, or with relative position biases of its own, such as Swin, BEiT or timm's
            `vit_relpos_*`; it runs on noise.
        img_size: height and width of the images; by default what the model declares.

    Raises:
        VicinalError: if the model has no table.
    """
    runner = make_runner(model, img_size)
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    with torch.no_grad():
        found = [table for name, prior in get_priors(model).items() for table in _of_prior(name, prior)]
        own, refused = _own_biases(runner)
        found += own
    if not found:
        others = f"; {_unread_sites(refused)}" if refused else ""
        raise VicinalError(
            f"{type(model).__name__} has no table: it has no prior, and no attention layer of it adds a bias that "
            f"differs by offset{others}. Models with a table are those of `vicinal train --prior rpe`, Swin and BEiT"
        )
    return sorted(found, key=lambda table: order.get(table.name.partition("#")[0], -1))


def _of_prior(name: str, prior: Prior) -> list[LayerTable]:
    """Returns the tables of one prior: scale, bias or both."""
    grid, found = prior.grid, []
    for role, values in zip(("scale", "bias"), prior.values(), strict=True):
        if values is None:
            continue
        if prior.per_offset:
            over, center = "offsets", (grid.height - 1, grid.width - 1)
        else:
            over, center = "patches", (grid.height // 2, grid.width // 2)
            values = center_view(values, grid.height, grid.width, per_offset=False)
        kind = prior.spec or type(prior).__name__
        found.append(LayerTable(name, kind, role, over, _double(values), center))  # type: ignore[arg-type]
    return found


def _unread_sites(sites: Sequence[AttentionSite]) -> str:
    """Returns a text that names layers whose bias, if any, was not read, one for each reason."""
    names: dict[str, list[str]] = {}
    for site in sites:
        names.setdefault(site.reason or "its keys are not its queries", []).append(site.name)
    each = (
        f"{its[0]}{f' and {len(its) - 1} more' if len(its) > 1 else ''} ({reason})" for reason, its in names.items()
    )
    return f"not read: {', '.join(each)}"


def _own_biases(runner: ModelRunner) -> tuple[list[LayerTable], list[AttentionSite]]:
    """Returns tables of biases that are not our priors; and the sites that could have others."""
    inspection = inspect_runner(runner)
    pooled = [site for site in inspection.served if isinstance(site.layout, PairLayout)]
    readers = [_BiasReader(site) for site in inspection.served if site not in pooled]
    hooks: list[Any] = [reader.site.module.register_forward_pre_hook(reader.open) for reader in readers]
    hooks += [reader.site.module.register_forward_hook(reader.close, always_call=True) for reader in readers]
    try:
        with eval_without_side_effects(runner.model), without_priors(runner.model):
            runner(runner.noise(NUM_IMAGES))
    finally:
        for hook in hooks:
            hook.remove()
    return [reader.table for reader in readers if reader.table is not None], pooled + inspection.refused


class _BiasReader(AttentionMode):
    """Reads the bias of one site's logits: its product is set to zero, so the bias alone reaches the softmax."""

    def __init__(self, site: AttentionSite) -> None:
        super().__init__()
        self.site = site
        self.products = self.softmaxes = self.fused = 0
        self.biases: list[Tensor] = []
        """Bias of each step, `(images, windows, heads, queries, keys)`."""
        self.table: LayerTable | None = None

    def open(self, *_: object) -> None:
        """Starts reading; a forward pre-hook of the module."""
        self.products = self.softmaxes = self.fused = 0
        self.__enter__()  # type: ignore[no-untyped-call]

    def close(self, *_: object) -> None:
        """Stops reading and makes the table; a forward hook of the module."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.table, self.biases = self._make_table(), []

    def on_fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: FusedCall) -> Tensor:
        """Reads the mask of a fused call."""
        self._read_mask(call.query, call.key, call.attn_mask)
        return super().on_fused(func, args, kwargs, call)

    def on_multi_head(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reads the mask of `F.multi_head_attention_forward`."""
        parts = multi_head(*args, **kwargs)
        self._read_mask(parts.q, parts.k, parts.mask)
        return super().on_multi_head(func, args, kwargs)

    def on_product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns zeros for the product of queries and keys; `baddbmm` adds the bias to them."""
        number = self.products
        self.products += 1
        own = not self.site.fused and any(step.product == number for step in self.site.steps)
        if own and func in BADDBMMS:
            args = (args[0], torch.zeros_like(args[1]), *args[2:])
        result = super().on_product(func, args, kwargs)
        return torch.zeros_like(result) if own and func not in BADDBMMS else result

    def on_softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reads the input of the softmax."""
        number = self.softmaxes
        self.softmaxes += 1
        steps = [] if self.site.fused else self.site.steps
        for step in steps:
            if step.softmax == number:
                self._keep(args[0].mT if step.transposed else args[0])
        return super().on_softmax(func, args, kwargs)

    def _read_mask(self, q: Tensor, k: Tensor, mask: Tensor | None) -> None:
        """Keeps the mask of the site's own call, if it is added to the logits."""
        number = self.fused
        self.fused += 1
        own = self.site.fused and any(step.product == number for step in self.site.steps)
        if own and mask is not None and mask.is_floating_point():
            leading = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
            self._keep(mask.expand(*leading, q.shape[-2], k.shape[-2]))

    def _keep(self, bias: Tensor) -> None:
        self.biases.append(self.site.head_layout.standard(bias).double())

    def _make_table(self) -> LayerTable | None:
        """Returns the table of the bias; None if it does not depend on the offset, or on more than that."""
        layout = self.site.layout
        if not self.biases or layout is None:
            return None
        added, grid = torch.cat(self.biases, -3), layout.grid  # heads that take turns
        if layout.order is not None:
            order = layout.order.to(added.device)
            added = added.index_select(-2, order).index_select(-1, order)
        pairs = grid.drop_prefix(added.amax(1))  # a shifted window masks pairs that another does not
        values = grid.fold(pairs[0]) / grid.fold(torch.ones_like(pairs[0]))
        rounding = MAX_ROUNDING * float(pairs.abs().max())
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
    """Returns the name of the class that holds the bias: a submodule, as in timm, or the attention module."""
    part = next((child for child in module.children() if hasattr(child, "get_bias")), None)
    if part is not None:
        return type(part).__name__
    return f"{type(module).__module__.rpartition('.')[2]}.{type(module).__name__}"


def _double(values: Tensor) -> NDArray[Any]:
    found: NDArray[Any] = values.double().numpy(force=True)
    return found
