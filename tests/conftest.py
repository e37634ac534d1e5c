"""Data for all tests."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vicinal.attention import chunks


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Exact values, computed independently of this package."""
    return json.loads((Path(__file__).parent / "golden" / "reference.json").read_text())


@pytest.fixture(scope="session")
def labeled_images() -> tuple[torch.Tensor, torch.Tensor]:
    """32 images `(32, 3, 32, 32)` and labels: of CIFAR-10 where there is a copy next to the project, else made."""
    return _labeled_images(32)


@pytest.fixture(scope="session")
def many_labeled_images() -> tuple[torch.Tensor, torch.Tensor]:
    """2048 images, as `labeled_images`."""
    return _labeled_images(2048)


def _labeled_images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    file = Path(__file__).parents[2] / "shared" / "data" / "cifar10" / "test-00000-of-00001.parquet"
    if not file.exists():
        generator, labels = torch.Generator().manual_seed(0), torch.arange(count) % 10
        of_class, own = (torch.randn(number, 3, 8, 8, generator=generator) for number in (10, count))
        return torch.nn.functional.interpolate(of_class[labels] + own, size=32, mode="bicubic"), labels
    import numpy as np
    import pyarrow.parquet as parquet
    from PIL import Image

    table = next(parquet.ParquetFile(file).iter_batches(batch_size=count)).to_pydict()
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(image["bytes"])).convert("RGB")) for image in table["img"]])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1, torch.tensor(table["label"])


@pytest.fixture(params=["all", "images", pytest.param("heads", marks=pytest.mark.slow), "rows"])
def chunk_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divides attention in each of the ways a large input would be."""
    logits = {"all": 2**19, "images": 300, "heads": 150, "rows": 35}[request.param]  # 2 heads of 10 tokens have 200
    monkeypatch.setattr(chunks, "CPU_CHUNK_LOGITS", logits)
