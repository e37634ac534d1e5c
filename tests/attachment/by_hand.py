"""Attention from a module's own weights, in float64, pair by pair of patches."""

import itertools

import torch


def attention_io(module, run):
    """What a module was given, and what it returned."""
    seen = []
    hook = module.register_forward_hook(lambda _, args, kwargs, out: seen.append((args, kwargs, out)), with_kwargs=True)
    run()
    hook.remove()
    return seen[0]


def logits_by_hand(module, x, prior):
    """From the module's own weights, in float64: `scale * logits`, bias by offset, and v."""
    batch, tokens, _ = x.shape
    qkv = x.double() @ module.qkv.weight.double().T
    if getattr(module, "q_bias", None) is not None:
        qkv = qkv + torch.cat([module.q_bias, module.k_bias, module.v_bias]).double()
    elif module.qkv.bias is not None:
        qkv = qkv + module.qkv.bias.double()
    q, k, v = qkv.reshape(batch, tokens, 3, module.num_heads, -1).permute(2, 0, 3, 1, 4)
    logits = q @ k.mT * q.shape[-1] ** -0.5
    bias = torch.zeros(module.num_heads, tokens, tokens, dtype=torch.float64)
    (scale, added), grid = prior.table(), prior.grid
    for query, key in itertools.product(range(grid.patches), repeat=2):
        row = key // grid.width - query // grid.width + grid.height - 1
        column = key % grid.width - query % grid.width + grid.width - 1
        pair = (..., grid.prefix + query, grid.prefix + key)
        if scale is not None:
            logits[pair] *= scale[:, row, column].double()
        if added is not None:
            bias[pair] = added[:, row, column].double()
    return logits, bias, v


def project(module, weights, v):
    out = (weights @ v).transpose(1, 2).flatten(2)
    return out @ module.proj.weight.double().T + module.proj.bias.double()
