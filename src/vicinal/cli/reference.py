"""`python main.py`: the reference program's command line, mapped onto `vicinal train`."""

import argparse
import shlex
import sys
from collections.abc import Sequence

from vicinal.errors import VicinalError, unknown_name

__all__ = ["parse", "run", "words"]

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
"""Names that differ; all others are the same here."""

DESCRIPTION = """\
The command line of the Gaussian mixture mask's reference program. It prints the `vicinal train` command that means
the same, and runs it; `vicinal train --help` has many more choices."""

CORRECTIONS = """\
what is meant differently, because the reference program gets it wrong:
  epochs      Its epoch walks the data --ra times, 3 by default. Here an epoch is one walk, so --epochs 100 --warmup 10
              become 300 and 30.
  pooling     Its --is_GMM also swaps ViT's class token for mean pooling. Here --is_GMM adds the mask and changes
              nothing else.
  accuracy    It reports the best test accuracy over all epochs. Here the last weights are tested, once.
  validation  It has none. Here 10% of the training images are held out, for every choice that is made.
  decay       Its weight decay acts on the mask too. Here it spares the mask.
  --is_SLM    Its mask starts at 0, where queries and keys learn nothing, and Swin silently goes without. Here it starts
              at 1, and works in every model.
  cait        Its cait is 192 wide, which is cait-192 here. The 5.1 M parameters of the paper's table are cait-tiny's,
              which is cait here."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The reference program's flags, with its defaults."""
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
    add("--data_path", metavar="FOLDER", help="a Parquet copy of it; from the Hugging Face Hub by default")
    add("--epochs", type=int, default=100, metavar="N", help="epochs, of --ra walks over the data each (%(default)s)")
    add(
        "--warmup",
        type=int,
        default=10,
        metavar="N",
        help="the first of them, with a rising learning rate (%(default)s)",
    )
    add("--ra", type=int, default=3, metavar="N", help="walks over the data in an epoch (%(default)s)")
    add("-b", "--batch_size", type=int, default=128, metavar="N", help="images in a step (%(default)s)")
    add("--lr", type=float, default=1e-3, metavar="RATE", help="learning rate (%(default)s)")
    add("--weight-decay", type=float, default=0.05, metavar="RATE", help="of all but the mask (%(default)s)")
    add("--sd", type=float, default=0.1, metavar="SHARE", help="stochastic depth (%(default)s)")
    add("--smoothing", type=float, default=0.1, metavar="SHARE", help="label smoothing (%(default)s)")
    add("--mix_prob", type=float, default=0.5, metavar="SHARE", help="batches with CutMix or Mixup (%(default)s)")
    add("--re", type=float, default=0.25, metavar="SHARE", help="images with random erasing (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of all random choices (%(default)s)")
    add("--no_cuda", action="store_true", help="train on the CPU")
    add("--tag", default="", help="ends the name of the run's folder")
    add("--resume", metavar="RUN", help="go on with a run, whose settings take the place of all others")
    return parser.parse_args(arguments)


def words(arguments: argparse.Namespace) -> list[str]:
    """What to write behind `vicinal train` for the same, as far as the reference is right."""
    if arguments.resume:
        return ["--resume", arguments.resume]
    if arguments.is_GMM and arguments.is_SLM:
        raise VicinalError("--is_GMM and --is_SLM are two masks; choose one of them")
    if arguments.dataset not in DATASETS:
        raise unknown_name("dataset", arguments.dataset, DATASETS)
    if arguments.ra < 1:
        raise VicinalError(f"--ra counts walks over the data, so at least 1, given {arguments.ra}")
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
    """Print the command that means the same, and run it; returns the exit code."""
    from vicinal.cli.main import main

    try:
        same = words(parse(arguments))
    except VicinalError as error:
        print(f"main.py: {error}", file=sys.stderr)
        return 2
    print(shlex.join(["vicinal", "train", *same]), flush=True)
    return main(["train", *same])
