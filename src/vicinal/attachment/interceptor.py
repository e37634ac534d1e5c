"""Applies a prior inside the forward of any attention module.

Multiplies at the product Q K^T, before any bias, window mask or talking heads; adds at the softmax that follows; and
takes over fused calls. So it serves every attention class.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vicinal.attention import PlacedPrior, attend, attention_weights, ordered_mask
from vicinal.attention.multi_head import multi_head
from vicinal.attention.precision import can_have_tiny_weights, drop_tiny_weights
from vicinal.attention.reference import attend_plain
from vicinal.errors import VicinalError
from vicinal.inspection.attention_mode import AttentionMode, FusedCall, Operation, Step
from vicinal.inspection.head_layout import HeadLayout

__all__ = ["PlacedTokens", "PriorInterceptor", "attend_in_order", "token_mismatch"]


class PlacedTokens(NamedTuple):
    """A prior on the grid of the current image, and the order of the tokens in it."""

    prior: PlacedPrior
    order: Tensor | None = None
    """Token at each position of the grid, `(tokens,)`; None if they are in that order."""
    position: Tensor | None = None
    """The inverse of `order`."""


class PriorInterceptor(AttentionMode):
    """Applies a prior to the attention that one module computes inside.

    Args:
        place: given the queries `(..., tokens, dim)` and the number of keys, returns the prior on their grid.
        layout: where heads are in the logits.
        steps: which operations of the module are the attention.
    """

    def __init__(
        self, place: Callable[[Tensor, int], PlacedTokens], layout: HeadLayout, steps: tuple[Step, ...]
    ) -> None:
        super().__init__()
        self.place, self.layout, self.steps = place, layout, steps
        self.placed: PlacedTokens | None = None
        self.products = self.softmaxes = self.fused = 0
        self.applied = 0
        """Number of steps that the prior was applied in."""
        self.shape: tuple[int, ...] = ()
        self.pair: tuple[Tensor | None, Tensor | None] | None = None

    def on_product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Multiplies Q K^T by the prior's scale."""
        number = self.products
        self.products += 1
        step = self._step(Operation.PLAIN, number)
        if step < 0:
            return func(*args, **kwargs)
        if func is torch.einsum or len(args) != 3:
            products = func(*args, **kwargs)
            prior_scale = self._values(step, products)[0]
            return products if prior_scale is None else self._apply(torch.mul, products, prior_scale, step)
        # baddbmm adds to the product, which is multiplied first.
        products = torch.bmm(args[1], args[2]) * kwargs.get("alpha", 1)
        prior_scale = self._values(step, products)[0]
        products = products if prior_scale is None else self._apply(torch.mul, products, prior_scale, step)
        return products + args[0] * kwargs.get("beta", 1)

    def on_softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Adds the prior's bias to the logits."""
        number = self.softmaxes
        self.softmaxes += 1
        step = next((n for n, each in enumerate(self.steps) if self._is_plain(each) and each.softmax == number), -1)
        if step < 0 or not self.shape:
            return func(*args, **kwargs)
        prior_bias = self._values(step, args[0])[1]
        if prior_bias is not None:
            logits = self._apply(torch.add, args[0], prior_bias, step)
            if can_have_tiny_weights(logits):  # a narrow prior makes denormal numbers, which are slow on a CPU
                maximum = logits.detach().amax(-2 if self.steps[step].transposed else -1, keepdim=True)
                logits = drop_tiny_weights(logits, maximum.masked_fill(maximum == -torch.inf, 0.0))
            args = (logits, *args[1:])
        self.applied += 1
        return func(*args, **kwargs)

    def on_fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: FusedCall) -> Tensor:
        """Computes a fused call under the prior."""
        number = self.fused
        self.fused += 1
        step = self._step(Operation.FUSED, number)
        if step < 0:
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        self.applied += 1
        if call.is_causal or call.enable_gqa:
            raise VicinalError("a spatial prior serves neither causal nor grouped-query attention")
        return self._attend(call, step)

    def on_multi_head(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Computes `F.multi_head_attention_forward` under the prior."""
        number = self.fused
        self.fused += 1
        if self._step(Operation.MULTI_HEAD, number) < 0:
            return func(*args, **kwargs)
        self.applied += 1
        parts = multi_head(*args, **kwargs)
        placed = self._place(parts.q, parts.k.shape[2])
        return parts.run(functools.partial(attend_in_order, placed), functools.partial(weights_in_order, placed))

    def _step(self, operation: Operation, number: int) -> int:
        """Returns which of the steps a product or fused call is; -1 if it is none."""
        for place, step in enumerate(self.steps):
            if step.operation is operation and step.product == number:
                return place
        return -1

    @staticmethod
    def _is_plain(step: Step) -> bool:
        return step.operation is Operation.PLAIN

    def _place(self, queries: Tensor, keys: int) -> PlacedTokens:
        """Returns the prior where the queries `(..., tokens, dim)` sit, the same in all steps of a forward."""
        if self.placed is None:
            self.placed = self.place(queries, keys)
        prior = self.placed.prior
        if (queries.shape[-2], keys) != (prior.queries, prior.keys):
            raise token_mismatch(prior, queries.shape[-2], keys)
        return self.placed

    def _values(self, step: int, logits: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns scale and bias as the module orders its tokens, each `(heads, queries, keys)` or None.

        Where images have places of their own, an axis for images comes first.

        Args:
            step: which of the steps.
            logits: the first time, those of the product, `(..., queries, keys)`, or transposed as the step says.
        """
        transposed = self.steps[step].transposed
        if not self.shape:
            self._place(logits.mT if transposed else logits, logits.shape[-2 if transposed else -1])
            self.shape = tuple(logits.shape)
        if self.pair is None:
            assert self.placed is not None
            scale, bias = self.placed.prior()
            position = self.placed.position
            if position is not None:
                scale, bias = (None if x is None else x[:, position][:, :, position] for x in (scale, bias))
            self.pair = scale, bias
        scale, bias = self.pair
        if transposed:
            scale, bias = (None if x is None else x.mT for x in (scale, bias))
        return scale, bias

    def _apply(self, operation: Any, logits: Tensor, values: Tensor, step: int) -> Tensor:
        values, turn = values.to(logits.dtype), step if self.layout.turns > 1 else 0
        if tuple(logits.shape) == self.shape:
            return self.layout.apply(operation, logits, values, turn)
        return self.layout.apply(operation, logits.reshape(self.shape), values, turn).view_as(logits)

    def _attend(self, call: FusedCall, step: int) -> Tensor:
        """Returns the result of a fused call in the shape that the module expects."""
        q, k, v, mask = call.query, call.key, call.value, call.attn_mask
        leading = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
        placed = self._place(q, k.shape[-2])
        q, k, v = (x.expand(*leading, *x.shape[-2:]) for x in (q, k, v))
        plain = self.layout.is_batch_by_heads
        if not plain:
            if mask is not None:
                mask = self._folded(mask.expand(*leading, q.shape[-2], k.shape[-2]))
            q, k, v = (self._folded(x) for x in (q, k, v))
        if self.layout.turns > 1:
            values = (None if x is None else x[..., step : step + 1, :, :] for x in placed.prior())
            scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
            out = attend_plain(q, k, v, *values, mask=mask, dropout=call.dropout_p, softmax_scale=scale)
        else:
            out = attend_in_order(placed, q, k, v, mask=mask, dropout=call.dropout_p, scale=call.scale)
        if plain:
            return out
        return self.layout.restore(out.unflatten(0, (-1, self.layout.windows)), tuple(leading))

    def _folded(self, x: Tensor) -> Tensor:
        """Returns `(*leading, m, n)` as `(images * windows, heads, m, n)`."""
        return self.layout.standard(x).flatten(0, 1)


def attend_in_order(
    placed: PlacedTokens,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Returns `attend` for tokens in another order than the prior's grid, in the module's order.

    Args:
        placed: the prior, and the order of the tokens.
        q: queries, `(batch, heads, tokens, dim)`, in the module's order; `k` and `v` as well.
        k: keys.
        v: values.
        mask: as for `attend`, in the module's order.
        dropout: as for `attend`.
        scale: as for `attend`.
    """
    prior, order, _ = placed
    return attend(q, k, v, prior=prior, mask=mask, dropout=dropout, scale=scale, order=order)


def weights_in_order(placed: PlacedTokens, q: Tensor, k: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Returns `attention_weights` for tokens in another order than the prior's grid, in the module's order."""
    prior, order, position = placed
    if order is None or position is None:
        return attention_weights(q, k, prior=prior, mask=mask)
    q, k = (x.index_select(-2, order) for x in (q, k))
    weights = attention_weights(q, k, prior=prior, mask=ordered_mask(mask, order))
    return weights.index_select(-2, position).index_select(-1, position)


def token_mismatch(prior: PlacedPrior, queries: int, keys: int) -> VicinalError:
    """Returns the error for sequences of another length than the prior was attached for."""
    if prior.queries == prior.keys:
        wanted, got = f"{prior.queries} tokens ({prior.grid})", str(queries if queries != prior.queries else keys)
    else:
        wanted, got = f"{prior.queries} queries and {prior.keys} keys", f"{queries} and {keys}"
    return VicinalError(
        f"the prior was attached for {wanted}, got {got}: "
        "attach with the img_size in use, or detach and attach again; tokens dropped at random are not served"
    )
