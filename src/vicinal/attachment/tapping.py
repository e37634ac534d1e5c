"""`tap`: read the attention of a model while it runs, whatever computes it, with a prior or without."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vicinal.attachment.choosing import Layers, choose
from vicinal.attachment.finding import FOLDED, IN_TURN, PRODUCTS, SOFTMAXES, calls_of, heads_third
from vicinal.attachment.multihead import multi_head
from vicinal.attachment.placing import LeftAlone, Site, place
from vicinal.attachment.running import Example, ImageSize, quietly, runner_for
from vicinal.attachment.swapping import no_short_cut
from vicinal.attention import attend, attention_weights, operator_arguments, recomputed_attention
from vicinal.errors import VicinalError, unknown

__all__ = ["Tap", "tap"]

Queries = Literal["all", "class", "mean"]
Reduce = Callable[[Site | LeftAlone, Tensor], Tensor]


def tap(
    model: nn.Module,
    layers: Layers | None = "last",
    *,
    queries: Queries = "all",
    gradient: bool = False,
    reduce: Reduce | None = None,
    img_size: ImageSize | None = None,
    example: Example | None = None,
) -> "Tap":
    """Read attention weights, after the softmax, from some layers of a model.

    >>> import torch, vicinal
    >>> vicinal.ensure_torchvision()
    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10)
    >>> with vicinal.tap(model, layers="last", queries="class") as t:
    ...     logits = model(torch.randn(8, 3, 64, 64))
    >>> t.last.shape  # what the class token sees: (images, heads, tokens)
    torch.Size([8, 3, 17])

    The model runs once on noise when the tap is made, to find its attention. A tap can be used as often as you like. It
    keeps the weights of the layers asked for, of the last run, and nothing else; fused attention stays fused.

    Args:
        model: any vision transformer.
        layers: which attention layers, class attention included: `last 4`, `first 2`, indices, or a function of index
            and module name; None for all.
        queries: `all` gives `(images, heads, queries, keys)`; `class` gives `(images, heads, keys)`, the class token's
            row, and computes no other; `mean` gives the same shape, the average over patches. Where an image is cut
            into windows, their axis comes second.
        gradient: let gradients flow through the weights; they are detached by default.
        reduce: given a layer and its weights as soon as it has run; what it returns is kept in their place, so that the
            weights of one layer are in memory at a time.
        img_size: as for `attach`.
        example: as for `attach`.
    """
    if not isinstance(model, nn.Module):
        raise VicinalError(f"tap takes a torch.nn.Module, given {type(model).__name__}")
    if queries not in get_args(Queries):
        raise unknown("queries", queries, get_args(Queries))
    run = runner_for(model, img_size, example)
    with quietly(model):
        every = calls_of(model, lambda: run(run.noise(2)))
    calls = [call for call in every if call.queries is not None]
    sites = place(model, calls, 2, run.image)
    if not sites:
        raise VicinalError(f"{type(model).__name__} has no attention to read")
    chosen = []
    for site in choose(sites, layers):
        call = site.call if isinstance(site, Site) else next(call for call in calls if call.module is site.module)
        chosen.append(_Layer(site, call.logits, queries, gradient, reduce))
        chosen[-1].check_class_token(model)
        chosen[-1].count_softmaxes([each.logits for each in every if each.module is site.module])
    return Tap(chosen)


class Tap:
    """Reads the attention of a model that runs inside `with`; made by `tap`."""

    def __init__(self, layers: list["_Layer"]) -> None:
        self._layers = layers
        self._open = False

    @property
    def layers(self) -> list[Site | LeftAlone]:
        """Where the weights come from: names and modules; grid, heads and windows where there is a grid."""
        return [layer.site for layer in self._layers]

    @property
    def weights(self) -> dict[str, Tensor]:
        """Weights of the last run, by module name."""
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
        for layer in self._layers:
            layer.open()
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        for layer in self._layers:
            layer.close()
        self._open = False
        unread = [layer.site.name for layer in self._layers if layer.weights is None]
        if unread and failed is None:
            raise VicinalError(f"no attention of {unread[0]} was read: run the model that was tapped inside `with`")


class _Layer:
    """One attention module that is read."""

    def __init__(
        self,
        site: Site | LeftAlone,
        logits: tuple[int, ...],
        queries: Queries,
        gradient: bool,
        reduce: Reduce | None,
    ) -> None:
        self.site, self.shape, self.queries, self.gradient, self.reduce = site, logits, queries, gradient, reduce
        self.heads_axis = site.heads_axis if isinstance(site, Site) else -3
        self.heads = site.heads if isinstance(site, Site) else logits[-3]
        self.softmaxes = 1
        """How many its attention is the sum of: more than one where, as in ConViT, places are seen beside contents."""
        self.weights: Tensor | None = None
        self._before: Callable[..., Any] | None = None

    def check_class_token(self, model: nn.Module) -> None:
        """Raise if the class token is asked for and there is none."""
        if self.queries != "class" or self.shape[-2] == 1:
            return
        prefix = self.site.grid.prefix if isinstance(self.site, Site) else 1
        absent = hasattr(model, "cls_token") and model.cls_token is None
        if prefix == 0 or absent:
            raise VicinalError(f"{self.site.name} has no class token to read; use queries='mean'")

    def count_softmaxes(self, seen: list[tuple[int, ...]]) -> None:
        """Note how many softmaxes of this layer's shape its module computes."""
        if self.heads_axis != IN_TURN:
            self.softmaxes = sum(self.fits(shape) for shape in seen)

    def open(self) -> None:
        """Take the place of the module's forward; `torch.compile` looks for that, and not for hooks."""
        self.weights = None
        module = self.site.module
        self._before = module.__dict__.get("forward")
        self._hook = module.register_forward_hook(no_short_cut)
        module.forward = self._read

    def close(self) -> None:
        """Leave the module as it was."""
        self._hook.remove()
        del self.site.module.forward
        if self._before is not None:
            self.site.module.forward = self._before

    def _read(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, read along."""
        self.weights = None
        module = self.site.module
        with _Reader(self):
            if self._before is not None:
                output = self._before(*args, **kwargs)
            else:
                output = type(module).forward(module, *args, **kwargs)
        if self.reduce is not None and self.weights is not None:
            self.weights = self.reduce(self.site, self.weights)
        return output

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether logits are this layer's: images and tokens may be more or fewer than when it was found."""
        if len(shape) != len(self.shape):
            return False
        if self.heads_axis == FOLDED:
            alike = shape[0] % self.heads == 0
        else:
            alike = self.heads_axis == IN_TURN or shape[self.heads_axis] == self.heads
        return alike and (shape[-1] == shape[-2]) == (self.shape[-1] == self.shape[-2])

    def keep(self, weights: Tensor) -> None:
        """Keep what was asked for of weights `(..., queries, keys)`, and no more."""
        if self.queries == "mean":
            prefix = self.site.grid.prefix if isinstance(self.site, Site) else 0
            weights = weights[..., prefix:, :].mean(-2, keepdim=True)
        weights = heads_third(weights, self.heads, self.heads_axis)
        windows = self.site.windows if isinstance(self.site, Site) else 1
        if windows > 1:
            weights = weights.reshape(-1, windows, *weights.shape[-3:])
        elif weights.dim() == 5:
            weights = weights.flatten(0, 1)
        weights = weights if self.queries == "all" else weights.squeeze(-2)
        if self.weights is not None:  # heads that take turns
            weights = torch.cat([self.weights, weights], -3 if self.queries == "all" else -2)
        self.weights = weights

    def compute(self, q: Tensor, k: Tensor, **settings: Any) -> None:
        """Keep the weights of a fused call."""
        with torch.set_grad_enabled(self.gradient and torch.is_grad_enabled()):
            rows = slice(1) if self.queries == "class" else slice(None)
            self.keep(attention_weights(q, k, queries=rows, **settings))


class _Reader(TorchFunctionMode):
    """Reads along while one module runs."""

    def __init__(self, layer: _Layer) -> None:
        super().__init__()
        self.layer = layer
        self.left = layer.heads if layer.heads_axis == IN_TURN else 1
        self.to_add = layer.softmaxes

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.left:
            return result
        if func is attend:
            q, k = args[:2]
            self._compute(q, k, prior=kwargs["prior"], mask=kwargs["mask"], scale=kwargs["scale"])
        elif func is recomputed_attention:  # what `attend` is under torch.compile
            prior: Any = self.layer.site.module.prior
            call = operator_arguments(args)
            self._compute(call.q, call.k, prior=prior, mask=call.mask, scale=call.settings.softmax_scale)
        elif func is F.scaled_dot_product_attention:
            self._fused(*args, **kwargs)
        elif func is F.multi_head_attention_forward:
            parts = multi_head(*args, **kwargs)
            self._compute(parts.q, parts.k, mask=parts.mask)
        elif func in SOFTMAXES and self.layer.fits(tuple(result.shape)):
            self.to_add -= 1
            if self.layer.softmaxes == 1:
                self._keep(result)
        elif func in PRODUCTS and self.layer.softmaxes > 1 and self.to_add == 0:  # their sum, on its way to the values
            factor = args[1] if func is torch.einsum else args[0]
            if self.layer.fits(tuple(factor.shape)):
                self._keep(factor)
        return result

    def _keep(self, weights: Tensor) -> None:
        self.left -= 1
        kept = weights if self.layer.gradient else weights.detach()
        # A copy of one row, so that the rest can go.
        self.layer.keep(kept[..., :1, :].clone() if self.layer.queries == "class" else kept)

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **_: Any,
    ) -> None:
        if is_causal:
            hidden = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
            attn_mask = hidden.tril()
        self._compute(query, key, mask=attn_mask, scale=scale)

    def _compute(self, q: Tensor, k: Tensor, **settings: Any) -> None:
        if self.layer.fits((*q.shape[:-1], k.shape[-2])):
            self.left -= 1
            self.layer.compute(q, k, **settings)
