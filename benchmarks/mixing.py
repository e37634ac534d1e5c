"""What labels by attention cost: a training step with TransMix next to the same step with CutMix.

    python benchmarks/mixing.py            # about eight minutes on two idle cores
    python benchmarks/mixing.py --compile  # under torch.compile; compiling takes minutes

A step is mixing, forward, targets, cross-entropy, backward and AdamW, on the same model for all contenders; every batch
is mixed. `transmix` reads the class token's row of the last block. The next reads the mean over all patches there, as
models with global_pool="avg" need, and computes that block's whole attention for it. The last reads the attention of
every block, as the published program does. Each runs once in a round, in random order; printed are the median ratio to
CutMix, the quartiles, and the bytes kept from forward to backward, by autograd and by what reads attention.
"""

import argparse
import itertools
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

import vicinal
from attach import MODELS
from measurement import interleaved, print_table
from vicinal.analysis.cost.saved_tensors import saved_bytes
from vicinal.inspection import Tap, patch_attention

NAMES = ("vit", "deit_tiny")  # with a class token


def held_bytes(mixing: vicinal.Mixing, every_block: Tap | None) -> int:
    """Bytes of the attention that was read and is still there, whole storages of which a view is kept included."""
    taps = [] if mixing.attention is None else [mixing.attention._reader]
    taps += [] if every_block is None else [every_block]
    storages = [weights.untyped_storage() for tap in taps for weights in tap.weights.values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(name: str, prior: str, compiled: bool, rounds: int, images_per_step: int | None) -> None:
    """Time the step of one model and print a table."""
    make, pixels, usual = MODELS[name]
    batch = images_per_step or usual
    torch.manual_seed(0)
    model = make()
    if prior != "none":
        vicinal.attach(model, prior)
    run = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images, labels = torch.randn(batch, 3, pixels, pixels), torch.randint(10, (batch,))
    steps = itertools.count()
    classes = model.num_classes
    how = {"classes": classes, "prob": 1.0}
    transmix = vicinal.Mixing("transmix", model=model, **how)  # type: ignore[arg-type]
    over_patches = vicinal.Mixing("transmix", model=patch_attention(model, queries="mean"), **how)  # type: ignore[arg-type]
    contenders: dict[str, tuple[vicinal.Mixing, Tap | None]] = {
        "cutmix": (vicinal.Mixing("cutmix", **how), None),  # type: ignore[arg-type]
        "transmix": (transmix, None),
        "transmix, mean over patches": (over_patches, None),
    }
    if not compiled:
        contenders["transmix, every block read"] = (transmix, vicinal.tap(model, None))

    def loss(key: str) -> Tensor:
        mixing, every_block = contenders[key]
        mixed = mixing(images, labels, seed=next(steps))
        with every_block or nullcontext(), mixing:
            logits = run(mixed.images)
        return F.cross_entropy(logits, mixing.targets(mixed))

    def step(key: str) -> None:
        loss(key).backward()
        optimizer.step()
        optimizer.zero_grad()

    times = interleaved({key: lambda key=key: step(key) for key in contenders}, rounds)  # type: ignore[misc]
    constant = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers(), images, labels)}
    memory = {}
    for key, readers in contenders.items():
        memory[key] = saved_bytes(lambda key=key: loss(key), constant) + held_bytes(*readers)  # type: ignore[misc]
    title = f"{name}, prior {prior}, {pixels} px, batch {batch}, {'compiled' if compiled else 'eager'}"
    print_table(title, times, memory)


def main() -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="compile the models")
    parser.add_argument("--models", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--priors", nargs="+", default=["none", "gmm"])
    parser.add_argument("--rounds", type=int, default=15, help="measured steps of each")
    parser.add_argument("--batch", type=int, help="images of a step; 128 for vit and 16 for deit_tiny by default")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, fp32")
    for name, prior in itertools.product(arguments.models, arguments.priors):
        measure(name, prior, arguments.compile, arguments.rounds, arguments.batch)


if __name__ == "__main__":
    main()
