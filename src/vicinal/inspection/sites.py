"""Finds every attention of a model, and where its tokens sit: the sites that a prior can be attached to."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vicinal.cells import Cells, Layout
from vicinal.grid import Grid
from vicinal.inspection.attention_mode import Operation, Step
from vicinal.inspection.exact_centers import needs_exact_centers, with_exact_centers
from vicinal.inspection.head_layout import HeadLayout
from vicinal.inspection.model_runner import ModelRunner
from vicinal.inspection.pair_layout import pair_layout
from vicinal.inspection.place_tokens import Placement, decide
from vicinal.inspection.probe import Evidence, Follow, Key, collect_evidence, merge_evidence
from vicinal.inspection.refusal import Refusal, RefusalKind
from vicinal.inspection.shared_heads import find_shared_heads
from vicinal.inspection.shared_layout import shared_layout

__all__ = ["AttentionSite", "find_sites"]

TIED_DISTANCE = 1.2  # times the distance of the nearest key: keys that are as near
MAX_ROUNDS = 3  # of a probe, where attention without a residual path hides the layers behind it


@dataclass(frozen=True, eq=False)
class AttentionSite:
    """One attention of a model, and where its tokens sit."""

    name: str
    """Name of the module; `#n` behind it for its n-th attention, if it computes several."""
    module: nn.Module
    head_layout: HeadLayout
    """Where images, windows and heads are in the logits."""
    steps: tuple[Step, ...]
    """Which operations of the module's forward it consists of; several where heads take turns or maps are combined."""
    logits: tuple[int, ...]
    """Shape of the logits in a probe, `(..., queries, keys)`."""
    queries: Cells | Refusal
    keys: Cells | Refusal
    layout: Layout | None
    """Grid and token order for a prior; None if it takes none."""
    refusal: Refusal | None
    """Why it takes no prior; None if it does."""
    softmaxes: int = 1
    """How many softmaxes are summed before they meet the values, as in ConViT."""
    met: int | None = None
    """Number, among the module's products, of the one with the values, if they are summed."""

    @property
    def heads(self) -> int:
        """Number of heads that a prior has here."""
        return self.head_layout.heads

    @property
    def windows(self) -> int:
        """Number of windows of an image; 1 where attention is global."""
        return self.head_layout.windows

    @property
    def fused(self) -> bool:
        """Whether attention is computed in one call."""
        return self.steps[0].operation is not Operation.PLAIN

    @property
    def grid(self) -> Grid:
        """Rows and columns of a window behind the tokens without a place; raises if it takes no prior."""
        if self.layout is None:
            raise AttributeError(f"{self.name} has no grid: {self.reason}")
        return self.layout.grid

    @property
    def reason(self) -> str:
        """Why it takes no prior; empty if it does."""
        return "" if self.refusal is None else self.refusal.reason

    @property
    def place(self) -> str:
        """Grid, and number of windows where there are several; empty if it takes no prior."""
        if self.layout is None:
            return ""
        return f"{self.layout}" if self.windows == 1 else f"{self.windows} windows of {self.layout}"


