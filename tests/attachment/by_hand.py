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


def heads_by_hand(module, x):
    """q, k and v, each `(batch, heads, tokens, dim)`, of a module of timm, transformers or torch."""
    x = x.double()
    if hasattr(module, "q_proj"):
        layers = (module.q_proj, module.k_proj, module.v_proj)
        qkv = [x @ each.weight.double().T + (0 if each.bias is None else each.bias.double()) for each in layers]
    elif hasattr(module, "in_proj_weight"):
        qkv = (x @ module.in_proj_weight.double().T + module.in_proj_bias.double()).chunk(3, -1)
    else:
        qkv = x @ module.qkv.weight.double().T
        if getattr(module, "q_bias", None) is not None:
            qkv = qkv + torch.cat([module.q_bias, module.k_bias, module.v_bias]).double()
        elif module.qkv.bias is not None:
            qkv = qkv + module.qkv.bias.double()
        qkv = qkv.chunk(3, -1)
    heads = next(getattr(module, name) for name in ("num_heads", "num_attention_heads") if hasattr(module, name))
    return [each.reshape(*x.shape[:2], heads, -1).transpose(1, 2) for each in qkv]


def logits_by_hand(module, x, prior):
    """`scale * logits`, bias by offset, and v."""
    q, k, v = heads_by_hand(module, x)
    logits = q @ k.mT * q.shape[-1] ** -0.5
    bias = torch.zeros(logits.shape[1:], dtype=torch.float64)
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
    """From attention weights and values to the module's output."""
    out = (weights @ v).transpose(1, 2).flatten(2)
    last = next(getattr(module, name) for name in ("proj", "o_proj", "out_proj") if hasattr(module, name))
    return out @ last.weight.double().T + last.bias.double()
