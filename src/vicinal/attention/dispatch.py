"""`attend`: checks its arguments and chooses the path that computes attention under a prior.

- Without a gradient of the prior, a bias is the `attn_mask` of `F.scaled_dot_product_attention` (fused.py). In
  inference a prior over tokens is cached between calls.
- In training, `RecomputedAttention` (recompute.py) keeps q, k, v and the prior's table for backward: (2h-1)(2w-1)
  numbers per head. Logits, softmax and the prior's queries x keys form are computed again. That is less memory than
  the fused kernel keeps (no output, no log-sum-exp). Most of the time of eager attention is page faults and cache
  misses on batch x heads x queries x keys arrays; these are a few cache-sized chunks here.
- Under `torch.compile`, training on a CPU calls the same as an operator (compile_op.py). In inference, and under
  `torch.export`, the plain formula (reference.py) is traced, for the compiler to fuse.
- On GPUs, the rule of gpu_path.py chooses.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from vicinal.attention.chunks import CPU_CHUNK_LOGITS
from vicinal.attention.compile_op import recomputed_attention
from vicinal.attention.flex import attend_flex
from vicinal.attention.fused import attend_fused
from vicinal.attention.gpu_path import GpuPath, call_facts, choose_gpu_path, runs_on_gpu
from vicinal.attention.per_image import PriorPerImage
from vicinal.attention.placed_prior import PlacedPrior, token_counts
from vicinal.attention.precision import additive_mask, makes_tiny_weights, softmax_dtype
from vicinal.attention.quadratic import attend_quadratic
from vicinal.attention.recompute import RecomputedAttention, Settings
from vicinal.attention.reference import attend_plain
from vicinal.errors import VicinalError, unknown_name
from vicinal.grid import Grid
from vicinal.priors.base import Prior
from vicinal.priors.full_precision import autocasting, full_precision

__all__ = ["Backend", "attend"]

Backend = Literal["auto", "plain", "recompute", "flex", "quadratic"]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    prior: Prior | PlacedPrior | None = None,
    mask: Tensor | None = None,
    dropout: float = 0,  # of 0.0 `torch.compile(dynamic=True)` makes a symbol, and compiles again when it is compared
    scale: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Returns attention under a prior, `softmax(prior(q k^T * scale) + mask) v`: `(batch, heads, queries, v_dim)`.

    >>> import torch, vicinal
    >>> prior = vicinal.build_prior("gmm", heads=4, grid=vicinal.Grid(8, 8, prefix=1))
    >>> q, k, v = torch.randn(3, 2, 4, 65, 16)
    >>> vicinal.attend(q, k, v, prior=prior).shape
    torch.Size([2, 4, 65, 16])

    Args:
        q: queries, `(batch, heads, queries, dim)`.
        k: keys, `(batch, heads, keys, dim)`; under a prior with a grid, as many as queries.
        v: values, `(batch, heads, keys, v_dim)`.
        prior: multiplies the logits by its scale and adds its bias; None for plain attention.
        mask: True where a query attends to a key, or numbers to add to the logits; broadcasts to
            `(batch, heads, queries, keys)`.
        dropout: probability that an attention weight is dropped. Applied whenever it is > 0: pass 0 in evaluation.
        scale: factor of q k^T; `dim ** -0.5` by default.
        backend: `auto` chooses; `plain` is the formula, `recompute` the memory-saving path, `flex` compiles
            PyTorch's flex_attention (made for CUDA; no dropout, and no backward on CPU), `quadratic` makes channels of
            q and k of a quadratic bias (`conv`).
    """
    if not torch.compiler.is_compiling() and has_torch_function((q, k, v)):  # inside a tap, for example
        return handle_torch_function(
            attend, (q, k, v), q, k, v, prior=prior, mask=mask, dropout=dropout, scale=scale, backend=backend
        )
    if prior is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    if isinstance(prior, PriorPerImage):
        options: Any = {"dropout": dropout, "scale": scale, "backend": backend}
        groups = prior.split(q, k, v, mask)
        return prior.join([attend(*qkv, prior=placed, mask=its_mask, **options) for placed, *qkv, its_mask in groups])
    _check(q, k, v, prior, mask, dropout, backend)
    if autocasting(q.device):  # as scaled_dot_product_attention does
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    with full_precision(q.device):
        return _dispatch(q, k, v, prior, mask, dropout, q.shape[-1] ** -0.5 if scale is None else scale, backend)


