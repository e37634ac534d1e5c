"""What a prior costs: forward + backward time, and bytes kept for backward, next to attention without one.

    python benchmarks/attention.py                    # all grids, one and two threads: about six minutes on two cores
    python benchmarks/attention.py --sides 8 16       # some of the grids
    python benchmarks/attention.py --compile          # adds the same under torch.compile
    python benchmarks/attention.py --dtype bfloat16   # next to SDPA in the same dtype
    python benchmarks/attention.py --narrow           # narrow windows of `conv` only, about a minute
    VICINAL_NATIVE=avx2 python benchmarks/attention.py    # another variant of the native library; 0 for none

Every way runs once in each round, in random order, so a busy machine slows all alike; ratios are taken inside a round.
Printed: the median ratio to `F.scaled_dot_product_attention` without a prior, mask and dropout, and the quartiles.
Tables and masks are built from the parameters inside the measured step, as they are in training; the step is what lies
between the linear layers of a timm block: qkv in one array, attention, heads merged.
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
from vicinal.attention import attend, attend_packed
from vicinal.attention.native import attention_path, prepare_native

Way = Callable[[Tensor], Tensor]

# side -> batch, heads, dim, prefix: the paper's ViT at 32 px, DeiT-Ti at 224 px, a middle size, the paper's at patch 1
SHAPES = {8: (128, 12, 16, 1), 14: (16, 3, 64, 1), 16: (32, 6, 32, 0), 32: (4, 3, 32, 0)}
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
        self.prefix = grid.prefix

    def forward(self) -> Tensor:
        """The mask, `(heads, tokens, tokens)`, 1 for tokens without a place."""
        mask = (self.alpha * torch.exp(-self.distance / (2 * (self.sigma**2 + 1e-5)))).sum(0)
        return F.pad(mask, (self.prefix, 0, self.prefix, 0), value=1.0)


def paper_attention(q: Tensor, k: Tensor, v: Tensor, mask: PaperMask) -> Tensor:
    """Eager attention under the paper's mask."""
    return ((q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5 * mask()).softmax(-1) @ v


def by_views(qkv: Tensor, heads: int, attention: Callable[..., Tensor], **options: object) -> Tensor:
    """Attention of views of a projection, heads merged: `(batch, tokens, heads * dim)`."""
    q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return attention(q, k, v, **options).transpose(1, 2).flatten(2)


def ways(heads: int, grid: vicinal.Grid, compiled: bool, dtype: torch.dtype) -> dict[str, Way]:
    """Everything that is compared, by name; the first one is the measure."""
    views = functools.partial(by_views, heads=heads)

    def prior(spec: str) -> vicinal.Prior:
        return vicinal.build_prior(spec, heads=heads, grid=grid)

    def ours(spec: str, **options: object) -> Way:
        return functools.partial(attend_packed, heads=heads, prior=prior(spec), **options)

    windows = torch.where(torch.rand(2, 1, grid.tokens, grid.tokens) < 0.2, -100.0, 0.0)
    sdpa = functools.partial(views, attention=F.scaled_dot_product_attention)
    found: dict[str, Way] = {
        "SDPA, no prior": sdpa,
        "paper's way, K=5": functools.partial(views, attention=paper_attention, mask=PaperMask(heads, grid, 5)),
        "gmm K=5, torch's operations": functools.partial(
            views, attention=attend, prior=prior("gmm:init=spread"), backend="recompute"
        ),
        "vicinal, no prior": functools.partial(attend_packed, heads=heads),
        "vicinal, gmm K=5": ours("gmm:init=spread"),
        "vicinal, gmm K=20": ours("gmm:init=spread,kernels=20"),
        "vicinal, gab": ours("gab"),
        "vicinal, rpe": ours("rpe:init=normal"),
        "vicinal, conv": ours("conv"),
        "vicinal, gmm+gab": ours("gmm:init=spread+gab"),
        "vicinal, gmm, dropout 0.1": ours("gmm:init=spread", dropout=0.1),
        "vicinal, gmm, window mask": ours("gmm:init=spread", mask=windows),
        "vicinal, gmm, q, k and v apart": functools.partial(views, attention=attend, prior=prior("gmm:init=spread")),
    }
    if dtype != torch.float32:
        del found["paper's way, K=5"]  # its program has a mask in fp32
    if compiled:
        # Gradients of the priors' parameters included; each way compiles in its first, unmeasured round.
        names = ["SDPA, no prior", "vicinal, gmm K=5", "vicinal, gab", "vicinal, conv"]
        found |= {f"compiled: {name}": torch.compile(found[name], fullgraph=True, dynamic=False) for name in names}
    return found


def narrow_ways(heads: int, grid: vicinal.Grid) -> dict[str, Way]:
    """Returns attention without a prior and under narrow windows, by name."""
    sdpa = functools.partial(by_views, heads=heads, attention=F.scaled_dot_product_attention)
    found: dict[str, Way] = {"SDPA, no prior": sdpa}
    for sigma in NARROW_SIGMAS:
        prior = vicinal.build_prior("conv", heads=heads, grid=grid, sigma=sigma)
        found[f"vicinal, conv sigma={sigma:g}"] = functools.partial(attend_packed, heads=heads, prior=prior)
    return found


def measure(
    side: int, rounds: int, contenders: Callable[[int, vicinal.Grid], dict[str, Way]], dtype: torch.dtype
) -> None:
    """Times all contenders, made from heads and grid, on one grid and prints a table."""
    batch, heads, dim, prefix = SHAPES[side]
    grid = vicinal.Grid(side, side, prefix)
    leaf = torch.randn(batch, grid.tokens, 3 * heads * dim, dtype=dtype, requires_grad=True)
    gradient = torch.randn(batch, grid.tokens, heads * dim, dtype=dtype)
    found = contenders(heads, grid)

    def modules(way: Way) -> list[nn.Module]:
        values = getattr(way, "keywords", {}).values()
        return [value for value in values if isinstance(value, nn.Module)]

    def forward(way: Way) -> Tensor:
        return way(leaf.view_as(leaf))  # the output of a layer, not a leaf

    def step(way: Way) -> None:
        inputs = [leaf, *(parameter for module in modules(way) for parameter in module.parameters())]
        torch.autograd.grad(forward(way), inputs, gradient)

    times = interleaved({name: functools.partial(step, way) for name, way in found.items()}, rounds)
    memory = {}
    for name, way in found.items():
        constant = {t.untyped_storage().data_ptr() for m in modules(way) for t in (*m.parameters(), *m.buffers())}
        memory[name] = saved_bytes(functools.partial(forward, way), constant)
    title = f"grid {grid}, batch {batch}, {heads} heads of {dim}, threads: {torch.get_num_threads()}"
    print_table(title, times, memory)


def compare_threads(threads: list[int], rounds: int, dtype: torch.dtype) -> None:
    """Times attention under a `gmm` with numbers of threads that take turns, and prints a table."""
    batch, heads, dim, prefix = SHAPES[NARROW_SIDE]
    grid = vicinal.Grid(NARROW_SIDE, NARROW_SIDE, prefix)
    prior = vicinal.build_prior("gmm:init=spread", heads=heads, grid=grid)
    leaf = torch.randn(batch, grid.tokens, 3 * heads * dim, dtype=dtype, requires_grad=True)

    def step(count: int) -> None:
        torch.set_num_threads(count)
        torch.autograd.grad(attend_packed(leaf, heads=heads, prior=prior).sum(), [leaf, *prior.parameters()])

    runs = {f"gmm K=5, threads: {count}": functools.partial(step, count) for count in threads}
    print_table(f"grid {grid}, batch {batch}, {heads} heads of {dim}", interleaved(runs, rounds))


def main() -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sides", nargs="+", type=int, choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--compile", action="store_true", help="add torch.compile'd ways")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16", "float64"], default="float32")
    parser.add_argument("--rounds", type=int, default=21, help="measured rounds")
    parser.add_argument("--narrow", action="store_true", help="narrow windows only")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    prepare_native()
    dtype = getattr(torch, arguments.dtype)
    print(f"torch {torch.__version__}; forward + backward, {dtype}; attention of vicinal: {attention_path()}")
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for side in [] if arguments.narrow else arguments.sides:
            measure(side, arguments.rounds, functools.partial(ways, compiled=arguments.compile, dtype=dtype), dtype)
        measure(NARROW_SIDE, arguments.rounds, narrow_ways, dtype)
    compare_threads(arguments.threads, arguments.rounds, dtype)


if __name__ == "__main__":
    main()
