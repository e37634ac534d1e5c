"""What labels by attention cost: a training step with TransMix next to the same step with CutMix.

    python benchmarks/mixing.py            # about four minutes on two cores
    python benchmarks/mixing.py --compile  # under torch.compile; compiling takes minutes

A step is mixing, forward, targets, cross-entropy, backward and AdamW, on the same model for all contenders; every batch
is mixed. The last contender reads the whole attention of every block, as the published program does. Each runs once in
a round, in random order; printed are the median ratio to CutMix, the quartiles, and bytes kept for backward.
"""

import argparse
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

import vicinal
from attach import MODELS
from measuring import interleaved, print_table
from vicinal.analysis.memory import saved_bytes

ROUNDS = {"vit": 61, "deit_tiny": 41}


def measure(name: str, prior: str, compiled: bool, rounds: int) -> None:
    """Time the step of one model and print a table."""
    make, pixels, batch = MODELS[name]
    torch.manual_seed(0)
    model = make()
    if prior != "none":
        vicinal.attach(model, prior)
    run = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images, labels = torch.randn(batch, 3, pixels, pixels), torch.randint(10, (batch,))
    steps = itertools.count()
    classes = model.num_classes
    cutmix = vicinal.Mixing("cutmix", classes=classes, prob=1.0)  # type: ignore[arg-type]
    transmix = vicinal.Mixing("transmix", classes=classes, prob=1.0, model=model)  # type: ignore[arg-type]
    every_block = vicinal.tap(model, None)
    contenders: dict[str, tuple[vicinal.Mixing, Callable[[], AbstractContextManager[object]]]] = {
        "cutmix": (cutmix, nullcontext),
        "transmix": (transmix, nullcontext),
    }
    if not compiled:
        contenders["transmix, every block read"] = (transmix, lambda: every_block)

    def loss(key: str) -> Tensor:
        mixing, around = contenders[key]
        mixed = mixing(images, labels, seed=next(steps))
        with around(), mixing:
            logits = run(mixed.images)
        return F.cross_entropy(logits, mixing.targets(mixed))

    def step(key: str) -> None:
        loss(key).backward()
        optimizer.step()
        optimizer.zero_grad()

    times = interleaved({key: lambda key=key: step(key) for key in contenders}, rounds, warm_up=3)  # type: ignore[misc]
    constant = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers(), images, labels)}
    memory = {key: saved_bytes(lambda key=key: loss(key), constant) for key in contenders}  # type: ignore[misc]
    how = "compiled" if compiled else "eager"
    print_table(f"{name}, prior {prior}, {pixels} px, batch {batch}, {how}", times, memory)


def main() -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="compile the models")
    parser.add_argument("--models", nargs="+", choices=ROUNDS, default=list(ROUNDS))
    parser.add_argument("--priors", nargs="+", default=["none", "gmm"])
    parser.add_argument("--rounds", type=int, help="61 and 41 by default")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, fp32")
    for name, prior in itertools.product(arguments.models, arguments.priors):
        measure(name, prior, arguments.compile, arguments.rounds or ROUNDS[name])


if __name__ == "__main__":
    main()
