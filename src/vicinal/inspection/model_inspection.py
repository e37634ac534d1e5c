"""The inspection of a model: every attention, whether it takes a prior, and why not."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn
from tqdm import tqdm

from vicinal.inspection.attention_observer import observe_attention
from vicinal.inspection.image_context import ImageModules
from vicinal.inspection.model_runner import ModelRunner, eval_without_side_effects, in_full_precision
from vicinal.inspection.sites import AttentionSite, find_sites
from vicinal.inspection.size_rule import SizeRule
from vicinal.text_table import text_table

__all__ = ["Inspection", "inspect_runner", "without_priors"]

PROGRESS_DELAY = 2  # seconds before a progress bar shows


@dataclass(frozen=True, eq=False)
class Inspection:
    """The attention of a model: sites that take a prior, and those that do not, with the reason."""

    runner: ModelRunner
    """The model, and the images that it ran on."""
    sites: list[AttentionSite]
    """Every attention, in the order in which they run."""
    image_modules: dict[nn.Module, tuple[int, int]]
    """The innermost modules that are given the image, and its height and width there."""
    verified: bool = False
    """Whether a prior was tried in every site that takes one."""
    size_rules: dict[str, SizeRule] = field(default_factory=dict)
    """How the grid of each site that takes a prior changes with the image, by name; found with `verified`."""

    @property
    def served(self) -> list[AttentionSite]:
        """Sites that take a prior."""
        return [site for site in self.sites if site.refusal is None]

    @property
    def refused(self) -> list[AttentionSite]:
        """Sites that take none; `site.refusal` says why."""
        return [site for site in self.sites if site.refusal is not None]

    def __str__(self) -> str:
        height, width = self.runner.image
        rows = [("module", "class", "heads", "tokens")]
        rows += [(site.name, type(site.module).__name__, str(site.heads), site.place) for site in self.served]
        lines = [
            f"{type(self.runner.model).__name__} at {height} x {width}: "
            f"{len(self.served)} of {len(self.sites)} attention layers take a prior"
        ]
        lines += text_table(rows).splitlines() if self.served else []
        lines += [f"refused: {site.name}: {site.reason}" for site in self.refused]
        return "\n".join(lines)


def inspect_runner(runner: ModelRunner) -> Inspection:
    """Returns the inspection of a model, run as `runner` says."""
    model = runner.model
    with (
        eval_without_side_effects(model),
        without_priors(model),
        in_full_precision(model),
        tqdm(desc="inspecting", unit=" probes", delay=PROGRESS_DELAY, leave=False, disable=_quiet()) as bar,
    ):
        with ImageModules(runner) as modules:
            calls = observe_attention(model, lambda: runner(runner.noise(1)))
        sites = find_sites(runner, len(calls), bar.update) if calls else []
        return Inspection(runner, sites, modules.found)


@contextlib.contextmanager
def without_priors(model: nn.Module) -> Iterator[None]:
    """Gives modules that carry a prior their own class back inside, so that the model runs as if it had none."""
    attached = {module: type(module) for module in model.modules() if hasattr(type(module), "plain_class")}
    for module, cls in attached.items():
        module.__class__ = cls.plain_class  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, cls in attached.items():
            module.__class__ = cls


def _quiet() -> bool:
    """Returns whether nobody watches: a progress bar is for terminals."""
    return not sys.stderr.isatty()
