"""Fast forwards for timm's attention classes that most models use.

Entering a mode costs some microseconds a layer, which shows with a batch of one image. These do what the class's own
forward does, with `attend` in place of its attention, and are used only where that forward is timm's, unchanged.
"""

from typing import Any

import torch
from timm.layers.attention import Attention
from timm.models.swin_transformer import WindowAttention
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import Tensor, nn

from vicinal.attachment.interceptor import token_mismatch
from vicinal.attachment.patch_prior import run_eagerly
from vicinal.attachment.subclass import FAST_FORWARDS, WithPrior
from vicinal.attention import GivenPrior, PlacedPrior, attend, attend_packed
from vicinal.attention.native.path import native_serves
from vicinal.attention.placed_prior import current_values
from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.priors.full_precision import widen

__all__ = ["attention_forward", "relative_attention_forward", "window_attention_forward"]


class _FastForward(WithPrior):
    """A forward of ours, for tokens that stand row by row."""

    def _prior_for(self, x: Tensor) -> PlacedPrior:
        """Returns the prior on the grid of tokens `(batch, tokens, dim)`."""
        prior, tokens = self.place_prior(x, x.shape[1]).prior, x.shape[1]
        if tokens != prior.queries:
            raise token_mismatch(prior, tokens, tokens)
        return prior


class AttentionForward(_FastForward):
    """timm's `Attention`, under a prior."""

    def forward(self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Returns tokens, `(batch, tokens, dim)`."""
        if is_causal:
            raise VicinalError("a spatial prior does not serve causal attention")
        if torch.compiler.is_compiling() and self.has_patches():
            return run_eagerly(self.forward, x, attn_mask)  # type: ignore[no-any-return]
        return attention_forward(self, x, self._prior_for(x), attn_mask)


class RelativeAttentionForward(_FastForward):
    """timm's `RelPosAttention`, under a prior."""

    def forward(self: Any, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """Returns tokens, `(batch, tokens, dim)`."""
        return relative_attention_forward(self, x, self._prior_for(x), shared_rel_pos)


class WindowAttentionForward(_FastForward):
    """timm's `WindowAttention` of Swin, under a prior."""

    def forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns windows, `(batch * windows, tokens, dim)`."""
        return window_attention_forward(self, x, self._prior_for(x), mask)


def attention_forward(module: Any, x: Tensor, prior: PlacedPrior | None, mask: Tensor | None = None) -> Tensor:
    """Returns what timm's `Attention` does under a prior, `(batch, tokens, dim)`.

    Args:
        module: the attention module.
        x: tokens, `(batch, tokens, dim)`.
        prior: on the grid of the tokens; None for plain attention.
        mask: as for `attend`.
    """
    gate = None if module.gate is None else module.gate(x).sigmoid()
    out = module.norm(_attend_heads(module, x, prior, mask))
    return module.proj_drop(module.proj(out if gate is None else out * gate))  # type: ignore[no-any-return]


def relative_attention_forward(
    module: Any, x: Tensor, prior: PlacedPrior | None, shared: Tensor | None = None
) -> Tensor:
    """Returns what timm's `RelPosAttention` does under a prior, `(batch, tokens, dim)`.

    Args:
        module: the attention module.
        x: tokens, `(batch, tokens, dim)`.
        prior: on the grid of the tokens; None for plain attention.
        shared: bias of all layers, `(1, heads, tokens, tokens)`, for modules without one of their own.
    """
    bias = shared if module.rel_pos is None else module.rel_pos.get_bias()
    return module.proj_drop(module.proj(_attend_heads(module, x, prior, bias)))  # type: ignore[no-any-return]


def _attend_heads(module: Any, x: Tensor, prior: PlacedPrior | None, mask: Tensor | None) -> Tensor:
    """Returns the joined heads, `(batch, tokens, heads * dim)`, of a module that normalizes q and k if it has norms."""
    batch, tokens, _ = x.shape
    qkv, dropout = module.qkv(x), module.attn_drop.p if module.training else 0.0
    options = {"prior": prior, "mask": mask, "dropout": dropout, "scale": module.scale}
    if type(module.q_norm) is type(module.k_norm) is nn.Identity:
        return attend_packed(qkv, heads=module.num_heads, **options)
    q, k, v = qkv.reshape(batch, tokens, 3, module.num_heads, module.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    return attend(module.q_norm(q), module.k_norm(k), v, **options).transpose(1, 2).flatten(2)


def window_attention_forward(module: Any, x: Tensor, prior: PlacedPrior | None, mask: Tensor | None = None) -> Tensor:
    """Returns what timm's `WindowAttention` does under a prior, `(batch * windows, tokens, dim)`.

    Args:
        module: the attention module.
        x: windows, `(batch * windows, tokens, dim)`.
        prior: on the grid of a window; None for plain attention.
        mask: `(windows, tokens, tokens)`, the same for every image.
    """
    dropout = module.attn_drop.p if module.training else 0.0
    window, native = Grid(*module.window_size), native_serves(x)
    if native and (prior is None or (prior.per_offset and prior.grid == window)):
        prior = with_table(prior, relative_table(module.relative_position_bias_table, window), window)
        mask = None if mask is None else mask[:, None]
    else:
        bias = module._get_rel_pos_bias()
        mask = bias if mask is None else (bias + mask[:, None]).repeat(x.shape[0] // len(mask), 1, 1, 1)
    options = {"mask": mask, "dropout": dropout, "scale": module.scale}
    out = attend_packed(module.qkv(x), heads=module.num_heads, prior=prior, **options)
    return module.proj_drop(module.proj(out))  # type: ignore[no-any-return]


def relative_table(flat: Tensor, window: Grid) -> Tensor:
    """Returns timm's relative position bias as a table over offsets, `(heads, 2h-1, 2w-1)`.

    timm numbers offsets from key to query; ours are from query to key.

    Args:
        flat: `((2h-1) * (2w-1), heads)`.
        window: of `h x w` patches.
    """
    return flat.flip(0).T.reshape(-1, *window.table_shape)


def with_table(prior: PlacedPrior | None, table: Tensor, window: Grid) -> PlacedPrior:
    """Returns a prior with a table that the module adds itself in its bias.

    Args:
        prior: over offsets of the window; None for no other prior.
        table: `(heads, 2h-1, 2w-1)`.
        window: of `h x w` patches.
    """
    scale = bias = None
    if prior is not None:
        scale, bias = current_values(prior)
    table = widen(table)
    pair = scale, table if bias is None else bias + table
    return GivenPrior(pair, len(table), window.tokens, window.tokens, window, per_offset=True)


FAST_FORWARDS[Attention.forward] = AttentionForward
FAST_FORWARDS[RelPosAttention.forward] = RelativeAttentionForward
FAST_FORWARDS[WindowAttention.forward] = WindowAttentionForward
