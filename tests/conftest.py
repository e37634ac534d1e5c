"""Fixtures for all tests."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vicinal._torchvision import ensure_torchvision

ensure_torchvision()  # before any test imports timm


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Exact values, computed independently of this package."""
    return json.loads((Path(__file__).parent / "golden" / "reference.json").read_text())
