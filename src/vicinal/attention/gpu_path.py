"""The rule by which `attend` chooses a path on GPUs: a pure function of facts about a call.

None of the paths was run on a GPU; docs/performance.md says what was tested on a CPU.
"""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from vicinal.attention.placed_prior import PlacedPrior
from vicinal.attention.quadratic import quadratic_bias, quadratic_is_exact
from vicinal.priors.base import Prior
from vicinal.priors.function_transforms import transforms_active

__all__ = ["Call", "GpuPath", "PriorKind", "call_facts", "choose_gpu_path", "runs_on_gpu"]

FLEX_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_FLEX_WIDTH = 16  # channels of a head below which flex_attention has no kernel on CUDA


class GpuPath(Enum):
    """A path that computes attention on a GPU; its value is a `backend` of `attend`, except for `fused`."""

    QUADRATIC = "quadratic"
    FLEX = "flex"
    RECOMPUTE = "recompute"
    FUSED = "fused"
    PLAIN = "plain"


class PriorKind(Enum):
    """What a prior does to the logits."""

    QUADRATIC = "adds a bias that channels of q and k hold exactly"
    BIAS = "adds any other bias"
    SCALE = "multiplies, and can add as well"
    NONE = "leaves them as they are"


@dataclass(frozen=True)
class Call:
    """The facts about a call of `attend` that decide on its path."""

    device_type: str
    dtype: torch.dtype
    head_width: int
    """Channels of a head: the smaller of those of q and of v."""
    kind: PriorKind
    learned: bool
    """Whether the prior's bias, or a mask, needs a gradient."""
    gradient: bool
    """Whether autograd records."""
    dropout: bool = False
    compiling: bool = False
    exporting: bool = False
    transformed: bool = False
    """Whether a function transform is active, such as `torch.func.vmap` or forward-mode AD."""


def choose_gpu_path(call: Call) -> GpuPath:
    """Returns the path for a call; the first of these that applies.

    1. `PLAIN` under `torch.export` and under function transforms: both need operations that they know.
    2. `FUSED` without a scale and a bias: attention is `F.scaled_dot_product_attention` as it is.
    3. `QUADRATIC` for a quadratic bias on CUDA: flash attention serves it, eager and compiled, with gradients for the
       prior and with dropout, and keeps nothing of tokens x tokens. Kernels of other devices may sum in half
       precision, which the channels do not bear.
    4. `FLEX` under `torch.compile` on CUDA, without dropout, for dtypes and widths that its kernels have: one kernel
       reads the table and gives its gradient. Eager, it would compile for every new shape.
    5. `FUSED` for a bias without a gradient: it is the `attn_mask` of a fused kernel. Compiled as well.
    6. `PLAIN` under `torch.compile` otherwise: the compiler fuses what it traces.
    7. `RECOMPUTE` otherwise: it keeps q, k, v and the table for backward, and works in chunks.
    """
    cuda = call.device_type == "cuda"
    has_kernel = call.dtype in FLEX_DTYPES and call.head_width >= MIN_FLEX_WIDTH
    if call.exporting or call.transformed:
        return GpuPath.PLAIN
    if call.kind is PriorKind.NONE:
        return GpuPath.FUSED
    if call.kind is PriorKind.QUADRATIC and cuda:
        return GpuPath.QUADRATIC
    if call.compiling and cuda and has_kernel and not call.dropout:
        return GpuPath.FLEX
    if call.kind is not PriorKind.SCALE and not (call.gradient and call.learned):
        return GpuPath.FUSED
    return GpuPath.PLAIN if call.compiling else GpuPath.RECOMPUTE


def runs_on_gpu(q: Tensor) -> bool:
    """Returns whether the rule of this file applies to queries `q`: on every device but a CPU."""
    return q.device.type != "cpu"


def call_facts(
    q: Tensor, v: Tensor, prior: Prior | PlacedPrior, mask: Tensor | None, dropout: float, softmax_scale: float
) -> Call:
    """Returns the facts about a call of `attend`; arguments as there."""
    kind, learned = _prior_kind(q, prior, softmax_scale)
    return Call(
        device_type=q.device.type,
        dtype=q.dtype,
        head_width=min(q.shape[3], v.shape[3]),
        kind=kind,
        learned=learned or (mask is not None and mask.requires_grad),
        gradient=torch.is_grad_enabled(),
        dropout=dropout > 0,
        compiling=torch.compiler.is_compiling(),
        exporting=torch.compiler.is_exporting(),
        transformed=transforms_active(),
    )


def _prior_kind(q: Tensor, prior: Prior | PlacedPrior, softmax_scale: float) -> tuple[PriorKind, bool]:
    """Returns the kind of a prior, and whether its bias needs a gradient."""
    bias, grid = quadratic_bias(prior), prior.grid
    rounded = q.dtype == torch.float32 and _tf32_is_on()  # to 11 bits: channels would have to be split
    if bias is not None and grid is not None and not rounded:
        exact = quadratic_is_exact(grid, q.dtype, softmax_scale, bias.learned)
        return PriorKind.QUADRATIC if exact else PriorKind.BIAS, bias.learned
    prior_scale, prior_bias = prior.values()
    if prior_scale is not None:
        return PriorKind.SCALE, True
    return PriorKind.NONE if prior_bias is None else PriorKind.BIAS, prior_bias is not None and prior_bias.requires_grad


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _tf32_is_on() -> bool:
    """Returns whether CUDA multiplies fp32 matrices in TF32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
