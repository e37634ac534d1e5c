"""Sizes of chunks for tests of attention."""

import pytest

from vicinal.attention import chunks


@pytest.fixture(params=["all", "images", "heads", "rows"])
def chunk_sizes(request, monkeypatch):
    """Divide attention in each of the ways a large input would be."""
    logits = {"all": 2**19, "images": 300, "heads": 150, "rows": 35}[request.param]  # 2 heads of 10 tokens have 200
    monkeypatch.setattr(chunks, "CPU_CHUNK_LOGITS", logits)
