"""`torch.compile` in tests: on, whatever a test before left, and off again. Its first use takes a second."""

from collections.abc import Iterator

import pytest
import torch

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
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(2))
