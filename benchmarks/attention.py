"""What a prior costs: forward + backward time, and bytes kept for backward, next to attention without one.

    python benchmarks/attention.py            # all grids, about four minutes on two cores
    python benchmarks/attention.py --short    # 8 x 8 and 16 x 16, about half a minute
    python benchmarks/attention.py --compile  # adds the same under torch.compile
    python benchmarks/attention.py --narrow   # narrow windows of `conv` only, about a minute

Every way runs once in each round, in random order, so a busy machine slows all alike; ratios are taken inside a round.
Printed: the median ratio to `F.scaled_dot_product_attention` without a prior, and the quartiles. Tables and masks are
built from the parameters inside the measured step, as they are in training; the step is what lies between the linear
layers of a timm block: qkv in one array, heads split, attention, heads merged.
"""

import argparse
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vicinal
from measurement import interleaved, print_table
from vicinal.analysis.cost.saved_tensors import saved_bytes
from vicinal.attention import attend

Way = Callable[[Tensor, Tensor, Tensor], Tensor]

# side -> batch, heads, dim: the paper's ViT at 32 px, a middle size, DeiT-Ti at 224 px, the paper's size at patch 1
SHAPES = {8: (128, 12, 16), 14: (16, 3, 64), 16: (32, 6, 32), 32: (4, 3, 32)}
SHORT = (8, 16)
NARROW_SIDE = 16
NARROW_SIGMAS = (0.3, 0.5, 1.0, 2.0)  # in patches; the weights of plain attention under them are denormal numbers


class PaperMask(nn.Module):
    """The mask as the paper's program builds it: kernels x heads x tokens x tokens numbers, every step."""

    def __init__(self, heads: int, grid: vicinal.Grid, kernels: int) -> None:
        super().__init__()
        self.sigma = nn.Parameter(10 + 10 * torch.randn(kernels, heads, 1, 1))
        self.alpha = nn.Parameter(2 * torch.randn(kernels, heads, 1, 1))
        place = grid.coordinates().float()
        self.register_buffer("distance", torch.cdist(place, place).square())

    def forward(self) -> Tensor:
        """The mask, `(heads, tokens, tokens)`."""
        return (self.alpha * torch.exp(-self.distance / (2 * (self.sigma**2 + 1e-5)))).sum(0)


def paper_attention(q: Tensor, k: Tensor, v: Tensor, mask: PaperMask) -> Tensor:
    """Eager attention under the paper's mask."""
    return ((q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5 * mask()).softmax(-1) @ v


def ways(heads: int, grid: vicinal.Grid, compiled: bool) -> dict[str, Way]:
    """Everything that is compared, by name; the first one is the measure."""

    def ours(spec: str, **options: str) -> Way:
        return functools.partial(attend, prior=vicinal.build_prior(spec, heads=heads, grid=grid), **options)

    found: dict[str, Way] = {
        "SDPA, no prior": F.scaled_dot_product_attention,
        "paper's way, K=5": functools.partial(paper_attention, mask=PaperMask(heads, grid, 5)),
        "plain eager, gmm K=5": ours("gmm:init=spread", backend="plain"),
        "vicinal, gmm K=1": ours("gmm:init=spread,kernels=1"),
        "vicinal, gmm K=5": ours("gmm:init=spread"),
        "vicinal, gmm K=20": ours("gmm:init=spread,kernels=20"),
        "vicinal, gab (bias)": ours("gab"),
        "vicinal, gmm+gab (both)": ours("gmm:init=spread+gab"),
        "vicinal, conv (bias)": ours("conv"),
    }
    if compiled:
        # Gradients of the priors' parameters included; each way compiles in its first, unmeasured round.
        names = ["SDPA, no prior", "vicinal, gmm K=5", "vicinal, gab (bias)", "vicinal, conv (bias)"]
        found |= {f"compiled: {name}": torch.compile(found[name], fullgraph=True, dynamic=False) for name in names}
    return found


def narrow_ways(heads: int, grid: vicinal.Grid) -> dict[str, Way]:
    """Returns attention without a prior and under narrow windows, by name."""
    found: dict[str, Way] = {"SDPA, no prior": F.scaled_dot_product_attention}
    for sigma in NARROW_SIGMAS:
        prior = vicinal.build_prior("conv", heads=heads, grid=grid, sigma=sigma)
        found[f"vicinal, conv sigma={sigma:g}"] = functools.partial(attend, prior=prior)
    return found


def measure(side: int, rounds: int, contenders: Callable[[int, vicinal.Grid], dict[str, Way]]) -> None:
    """Times all contenders, made from heads and grid, on one grid and prints a table."""
    batch, heads, dim = SHAPES[side]
    grid = vicinal.Grid(side, side)
    qkv = torch.randn(batch, grid.tokens, 3 * heads * dim, requires_grad=True)
    gradient = torch.randn(batch, grid.tokens, heads * dim)
    found = contenders(heads, grid)

    def modules(way: Way) -> list[nn.Module]:
        values = getattr(way, "keywords", {}).values()
        return [value for value in values if isinstance(value, nn.Module)]

    def forward(way: Way) -> Tensor:
        q, k, v = qkv.view(batch, grid.tokens, 3, heads, dim).permute(2, 0, 3, 1, 4).unbind(0)
        return way(q, k, v).transpose(1, 2).reshape(gradient.shape)

    def step(way: Way) -> None:
        inputs = [qkv, *(parameter for module in modules(way) for parameter in module.parameters())]
        torch.autograd.grad(forward(way), inputs, gradient)

    times = interleaved({name: functools.partial(step, way) for name, way in found.items()}, rounds)
    memory = {}
    for name, way in found.items():
        constant = {t.untyped_storage().data_ptr() for m in modules(way) for t in (*m.parameters(), *m.buffers())}
        memory[name] = saved_bytes(functools.partial(forward, way), constant)
    title = f"grid {grid}, batch {batch}, {heads} heads of {dim}, threads: {torch.get_num_threads()}"
    print_table(title, times, memory)


def main() -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true", help="8 x 8 and 16 x 16 only")
    parser.add_argument("--compile", action="store_true", help="add torch.compile'd ways")
    parser.add_argument("--rounds", type=int, default=None, help="measured rounds (31; short: 15)")
    parser.add_argument("--narrow", action="store_true", help="narrow windows only")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; forward + backward, fp32")
    rounds = arguments.rounds or (15 if arguments.short else 31)
    if not arguments.narrow:
        for side in SHORT if arguments.short else SHAPES:
            measure(side, rounds, functools.partial(ways, compiled=arguments.compile))
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        measure(NARROW_SIDE, rounds, narrow_ways)


if __name__ == "__main__":
    main()
