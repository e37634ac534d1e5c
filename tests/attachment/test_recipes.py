"""The recipes of docs/attach.md run as they stand."""

import re
from pathlib import Path

import pytest

MODELS = (
    "dinov2",
    "dinov3",
    "sam",
    "upernet",
    "mask2former",
    "segformer",
    "unet",
    "smp_upernet",
    "dpt",
    "detr",
)
PAGE = Path(__file__).parents[2] / "docs" / "attach.md"


@pytest.mark.slow
def test_the_examples_of_the_page_run():
    pytest.importorskip("transformers")
    pytest.importorskip("segmentation_models_pytorch")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) >= 8
    names: dict[str, object] = {}  # later blocks build on earlier ones
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    attached = {name: str(names[name]) for name in MODELS}
    assert all("WithPrior" in text for text in attached.values())
