"""`python main.py`: the reference program's command line, mapped onto `vicinal train`."""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

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

DIFFERENCES = """\
differences from the reference program, because of its errors:
  epochs      Its epoch passes over the data --ra times, 3 by default. Here an epoch is one pass, so --epochs 100
              --warmup 10 become 300 and 30.
  pooling     Its --is_GMM also replaces ViT's class token by average pooling. Here --is_GMM adds the mask and changes
              nothing else.
  accuracy    It reports the best test accuracy over all epochs. Here the last weights are tested, once.
  validation  It has none. Here 10% of the training images are held out for validation.
  decay       It applies weight decay to all parameters. Here to all but the mask and tables of relative positions.
  mask        It computes exp(-d^2) first, which is 0 in single precision from d^2 = 104 on. Here the exponent is
              computed first.
  smoothing   It ignores --smoothing, and smooths by 0.1. Here --smoothing is used; --ls turns smoothing off in both.
  --is_SLM    Its mask starts at 0, where queries and keys get no gradient, and Swin ignores it silently. Here it starts
              at 1 and works in every model.
  cait        Its cait has width 192, which is cait-192 here. The 5.1 M parameters in the paper's table are those of
              cait-tiny, which is cait here.
further differences:
  AutoAugment It rotates to one side only, and shears with bicubic interpolation; solarize starts at 256. Here it is
              torchvision's: to both sides, nearest neighbor, from 255.
  erasing     It draws the ratio of the sides of a box evenly from 0.3 to 3.3, so more boxes are tall than wide. Here
              the logarithm of the ratio is drawn evenly (timm). It tries 100 times to place a box; here 10 times.
  CutMix      A box of an odd number of pixels loses one of them there. Here it has all.
  batches     It drops the images that do not fill a last batch. Here they are a smaller batch.
  CIFAR-100   The mean of red is 0.5070 there, 0.5071 here.
  seeds       The same seed draws other numbers, and the number of workers does not change them here.
  ignored     --disable-cos, --channel, --heads, --depth and --enable_aug change nothing, there and here. --print-freq
              sets how often it prints; here a line is printed for every epoch."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the flags of the reference program, with its defaults."""
    parser = argparse.ArgumentParser(
        prog="main.py",
        description=DESCRIPTION,
        epilog=DIFFERENCES,
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
    _add_augmentation(parser)
    _add_hardware(parser)
    add("--tag", default="", help="suffix of the run folder")
    add("--resume", metavar="RUN", help="continue a run with its own settings; all other flags are ignored")
    return parser.parse_args(arguments)


def _add_augmentation(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ls", action="store_true", help="no label smoothing")
    add("--aa", action="store_true", help="no AutoAugment")
    add("--cm", action="store_true", help="no CutMix")
    add("--mu", action="store_true", help="no Mixup")
    add("--beta", type=float, default=1.0, metavar="X", help="parameter of CutMix's Beta distribution (%(default)s)")
    add("--alpha", type=float, default=1.0, metavar="X", help="parameter of Mixup's Beta distribution (%(default)s)")
    add("--re_sh", type=float, default=0.4, metavar="SHARE", help="largest erased area (%(default)s)")
    add("--re_r1", type=float, default=0.3, metavar="RATIO", help="smallest ratio of erased sides (%(default)s)")


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    """Adds flags for the hardware, and those that the reference program ignores too."""
    add = parser.add_argument
    add("--gpu", type=int, default=0, metavar="N", help="index of the GPU, if there is one (%(default)s)")
    add("-j", "--workers", type=int, metavar="N", help="processes that load images")
    add("--no_cuda", action="store_true", help="train on the CPU")
    for flag in ("--print-freq", "--channel", "--heads", "--depth"):
        add(flag, type=int, metavar="N", help="ignored")
    for flag in ("--disable-cos", "--enable_aug"):
        add(flag, action="store_true", help="ignored")


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
        "smoothing": 0.0 if arguments.ls else arguments.smoothing,
        "auto-augment": not arguments.aa,
        "mix": {(False, False): "both", (True, False): "mixup", (False, True): "cutmix"}.get(
            (arguments.cm, arguments.mu), "none"
        ),
        "mix-prob": arguments.mix_prob,
        "mixup-alpha": arguments.alpha,
        "cutmix-alpha": arguments.beta,
        "erasing": arguments.re,
        "erasing-area": arguments.re_sh,
        "erasing-aspect": arguments.re_r1,
        "workers": arguments.workers,
        "device": "cpu" if arguments.no_cuda else f"cuda:{arguments.gpu}" if arguments.gpu else "auto",
        "seed": arguments.seed,
        "out": f"runs/{name}",
    }
    return _as_flags(settings)


def _as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Returns settings as words of a command line; a setting that is None is left out."""
    words = []
    for flag, value in settings.items():
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words


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
