"""Disturbs the image of a model and collects how every query and key responds: the evidence of where tokens sit.

A probe runs the model on noise and on the same noise under four ramps: disturbances that grow downward, upward, to the
right and to the left. Nothing mixes places meanwhile: attention returns zeros, and a convolution or pooling passes on
how much each place differs, in that place. So a token's squared responses to the four ramps give its center, in every
layer, however deep.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vicinal.inspection.attention_marks import AttentionCall
from vicinal.inspection.attention_observer import AttentionObserver
from vicinal.inspection.disturbance import (
    AMPLITUDE,
    keep_in_place,
    keep_maxima_in_place,
    norm_by_first,
    take_first,
    unfold_in_place,
)
from vicinal.inspection.kernel_places import kernel_places
from vicinal.inspection.model_runner import ModelRunner
from vicinal.inspection.pool_calls import PoolCall, find_pool_call, token_pooling
from vicinal.pooled_tokens import SequencePooling

__all__ = ["RAMPS", "Evidence", "Follow", "Key", "collect_evidence", "key_of", "merge_evidence"]

RAMPS = 4
MAX_PIXELS = 512**2  # of an image; larger ones run with two ramps at a time, for the memory
# Operations that look at several places of a map `(images, channels, rows, columns)` at once.
SPATIAL = {
    torch.conv2d,
    F.conv2d,
    torch.conv_transpose2d,
    torch.max_pool2d,
    F.max_pool2d,
    F.avg_pool2d,
    F.adaptive_avg_pool2d,
    F.adaptive_max_pool2d,
    F.lp_pool2d,
}

FROM_FIRST = {F.grid_sample}  # takes values from places that depend on the content
MAXIMA = {torch.amax, torch.Tensor.amax, torch.max, torch.Tensor.max}  # pool tokens where no map is formed


Key = tuple[nn.Module, int, int, int]
"""An attention in a run: module, number of its forward, number of its product, and that of its softmax."""
Follow = Callable[[tuple[int, ...]], Tensor]
"""Given the shape of the logits, returns weights by which queries take the value of one key each."""


@dataclass(eq=False)
class Evidence:
    """How the queries and keys of one attention responded to ramps."""

    call: AttentionCall
    """The attention, without its queries and keys."""
    images: int
    """Number of images in the batch of a probe."""
    image_axis: tuple[int, bool] | None = None
    """Leading axis of the logits that counts images, and whether images vary fastest in it; None if no axis does."""
    queries: list[Tensor] = field(default_factory=list)
    """Squared responses, one tensor for each probe: `(RAMPS, *leading, tokens)`, where images are left out of the
    leading axes. Relative to the mean squared length of a query."""
    keys: list[Tensor] = field(default_factory=list)
    """As `queries`."""
    pools: list[PoolCall] = field(default_factory=list)
    """Poolings before this attention, not evenly strided, with as many results as it has queries or keys."""


def ramps(height: int, width: int) -> Tensor:
    """Returns how strongly pixels are disturbed, `(RAMPS, height, width)`: the squares are linear in the position."""
    row, column = ((torch.arange(n) + 0.5) / n for n in (height, width))
    down, right = row[:, None].expand(height, width), column.expand(height, width)
    return torch.stack([down, 1 - down, right, 1 - right]).sqrt()


def collect_evidence(
    runner: ModelRunner, count: int, seed: int, follow: Mapping[Key, Follow], exact: bool = False
) -> dict[Key, Evidence]:
    """Probes a model once.

    Args:
        runner: the model, in evaluation mode and full precision, and its images.
        count: how many attentions it computes; it stops after the last one.
        seed: of the noise.
        follow: attention in which queries take the value of a key, instead of zeros.
        exact: pass differences on to the center of each kernel, where it stands by its stride and padding, instead of
            spreading them evenly over the output. Lines at the edge of the image are less clear then.

    Returns:
        The evidence of every attention, in the order in which they run.
    """
    height, width = runner.image
    masks = ramps(height, width).view(RAMPS, *[1] * (len(runner.shape) - 2), height, width)
    together = RAMPS if height * width <= MAX_PIXELS else RAMPS // 2
    base, noise = torch.randn(2, *runner.shape, generator=torch.Generator().manual_seed(seed))
    parts: list[dict[Key, Evidence]] = []
    for some in masks.split(together):
        # The first image again at the end shows which axis of the logits counts images.
        images = torch.cat([base[None], base + AMPLITUDE * some * noise.sign(), base[None]])
        parts.append({})
        prober = _Prober(runner.model, count, len(images), follow, parts[-1], exact)
        prober.run(functools.partial(runner, runner.like_model(images)))
    for part in parts[1:]:
        for key, evidence in parts[0].items():
            more = part.get(key)
            if more is None or evidence.image_axis != more.image_axis:
                evidence.image_axis = None
            elif evidence.image_axis is not None:
                evidence.queries = [torch.cat([evidence.queries[0], more.queries[0]])]
                evidence.keys = [torch.cat([evidence.keys[0], more.keys[0]])]
                evidence.pools = [
                    replace(one, responses=torch.cat([one.responses, two.responses]))
                    for one, two in zip(evidence.pools, more.pools, strict=True)
                ]
    return parts[0]


def merge_evidence(found: dict[Key, Evidence], more: Mapping[Key, Evidence]) -> None:
    """Adds the evidence of another probe; an attention that is not in both alike is not read."""
    for key, evidence in more.items():
        known = found.get(key)
        if known is None:
            found[key] = evidence
            evidence.image_axis = None
        elif known.image_axis != evidence.image_axis or known.call.logits != evidence.call.logits:
            known.image_axis = None
        else:
            known.queries += evidence.queries
            known.keys += evidence.keys
    for key, evidence in found.items():
        if key not in more:
            evidence.image_axis = None


class _Prober(AttentionObserver):
    """Keeps places apart while a model runs on a base image, its disturbed copies, and the base image again."""

    def __init__(
        self,
        model: nn.Module,
        count: int,
        images: int,
        follow: Mapping[Key, Follow],
        found: dict[Key, Evidence],
        exact: bool,
    ) -> None:
        super().__init__(model, self._collect, count)
        self.images, self.follow, self.found, self.exact = images, follow, found, exact
        self.pools: list[PoolCall] = []

    def attention_result(
        self, call: AttentionCall, weights: Tensor | None, values: Tensor | None, compute: Callable[..., Tensor]
    ) -> Tensor:
        """Returns zeros, or the values that queries follow; attention itself is not computed."""
        follow = self.follow.get(key_of(call))
        if follow is not None:
            followed = follow(call.logits).to(values if weights is None else weights)
            if weights is None or weights.shape == followed.shape:
                return compute(followed)
            if weights.shape == followed.mT.shape:
                return compute(followed.mT)
        if values is not None:
            return values.new_zeros(*call.logits[:-1], values.shape[-1])
        assert weights is not None
        return torch.zeros_like(compute(weights.to("meta")), device=weights.device)

    def on_other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keeps differences between images in place."""
        result = super().on_other(func, args, kwargs)
        pooling = token_pooling(func, args, kwargs) if args and isinstance(result, Tensor) else None
        if pooling is not None:
            call = find_pool_call(pooling, args[0], result, self.images)
            self.pools += [] if call is None else [call]
        sequence = self.exact and isinstance(pooling, SequencePooling)
        resampled = self.exact and func is F.interpolate
        known = sequence or resampled or func in (*SPATIAL, *FROM_FIRST, F.unfold, F.group_norm)
        if known and isinstance(result, Tensor) and args:
            if sequence:  # a map of one row
                kept = keep_in_place(args[0].unsqueeze(2), result.unsqueeze(2), self.images, pooling).squeeze(2)
            elif func is F.unfold:
                kept = unfold_in_place(result, self.images, *args, **kwargs)
            elif func is F.group_norm:
                kept = norm_by_first(result, self.images, *args, **kwargs)
            elif func in FROM_FIRST:
                kept = take_first(result, self.images)
            else:
                kernels = pooling or kernel_places(func, args, kwargs) if self.exact else None
                kept = keep_in_place(args[0], result, self.images, kernels)
            kept._attention_marks = getattr(result, "_attention_marks", ())  # type: ignore[attr-defined]
            return kept
        if self.exact and func in MAXIMA and len(args) + len(kwargs) == 2 and args:
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            if isinstance(result, torch.return_types.max):
                values = keep_maxima_in_place(args[0], result[0], self.images, dim)
                return torch.return_types.max((values, result[1]))
            if isinstance(result, Tensor):
                return keep_maxima_in_place(args[0], result, self.images, dim)
        return result

    def _collect(self, call: AttentionCall) -> None:
        evidence = self.found.setdefault(key_of(call), Evidence(call, self.images))
        responses = _responses(call, self.images)
        if responses is not None:
            evidence.image_axis, queries, keys = responses
            evidence.queries, evidence.keys = [queries], [keys]
            evidence.pools = [pool for pool in self.pools if pool.outputs in call.logits[-2:]]
        call.q = call.k = torch.empty(0)


