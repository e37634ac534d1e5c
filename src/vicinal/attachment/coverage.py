"""Which of timm's models take a prior: a survey that makes and inspects every one."""

import fnmatch
import functools
from collections import Counter
from pathlib import Path

import timm
import torch

from vicinal.attachment.dry_run import inspect
from vicinal.attachment.survey import Finding, Limits, Survey, finding_of, finding_or_skip
from vicinal.attachment.timm_attention import spatial_layers
from vicinal.errors import VicinalError
from vicinal.inspection.attention_observer import observe_attention
from vicinal.inspection.model_runner import eval_without_side_effects, make_runner

__all__ = ["families", "inspect_model", "timm_survey"]

MODELS_PER_PROCESS = 40  # a process takes seconds to start; timm has 1300 models


def families() -> dict[str, str]:
    """Returns timm's file of each model, by the model's name."""
    return {
        name: module
        for module in timm.list_modules()
        for name in timm.list_models(module=module)
        if timm.model_entrypoint(name).__module__.startswith("timm.")  # others register theirs too
    }


def inspect_model(name: str, family: str, limit: int) -> Finding:
    """Makes one model and returns which of its attention modules take a prior.

    Args:
        name: of a timm model.
        family: of that model, to be passed on.
        limit: number of parameters above which a model is skipped.
    """
    with torch.device("meta"):
        empty = timm.create_model(name).eval()
    count = sum(parameter.numel() for parameter in empty.parameters())
    if count > limit:
        return Finding(name, family, count, skipped=f"more than {limit / 1e6:.0f} M parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = timm.create_model(name)
    runner, spatial = make_runner(model), spatial_layers(model)
    with eval_without_side_effects(model):
        attentions = observe_attention(model, lambda: runner(runner.noise(1)))  # cheaper than to probe it
    if not attentions and not spatial:
        return Finding(name, family, count, runner.image)
    return finding_of(inspect(model), name, family, spatial)


def inspect_or_skip(name: str, family: str, limit: int) -> Finding:
    """Returns the finding of one model; if it fails, a finding that says why the model was skipped."""
    return finding_or_skip(name, family, lambda: inspect_model(name, family, limit))


def timm_survey(pattern: str, notes: Path, *, limit: int, memory: int, seconds: float) -> Survey:
    """Returns a survey of every timm model whose name fits: the first of each family, then the second, and so on.

    Args:
        pattern: of names, such as `swin*`.
        notes: file of findings, one per line; models found there are not inspected again.
        limit: number of parameters above which a model is skipped.
        memory: bytes that the inspecting process can use.
        seconds: time for one model.
    """
    known = families()
    names = [name for name in sorted(known) if fnmatch.fnmatch(name, pattern)]
    before: Counter[str] = Counter()
    rank = {}  # so that a survey that ends early has been in all families
    for name in names:
        rank[name] = before[known[name]]
        before[known[name]] += 1
    fitting = {name: known[name] for name in sorted(names, key=rank.__getitem__)}
    if not fitting:
        raise VicinalError(f"no timm model is named {pattern!r}; 'vicinal models' lists families")
    return Survey(
        fitting,
        functools.partial(inspect_or_skip, limit=limit),
        notes,
        Limits(memory, seconds, MODELS_PER_PROCESS),
        timm.__version__,
        lambda finding: not finding.skipped or finding.parameters > limit,
    )
