"""What runs beside the model: items made ahead of it, windows written behind it, and their errors."""

import gc
import sys
import threading
from contextlib import closing
from types import SimpleNamespace

import pytest

from attnscope.corpus.folder import Job, Shard
from attnscope.corpus.items import Item
from attnscope.corpus.pipeline import Writing, _undisturbed, ahead, run_shards
from attnscope.corpus.worker import Replicas, Worker

SECONDS = 600  # in which a thread gets its turn, however busy the machine is


def test_items_made_ahead_come_in_order_and_are_made_while_others_are_used():
    made = [threading.Event() for _ in range(4)]

    def source():
        for number, event in enumerate(made):
            event.set()
            yield number

    with closing(ahead(source())) as items:
        assert next(items) == 0
        assert made[1].wait(SECONDS)  # nobody asked for it yet
        assert list(items) == [1, 2, 3]


def test_an_error_comes_out_where_its_item_would():
    def source():
        yield 1
        yield 2
        raise ValueError("broken")

    items = ahead(source())
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(ValueError, match="broken"):
        next(items)


def test_closed_it_makes_no_more():
    made = []

    def source():
        for number in range(100):
            made.append(number)
            yield number

    items = ahead(source())
    next(items)
    items.close()
    assert len(made) <= 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]


class Recorder:
    """A writer that notes what it is told to do."""

    def __init__(self, shard, said, breaks=()):
        self.shard, self.said, self.breaks = shard, said, breaks

    def _do(self, what):
        self.said.append((what, self.shard))
        if what in self.breaks:
            raise OSError(what)

    def add(self, measured):
        self._do("add")

    def commit(self):
        self._do("commit")
        return self.shard

    def abandon(self):
        self._do("abandon")


def put(writing, shard, last):
    writing.put(shard, SimpleNamespace(), last)


def test_shards_are_committed_in_order_and_an_unfinished_one_at_the_end():
    said, committed = [], []
    with Writing(lambda shard: Recorder(shard, said), committed.append) as writing:
        for shard, last in (("a", False), ("a", True), ("b", False)):
            put(writing, shard, last)
        writing.finish()
    assert committed == ["a", "b"]
    assert said == [("add", "a"), ("add", "a"), ("commit", "a"), ("add", "b"), ("commit", "b")]


@pytest.mark.parametrize("breaks", ["add", "commit"])
def test_what_fails_in_writing_is_raised_by_the_next_call_and_leaves_nothing(breaks):
    said, committed = [], []

    def write():
        with Writing(lambda shard: Recorder(shard, said, breaks), committed.append) as writing:
            put(writing, "a", True)
            put(writing, "b", True)

    with pytest.raises(OSError, match=breaks):
        write()
    assert committed == []
    assert said[-1] == ("abandon", "a")
    assert all(shard == "a" for _, shard in said)


def test_where_the_block_raises_the_unfinished_shard_is_abandoned():
    said, committed = [], []

    def write():
        with Writing(lambda shard: Recorder(shard, said), committed.append) as writing:
            put(writing, "a", False)
            raise KeyError("model")

    with pytest.raises(KeyError, match="model"):
        write()
    assert (said, committed) == ([("add", "a"), ("abandon", "a")], [])


def test_a_window_is_written_while_the_next_is_measured():
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Recorder):
        def add(self, measured):
            begun.set()
            assert go_on.wait(SECONDS)

    with Writing(lambda shard: Slow(shard, []), [].append) as writing:
        put(writing, "a", True)
        assert begun.wait(SECONDS)  # put has returned, and it is still being written
        go_on.set()
        writing.finish()


def test_the_same_threads_run_every_window_and_none_goes_on_behind_an_error(tiny):
    replicas = Replicas(tiny)
    replicas.threads = 2
    both, done = threading.Barrier(2), []

    def meet(loaded, group):
        both.wait(SECONDS)
        return threading.current_thread()

    first, second = ({*replicas.each(meet, [0, 1], lambda: False)} for _ in range(2))
    assert len(first) == 2
    assert first == second

    def fail(loaded, group):
        both.wait(SECONDS)
        if group == 0:
            raise KeyError("model")
        done.append(group)

    with pytest.raises(KeyError, match="model"):
        replicas.each(fail, [0, 1], lambda: False)
    assert done == [1]


def test_while_shards_run_no_thread_holds_the_interpreter_for_long(tiny):
    before, seen = sys.getswitchinterval(), []
    shard = Shard((Item(0, "f", 1, "0", "the bank"),))

    def stop():
        seen.append(sys.getswitchinterval())
        return False

    run_shards(Worker(Job(), tiny), [shard], lambda shard: Recorder(shard, []), [].append, stop)
    assert max(seen) < before
    assert sys.getswitchinterval() == before


def test_what_the_caller_froze_stays_frozen(monkeypatch):
    theirs = ["frozen by the caller"]
    gc.freeze()
    ours = ["made afterwards"]
    with _undisturbed():
        pass
    assert _is_frozen(theirs)
    assert not _is_frozen(ours)
    gc.unfreeze()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)  # as it is now; conftest says otherwise
    try:
        with _undisturbed():
            assert _is_frozen(ours)
        assert not _is_frozen(ours)
    finally:
        gc.freeze()  # as conftest has it


def _is_frozen(thing: list[str]) -> bool:
    """Whether the collector passes over an object; a count would change with what other threads let go."""
    return not any(one is thing for one in gc.get_objects())
