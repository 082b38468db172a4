"""Which engine reads a batch, and that a text's numbers do not depend on it."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from attnscope.corpus import worker as replicas
from attnscope.corpus import worker as worker_module
from attnscope.corpus.folder import Job, Shard
from attnscope.corpus.items import Item
from attnscope.corpus.records import Corpus
from attnscope.corpus.run import run_folder
from attnscope.corpus.worker import Worker
from attnscope.hooks.engines import Engine
from attnscope.model.options import LoadOptions
from attnscope.observe import engine_choice
from attnscope.observe.request import Request
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
    monkeypatch.setattr(engine_choice, "SURELY_FITS", 0)
    monkeypatch.setattr(engine_choice, "free_memory", lambda device: 2 * 2**20)
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
    monkeypatch.setattr(engine_choice, "free_memory", lambda device: 2**40)
    engines.clear()
    expected = measured(tiny, "auto")
    assert {engine for engine, _ in engines} == {"eager"}
    assert found.failures == expected.failures == []
    for ours, theirs in zip(numbers(found), numbers(expected), strict=True):
        assert_close(ours, theirs, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_fused_reads_every_batch_fused_with_the_numbers_of_eager(tiny, engines, monkeypatch):
    monkeypatch.setattr(engine_choice, "free_memory", lambda device: 2**40)
    found = measured(tiny, "fused")
    assert {engine for engine, _ in engines} == {"fused"}
    for ours, theirs in zip(numbers(found), numbers(measured(tiny, "eager")), strict=True):
        assert_close(ours, theirs, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("engine", ["auto", "eager"])
def test_where_fused_cannot_be_had_the_text_that_does_not_fit_fails(tiny, engines, monkeypatch, engine):
    if engine == "auto":
        monkeypatch.setattr(engine_choice, "calls_interface", lambda model: False)
    found = measured(tiny, engine)
    assert [failure.item for failure in found.failures] == [6]
    assert "eager attention over" in found.failures[0].reason
    assert len(found.seen) == 6
    assert {engine for engine, _ in engines} == {"eager"}


@pytest.fixture
def kernel(monkeypatch):
    """The compiled kernel, taken for any window; how many calls it answered."""
    calls: Counter[str] = Counter()
    run = Engine.run

    def counted(self, *call):
        if self.name == "numba":
            calls["numba"] += 1
        return run(self, *call)

    monkeypatch.setattr(worker_module, "FASTER_SCORES", 0)
    monkeypatch.setattr(Engine, "run", counted)
    return calls


@pytest.fixture(scope="module")
def by_eager(tiny):
    return measured(tiny, "eager")


@pytest.mark.parametrize(
    ("threads", "installed"),
    [(2, True), (1, False), *(pytest.param(*both, marks=pytest.mark.e2e) for both in ((1, True), (2, False)))],
)
def test_the_kernel_gives_what_eager_gives_on_one_core_and_on_two(
    tiny, kernel, by_eager, monkeypatch, threads, installed
):
    monkeypatch.setattr(replicas, "cores", lambda: threads)
    monkeypatch.setattr(engine_choice.kernels_cpu, "installed", lambda: installed)
    found = measured(tiny, "auto")
    assert bool(kernel) == installed
    assert found.failures == []
    assert set(found.engines) == {"numba" if installed else "eager"}
    for ours, theirs in zip(numbers(found), numbers(by_eager), strict=True):
        assert_close(ours, theirs, atol=1e-5 if installed else 0, rtol=1e-5 if installed else 0, equal_nan=True)
    for (_, ours), (_, theirs) in zip(found.seen, by_eager.seen, strict=True):
        mine, other = ours.relations(), theirs.relations()
        assert mine.select(["layer", "head", "query"]).equals(other.select(["layer", "head", "query"]))
        clear = torch.tensor(other["weight"].to_pylist()).diff().abs() > 1e-5  # of equal weights either may come first
        same = torch.tensor(mine["key"].to_pylist()) == torch.tensor(other["key"].to_pylist())
        assert same[1:-1][clear[1:] & clear[:-1]].all()


@pytest.mark.parametrize(
    "asked",
    [
        {"request": Request(relations=True, top_k=None)},
        {"request": Request(weights=True)},
        {"request": Request(relations=True, group="words")},
        {"request": Request(query="last")},
        {"query_field": "ask"},
        {"load": LoadOptions(dtype="bfloat16")},
    ],
)
def test_what_the_kernel_does_not_answer_or_would_round_otherwise_is_read_eager(tiny, kernel, asked):
    loaded = replace(tiny, dtype="bfloat16") if "load" in asked else tiny
    assert not Worker(Job(**asked), loaded)._kernel
    assert Worker(Job(), tiny)._kernel


def test_the_batch_with_the_fewest_tokens_comes_last(tiny, kernel, monkeypatch):
    """Cores that share the batches then end at about the same time."""
    sizes: list[int] = []
    each = worker_module.Replicas.each

    def sized(replicas, work, groups, stop):
        sizes.extend(sum(text.longest for text in group) for group in groups)
        return each(replicas, work, groups, stop)

    monkeypatch.setattr(worker_module.Replicas, "each", sized)
    measured(tiny, "auto")
    assert len(sizes) > 2
    assert sizes == sorted(sizes, reverse=True)


def test_short_corpora_are_read_without_the_kernel(tiny):
    assert set(measured(tiny, "auto").engines) == {"eager"}


def test_a_kernel_that_does_not_hold_is_left_and_its_texts_are_read_again(tiny, kernel, by_eager, monkeypatch):
    run = Engine.run

    def wrong(self, *call):
        output, check = run(self, *call)
        check.value_error = 0.5 if self.name == "numba" else check.value_error
        return output, check

    monkeypatch.setattr(Engine, "run", wrong)
    monkeypatch.setattr(replicas, "cores", lambda: 1)
    found = measured(tiny, "auto")
    assert found.failures == []
    assert set(found.engines) == {"eager"}
    for ours, theirs in zip(numbers(found), numbers(by_eager), strict=True):
        assert_close(ours, theirs, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_a_text_at_fault_is_found_and_the_others_keep_the_kernel(tiny, kernel, monkeypatch):
    """One text whose weights break on either engine."""
    forward = worker_module.Worker._forward

    def broken(self, loaded, texts, engine):
        if any(text.item.number == 2 for text in texts):
            raise RuntimeError("broken text")
        return forward(self, loaded, texts, engine)

    monkeypatch.setattr(worker_module.Worker, "_forward", broken)
    items = tuple(Item(number, "f", number, str(number), text) for number, text in enumerate(TEXTS))
    worker = Worker(Job(batch_tokens=128), tiny)
    [window] = worker.windows(Shard(items))
    found = worker.measure(window)
    assert [failure.item for failure in found.failures] == [2]
    assert [item.number for item, _ in found.seen] == [0, 1, 3, 4, 5, 6]
    assert worker._quick


def test_a_long_text_is_read_by_what_is_faster_and_again_by_eager_where_that_does_not_hold(
    tiny, engines, by_eager, monkeypatch
):
    monkeypatch.setattr(engine_choice, "free_memory", lambda device: 2**40)
    monkeypatch.setattr(engine_choice, "FASTER_TOKENS", 200)
    found = measured(tiny, "auto")
    assert {engine for engine, longest in engines if longest >= 200} == {"fused"}
    assert {engine for engine, longest in engines if longest < 200} == {"eager"}
    run = Engine.run
    monkeypatch.setattr(Engine, "run", lambda self, *call: 1 / 0 if self.name == "fused" else run(self, *call))
    engines.clear()
    again = measured(tiny, "auto")
    assert [engine for engine, longest in engines if longest >= 200] == ["fused", "eager"]
    assert found.failures == again.failures == []
    for one in (found, again):
        for ours, theirs in zip(numbers(one), numbers(by_eager), strict=True):
            assert_close(ours, theirs, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_run_json_says_who_answered_what_also_after_another_run(tiny, kernel, tmp_path):
    corpus, texts = tmp_path / "corpus.txt", TEXTS[:3]
    corpus.write_text("\n".join(texts))
    job = Job(shard_bytes=2**12)
    windows: list[object] = []
    run_folder(
        job, Corpus((str(corpus),)), tmp_path / "run", {}, loaded=tiny, stop=lambda: bool(windows), note=windows.append
    )
    before = json.loads((tmp_path / "run" / "run.json").read_text())
    assert 0 < before["engines"]["numba"] < len(texts)
    run_folder(job, Corpus((str(corpus),)), tmp_path / "run", {}, loaded=tiny)
    said = json.loads((tmp_path / "run" / "run.json").read_text())
    assert said["engines"] == {"numba": len(texts)}
    assert said["answered_by"]["Entropy"] == said["answered_by"]["TopK"] == ["numba"]
    assert {name: said[name] for name in ("schema", "options")} == {
        name: before[name] for name in ("schema", "options")
    }
