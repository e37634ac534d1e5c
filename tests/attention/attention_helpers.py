"""Inputs and comparisons for tests of attention."""

import torch


def inputs(grid, batch=3, heads=2, dim=4, dtype=torch.float32, v_dim=None):
    shape = (batch, heads, grid.tokens, dim)
    q, k = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(2))
    return q, k, torch.randn(*shape[:3], v_dim or dim, dtype=dtype, requires_grad=True)


def gradients(out, tensors, seed=0):
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)
    return torch.autograd.grad(out, tensors, direction, allow_unused=True)


def assert_all_close(left, right, **tolerance):
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **tolerance)
