"""Small models whose tokens stand in orders that no library has, or that compute attention in unusual ways."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, COLUMNS, WIDTH, HEADS = 6, 8, 48, 4
IMAGE = (3, 8 * ROWS, 8 * COLUMNS)

Order = Callable[[Tensor], Tensor]
"""From a map `(images, WIDTH, ROWS, COLUMNS)` to tokens `(images, tokens, WIDTH)`."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of q, k and v, `(images, HEADS, tokens, dim)`."""


def row_by_row(x: Tensor) -> Tensor:
    return x.flatten(2).mT


def column_by_column(x: Tensor) -> Tensor:
    return x.mT.flatten(2).mT


def permuted(order: Tensor) -> Order:
    return lambda x: row_by_row(x)[:, order]


def sorted_by_content(x: Tensor) -> Tensor:
    tokens = row_by_row(x)
    return tokens.gather(1, tokens[..., :1].argsort(1).expand_as(tokens))


def upper_half(x: Tensor) -> Tensor:
    return row_by_row(x[:, :, : ROWS // 2])


def two_scales(x: Tensor) -> Tensor:
    return torch.cat([row_by_row(x), row_by_row(F.avg_pool2d(x, 2))], 1)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def einsum_of_lists(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhid,bhjd->bhij", [q, k]).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", [weights, v])


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The softmax is over the first axis of the product."""
    return (k @ q.mT).softmax(-2).mT @ v


def heads_outside_images(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One axis counts heads and images, images fastest."""
    folded = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
    return plain(*folded).unflatten(0, (HEADS, -1)).transpose(0, 1)


class MadeUp(nn.Module):
    """Patches in some order, and two layers of attention with residual paths."""

    def __init__(self, order: Order = row_by_row, attend: Attend = plain) -> None:
        super().__init__()
        self.order, self.attend = order, attend
        self.embed = nn.Conv2d(3, WIDTH, 8, 8)
        self.layers = nn.ModuleList([MadeUpAttention(attend) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.order(self.embed(x))
        for layer in self.layers:
            x = x + layer(x)
        return x


class MadeUpAttention(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.norm, self.qkv, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))
