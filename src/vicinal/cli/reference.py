"""`python main.py`: the reference program's command line, mapped onto `vicinal train`."""

import argparse
import shlex
import sys
from collections.abc import Sequence

from vicinal.errors import VicinalError, unknown_name

__all__ = ["parse", "run", "train_args"]

DATASETS = {"CIFAR10": "cifar10", "CIFAR100": "cifar100", "SVHN": "svhn", "T-IMNET": "tiny-imagenet"}
MODELS = {
    "cait": "cait-192",
    "vit_d6": "vit-d6",
    "vit_d15": "vit-d15",
    "vit_d30": "vit-d30",
    "vit_d30*": "vit-d30-108",
    "vit_d30**": "vit-d30-192",
    "vit_d60": "vit-d60",
}
"""Models with another name here. All other names are the same."""

DESCRIPTION = """\
The command line of the reference program for Gaussian mixture masks. It prints the equivalent `vicinal train`
command and runs it; `vicinal train --help` has many more settings."""

CORRECTIONS = """\
differences, because of errors in the reference program:
  epochs      Its epoch passes over the data --ra times, 3 by default. Here an epoch is one pass, so --epochs 100
              --warmup 10 become 300 and 30.
  pooling     Its --is_GMM also replaces ViT's class token by average pooling. Here --is_GMM adds the mask and changes
              nothing else.
  accuracy    It reports the best test accuracy over all epochs. Here the last weights are tested, once.
  validation  It has none. Here 10% of the training images are held out for validation.
  decay       It applies weight decay to the mask. Here the mask has none.
  --is_SLM    Its mask starts at 0, where queries and keys get no gradient, and Swin ignores it silently. Here it starts
              at 1 and works in every model.
  cait        Its cait has width 192, which is cait-192 here. The 5.1 M parameters in the paper's table are those of
              cait-tiny, which is cait here."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the flags of the reference program, with its defaults."""
    parser = argparse.ArgumentParser(
        prog="main.py",
        description=DESCRIPTION,
        epilog=CORRECTIONS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--model",
        default="vit",
        metavar="NAME",
        help="vit, swin, cait-tiny, pit, t2t, cait, vit-base, vit-heat, vit_d30, ... (vit)",
    )
    add("--is_GMM", action="store_true", help="with a Gaussian mixture mask")
    add("--is_SLM", action="store_true", help="with an element-wise learnable mask")
    add("--num_kernals", type=int, default=5, metavar="K", help="Gaussians in a mixture (%(default)s)")
    add("--dataset", default="CIFAR10", metavar="NAME", help=f"{', '.join(DATASETS)} (%(default)s)")
    add("--data_path", metavar="FOLDER", help="folder with a Parquet copy; the Hugging Face Hub by default")
    add("--epochs", type=int, default=100, metavar="N", help="epochs, of --ra passes over the data each (%(default)s)")
    add(
        "--warmup",
        type=int,
        default=10,
        metavar="N",
        help="warm-up epochs (%(default)s)",
    )
    add("--ra", type=int, default=3, metavar="N", help="passes over the data in an epoch (%(default)s)")
    add("-b", "--batch_size", type=int, default=128, metavar="N", help="images in a step (%(default)s)")
    add("--lr", type=float, default=1e-3, metavar="RATE", help="learning rate (%(default)s)")
    add(
        "--weight-decay",
        type=float,
        default=0.05,
        metavar="RATE",
        help="weight decay, not applied to the mask (%(default)s)",
    )
    add("--sd", type=float, default=0.1, metavar="SHARE", help="stochastic depth (%(default)s)")
    add("--smoothing", type=float, default=0.1, metavar="SHARE", help="label smoothing (%(default)s)")
    add("--mix_prob", type=float, default=0.5, metavar="SHARE", help="batches with CutMix or Mixup (%(default)s)")
    add("--re", type=float, default=0.25, metavar="SHARE", help="images with random erasing (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of all random choices (%(default)s)")
    add("--no_cuda", action="store_true", help="train on the CPU")
    add("--tag", default="", help="suffix of the run folder")
    add("--resume", metavar="RUN", help="continue a run with its own settings; all other flags are ignored")
    return parser.parse_args(arguments)


def train_args(arguments: argparse.Namespace) -> list[str]:
    """Returns the equivalent arguments of `vicinal train`.

    Args:
        arguments: from `parse`.

    Raises:
        VicinalError: if the flags contradict each other, or the dataset is not known.
    """
    if arguments.resume:
        return ["--resume", arguments.resume]
    if arguments.is_GMM and arguments.is_SLM:
        raise VicinalError("--is_GMM and --is_SLM exclude each other")
    if arguments.dataset not in DATASETS:
        raise unknown_name("dataset", arguments.dataset, DATASETS)
    if arguments.ra < 1:
        raise VicinalError(f"--ra must be at least 1, got {arguments.ra}")
    model, dataset = MODELS.get(arguments.model, arguments.model), DATASETS[arguments.dataset]
    prior = "none"
    if arguments.is_GMM:
        prior = f"gmm:kernels={arguments.num_kernals},init=paper"
    elif arguments.is_SLM:
        prior = "elm"
    mask = "gmm" if arguments.is_GMM else "elm" if arguments.is_SLM else ""
    name = "-".join(part for part in (model, mask, dataset, str(arguments.seed), arguments.tag) if part)
    settings = {
        "recipe": "paper",
        "model": model,
        "prior": prior,
        "dataset": dataset,
        "data-dir": arguments.data_path,
        "val-size": 0.1,
        "epochs": arguments.epochs * arguments.ra,
        "warmup": arguments.warmup * arguments.ra,
        "batch-size": arguments.batch_size,
        "lr": arguments.lr,
        "weight-decay": arguments.weight_decay,
        "drop-path": arguments.sd,
        "smoothing": arguments.smoothing,
        "mix": "both",
        "mix-prob": arguments.mix_prob,
        "erasing": arguments.re,
        "device": "cpu" if arguments.no_cuda else "auto",
        "seed": arguments.seed,
        "out": f"runs/{name}",
    }
    return [word for flag, value in settings.items() if value is not None for word in (f"--{flag}", str(value))]


def run(arguments: Sequence[str] | None = None) -> int:
    """Prints the equivalent `vicinal train` command and runs it. Returns the exit code."""
    from vicinal.cli.main import main

    try:
        args = train_args(parse(arguments))
    except VicinalError as error:
        print(f"main.py: {error}", file=sys.stderr)
        return 2
    print(shlex.join(["vicinal", "train", *args]), flush=True)
    return main(["train", *args])
