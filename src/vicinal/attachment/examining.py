"""What in a model can take a prior: find its attention, place it on grids, check every module."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vicinal.attachment.checking import check_module
from vicinal.attachment.finding import Call, calls_of
from vicinal.attachment.ordering import check_order
from vicinal.attachment.placing import LeftAlone, Site, place
from vicinal.attachment.running import Runner
from vicinal.errors import VicinalError

__all__ = ["Examination", "disturbed", "examine"]


@dataclass(frozen=True)
class Examination:
    """What was found in a model."""

    sites: list[Site]
    """Attention that a prior can be attached to, in the order in which it runs."""
    left_alone: list[LeftAlone]

    @property
    def reasons(self) -> dict[str, str]:
        """Why modules are left alone, by name."""
        return {left.name: left.reason for left in self.left_alone}


def examine(run: Runner) -> Examination:
    """Run a model on noise, and say where its attention is and what of it a prior would reach as it should."""
    batch = 1 if _large(run) else 2
    places = place(run.model, calls_of(run.model, lambda: run(run.noise(batch))), batch, run.image)
    sites = [site for site in places if isinstance(site, Site)]
    refused = _refused(sites, run)
    left = [site for site in places if isinstance(site, LeftAlone)]
    left += [
        LeftAlone(site.name, site.module, refused[site.name], site.call.logits)
        for site in sites
        if site.name in refused
    ]
    return Examination([site for site in sites if site.name not in refused], left)


def _large(run: Runner) -> bool:
    """Whether images are so large that attention over a few of them at once might not fit into memory."""
    return run.image[0] * run.image[1] > 512**2


def _joined(calls: Sequence[Call]) -> Call:
    """The calls of several runs as one of them all."""
    queries = [call.queries for call in calls if call.queries is not None]
    return replace(calls[0], queries=torch.cat(queries) if queries else None)


def disturbed(run: Runner, masks: Tensor, seed: int) -> list[Call]:
    """What a model computes for an image of noise, and for copies of it whose pixels of 1 in `masks` are disturbed."""
    images = run.noise(1, seed).repeat(len(masks) + 1, 1, 1, 1)
    images[1:] += 0.5 * masks[:, None].to(images) * run.noise(1, seed + 1000)
    if not _large(run):
        return calls_of(run.model, lambda: run(images))
    one_by_one = zip(*(calls_of(run.model, functools.partial(run, x)) for x in images.split(1)), strict=True)
    return [_joined(calls) for calls in one_by_one]


def _refused(sites: Sequence[Site], run: Runner) -> dict[str, str]:
    """Modules that a prior would not reach as it should, by name, with the reason."""
    refused = {}
    for site in sites:
        try:
            check_module(site)
        except VicinalError as error:
            refused[site.name] = str(error)

    # Modules of one class and shape hold their tokens alike; the first of them has mixed the image least.
    first: dict[tuple[type[nn.Module], tuple[int, ...]], Site] = {}
    for site in sites:
        first.setdefault((type(site.module), site.call.logits), site)
    wrong = check_order(list(first.values()), run.image, functools.partial(disturbed, run))
    for site in sites:
        reason = wrong.get(first[type(site.module), site.call.logits].name)
        if reason is not None:
            refused.setdefault(site.name, reason)
    return refused
