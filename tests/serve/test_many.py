"""Many questions, and many that are broken off: all are answered, nothing is left, memory stays as it was."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from attnscope.errors import AttnscopeError
from attnscope.model.options import LoadOptions
from attnscope.observe.request import CaptureSpec, Request
from attnscope.serve import client
from attnscope.serve import wire as place
from attnscope.serve.wire import UnansweredError
from attnscope.utils.stages import NO_PROGRESS
from helpers.command_line import SENTENCE, call
from helpers.forks import until
from helpers.serving import serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not place.supported(), reason="this system has no sockets that say who asks"),
]


class BrokenOffError(Exception):
    """Who asks has gone."""


def break_off(_):
    """Go before the pass."""
    raise BrokenOffError


class Impatient(type(NO_PROGRESS)):
    """Goes at the second layer."""

    def stage(self, title, total=None, unit=""):
        from contextlib import contextmanager

        @contextmanager
        def block():
            steps = []

            def advance(count):
                steps.append(count)
                if len(steps) == 2:
                    raise BrokenOffError

            yield advance

        return block()


def one(rng):
    """A question as somebody asks it, or breaks it off."""
    kind = rng.choice(("whole", "whole", "refused", "before the pass", "amid the pass", "no model"))
    words = " ".join(rng.choice(("river", "bank", "the", "money")) for _ in range(rng.randint(2, 60)))
    ask = CaptureSpec(words, Request(query="elephant" if kind == "refused" else None, relations=rng.random() < 0.5))
    options = LoadOptions(dtype="bfloat16") if kind == "no model" else LoadOptions()
    how = {"check": break_off} if kind == "before the pass" else {}
    tell = Impatient() if kind == "amid the pass" else NO_PROGRESS
    with suppress(BrokenOffError, AttnscopeError, UnansweredError):
        client.ask_server(options, ask, tell, **how)


def test_a_thousand_questions_with_failures_leave_nothing(tmp_path):
    alone, rng = call("relations", SENTENCE), random.Random(5)
    with serving(tmp_path / "run") as server:
        with server.found():
            for _ in range(200):
                one(rng)
            until(lambda: not server.status["busy"])
            before = server.status["memory_bytes"]
            for _ in range(800):
                one(rng)
        until(lambda: not server.status["busy"])
        assert server.status["memory_bytes"] < 1.1 * before
        assert server.call("relations", SENTENCE) == alone


def test_two_hundred_questions_of_ten_clients_are_all_answered(tmp_path):
    with serving(tmp_path / "run") as server, server.found(), ThreadPoolExecutor(10) as clients:

        def table(_):
            return client.ask_server(LoadOptions(), CaptureSpec(SENTENCE), NO_PROGRESS).table()

        first, before = table(0), server.status["memory_bytes"]
        assert all(found.equals(first) for found in clients.map(table, range(200)))
        assert server.status["answered"] == 201
        assert server.status["memory_bytes"] < 1.1 * before
