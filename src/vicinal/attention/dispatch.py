"""`attend`: checks its arguments and chooses the path that computes attention under a prior.

On a CPU the native kernels (native/) compute all of it, where they are built; elsewhere:

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

from vicinal.attention.call_checks import check_call, repeats
from vicinal.attention.chunks import CPU_CHUNK_LOGITS
from vicinal.attention.compile_op import recomputed_attention
from vicinal.attention.flex import attend_flex
from vicinal.attention.fused import attend_fused
from vicinal.attention.gpu_path import GpuPath, call_facts, choose_gpu_path, runs_on_gpu
from vicinal.attention.native.path import attend_native, native_serves
from vicinal.attention.per_image import PriorPerImage, ordered_mask
from vicinal.attention.placed_prior import PlacedPrior
from vicinal.attention.precision import additive_mask, makes_tiny_weights, softmax_dtype
from vicinal.attention.quadratic import attend_quadratic
from vicinal.attention.recompute import RecomputedAttention, Settings
from vicinal.attention.reference import attend_plain
from vicinal.errors import VicinalError, unknown_name
from vicinal.priors.base import Prior
from vicinal.priors.full_precision import autocasting, full_precision
from vicinal.priors.function_transforms import transforms_active

__all__ = ["Backend", "attend"]

Backend = Literal["auto", "plain", "recompute", "flex", "quadratic", "native"]


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
    order: Tensor | None = None,
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
            `(batch, heads, queries, keys)`. One for fewer images, `(windows, heads or 1, queries, keys)`, repeats over
            the batch.
        dropout: probability that an attention weight is dropped. Applied whenever it is > 0: pass 0 in evaluation.
        scale: factor of q k^T; `dim ** -0.5` by default.
        backend: `auto` chooses; `plain` is the formula, `recompute` the memory-saving path, `flex` compiles
            PyTorch's flex_attention (made for CUDA; no dropout, and no backward on CPU), `quadratic` makes channels of
            q and k of a quadratic bias (`conv`), `native` are the kernels for CPUs.
        order: token at each position of the prior's grid, `(tokens,)`; None if tokens are in that order.
    """
    if backend not in get_args(Backend):
        raise unknown_name("backend", backend, get_args(Backend))
    options: Any = {"dropout": dropout, "scale": scale, "backend": backend}
    if not torch.compiler.is_compiling() and has_torch_function((q, k, v)):  # inside a tap, for example
        if order is not None:
            return _attend_ordered(q, k, v, order, mask=mask, prior=prior, **options)
        mask = _repeated(mask, q)
        return handle_torch_function(attend, (q, k, v), q, k, v, mask=mask, prior=prior, **options)
    if isinstance(prior, PriorPerImage):
        groups = prior.split(q, k, v, mask)
        return prior.join([attend(*qkv, prior=placed, mask=its_mask, **options) for placed, *qkv, its_mask in groups])
    if prior is None and not _native_without_prior(q, k, v, dropout, backend):
        mask = _repeated(mask, q)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    check_call(q, k, v, prior, mask, dropout)
    if autocasting(q.device):  # as scaled_dot_product_attention does
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    with full_precision(q.device):
        softmax_scale = q.shape[-1] ** -0.5 if scale is None else scale
        return _dispatch(q, k, v, prior, mask, dropout, softmax_scale, backend, order)


def _native_without_prior(q: Tensor, k: Tensor, v: Tensor, dropout: float, backend: str) -> bool:
    """Returns whether the native kernels serve attention without a prior, which can have other shapes than theirs."""
    if backend == "native":
        return True
    same = q.dim() == k.dim() == v.dim() == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2]
    return backend == "auto" and same and native_serves(q, k, v, dropout=dropout)


def _attend_ordered(q: Tensor, k: Tensor, v: Tensor, order: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """Returns `attend` of tokens that are put in the order of the prior's grid, and back: `(..., tokens, v_dim)`."""
    q, k, v = (x.index_select(-2, order) for x in (q, k, v))
    return attend(q, k, v, mask=ordered_mask(mask, order), **options).index_select(-2, order.argsort())


def _repeated(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Returns a mask for all images of `q`."""
    return mask.repeat(q.shape[0] // mask.shape[0], 1, 1, 1) if mask is not None and repeats(mask, q) else mask


def _dispatch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prior: Prior | PlacedPrior | None,
    mask: Tensor | None,
    dropout: float,
    softmax_scale: float,
    backend: Backend,
    order: Tensor | None,
) -> Tensor:
    """Returns attention by the native kernels, or else by `_attend_by_torch`: `(batch, heads, queries, v_dim)`."""
    if backend in ("auto", "native") and native_serves(q, k, v, dropout=dropout):
        mask = mask if order is None else ordered_mask(mask, order)
        options: Any = {"mask": mask, "dropout": dropout, "softmax_scale": softmax_scale, "order": order}
        return attend_native(q, k, v, prior, **options)
    if backend == "native":
        raise VicinalError("backend='native' is not available for this call; `vicinal doctor` says what is built")
    assert prior is not None
    if order is not None:
        options = {"prior": prior, "dropout": dropout, "scale": softmax_scale, "backend": backend}
        return _attend_ordered(q, k, v, order, mask, **options)
    return _attend_by_torch(q, k, v, prior, _repeated(mask, q), dropout, softmax_scale, backend)


def _attend_by_torch(
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
    if auto and (transforms_active() or (compiling and not _operator_serves(q, dropout))):
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
