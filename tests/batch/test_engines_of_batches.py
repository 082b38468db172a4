"""Which engine reads a batch, and that a text's numbers do not depend on it."""

import pytest
import torch
from torch.testing import assert_close

from attnscope.batch import worker as worker_module
from attnscope.batch.items import Item
from attnscope.batch.job import Job
from attnscope.batch.shards import Shard
from attnscope.batch.worker import Worker
from attnscope.seam import choice
from helpers.corpora import some_texts

TEXTS = [*some_texts(6, seed=5, longest=20), "the bank of the river " * 60]  # the last has some 300 tokens


@pytest.fixture
def engines(monkeypatch, tiny):
    """A machine on which only small matrices fit; the engine of every pass and its longest text."""
    real, used = worker_module.observe, []

    def observe(loaded, prompts, request, engine, **how):
        used.append((engine.name, max(map(len, prompts))))
        return real(loaded, prompts, request, engine=engine, **how)

    monkeypatch.setattr(worker_module, "observe", observe)
    monkeypatch.setattr(worker_module, "SURELY_FITS", 0)
    monkeypatch.setattr(choice, "free_memory", lambda device: 2 * 2**20)
    return used


def measured(loaded, engine):
    items = tuple(Item(number, "f", number, str(number), text) for number, text in enumerate(TEXTS))
    worker = Worker(Job(engine=engine, batch_tokens=128), loaded)
    [window] = worker.windows(Shard(items))
    return worker.measure(window)


def numbers(found):
    """Scores and relations of every text."""
    scores = [torch.tensor([list(head.score.values()) for head in seen.heads]) for _, seen in found.seen]
    weights = [torch.tensor(seen.relations()["weight"].to_pylist()) for _, seen in found.seen]
    return scores + weights


def test_auto_reads_eager_while_a_batch_fits_and_else_fused_with_the_same_numbers(tiny, engines, monkeypatch):
    found = measured(tiny, "auto")
    assert {engine for engine, _ in engines} == {"eager", "fused"}
    assert {engine for engine, longest in engines if longest > 128} == {"fused"}
    monkeypatch.setattr(choice, "free_memory", lambda device: 2**40)
    engines.clear()
    expected = measured(tiny, "auto")
    assert {engine for engine, _ in engines} == {"eager"}
    assert found.failures == expected.failures == []
    for ours, theirs in zip(numbers(found), numbers(expected), strict=True):
        assert_close(ours, theirs, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_fused_reads_every_batch_fused_with_the_numbers_of_eager(tiny, engines, monkeypatch):
    monkeypatch.setattr(choice, "free_memory", lambda device: 2**40)
    found = measured(tiny, "fused")
    assert {engine for engine, _ in engines} == {"fused"}
    for ours, theirs in zip(numbers(found), numbers(measured(tiny, "eager")), strict=True):
        assert_close(ours, theirs, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("engine", ["auto", "eager"])
def test_where_fused_cannot_be_had_the_text_that_does_not_fit_fails(tiny, engines, monkeypatch, engine):
    if engine == "auto":
        monkeypatch.setattr(choice, "calls_interface", lambda model: False)
    found = measured(tiny, engine)
    assert [failure.item for failure in found.failures] == [6]
    assert "eager attention over" in found.failures[0].reason
    assert len(found.seen) == 6
    assert {engine for engine, _ in engines} == {"eager"}
