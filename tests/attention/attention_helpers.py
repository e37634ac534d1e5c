"""Inputs and comparisons for tests of attention."""

import itertools

import torch

SPECS = ["gmm:init=spread", "gab", "gmm:init=paper+gab", "elm", "conv", "decay", "rpe:init=normal", "elm+gab", "none"]


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


def by_hand(q, k, v, prior, mask=None, scale=None):
    """Attention as a loop over images, heads, queries and keys, in float64."""
    q, k, v = (x.detach().double() for x in (q, k, v))
    prior_scale, prior_bias = (None if values is None else values.detach() for values in prior())
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.zeros_like(v)
    for image, head, query in itertools.product(*map(range, q.shape[:3])):
        logits = []
        for key in range(k.shape[2]):
            logit = scale * float(q[image, head, query] @ k[image, head, key])
            logit *= 1.0 if prior_scale is None else float(prior_scale[head, query, key])
            logit += 0.0 if prior_bias is None else float(prior_bias[head, query, key])
            logits.append(logit if mask is None else logit + float(mask[image, head, query, key]))
        weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
        out[image, head, query] = weights @ v[image, head]
    return out
