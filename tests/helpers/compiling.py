"""`torch.compile` in tests. Its first use takes a second."""

from collections.abc import Iterator

import pytest
import torch

from helpers.families import tiny_model
from helpers.seconds import once


@pytest.fixture
def compiling() -> Iterator[None]:
    """What is compiled is forgotten afterwards."""
    _first()
    yield
    torch._dynamo.reset()


@once
def _first() -> None:
    torch.compile(tiny_model("llama", num_hidden_layers=1), backend="eager")(torch.arange(5)[None])
