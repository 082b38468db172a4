"""What all tests share."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SHARED = Path(__file__).parents[2] / "shared" / "models"


@pytest.fixture(scope="session")
def demo():  # type: ignore[no-untyped-def]
    """The embedded model."""
    from attnscope.model.loading import LoadOptions, load

    return load(LoadOptions())


@pytest.fixture(params=["stories260K-llama", "babyllama-char105"])
def real_model_folder(request: pytest.FixtureRequest) -> Path:
    """A folder of real pretrained weights with an independent oracle; skips where they are not at hand."""
    folder = SHARED / request.param
    if not folder.is_dir():
        pytest.skip(f"no pretrained weights at {folder.name}: they lie beside the checkout only on some machines")
    return folder
