"""A tiny model on disk, shared by the tests of `batch`."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


class Here(Executor):
    """Does at once, in this process, what it is given."""

    def submit(self, do: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(do(*given, **named))
        except Exception as error:
            done.set_exception(error)
        return done


@pytest.fixture
def drawn_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn in this process, without the second that each of a pool takes to start; e2e has the pool."""

    @contextmanager
    def pool(workers: int) -> Iterator[Executor]:
        yield Here()

    if request.node.get_closest_marker("e2e") is None:
        monkeypatch.setattr("attnscope.corpus.run.drawing_pool", pool)
