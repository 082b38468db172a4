"""Real pretrained weights, which lie beside the checkout on some machines alone."""

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3] / "shared" / "models"
ELSEWHERE = "beside the checkout only on some machines"


def pretrained(name: str) -> Path:
    """The folder of a model; skips where it is not at hand."""
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip(f"no pretrained weights at {name}: they lie {ELSEWHERE}")
    return folder
