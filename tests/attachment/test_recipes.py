"""The recipes of docs/attach.md run as they stand."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "attach.md"


@pytest.mark.slow
def test_the_examples_of_the_page_run():
    pytest.importorskip("transformers")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) >= 6
    names: dict[str, object] = {}  # later blocks build on earlier ones
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    attached = {name: str(names[name]) for name in ("dinov2", "dinov3", "sam", "upernet", "mask2former", "detr")}
    assert all("WithPrior" in text for text in attached.values())
