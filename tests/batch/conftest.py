"""A tiny model on disk, shared by the tests of `batch`."""

from pathlib import Path

import pytest

from helpers.folders import saved


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama with the demo's tokenizer."""
    return saved(tmp_path_factory.mktemp("tiny") / "llama", "llama", vocab_size=2048)


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path):
    """The same, loaded."""
    from attnscope.model.loading import load
    from attnscope.model.options import LoadOptions

    return load(LoadOptions(model=str(tiny_folder), device="cpu"))
