"""Any layout of q, k, v and gradients in memory, with dropout, and queries and keys of any number: the formula."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from formula import random_call, settings
from vicinal.attention.native import prepare_native
from vicinal.attention.native.operators import NativeArguments, native_attention

pytestmark = pytest.mark.skipif(not prepare_native().path, reason="no native library here")

LAYOUTS = {
    "one after another": lambda x: x.contiguous(),
    "as a projection": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels apart": lambda x: x.mT.contiguous().mT,
    "a part of rows": lambda x: torch.cat([x, x + 1], -1)[..., : x.shape[-1]],
    "every other row": lambda x: torch.stack([x, x + 1], 3).flatten(2, 3)[:, :, ::2],
    "every other number": lambda x: torch.stack([x, x + 1], -1)[..., 0],
    "one for all images": lambda x: x[:1].expand_as(x),
    "one for all tokens": lambda x: x[:, :, :1].expand_as(x),
}
layouts = st.sampled_from(sorted(LAYOUTS))


@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (4, 3, 40, 40, 20, 20))),
    in_memory=st.tuples(layouts, layouts, layouts, layouts),
    dropout=st.sampled_from([0.0, 0.3]),
    masked=st.booleans(),
    prior=st.booleans(),
    seed=st.integers(0, 100),
)
def test_equals_the_formula(sizes, in_memory, dropout, masked, prior, seed):
    batch, heads, queries, keys, dim, v_dim = sizes
    options = {"batch": batch, "heads": heads, "queries": queries, "keys": keys, "dim": dim, "v_dim": v_dim}
    mask = (batch, 1, queries, keys) if masked else None
    call = random_call(None, **options, mask=mask, scale=prior, bias=prior, seed=seed)
    tensors = (call.q, call.k, call.v, call.direction)
    call.q, call.k, call.v, direction = (LAYOUTS[name](x) for name, x in zip(in_memory, tensors, strict=True))
    given = NativeArguments(call.scale, call.bias, call.mask, None, settings(call, dropout=dropout, seed=seed))
    unit = torch.eye(keys, dtype=torch.float64).expand(batch, heads, -1, -1)
    weights = native_attention(call.q, call.k, unit, given)
    whole = native_attention(call.q, call.k, unit, given._replace(settings=settings(call)))
    leaves = [x if x is None else x.detach().requires_grad_() for x in call.leaves]
    expected = formula(*leaves, weights / whole)
    q, k, v, *values = leaves
    found = native_attention(q, k, v, NativeArguments(*values, None, given.settings))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    given_leaves = [x for x in leaves if x is not None]
    ours, theirs = (torch.autograd.grad(out, given_leaves, direction) for out in (found, expected))
    for mine, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, exact, atol=1e-11, rtol=1e-11)


def formula(q, k, v, scale, bias, mask, factors):
    """Returns attention by the formula; `factors` are those of dropout, of all weights."""
    logits = q @ k.mT * q.shape[-1] ** -0.5
    logits = logits if scale is None else logits * scale + bias
    logits = logits if mask is None else logits + mask
    return (logits.softmax(-1) * factors) @ v
