"""Fast forwards for timm's attention classes that most models use.

Entering a mode costs some microseconds a layer, which shows with a batch of one image. These do what the class's own
forward does, with `attend` in place of its attention, and are used only where that forward is timm's, unchanged.
"""

from typing import Any

import torch
from timm.layers.attention import Attention
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn

from vicinal.attachment.interceptor import token_mismatch
from vicinal.attachment.patch_prior import run_eagerly
from vicinal.attachment.subclass import FAST_FORWARDS, WithPrior
from vicinal.attention import GivenPrior, PlacedPrior, attend, attend_packed
from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.priors.full_precision import widen

__all__ = ["AttentionForward", "WindowAttentionForward"]


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
        batch, tokens, _ = x.shape
        prior = self._prior_for(x)
        gate = None if self.gate is None else self.gate(x).sigmoid()
        qkv, dropout = self.qkv(x), self.attn_drop.p if self.training else 0.0
        if type(self.q_norm) is type(self.k_norm) is nn.Identity:
            options = {"mask": attn_mask, "dropout": dropout, "scale": self.scale}
            out = attend_packed(qkv, heads=self.num_heads, prior=prior, **options)
        else:
            q, k, v = qkv.reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
            q, k = self.q_norm(q), self.k_norm(k)
            out = attend(q, k, v, prior=prior, mask=attn_mask, dropout=dropout, scale=self.scale)
            out = out.transpose(1, 2).reshape(batch, tokens, self.attn_dim)
        out = self.norm(out)
        return self.proj_drop(self.proj(out if gate is None else out * gate))  # type: ignore[no-any-return]


class WindowAttentionForward(_FastForward):
    """timm's `WindowAttention` of Swin, under a prior."""

    def forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns windows, `(batch * windows, tokens, dim)`."""
        prior = self._prior_for(x)
        dropout = self.attn_drop.p if self.training else 0.0
        mask = None if mask is None else mask[:, None]  # (windows, 1, tokens, tokens), the same for every image
        window = Grid(*self.window_size)
        if prior.per_offset and prior.grid == window:
            prior = with_table(prior, relative_table(self.relative_position_bias_table, window))
        else:
            bias = self._get_rel_pos_bias()
            mask = bias if mask is None else bias + mask
        out = attend_packed(
            self.qkv(x), heads=self.num_heads, prior=prior, mask=mask, dropout=dropout, scale=self.scale
        )
        return self.proj_drop(self.proj(out))  # type: ignore[no-any-return]


def relative_table(flat: Tensor, window: Grid) -> Tensor:
    """Returns timm's relative position bias as a table over offsets, `(heads, 2h-1, 2w-1)`.

    timm numbers offsets from key to query; ours are from query to key.

    Args:
        flat: `((2h-1) * (2w-1), heads)`.
        window: of `h x w` patches.
    """
    table: Tensor = flat.flip(0).T.unflatten(1, window.table_shape)
    return table


def with_table(prior: PlacedPrior, table: Tensor) -> PlacedPrior:
    """Returns a prior over offsets with a table that the module adds itself, `(heads, 2h-1, 2w-1)`, in its bias."""
    values = prior.values if torch.is_grad_enabled() else getattr(prior, "cached_values", prior.values)
    scale, bias = values()
    table = widen(table)
    pair = scale, table if bias is None else bias + table
    return GivenPrior(pair, prior.heads, prior.queries, prior.keys, prior.grid, prior.per_offset)


FAST_FORWARDS[Attention.forward] = AttentionForward
FAST_FORWARDS[WindowAttention.forward] = WindowAttentionForward
