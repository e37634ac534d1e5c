"""Attention from a module's own weights, in float64, pair by pair of tokens."""

import itertools

import torch


def attention_io(module, run):
    """Returns what a module was given, and what it returned."""
    seen = []
    hook = module.register_forward_hook(lambda _, args, kwargs, out: seen.append((args, kwargs, out)), with_kwargs=True)
    run()
    hook.remove()
    return seen[0]


def raster(rows, columns, prefix=0, suffix=0):
    """Returns the place of every token, (row, column) or None, of patches row by row between tokens without a place."""
    return [None] * prefix + list(itertools.product(range(rows), range(columns))) + [None] * suffix


def prior_by_hand(prior, places):
    """Returns scale and bias of every pair of tokens, each `(heads, tokens, tokens)`; 1 and 0 without a place.

    Args:
        prior: its table over offsets is looked up pair by pair.
        places: (row, column) or None of every token.
    """
    tables, grid = prior.table(), prior.grid
    scale, bias = (torch.full((prior.heads, len(places), len(places)), x, dtype=torch.float64) for x in (1.0, 0.0))
    for (i, query), (j, key) in itertools.product(enumerate(places), repeat=2):
        if query is None or key is None:
            continue
        row, column = key[0] - query[0] + grid.height - 1, key[1] - query[1] + grid.width - 1
        assert row >= 0
        assert column >= 0
        for values, table in zip((scale, bias), tables, strict=True):
            if table is not None:
                values[:, i, j] = table[:, row, column].double()
    return scale, bias


def formula_by_hand(prior, queries, keys):
    """Returns scale and bias of `gmm+gab`, each `(heads, queries, keys)`, from its parameters; 1 and 0 without a place.

    Args:
        prior: the composition.
        queries: (row, column) in patches, or None, of every query.
        keys: as queries.
    """
    mixture, gaussian = prior.parts
    sigma, alpha = mixture.sigma.double(), mixture.alpha.double()
    width, amplitude = gaussian.sigma.double(), gaussian.amplitude.double()
    scale, bias = (torch.full((prior.heads, len(queries), len(keys)), x, dtype=torch.float64) for x in (1.0, 0.0))
    for (i, query), (j, key) in itertools.product(enumerate(queries), enumerate(keys)):
        if query is None or key is None:
            continue
        squared = (key[0] - query[0]) ** 2 + (key[1] - query[1]) ** 2
        scale[:, i, j] = mixture.constant + (alpha * torch.exp(-squared / (2 * (sigma**2 + 1e-5)))).sum(0)
        bias[:, i, j] = amplitude**2 * torch.exp(-squared / (2 * (width**2 + 1e-5)))
    return scale, bias


def heads_by_hand(module, x):
    """Returns q, k and v, each `(batch, heads, tokens, dim)`, of a module of timm, transformers or torch."""
    x = x.double()
    separate = [("q_proj", "k_proj", "v_proj"), ("query", "key", "value")]
    names = next((names for names in separate if getattr(module, names[0], None) is not None), None)
    if names is not None:
        layers = [getattr(module, name) for name in names]
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
    counts = ("num_heads", "num_attention_heads", "heads")
    heads = next(getattr(module, name) for name in counts if hasattr(module, name))
    return [each.reshape(*x.shape[:2], heads, -1).transpose(1, 2) for each in qkv]


def logits_by_hand(module, x, prior, places):
    """Returns `scale * logits`, the bias, and v, of tokens `(batch, tokens, dim)` in `places`."""
    q, k, v = heads_by_hand(module, x)
    scale, bias = prior_by_hand(prior, places)
    return scale * (q @ k.mT * q.shape[-1] ** -0.5), bias, v


def project(module, weights, v):
    """Returns the module's output, from attention weights and values."""
    out = (weights @ v).transpose(1, 2).flatten(2)
    last = next((getattr(module, name) for name in ("proj", "o_proj", "out_proj") if hasattr(module, name)), None)
    return out if last is None else out @ last.weight.double().T + last.bias.double()


def assert_same(out, expected):
    """Outputs of order 1 must agree to rounding in float64."""
    assert out.dtype == torch.float64
    assert 0.1 < expected.abs().max() < 20
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
