"""What a prior costs in a whole model: a training step, and one image, next to the same model untouched.

    python benchmarks/attach.py            # about six minutes on two cores
    python benchmarks/attach.py --compile  # under torch.compile; compiling takes minutes
    python benchmarks/attach.py --threads 1 2  # tables for one thread, then for two

A step is forward, cross-entropy, backward and AdamW. Every model runs once in each round, in random order; printed are
the median ratio to the untouched model, the quartiles, and bytes kept for backward.
"""

import argparse
import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vicinal
from measurement import interleaved, print_table
from vicinal.analysis.cost.saved_tensors import saved_bytes

vicinal.ensure_torchvision()

from timm.models.deit import deit_tiny_patch16_224  # noqa: E402
from timm.models.swin_transformer import swin_tiny_patch4_window7_224  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

PRIORS = ("gmm:init=spread", "conv")


def paper_vit() -> nn.Module:
    """The paper's ViT for 32 x 32 pixels: 8 x 8 patches."""
    return VisionTransformer(
        img_size=32, patch_size=4, embed_dim=192, depth=9, num_heads=12, mlp_ratio=2, num_classes=10
    )


# name -> how to make it, pixels, batch
MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "vit": (paper_vit, 32, 128),
    "deit_tiny": (deit_tiny_patch16_224, 224, 16),
    "swin_tiny": (swin_tiny_patch4_window7_224, 224, 8),
}


def contenders(make: Callable[[], nn.Module]) -> dict[str, nn.Module]:
    """The same model untouched and with priors."""
    untouched = make()
    models = {"untouched": untouched}
    for prior in PRIORS:
        models[prior] = copy.deepcopy(untouched)
        vicinal.attach(models[prior], prior)
    return models


def training(name: str, compiled: bool, rounds: int) -> None:
    """Time a training step of one model and print a table."""
    make, pixels, batch = MODELS[name]
    images, labels = torch.randn(batch, 3, pixels, pixels), torch.randint(10, (batch,))
    models = contenders(make)
    runs: dict[str, nn.Module] = {
        key: torch.compile(model, fullgraph=True, dynamic=False) if compiled else model  # type: ignore[misc]
        for key, model in models.items()
    }
    optimizers = {key: torch.optim.AdamW(model.parameters(), lr=1e-4) for key, model in models.items()}

    def loss(key: str) -> Tensor:
        return F.cross_entropy(runs[key](images), labels)

    def step(key: str) -> None:
        loss(key).backward()
        optimizers[key].step()
        optimizers[key].zero_grad()

    times = interleaved({key: lambda key=key: step(key) for key in models}, rounds)  # type: ignore[misc]
    memory = {}
    for key, model in models.items():
        constant = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers(), images, labels)}
        memory[key] = saved_bytes(lambda key=key: loss(key), constant)  # type: ignore[misc]
    print_table(f"{name}, {pixels} px, batch {batch}, {'compiled' if compiled else 'eager'} training", times, memory)


def latency(name: str, rounds: int) -> None:
    """Time one image in evaluation and print a table."""
    make, pixels, _ = MODELS[name]
    image = torch.randn(1, 3, pixels, pixels)
    models = {key: model.eval() for key, model in contenders(make).items()}
    with torch.no_grad():
        times = interleaved({key: lambda model=model: model(image) for key, model in models.items()}, rounds, 5)
    print_table(f"{name}, {pixels} px, one image, eager", times)


def main() -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--compile", action="store_true", help="training under torch.compile instead of eager")
    parser.add_argument("--rounds", type=int, default=15, help="measured training steps of each")
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()], help="numbers of threads")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        print(f"torch {torch.__version__}, {threads} threads, fp32")
        for name in arguments.models:
            training(name, arguments.compile, arguments.rounds)
            if not arguments.compile:
                latency(name, 4 * arguments.rounds)


if __name__ == "__main__":
    main()
