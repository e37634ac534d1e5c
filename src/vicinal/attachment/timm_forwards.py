"""Fast forwards for timm's attention classes that most models use.

Entering a mode costs some microseconds a layer, which shows with a batch of one image. These do what the class's own
forward does, with `attend` in place of its attention, and are used only where that forward is timm's, unchanged.
"""

from typing import Any

import torch
from timm.layers.attention import Attention
from timm.models.swin_transformer import WindowAttention
from torch import Tensor

from vicinal.attachment.interceptor import token_mismatch
from vicinal.attachment.patch_prior import run_eagerly
from vicinal.attachment.subclass import FAST_FORWARDS, WithPrior
from vicinal.attention import PlacedPrior, attend
from vicinal.errors import VicinalError

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
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        dropout = self.attn_drop.p if self.training else 0.0
        out = attend(q, k, v, prior=prior, mask=attn_mask, dropout=dropout, scale=self.scale)
        out = self.norm(out.transpose(1, 2).reshape(batch, tokens, self.attn_dim))
        return self.proj_drop(self.proj(out if gate is None else out * gate))  # type: ignore[no-any-return]


class WindowAttentionForward(_FastForward):
    """timm's `WindowAttention` of Swin, under a prior."""

    def forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns windows, `(batch * windows, tokens, dim)`."""
        batch, tokens, _ = x.shape
        prior = self._prior_for(x)
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self._get_rel_pos_bias()
        if mask is not None:  # (windows, tokens, tokens), the same for every image
            bias = (bias + mask[:, None]).repeat(batch // len(mask), 1, 1, 1)
        dropout = self.attn_drop.p if self.training else 0.0
        out = attend(q, k, v, prior=prior, mask=bias, dropout=dropout, scale=self.scale)
        return self.proj_drop(self.proj(out.transpose(1, 2).reshape(batch, tokens, -1)))  # type: ignore[no-any-return]


FAST_FORWARDS[Attention.forward] = AttentionForward
FAST_FORWARDS[WindowAttention.forward] = WindowAttentionForward