def find_sites(
    runner: ModelRunner, count: int, progress: Callable[[], object] = lambda: None, rounds: int = MAX_ROUNDS
) -> list[AttentionSite]:
    """Finds every attention of a model by running it on noise.

    Args:
        runner: the model, in evaluation mode, without priors and in full precision; and its images.
        count: how many attentions a run has.
        progress: called after each probe.
        rounds: of the first probe at most; one only looks again at what is known, and compares no other noise.

    Returns:
        Sites in the order in which they run, those that take no prior included.
    """
    follow: dict[Key, Follow] = {}
    aspect = runner.image[0] / runner.image[1]
    for _ in range(rounds):
        found = collect_evidence(runner, count, 0, follow)
        progress()
        placements = {key: decide(evidence, aspect) for key, evidence in found.items()}
        known = dict(_followers(placements))
        # Tokens that follow nothing may stand behind attention without a residual path: let places pass there.
        if not any(_is_silent(each) for each in placements.values()) or len(known) == len(follow):
            break
        follow = known
    if rounds > 1:  # what moves in a probe with other noise depends on the content of the image
        merge_evidence(found, collect_evidence(runner, count, 1, follow))
        progress()
    placements = {key: decide(evidence, aspect) for key, evidence in found.items()}
    if any(needs_exact_centers(placement, found[key]) for key, placement in placements.items()):
        centers = collect_evidence(runner, count, 0, follow, exact=True)
        progress()
        placements = {
            key: with_exact_centers(placement, centers[key], aspect) if key in centers else placement
            for key, placement in placements.items()
        }
    found = {key: evidence for key, evidence in found.items() if evidence.call.used}
    placements = _with_shared_heads(runner, found, placements)
    names = {module: name or type(module).__name__ for name, module in runner.model.named_modules()}
    by_module: dict[nn.Module, dict[int, list[Key]]] = {}
    for key in found:
        by_module.setdefault(key[0], {}).setdefault(key[1], []).append(key)
    sites = []
    for module, forwards in by_module.items():
        runs = [_sites_of_forward(names[module], keys, found, placements) for keys in forwards.values()]
        alike = all(_same_sites(runs[0], other) for other in runs[1:])
        different = Refusal(RefusalKind.SEVERAL, f"it runs {len(runs)} times in one pass, on different tokens")
        sites += runs[0] if alike else [replace(site, layout=None, refusal=different) for site in runs[0]]
    return sites


def _is_silent(placement: Placement) -> bool:
    sides = (placement.queries, placement.keys)
    return any(isinstance(side, Refusal) and side.kind is RefusalKind.SILENT for side in sides)


def _followers(placements: dict[Key, Placement]) -> Iterator[tuple[Key, Follow]]:
    """Yields weights by which every query takes the mean value of the nearest keys, where both sides have cells."""
    for key, placement in placements.items():
        queries, keys = placement.queries, placement.keys
        if isinstance(queries, Cells) and isinstance(keys, Cells):
            q, k = (side.centers.nan_to_num(-9.0) for side in (queries, keys))
            distance = torch.cdist(q, k)
            # A query between several keys takes all of them: which one is nearest would be left to rounding.
            nearest = (distance <= TIED_DISTANCE * distance.amin(-1, keepdim=True)).float()
            weights = nearest / nearest.sum(-1, keepdim=True) * (queries.index >= 0)[..., None]
            yield key, functools.partial(_expanded, placement.layout, weights[:, None])


def _expanded(layout: HeadLayout, weights: Tensor, shape: tuple[int, ...]) -> Tensor:
    return layout.expand(weights, shape)


def _with_shared_heads(
    runner: ModelRunner, found: dict[Key, Evidence], placements: dict[Key, Placement]
) -> dict[Key, Placement]:
    """Returns placements that know which heads share one head of the weights."""
    unequal = {
        key: placements[key].layout
        for key, evidence in found.items()
        if key in placements and evidence.call.step.operation is Operation.PLAIN and _loses_heads(evidence.call)
    }
    if not unequal:
        return placements
    shared = find_shared_heads(runner, unequal)
    return placements | {
        key: replace(placements[key], layout=replace(layout, shared=shared[key]))
        for key, layout in unequal.items()
        if key in shared
    }


def _loses_heads(call: object) -> bool:
    """Returns whether the weights that meet values have fewer heads than the logits."""
    logits, used = call.logits, call.used  # type: ignore[attr-defined]
    return len(logits) == len(used) and logits != used and logits[-2:] == used[-2:]


