"""`tap` reads the attention of a model while it runs, whatever computes it, with a prior or without."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from vicinal.attention import attend, attention_weights
from vicinal.attention.compiled_call import compiled_call
from vicinal.attention.multi_head import multi_head
from vicinal.errors import VicinalError, unknown_name
from vicinal.inspection.attention_mode import AttentionMode, FusedCall, Operation
from vicinal.inspection.image_cells import ImageWatch, disable_fast_path, patch_queries
from vicinal.inspection.layer_selection import Layers, select_layers
from vicinal.inspection.model_inspection import Inspection, inspect_runner
from vicinal.inspection.model_runner import Example, ImageSize, make_runner, uncompiled
from vicinal.inspection.sites import AttentionSite

__all__ = ["Tap", "find_attention", "tap"]

Queries = Literal["all", "class", "mean"]
Reduce = Callable[[AttentionSite, Tensor], Tensor]


def tap(
    model: nn.Module,
    layers: Layers | None = "last",
    *,
    queries: Queries = "all",
    gradient: bool = False,
    reduce: Reduce | None = None,
    img_size: ImageSize | None = None,
    example: Example | None = None,
    inspection: Inspection | None = None,
) -> "Tap":
    """Returns a tap that reads attention weights, after the softmax, from some layers of a model.

    >>> import torch, vicinal
    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10)
    >>> with vicinal.tap(model, layers="last", queries="class") as t:
    ...     logits = model(torch.randn(8, 3, 64, 64))
    >>> t.last.shape  # what the class token sees: (images, heads, tokens)
    torch.Size([8, 3, 17])

    The model runs on noise when the tap is made, to find its attention. A tap can be used as often as you like. It
    keeps the weights of the layers asked for, of the last run, and nothing else; fused attention stays fused.

    Args:
        model: any vision transformer.
        layers: which attention layers, class attention included: `last 4`, `first 2`, indices, or a function of index
            and module name; None for all.
        queries: `all` gives `(images, heads, queries, keys)`; `class` gives `(images, heads, keys)`, the class token's
            row, and computes no other; `mean` gives the same shape, the average over patches. Where an image is cut
            into windows, their axis comes second.
        gradient: let gradients flow through the weights; they are detached by default.
        reduce: given a site and its weights as soon as it has run; what it returns is kept in their place, so that the
            weights of one layer are in memory at a time.
        img_size: as for `attach`.
        example: as for `attach`.
        inspection: what `inspect` returned for this model, so that it is not probed again.
    """
    if not isinstance(model, nn.Module):
        raise VicinalError(f"tap takes a torch.nn.Module, got {type(model).__name__}")
    if queries not in get_args(Queries):
        raise unknown_name("queries", queries, get_args(Queries))
    inspection = find_attention(model, img_size, example, inspection)
    sites = inspection.sites
    chosen = [_Layer(site, queries, gradient, reduce) for site in select_layers(sites, layers)]
    for layer in chosen:
        layer.check_class_token(model)
    return Tap(chosen, ImageWatch(inspection))


def find_attention(
    model: nn.Module, img_size: ImageSize | None, example: Example | None, inspection: Inspection | None
) -> Inspection:
    """Returns the attention of a model, found before or now. Raises VicinalError if there is none."""
    if inspection is None:
        inspection = inspect_runner(make_runner(model, img_size, example))
    elif inspection.runner.model is not uncompiled(model):
        raise VicinalError("the inspection is of another model; give that of this one")
    if not inspection.sites:
        raise VicinalError(f"{type(model).__name__} has no attention to read")
    return inspection


class Tap:
    """Reads the attention of a model that runs inside `with`; made by `tap`."""

    def __init__(self, layers: list["_Layer"], watch: ImageWatch) -> None:
        self._layers, self.watch = layers, watch
        self._open = False

    @property
    def layers(self) -> list[AttentionSite]:
        """Sites that the weights come from."""
        return [layer.site for layer in self._layers]

    @property
    def weights(self) -> dict[str, Tensor]:
        """Weights of the last run, by name of the site."""
        return {layer.site.name: layer.weights for layer in self._layers if layer.weights is not None}

    @property
    def last(self) -> Tensor:
        """Weights of the last of the layers asked for."""
        weights = list(self.weights.values())
        if not weights:
            raise VicinalError("nothing was read yet: run the model inside `with` first")
        return weights[-1]

    def __enter__(self) -> "Tap":
        if self._open:
            raise VicinalError("this tap is open already; make another one")
        self._open = True
        self.watch.open()
        for layer in self._layers:
            layer.open(self.watch)
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        for layer in reversed(self._layers):
            layer.close()
        self.watch.close()
        self._open = False
        unread = [layer.site.name for layer in self._layers if layer.weights is None]
        if unread and failed is None:
            raise VicinalError(f"no attention of {unread[0]} was read: run the model that was tapped inside `with`")


class _Layer:
    """One site that is read."""

    def __init__(self, site: AttentionSite, queries: Queries, gradient: bool, reduce: Reduce | None) -> None:
        self.site, self.queries, self.gradient, self.reduce = site, queries, gradient, reduce
        self.weights: Tensor | None = None
        self.position: Tensor | None = None
        """Position of each token in the prior's grid, if the module carries one for another order of tokens."""
        self._before: Callable[..., Any] | None = None

    def check_class_token(self, model: nn.Module) -> None:
        """Raises VicinalError if the class token is asked for and there is none."""
        if self.queries != "class" or self.site.logits[-2] == 1:
            return
        patches = patch_queries(self.site, self.site.logits[-2])
        placed = patches is not None and len(patches) > 0 and int(patches[0]) == 0
        absent = hasattr(model, "cls_token") and model.cls_token is None
        if placed or absent:
            raise VicinalError(f"{self.site.name} has no class token to read; use queries='mean'")

    def open(self, watch: ImageWatch) -> None:
        """Takes the place of the module's forward; `torch.compile` guards that, and not hooks."""
        self.weights, self._watch = None, watch
        module = self.site.module
        self._before = module.__dict__.get("forward")
        self._hook = module.register_forward_hook(disable_fast_path)
        module.forward = self._read

    def close(self) -> None:
        """Leaves the module as it was."""
        self._hook.remove()
        del self.site.module.forward
        if self._before is not None:
            self.site.module.forward = self._before

    def _read(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward and reads its attention."""
        self.weights = None
        if self.site.windows > 1 and self._watch.other is not None:  # their number is another one
            raise self._watch.unknown_places(self.site.name)
        module = self.site.module
        attached = hasattr(type(module), "plain_class")
        self.position = getattr(module, "prior_position", None) if attached else None
        with _Reader(self, attached, getattr(module, "prior", None) if attached else None):
            if self._before is not None:
                output = self._before(*args, **kwargs)
            else:
                output = type(module).forward(module, *args, **kwargs)
        if self.reduce is not None and self.weights is not None:
            self.weights = self.reduce(self.site, self.weights)
        return output

    def keep(self, weights: Tensor, in_grid: bool) -> None:
        """Keeps what was asked for of weights, and no more.

        Args:
            weights: `(..., queries or 1, keys)` with the leading axes of the logits; or, computed under a prior,
                `(images * windows, heads, queries or 1, keys)`.
            in_grid: whether they were computed under a prior, in the order of its grid.
        """
        windows = self.site.windows
        if in_grid and self.position is not None and self.site.layout is not None:
            position = self.position
            if len(position) != weights.shape[-1]:  # of an image of another size
                position = self.site.layout.raster_position(weights.shape[-1]).to(weights.device)
            weights = weights.index_select(-1, position)
            weights = weights.index_select(-2, position) if weights.shape[-2] > 1 else weights
        if in_grid and not self.site.head_layout.is_batch_by_heads:
            weights = weights.unflatten(0, (-1, windows))
        else:
            weights = self.site.head_layout.standard(weights)
        if self.queries == "mean":
            patches = patch_queries(self.site, weights.shape[-2])
            if patches is not None:
                weights = weights.index_select(-2, patches.to(weights.device))
            weights = weights.mean(-2, keepdim=True)
        weights = weights if windows > 1 else weights.squeeze(1)
        weights = weights if self.queries == "all" else weights.squeeze(-2)
        if self.weights is not None:  # heads that take turns, or maps that are combined
            weights = torch.cat([self.weights, weights], -3 if self.queries == "all" else -2)
        self.weights = weights

    def compute(self, q: Tensor, k: Tensor, in_grid: bool, **settings: Any) -> None:
        """Keeps the weights of a fused call."""
        with torch.set_grad_enabled(self.gradient and torch.is_grad_enabled()):
            rows = slice(None)
            if self.queries == "class":
                first = 0 if not in_grid or self.position is None else int(self.position[0])
                rows = slice(first, first + 1)
            self.keep(attention_weights(q, k, queries=rows, **settings), in_grid)


class _Reader(AttentionMode):
    """Reads the attention of one module while it runs."""

    def __init__(self, layer: _Layer, ours: bool, prior: Any) -> None:
        super().__init__()
        self.layer, self.ours, self.prior = layer, ours, prior
        self.products = self.softmaxes = self.fused = 0
        site = layer.site
        self.numbers = [step.product for step in site.steps]
        self.plain = site.steps[0].operation is Operation.PLAIN

    def on_fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: FusedCall) -> Tensor:
        """Reads a fused call."""
        result = func(*args, **kwargs)
        prior = kwargs["prior"] if func is attend else None
        mask = call.attn_mask
        if call.is_causal:
            mask = torch.ones(call.query.shape[-2], call.key.shape[-2], dtype=torch.bool, device=result.device).tril()
        key = call.key
        if call.enable_gqa and key.dim() > 2:
            key = key.repeat_interleave(call.query.shape[-3] // key.shape[-3], -3)
        self._compute(call.query, key, prior=prior, mask=mask, scale=call.scale)
        return result  # type: ignore[no-any-return]

    def on_other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reads what `attend` is under `torch.compile`."""
        result = func(*args, **kwargs)
        if (call := compiled_call(func, args)) is not None:
            self._compute(call.q, call.k, prior=call.prior, mask=call.mask, scale=call.scale)
        return result

    def on_multi_head(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reads `F.multi_head_attention_forward`."""
        result = func(*args, **kwargs)
        parts = multi_head(*args, **kwargs)
        self._compute(parts.q, parts.k, mask=parts.mask)
        return result

    def on_softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reads a softmax of the module's own, or one that stands for a fused call under a prior."""
        result, number, site = func(*args, **kwargs), self.softmaxes, self.layer.site
        self.softmaxes += 1
        stands_for_fused = torch.compiler.is_compiling() or site.steps[0].operation is Operation.MULTI_HEAD
        if not self.plain and self.prior is not None and stands_for_fused and self.fused in self.numbers:
            self.fused += 1
            self._keep(result, in_grid=True)
        elif self.plain and site.softmaxes == 1:
            step = next((step for step in site.steps if step.softmax == number), None)
            if step is not None:
                self._keep(result.mT if step.transposed else result, in_grid=False)
        return result

    def on_product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reads the sum of several softmaxes where it meets the values."""
        number, site = self.products, self.layer.site
        self.products += 1
        if self.plain and site.softmaxes > 1 and site.met == number:
            self._keep(args[1] if isinstance(args[0], str) else args[0], in_grid=False)
        return func(*args, **kwargs)

    def _keep(self, weights: Tensor, in_grid: bool) -> None:
        kept = weights if self.layer.gradient else weights.detach()
        if self.layer.queries == "class" and kept.shape[-2] > 1:
            first = 0 if not in_grid or self.layer.position is None else int(self.layer.position[0])
            kept = kept[..., first : first + 1, :].clone()  # a copy, so that the other rows can go
        self.layer.keep(kept, in_grid)

    def _compute(self, q: Tensor, k: Tensor, **settings: Any) -> None:
        number = self.fused
        self.fused += 1
        # A fast forward of ours calls `attend` where the module's own computes plain attention.
        wanted = self.ours and number < len(self.numbers) if self.plain else number in self.numbers
        if wanted:
            self.layer.compute(q, k, self.prior is not None, **settings)
