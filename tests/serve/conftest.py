"""A server in this process, whose workers run no model."""

import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from attnscope.model.options import LoadOptions
from attnscope.serve import server as serving_module
from helpers.command_line import HANGS
from helpers.forks import until
from helpers.serving import Stub, runtime


@pytest.fixture
def stubbed(monkeypatch, tmp_path):
    """What begins a server in this process whose workers are stubs."""
    monkeypatch.setattr(serving_module, "Worker", Stub)
    monkeypatch.setattr(Stub, "made", [])
    with tempfile.TemporaryDirectory() as short:
        for name, value in runtime(tmp_path / "run", Path(short)).items():
            monkeypatch.setenv(name, value)

        @contextmanager
        def begun(**how):
            with serving_module.Server(**how) as server:
                server.hold(LoadOptions())
                thread = threading.Thread(target=server.serve, daemon=True)
                thread.start()
                until(lambda: server.ready)
                yield server, thread
                server.stop()
                thread.join(HANGS)

        yield begun
