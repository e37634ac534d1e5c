"""`vicinal train`: from a configuration to a run folder."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from vicinal.errors import VicinalError

if TYPE_CHECKING:
    from vicinal.training.run_folder import Run

__all__ = ["run", "summary"]

HELP = """Train a model, and write a run folder.

Without any flag: vit-micro on the embedded digits, in about a minute on two cores. Other examples:

vicinal train --model vit --prior gmm --dataset cifar10 --recipe paper

vicinal train --model vit-mini --prior conv --dataset folder:photos --img-size 64 --epochs 50

vicinal train --resume runs/x

torchrun --nproc-per-node 2 -m vicinal train ... (or: accelerate launch -m vicinal train ...)

The recipe quick is crop and flip, for small data, short runs and CPUs; paper is the GMM paper's, with AutoAugment,
erasing, Mixup and CutMix. An epoch is one pass over the data here; the paper's program walks the data three times an
epoch, so its 100 epochs with 10 of warm-up are 300 and 30.

The figure to report is that of the test split, which is read once, at the end, with the last weights."""


def run(words: Sequence[str]) -> None:
    """Parse the words behind the verb and act."""
    from vicinal.training.config import TrainConfig, recipe

    first = _first(words)
    if first.resume is not None:
        from vicinal.training.run_folder import Run

        if first.config is not None or first.recipe is not None:
            raise VicinalError("--resume goes on with the run's own configuration; leave --config and --recipe out")
        base = Run(first.resume).config.changed(out=first.resume)
    elif first.config is not None:
        base = TrainConfig.from_yaml(first.config)
        if first.recipe is not None:
            raise VicinalError("give --config or --recipe; a file can say `recipe: paper` itself")
    else:
        base = recipe(first.recipe or "quick")

    def train(
        settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = base,
        *,
        recipe: Literal["quick", "paper"] = "quick",
        config: Path | None = None,
        resume: Path | None = None,
    ) -> None:
        """Do it.

        Args:
            settings: the run.
            recipe: where the defaults of all other flags come from.
            config: a YAML file with any of these settings; flags win over it.
            resume: a run that was stopped or killed, to be continued exactly.
        """
        _train(settings, resume)

    tyro.cli(train, prog="vicinal train", args=words, description=HELP)


def _first(words: Sequence[str]) -> argparse.Namespace:
    """The flags that say where the defaults of the others come from."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--recipe")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--resume", type=Path)
    try:
        return parser.parse_known_args(words)[0]
    except argparse.ArgumentError as error:
        raise VicinalError(str(error)) from None


def _train(settings: Any, resume_from: Path | None) -> None:
    from vicinal.training.run_folder import Run
    from vicinal.training.signals import Interrupted
    from vicinal.training.train import fit, resume

    done = resume_from is not None and Run(resume_from).finished
    try:
        run = resume(resume_from, settings) if resume_from is not None else fit(settings)
    except Interrupted as interrupted:
        if _is_first_process():
            print(f"vicinal: {interrupted}", file=sys.stderr)
        sys.exit(128 + interrupted.signal)
    if _is_first_process():
        print(f"{run.folder} is finished already\n" * done + summary(run))


def _is_first_process() -> bool:
    from accelerate import PartialState

    return bool(PartialState().is_main_process)


def summary(run: "Run") -> str:
    """What came out, and where it is."""
    results = run.results or {}
    lines = []
    for split, found in results.items():
        lines.append(
            f"{split:5} top-1 {100 * found['top1']:.2f}%  top-5 {100 * found['top5']:.2f}%  loss {found['loss']:.4f}  "
            f"calibration error {100 * found['calibration_error']:.1f}%  ({found['images']:,} images)"
        )
    return "\n".join([*lines, f"run folder: {run.folder}"])
