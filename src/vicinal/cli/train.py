"""`vicinal train`: from a configuration to a run folder."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import tyro

from vicinal.cli._flags import call_with_flags, field_docs
from vicinal.errors import VicinalError
from vicinal.training.recipes import RECIPES

if TYPE_CHECKING:
    from vicinal.training.config import TrainConfig
    from vicinal.training.run_folder import Run

__all__ = ["run", "summary"]

HELP = """Trains a model and writes a run folder.

Without any flag: vit-micro on the embedded digits, in about a minute on two cores. Other examples:

vicinal train --model vit --prior gmm --dataset cifar10 --recipe paper

vicinal train --prior conv --dataset folder:photos (an own folder: vit-mini at 64 pixels)

vicinal train --recipe finetune --model vit_tiny_patch16_224 --pretrained --prior gmm --dataset folder:photos

vicinal train --resume runs/x

torchrun --nproc-per-node 2 -m vicinal train ... (or: accelerate launch -m vicinal train ...)

The recipe quick uses random crop and flip, for small data, short runs and CPUs. The recipe paper is that of the GMM
paper, with AutoAugment, random erasing, Mixup and CutMix. The recipe finetune takes few epochs, with a lower learning
rate in earlier layers, from weights that were trained before. An epoch is one pass over the data; the paper's program
makes three passes in each epoch, so its 100 epochs with 10 of warm-up are 300 and 30 here.

The figure to report is that of the test split, which is evaluated once, at the end, with the last weights,
or those that --keep names."""


@dataclass
class BaseFlags:
    """The flags that determine the defaults of all other flags."""

    recipe: Annotated[str | None, tyro.conf.arg(metavar="{" + ",".join(RECIPES) + "}")] = None
    """Defaults of all other flags; quick if neither a recipe nor a file is given."""
    config: Path | None = None
    """YAML file with any of these settings; flags override it."""
    resume: Path | None = None
    """Folder of a run that was stopped or killed, which continues exactly."""


def run(args: Sequence[str]) -> None:
    """Parses the arguments after `vicinal train`, trains or resumes, and prints the results."""
    from vicinal.training.config import ConfigError

    base_flags, _ = call_with_flags(BaseFlags, "vicinal train", args, return_unknown_args=True, add_help=False)
    config = _base_config(base_flags)
    flags = call_with_flags(_flags_type(config), "vicinal train", args, description=HELP)
    groups = (vars(group) for group in vars(flags).values() if is_dataclass(group))
    try:
        _train(config.changed(**{name: value for group in groups for name, value in group.items()}), base_flags.resume)
    except ConfigError as error:
        raise VicinalError(error.flag_message) from error


def _flags_type(config: "TrainConfig") -> type:
    """Returns a dataclass of all flags: `BaseFlags`, and a dataclass for each group of settings.

    Args:
        config: the defaults.
    """
    from vicinal.training.config import FIELD_GROUPS

    hints, helps = get_type_hints(type(config)), field_docs(type(config))
    group_of_first = {first: group for group, first in FIELD_GROUPS.items()}
    annotated: Any = Annotated  # mypy wants to know its arguments
    groups: dict[str, list[Any]] = {}
    for each in fields(config):
        if each.name in group_of_first:
            members = groups.setdefault(group_of_first[each.name], [])
        type_ = annotated[hints[each.name], tyro.conf.arg(help=helps[each.name])]
        members.append((each.name, type_, field(default=getattr(config, each.name))))
    types = [
        (f"group{number}", annotated[make_dataclass(name.title().replace(" ", ""), members), tyro.conf.arg(name=name)])
        for number, (name, members) in enumerate(groups.items())
    ]
    return make_dataclass("Flags", types, bases=(BaseFlags,), kw_only=True)


def _base_config(flags: BaseFlags) -> "TrainConfig":
    """Returns the configuration that the other flags change."""
    from vicinal.training.config import TrainConfig, recipe

    if flags.resume is not None:
        from vicinal.training.run_folder import Run

        if flags.config is not None or flags.recipe is not None:
            raise VicinalError("--resume uses the configuration of the run: leave --config and --recipe out")
        return Run(flags.resume).config.changed(out=flags.resume)
    if flags.config is not None:
        if flags.recipe is not None:
            raise VicinalError("--config and --recipe exclude each other; the file can have a line `recipe: paper`")
        return TrainConfig.from_yaml(flags.config)
    return recipe(flags.recipe or "quick")


def _train(config: "TrainConfig", resume_from: Path | None) -> None:
    from vicinal.training.run_folder import Run
    from vicinal.training.signals import Interrupted
    from vicinal.training.train import resume, train

    was_finished = resume_from is not None and Run(resume_from).finished
    try:
        run = resume(resume_from, config) if resume_from is not None else train(config)
    except Interrupted as interrupted:
        if _is_main_process():
            print(f"vicinal: {interrupted}", file=sys.stderr)
        sys.exit(128 + interrupted.signal)
    if _is_main_process():
        print(f"{run.folder} is finished already\n" * was_finished + summary(run))


def _is_main_process() -> bool:
    from accelerate import PartialState

    return bool(PartialState().is_main_process)


def summary(run: "Run") -> str:
    """Returns one line of metrics for each split, and a line with the run folder."""
    lines = []
    for split, metrics in (run.results or {}).items():
        loss = "nan" if metrics["loss"] is None else f"{metrics['loss']:.4f}"  # JSON has null for NaN
        top5 = f"top-5 {100 * metrics['top5']:.2f}%  " if len(metrics["per_class"]) > 5 else ""
        balanced = (
            ""
            if "f1" not in metrics
            # results of version 0.1.0
            else (f"balanced {100 * metrics['balanced_accuracy']:.2f}%  F1 {100 * metrics['f1']:.2f}%  ")
        )
        lines.append(
            f"{split:5} top-1 {100 * metrics['top1']:.2f}%  {top5}{balanced}loss {loss}  "
            f"calibration error {100 * metrics['calibration_error']:.1f}%  ({metrics['images']:,} images)"
        )
    return "\n".join([*lines, f"run folder: {run.folder}"])