def _dispatch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prior: Prior | PlacedPrior,
    mask: Tensor | None,
    dropout: float,
    softmax_scale: float,
    backend: str,
) -> Tensor:
    """Returns attention by `backend`, `(batch, heads, queries, v_dim)`; `auto` chooses."""
    compiling, gradient = torch.compiler.is_compiling(), torch.is_grad_enabled()
    auto = backend == "auto"
    options: Any = {"mask": mask, "dropout": dropout, "softmax_scale": softmax_scale}
    if auto and runs_on_gpu(q):
        path = choose_gpu_path(call_facts(q, v, prior, mask, dropout, softmax_scale))
        if path is GpuPath.FUSED:
            return attend_fused(q, k, v, prior()[1], **options)
        if path is not GpuPath.RECOMPUTE:
            auto, backend = False, path.value
    if auto and (torch._C._are_functorch_transforms_active() or (compiling and not _operator_serves(q, dropout))):
        backend = "plain"
    if backend == "plain":
        return attend_plain(q, k, v, *prior(), **options)
    if backend == "flex":
        return attend_flex(q, k, v, prior, **options)
    if backend == "quadratic":
        return attend_quadratic(q, k, v, prior, **options)
    if auto and not gradient:
        prior_scale, prior_bias = prior()  # cached between calls
        if prior_scale is None:
            return attend_fused(q, k, v, prior_bias, **options)
        if q.numel() // q.shape[3] * k.shape[2] <= CPU_CHUNK_LOGITS and q.dtype.itemsize > 2:
            return attend_plain(q, k, v, prior_scale, prior_bias, **options)
    prior_scale, prior_bias = prior.values()
    frozen = not any(x is not None and x.requires_grad for x in (prior_bias, mask))
    # The fused kernel's gradients under a narrow bias are denormal. While compiling, the bias has no values to look at.
    if auto and prior_scale is None and frozen and (compiling or not makes_tiny_weights(prior_bias)):
        return attend_fused(q, k, v, prior()[1], **options)
    if mask is not None:
        mask = additive_mask(mask, softmax_dtype(q.dtype))
        mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
    # Dynamo makes an argument of a float such as dropout; 0.0 stays a constant of the graph.
    seed, dropout = (int(torch.randint(2**62, ())), dropout) if dropout else (0, 0.0)
    grid = prior.grid
    placed = (0, 0, 0, False) if grid is None else (grid.height, grid.width, grid.prefix, prior.per_offset)
    settings = Settings(*placed, softmax_scale, dropout, seed)
    recompute: Callable[..., Tensor] = recomputed_attention if compiling else RecomputedAttention.apply
    return recompute(q, k, v, prior_scale, prior_bias, mask, *settings)


def _operator_serves(q: Tensor, dropout: float) -> bool:
    """Returns whether a compiled model calls the operator and does not trace the formula: when training on a CPU."""
    return torch.is_grad_enabled() and not torch.compiler.is_exporting() and q.device.type == "cpu" and not dropout


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prior: Prior | PlacedPrior,
    mask: Tensor | None,
    dropout: float,
    backend: str,
) -> None:
    # Shapes become text only where they are wrong: text of a symbolic size makes it a constant of the compiled graph.
    if not q.dim() == k.dim() == v.dim() == 4 or k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]:
        raise VicinalError(f"attend takes q, k and v as (batch, heads, tokens, dim) alike, given {_shapes(q, k, v)}")
    if v.shape[:3] != k.shape[:3]:
        raise VicinalError(f"v must have the batch, heads and tokens of k, given {_shapes(q, k, v)}")
    if q.shape[1] != prior.heads:
        raise VicinalError(f"the prior is for {prior.heads} heads, given {q.shape[1]}; {_shapes(q, k, v)}")
    queries, keys = token_counts(prior)
    if q.shape[2] != queries:
        raise _wrong_tokens("queries", q.shape[2], queries, prior.grid, _shapes(q, k, v))
    if k.shape[2] != keys:
        raise _wrong_tokens("keys", k.shape[2], keys, prior.grid, _shapes(q, k, v))
    if not q.dtype.is_floating_point or not q.device == k.device == v.device == (prior.device or q.device):
        devices = ", ".join(f"{name} {x.device}" for name, x in (("q", q), ("k", k), ("v", v), ("prior", prior)))
        raise VicinalError(f"attend takes floating-point numbers on one device, given {q.dtype}; {devices}")
    if not 0.0 <= dropout < 1.0:
        raise VicinalError(f"dropout is a probability in [0, 1), given {dropout}")
    if backend not in get_args(Backend):
        raise unknown_name("backend", backend, get_args(Backend))
    if mask is not None:
        wanted = (*q.shape[:3], k.shape[2])
        sizes = zip(reversed(mask.shape), reversed(wanted), strict=False)
        fits = mask.dim() <= 4 and all(given == 1 or given == size for given, size in sizes)
        if not fits:
            raise VicinalError(
                f"mask must broadcast to (batch, heads, queries, keys) = {wanted}, given {tuple(mask.shape)}"
            )


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Returns the shapes of q, k and v as text."""
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def _wrong_tokens(side: str, given: int, expected: int, grid: Grid | None, shapes: str) -> VicinalError:
    """Returns the error for another number of queries or keys (`side`) than that of the prior."""
    if grid is None:
        return VicinalError(f"the prior is for {expected} {side}, given {given}; {shapes}")
    if grid.prefix >= given:
        return VicinalError(
            f"the prior's {grid.prefix} prefix tokens leave no patch in {given} tokens ({side}); {shapes}"
        )
    return VicinalError(
        f"the prior is for {expected} tokens ({grid}), given {given} {side}; {shapes}. "
        "Another image size needs prior.resize(grid)"
    )
