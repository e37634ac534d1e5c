"""`inspect`: a dry run of `attach` that reports every attention of a model and changes nothing."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from tqdm import tqdm

from vicinal.errors import VicinalError
from vicinal.inspection.model_runner import (
    Example,
    ImageSize,
    ModelRunner,
    eval_without_side_effects,
    in_full_precision,
    make_runner,
)
from vicinal.inspection.sites import AttentionSite, find_sites
from vicinal.text_table import text_table

__all__ = ["Inspection", "inspect", "inspect_runner", "without_priors"]

PROGRESS_DELAY = 2  # seconds before a progress bar shows


@dataclass(frozen=True, eq=False)
class Inspection:
    """The attention of a model: sites that take a prior, and those that do not, with the reason."""

    runner: ModelRunner
    """The model, and the images that it ran on."""
    sites: list[AttentionSite]
    """Every attention, in the order in which they run."""

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


def inspect(model: nn.Module, *, img_size: ImageSize | None = None, example: Example | None = None) -> Inspection:
    """Finds every attention of a model and where its tokens sit, without changing the model.

    >>> import vicinal
    >>> vicinal.ensure_torchvision()
    >>> import timm
    >>> model = timm.create_model("cait_xxs24_224", img_size=64, depth=2)
    >>> print(vicinal.inspect(model))
    Cait at 64 x 64: 2 of 4 attention layers take a prior
    module         class            heads  tokens
    blocks.0.attn  TalkingHeadAttn  4      4 x 4
    blocks.1.attn  TalkingHeadAttn  4      4 x 4
    refused: blocks_token_only.0.attn: its queries follow no place of the image
    refused: blocks_token_only.1.attn: its queries follow no place of the image

    The model runs on noise; a model that carries priors is looked at as if it had none. `attach(model, prior,
    inspection=...)` and `tap(model, inspection=...)` take the result, so that nothing is probed twice.

    Args:
        model: any vision transformer.
        img_size: height and width of the images; by default what the model declares.
        example: an input to learn the image's shape from, where the model takes none of the default shape: a tensor, or
            a mapping of keyword arguments with one image tensor.

    Returns:
        The sites that take a prior, and those that do not, with the reason.
    """
    if not isinstance(model, nn.Module):
        raise VicinalError(f"inspect takes a torch.nn.Module, got {type(model).__name__}")
    return inspect_runner(make_runner(model, img_size, example))


def inspect_runner(runner: ModelRunner) -> Inspection:
    """Returns the inspection of a model, run as `runner` says."""
    with eval_without_side_effects(runner.model), without_priors(runner.model), in_full_precision(runner.model):
        with tqdm(desc="inspecting", unit=" probes", delay=PROGRESS_DELAY, leave=False, disable=_quiet()) as bar:
            return Inspection(runner, find_sites(runner, bar.update))


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