def _sites_of_forward(
    name: str, keys: Sequence[Key], found: dict[Key, Evidence], placements: dict[Key, Placement]
) -> list[AttentionSite]:
    """Returns the sites of one forward of a module."""
    groups: dict[int, list[Key]] = {}
    for key in keys:
        groups.setdefault(found[key].call.group, []).append(key)
    sites = []
    for number, members in enumerate(groups.values(), start=1):
        site = _site(name if number == 1 else f"{name}#{number}", members, found, placements)
        sites.append(site)
    if len(sites) > 1 and _take_turns(sites):
        layout = replace(sites[0].head_layout, turns=len(sites))
        return [replace(sites[0], head_layout=layout, steps=tuple(step for site in sites for step in site.steps))]
    if sum(site.layout is not None for site in sites) > 1:
        several = Refusal(RefusalKind.SEVERAL, f"it computes {len(sites)} attentions with heads of their own")
        return [site if site.layout is None else replace(site, layout=None, refusal=several) for site in sites]
    return sites


def _site(
    name: str, members: Sequence[Key], found: dict[Key, Evidence], placements: dict[Key, Placement]
) -> AttentionSite:
    """Returns the site of attentions whose weights are combined; mostly, of one."""
    call, placement = found[members[0]].call, placements[members[0]]
    layout = refusal = None
    if call.refused:
        refusal = Refusal(RefusalKind.UNSUPPORTED, f"it computes {call.refused}, which priors do not serve")
    elif not all(_same_placement(placement, placements[key]) for key in members[1:]):
        refusal = Refusal(RefusalKind.SEVERAL, "it combines attention maps over different tokens")
    elif _loses_heads(call) and placement.layout.shared is None and call.step.operation is Operation.PLAIN:
        refusal = Refusal(RefusalKind.UNSUPPORTED, "it combines its heads before they meet the values")
    else:
        decided = _layout(placement)
        layout, refusal = (decided, None) if isinstance(decided, Layout) else (None, decided)
    return AttentionSite(
        name=name,
        module=call.module,
        head_layout=placement.layout,
        steps=tuple(found[key].call.step for key in members),
        logits=call.logits,
        queries=placement.queries,
        keys=placement.keys,
        layout=layout,
        refusal=refusal,
        softmaxes=call.softmaxes,
        met=call.met,
    )


def _layout(placement: Placement) -> Layout | Refusal:
    """Returns the grid and order that queries and keys share, or why there is none."""
    if placement.pairs is not None:
        return placement.pairs
    queries, keys = placement.queries, placement.keys
    if isinstance(queries, Refusal) or isinstance(keys, Refusal):
        return queries if isinstance(queries, Refusal) else keys  # type: ignore[return-value]
    return shared_layout(queries) if queries.same_as(keys) else pair_layout(queries, keys)


def _take_turns(sites: Sequence[AttentionSite]) -> bool:
    """Returns whether attentions of a module are its heads, one after another."""
    single = all(site.head_layout.logit_heads == 1 and len(site.steps) == 1 for site in sites)
    return single and all(_same_site(sites[0], site) for site in sites[1:])


def _same_sites(one: Sequence[AttentionSite], other: Sequence[AttentionSite]) -> bool:
    same = len(one) == len(other)
    return same and all(_same_site(a, b) and a.steps == b.steps for a, b in zip(one, other, strict=True))


def _same_site(one: AttentionSite, other: AttentionSite) -> bool:
    same = one.head_layout == other.head_layout and one.logits == other.logits
    return same and _same_cells(one.queries, other.queries) and _same_cells(one.keys, other.keys)


def _same_placement(one: Placement, other: Placement) -> bool:
    same = one.layout == other.layout
    return same and _same_cells(one.queries, other.queries) and _same_cells(one.keys, other.keys)


def _same_cells(one: Cells | Refusal, other: Cells | Refusal) -> bool:
    if isinstance(one, Cells) and isinstance(other, Cells):
        return one.same_as(other)
    return isinstance(one, Refusal) and isinstance(other, Refusal) and one.kind is other.kind
