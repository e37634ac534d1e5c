"""Small sets of images, and a cache that goes away."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vicinal.data import ImageSplit, Preprocessing


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("VICINAL_CACHE", str(folder))
    return folder


@pytest.fixture
def noise() -> Callable[..., np.ndarray]:
    """Random pixels `(height, width, 3)`, the same for the same number."""

    def make(height: int, width: int, number: int = 0) -> np.ndarray:
        return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)

    return make


@pytest.fixture
def folder(tmp_path: Path, noise: Callable[..., np.ndarray]) -> Path:
    """10 cats and 5 dogs."""
    root = tmp_path / "pets"
    for name, count in (("cat", 10), ("dog", 5)):
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(noise(12, 16, number)).save(root / name / f"{number}.png")
    return root


class Reader:
    """ImageSplit in memory, and a count of how often they were read."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self.arrays, self.calls = arrays, 0

    def __call__(self, row: int) -> Image.Image:
        self.calls += 1
        return Image.fromarray(self.arrays[row])


@pytest.fixture
def in_memory() -> Callable[..., ImageSplit]:
    """Arrays as pictures of three classes."""

    def make(arrays: list[np.ndarray], key: str = "memory") -> ImageSplit:
        return ImageSplit.of_split(np.arange(len(arrays)) % 3, Reader(arrays), key)

    return make


@pytest.fixture
def square() -> Callable[..., Preprocessing]:
    def make(size: int, **options: float) -> Preprocessing:
        return Preprocessing(size, size, 3, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3), **options)

    return make
