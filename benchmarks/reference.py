"""A training step of the GMM paper's own models next to ours, with the GMM mask.

    git clone https://github.com/CatworldLee/Gaussian-Mixture-Mask-Attention checkout
    pip install einops                               # what its models import
    python benchmarks/reference.py checkout          # about ten minutes on two cores
    python benchmarks/reference.py checkout --threads 1 --models vit cait

The checkout is not part of this project; its models are imported from where it is, and run as they are. A step is
forward, cross-entropy, backward and AdamW; both models run once in each round, in random order. Printed are our
throughput as a multiple of the reference's, the median over rounds and the quartiles, and milliseconds of a step.

Both sides have the same widths, depths, mask and drop path rate. The reference's ViT has no class token under a mask,
so ours has the mean over patches. Parameters of the reference include its frozen tables. `tune_cpu` serves both.
"""

import argparse
import importlib
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vicinal
from measurement import interleaved
from vicinal import VicinalError

vicinal.ensure_torchvision()

MODELS = {"vit": "vit", "swin": "swin", "cait": "cait-tiny", "pit": "pit", "t2t": "t2t"}
"""Our names, and those of the reference's `create_model`."""
POOLS = {"vit": "avg"}
"""Pooling of the reference under a mask, where it is not our default."""
KERNELS, DROP_PATH, CLASSES, PIXELS = 5, 0.1, 10, 32


def load_reference(path: Path) -> Any:
    """Imports the module `models.create_model` of a checkout, and returns it.

    Raises:
        VicinalError: the folder is not a checkout of the reference, or cannot be imported.
    """
    if not all((path / file).is_file() for file in ("models/create_model.py", "models/gmm.py", "utils/drop_path.py")):
        raise VicinalError(
            f"{path} is not a checkout of the GMM paper's repository: it must hold models/create_model.py, "
            "models/gmm.py and utils/drop_path.py"
        )
    sys.path.insert(0, str(path.resolve()))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it imports from timm.models.layers, a former place
            return importlib.import_module("models.create_model")
    except ImportError as error:
        raise VicinalError(f"the reference in {path} cannot be imported: {error}; pip install {error.name}") from error
    finally:
        sys.path.remove(str(path.resolve()))


def make_models(reference: Any, name: str) -> dict[str, nn.Module]:
    """Returns the reference's model and ours, with masks of as many Gaussians."""
    settings = argparse.Namespace(
        model=MODELS[name], sd=DROP_PATH, is_GMM=True, is_SLM=False, num_kernals=KERNELS
    )  # the reference's spelling
    prior = f"gmm:kernels={KERNELS},init=paper"
    options = {"img_size": PIXELS, "num_classes": CLASSES, "drop_path_rate": DROP_PATH, "global_pool": POOLS.get(name)}
    return {
        "reference": reference.create_model(PIXELS, CLASSES, settings).train(),
        "vicinal": vicinal.create_model(name, prior=prior, **options).train(),
    }


def measure(reference: Any, name: str, batch: int, rounds: int) -> None:
    """Times steps of both models and prints a line."""
    images, labels = torch.randn(batch, 3, PIXELS, PIXELS), torch.randint(CLASSES, (batch,))
    models = make_models(reference, name)
    optimizers = {key: torch.optim.AdamW(model.parameters(), lr=1e-4) for key, model in models.items()}

    def step(key: str) -> Tensor:
        optimizers[key].zero_grad()
        loss = F.cross_entropy(models[key](images), labels)
        loss.backward()
        optimizers[key].step()
        return loss

    with vicinal.tune_cpu():
        times = interleaved({key: lambda key=key: step(key) for key in models}, rounds)  # type: ignore[misc]
    ratios = [theirs / ours for theirs, ours in zip(times["reference"], times["vicinal"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    ms = {key: statistics.median(values) * 1e3 for key, values in times.items()}
    parameters = {key: sum(each.numel() for each in model.parameters()) for key, model in models.items()}
    print(
        f"{name:6}{ms['reference']:12.0f}{ms['vicinal']:10.0f}{middle:9.2f}{f'{low:.2f}-{high:.2f}':>14}"
        f"{parameters['reference']:14,}{parameters['vicinal']:12,}",
        flush=True,
    )


def main() -> None:
    """Parses the command line and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, help="checkout of the GMM paper's repository")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15, help="measured steps of each, at least 2")
    parser.add_argument("--batch", type=int, default=128, help="images in a step")
    arguments = parser.parse_args()
    try:
        reference = load_reference(arguments.path)
    except VicinalError as error:
        sys.exit(f"error: {error}")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, fp32, batch {arguments.batch}")
    print(f"{'':6}{'reference ms':>12}{'ours ms':>10}{'times':>9}{'quartiles':>14}{'parameters':>14}{'ours':>12}")
    for name in arguments.models:
        measure(reference, name, arguments.batch, arguments.rounds)


if __name__ == "__main__":
    main()
