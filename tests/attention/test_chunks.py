"""Chunks cover every pair of tokens once, whatever their size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_helpers import assert_all_close, gradients, inputs
from vicinal import Grid, attend, build_prior
from vicinal.attention import chunks


@settings(max_examples=20, deadline=None)
@given(batch=st.integers(1, 5), heads=st.integers(1, 3), room=st.integers(1, 700), height=st.integers(1, 3))
def test_any_size_of_chunks_gives_the_same(batch, heads, room, height):
    grid = Grid(height, 2, prefix=1)
    q, k, v = inputs(grid, batch=batch, heads=heads)
    prior = build_prior("gmm:init=spread+gab", heads=heads, grid=grid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CPU_CHUNK_LOGITS", room)
        out = attend(q, k, v, prior=prior)
        ours = gradients(out, [q, k, v, *prior.parameters()])
    plain = attend(q, k, v, prior=prior, backend="plain")
    torch.testing.assert_close(out, plain, atol=1e-5, rtol=1e-5)
    assert_all_close(ours, gradients(plain, [q, k, v, *prior.parameters()]), atol=1e-5, rtol=1e-4)


@settings(max_examples=50, deadline=None)
@given(batch=st.integers(0, 6), heads=st.integers(1, 4), tokens=st.integers(1, 12), limit=st.integers(1, 900))
def test_every_query_is_in_one_chunk_and_buffers_are_large_enough(batch, heads, tokens, limit):
    q = torch.zeros(batch, heads, tokens, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CPU_CHUNK_LOGITS", limit)
        chunked = chunks.ChunkedAttention(q, q, logit_buffers=1)
        visits = torch.zeros(batch, heads, tokens)
        for group in chunked.head_groups:
            for images, rows in chunked.chunks:
                visits[images, group, rows] += 1
                queries, keys = chunked.load("q", q[images, group, rows]), chunked.load("k", q[images, group])
                assert chunked.product(0, queries, keys, group).shape == (*visits[images, group, rows].shape, tokens)
    assert (visits == 1).all()


@given(total=st.integers(1, 60), count=st.integers(1, 80))
def test_even_chunks_are_the_smallest_that_cover_the_total_in_that_many(total, count):
    covering = [size for size in range(1, total + 1) if size * count >= total]
    assert chunks.even_chunk(total, count) == min(covering)