def key_of(call: AttentionCall) -> Key:
    """Returns what names an attention in every run of the model."""
    return call.module, call.forward, call.step.product, call.step.softmax


def _responses(call: AttentionCall, images: int) -> tuple[tuple[int, bool], Tensor, Tensor] | None:
    """Returns the axis of the images and the squared responses of queries and keys; None if no axis counts images.

    Images are counted where the first and the last index, the same image, agree.
    """
    lead = call.logits[:-2]
    sides = []
    for x in (call.q, call.k):
        missing = len(lead) - (x.dim() - 2)
        x = x.reshape(*[1] * missing, *x.shape)
        sides.append(x.expand(*(max(n, m) for n, m in zip(lead, x.shape, strict=False)), *x.shape[-2:]))
    for axis, size in enumerate(lead):
        if size % images:
            continue
        for fastest in (False, True):
            parts = (-1, images) if fastest else (images, -1)
            split = [x.unflatten(axis, parts).movedim(axis + fastest, 0) for x in sides]
            if all(_same(x[0], x[-1]) for x in split):
                queries, keys = (_squared(x) for x in split)
                return (axis, fastest), queries, keys
    return None


def _same(one: Tensor, other: Tensor) -> bool:
    """Returns whether two results are of the same image: disturbed ones differ by about AMPLITUDE of their size."""
    return torch.allclose(one, other, rtol=0, atol=AMPLITUDE / 100 * float(other.abs().max()))


def _squared(x: Tensor) -> Tensor:
    """Returns squared differences from the first image, `(RAMPS, *leading, tokens)`, on the CPU."""
    x = x.float()
    squared = (x[1:-1] - x[:1]).square().sum(-1).cpu().double()
    return squared / float(x.square().sum(-1).double().mean().clamp(min=torch.finfo(torch.float64).tiny))
