"""`torch.compile` in tests: on, whatever a test before left, and off again. Its first use takes a second."""

from collections.abc import Iterator

import pytest
import torch

from helpers.families import tiny_model
from helpers.seconds import once


@pytest.fixture
def compiling() -> Iterator[None]:
    """PyTorch compiles: two captures at once, in two threads, leave it switched off."""
    torch.compiler.set_stance("default")
    _first()
    yield
    torch._dynamo.reset()


@once
def _first() -> None:
    torch.compile(tiny_model("llama", num_hidden_layers=1), backend="eager")(torch.arange(5)[None])
