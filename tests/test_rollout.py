"""Rollout against the dense product of the layers' own matrices, on both engines.

Shapes: Q query, K key, T token.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from attnscope.errors import MemoryLimitError, ModelError
from attnscope.hooks.engines import engine_named
from attnscope.inputs.prompt import Prompt, from_text
from attnscope.model.geometry import geometry_of
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import load
from attnscope.model.options import LoadOptions
from attnscope.observe.collect import observe
from attnscope.observe.collectors import bins, tokens
from attnscope.observe.collectors.tokens import Rollout, RolloutCollector
from attnscope.observe.observation import Observation
from attnscope.observe.request import Request
from attnscope.utils.tables import rows as rows_of
from helpers.command_line import call
from helpers.dispatched import largest_tensor
from helpers.families import tiny_model
from helpers.folders import saved

TEXT = "The bank is by the river. The river is by the bank, and the bank is wide. We sat there and read."
SHARP = {"initializer_range": 0.5}  # so that attention is far from uniform
MODELS = {
    "demo": None,
    "grouped heads": ("qwen3", SHARP),
    "sink logits": ("gpt_oss", SHARP),
    "windows": ("mistral", SHARP),
    "layers without attention": ("granitemoehybrid", SHARP),
    "keys that are not tokens": ("deepseek_v4", {}),
}
ENGINES = ("eager", "fused", "fused, listening")


@pytest.fixture(scope="module")
def loaded_as(demo):
    """A model under the implementation that an engine listens to; both have the same weights."""
    made: dict[tuple[str, str], LoadedModel] = {}

    def get(name: str, attention: str) -> LoadedModel:
        if (name, attention) not in made:
            made[name, attention] = _loaded(demo, name, attention)
        return made[name, attention]

    return get


def _loaded(demo: LoadedModel, name: str, attention: str) -> LoadedModel:
    if MODELS[name] is None:
        return load(LoadOptions(attention=attention))
    family, overrides = MODELS[name]
    try:
        model = tiny_model(family, vocab_size=2000, attention=attention, **overrides)
    except ValueError:  # the family has no sdpa
        model = tiny_model(family, vocab_size=2000, **overrides)
    geometry = geometry_of(model.config)
    return LoadedModel(model, demo.tokenizer, geometry, name, None, "cpu", "float32")


def see(loaded_as, name: str, engine: str, prompts: list[Prompt], group: str = "tokens") -> list[Observation]:
    loaded = loaded_as(name, "eager" if engine == "eager" else "sdpa")
    wanted = Request(metrics=(), rollout=group)  # type: ignore[arg-type]
    return observe(loaded, prompts, wanted, engine=engine_named(engine.split(",")[0], listen="listening" in engine))


def product(loaded: LoadedModel, prompt: Prompt, residual: float = 1.0, divide: bool = True, backwards: bool = False):
    """A_L ... A_1 in float64 from `output_attentions`, row by row; with other arguments, wrong."""
    layers = loaded.model(torch.tensor([prompt.ids]), output_attentions=True, use_cache=False).attentions
    layers = [weights[0].double() for weights in layers if weights is not None]
    rolled = np.eye(len(prompt))
    for weights_HQK in reversed(layers) if backwards else layers:
        step = np.zeros_like(rolled)
        for i in range(len(prompt)):
            row = sum(head[i].numpy() for head in weights_HQK) / len(weights_HQK)
            row[i] += residual
            step[i] = row / row.sum() if divide else row / 2
        rolled = step @ rolled
    return rolled


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", list(MODELS)[:-1])
def test_it_is_the_product_of_the_layers(loaded_as, demo, name: str, engine: str) -> None:
    prompt = from_text(demo.tokenizer, TEXT)
    [seen] = see(loaded_as, name, engine, [prompt])
    found, expected = seen.rollout.share_GG, product(loaded_as(name, "eager"), prompt)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-6)
    assert seen.rollout.row_sum_error < 1e-6
    assert np.abs(np.triu(found, 1)).max() == 0  # nothing is attributed to later tokens
    assert len(set(np.diag(found).round(4).tolist())) > 5  # and not from everywhere alike


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("demo", {"backwards": True}),
        ("demo", {"residual": 0.0}),
        ("sink logits", {"divide": False}),
    ],
    ids=lambda value: str(value),
)
def test_another_product_would_be_noticed(loaded_as, demo, name: str, wrong: dict) -> None:
    prompt = from_text(demo.tokenizer, TEXT)
    [seen] = see(loaded_as, name, "eager", [prompt])
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(seen.rollout.share_GG, product(loaded_as(name, "eager"), prompt, **wrong), atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("group", ["words", "sentences", "bins"])
def test_groups_sum_over_keys_and_average_over_queries(loaded_as, demo, group: str, engine: str) -> None:
    prompt = from_text(demo.tokenizer, TEXT)
    rolled = see(loaded_as, "sink logits", engine, [prompt], group)[0].rollout
    dense = product(loaded_as("sink logits", "eager"), prompt)
    units = {"words": prompt.words, "sentences": prompt.sentences, "bins": bins(prompt)}[group]
    assert list(rolled.units) == list(units)
    for i, query in enumerate(units):
        for j, key in enumerate(units):
            cells = [dense[q, k] for q in range(query.start, query.stop) for k in range(key.start, key.stop)]
            assert rolled.share_GG[i, j] == pytest.approx(sum(cells) / (query.stop - query.start), abs=1e-5)
            assert rolled.share_GG[i, j] == 0 or j <= i
    np.testing.assert_allclose(rolled.share_GG.sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize("engine", ["eager", "fused"])
@pytest.mark.parametrize("name", ["demo", "sink logits"])
def test_padding_changes_nothing(loaded_as, demo, name: str, engine: str) -> None:
    prompts = [from_text(demo.tokenizer, text) for text in (TEXT, "We sat there.", "The mill is old. It is wide.")]
    for group in ("words", "tokens"):
        together = see(loaded_as, name, engine, prompts, group)
        for prompt, seen in zip(prompts, together, strict=True):
            [alone] = see(loaded_as, name, engine, [prompt], group)
            assert seen.rollout.units == alone.rollout.units
            np.testing.assert_allclose(seen.rollout.share_GG, alone.rollout.share_GG, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("name", "layers"), [("layers without attention", (1, 3)), ("keys that are not tokens", (0, 1, 3))]
)
def test_layers_that_do_not_attend_to_tokens_are_passed(loaded_as, demo, name, layers, engine: str) -> None:
    [seen] = see(loaded_as, name, engine, [from_text(demo.tokenizer, TEXT)])
    assert seen.rollout.layers == layers
    assert seen.rollout.row_sum_error < 1e-6


def test_a_layer_is_asked_once(loaded_as, demo, monkeypatch) -> None:
    """On every engine: so that what is carried from layer to layer is carried once."""
    asked: list[int] = []
    asks = RolloutCollector.questions
    monkeypatch.setattr(
        RolloutCollector, "questions", lambda probe, layer: (asked.append(layer.key.layer), asks(probe, layer))[1]
    )
    for engine in ENGINES:
        asked.clear()
        see(loaded_as, "demo", engine, [from_text(demo.tokenizer, TEXT)])
        assert asked == [0, 1, 2, 3]


def test_nothing_to_roll_out_is_said(demo) -> None:
    prompt = from_text(demo.tokenizer, TEXT)
    with pytest.raises(ModelError, match="no layer"):
        RolloutCollector(torch.zeros(1, len(prompt), dtype=torch.long)).rolled(0, bins(prompt))


def test_a_matrix_that_does_not_fit_is_refused(loaded_as, demo, monkeypatch) -> None:
    prompt = from_text(demo.tokenizer, TEXT)
    monkeypatch.setattr(tokens, "free_memory", lambda device: 10_000)
    with pytest.raises(MemoryLimitError, match=r"towards \d+ groups takes .*; take fewer, larger groups"):
        see(loaded_as, "demo", "fused", [prompt])
    assert see(loaded_as, "demo", "fused", [from_text(demo.tokenizer, "by the")])


def test_a_long_text_makes_no_matrix() -> None:
    """The largest tensor of a fused rollout, watched through the dispatcher, is tokens x heads x groups."""
    loaded = load(LoadOptions(attention="sdpa", positions=4096))
    prompt = from_text(loaded.tokenizer, "The river rose and the boats went by. " * 64)
    with largest_tensor() as largest:
        [seen] = observe(loaded, [prompt], Request(metrics=(), rollout="bins"), engine=engine_named("tiles"))
    assert len(prompt) > 500
    assert len(seen.rollout.units) <= 200
    assert largest[0] <= 4 * 6 * len(prompt) * (200 + 32) < 4 * 6 * len(prompt) ** 2
    assert seen.rollout.row_sum_error < 1e-5


# tables and pictures


def units(count: int) -> tuple:
    text = " a" * count
    prompt = Prompt(text, (0,) * count, (" a",) * count, ("·a",) * count, (False,) * count, (), ())
    return tuple(bins(prompt, count))


def test_a_table_is_sorted_and_filtered() -> None:
    share = np.array([[1, 0, 0], [0.25, 0.75, 0], [0.5, 0.2, 0.3]], dtype=np.float32)
    rolled = Rollout(units(3), share, (0,))

    def pairs(**wanted) -> list:
        return [(row[0], row[2]) for row in rows_of(rolled.table(**wanted))]

    assert pairs() == [(0, 0), (1, 1), (1, 0), (2, 0), (2, 2), (2, 1)]
    assert pairs(top_k=1) == [(0, 0), (1, 1), (2, 0)]
    assert pairs(min_weight=0.3) == [(0, 0), (1, 1), (2, 0), (2, 2)]
    assert next(rows_of(rolled.table())) == (0, " a", 0, " a", 1.0)


def test_many_units_are_put_together() -> None:
    generator = np.random.default_rng(0)
    share = np.tril(generator.random((11, 11))).astype(np.float32)
    share /= share.sum(-1, keepdims=True)
    values, *step = Rollout(units(11), share, (0,)).binned(4)
    assert (values.shape, step) == ((4, 4), [3, 3])
    chosen, *step = Rollout(units(11), share, (0,), rows=(4, 9)).binned(4)
    assert step == [1, 3]
    for row, unit in enumerate((4, 9)):
        cells = [share[unit, 3 * c : 3 * c + 3].sum() for c in range(4)]
        np.testing.assert_allclose(np.nan_to_num(chosen[row]), cells, atol=1e-6)
    for r in range(4):
        for c in range(4):
            cell = share[3 * r : 3 * r + 3, 3 * c : 3 * c + 3]
            if c > r:
                assert np.isnan(values[r, c])
            else:
                assert values[r, c] == pytest.approx(sum(row.sum() for row in cell) / len(cell), abs=1e-6)
    np.testing.assert_allclose(np.nansum(values, -1), 1, atol=1e-6)


def test_bins_cover_the_text(demo) -> None:
    prompt = from_text(demo.tokenizer, TEXT)
    for most in (1, 7, len(prompt), 200):
        runs = bins(prompt, most)
        assert len(runs) <= most
        assert [place for run in runs for place in range(run.start, run.stop)] == list(range(len(prompt)))
        assert "".join(run.name for run in runs) == "".join(prompt.tokens)


# the command


@pytest.mark.parametrize("engine", [pytest.param("eager", marks=pytest.mark.e2e), "fused"])
def test_the_command_prints_what_it_writes(demo, loaded_as, tmp_path: Path, engine: str) -> None:
    done = call("rollout", "--text", TEXT, "--top-k", "all", "--engine", engine, "--out", str(tmp_path)).ok()
    assert (tmp_path / "rollout.csv").read_bytes() == done.out
    assert {path.name for path in tmp_path.iterdir()} == {"rollout.csv", "rollout.png", "manifest.json"}
    expected = product(loaded_as("demo", "eager"), from_text(demo.tokenizer, TEXT))
    found = np.zeros_like(expected)
    for row in done.rows:
        found[int(row["query"]), int(row["key"])] = float(row["weight"])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["engine"] == engine
    assert manifest["rollout"]["layers"] == [0, 1, 2, 3]
    assert manifest["rollout"]["row_sum_error"] < 1e-6
    assert list(manifest["files"]) == ["rollout.csv", "rollout.png"]


@pytest.mark.parametrize(("group", "picture"), [("tokens", True), ("words", False)])
def test_a_query_leaves_its_rows_alone(tmp_path: Path, group: str, picture: bool) -> None:
    out = ("--image", "svg", "--out", str(tmp_path)) if picture else ()
    every = call("rollout", TEXT, "--group", group, "--top-k", "all", "-q").ok().rows
    asked = ("--query", "it", "--define", "it=bank,last")
    some = call("rollout", TEXT, "--group", group, "--top-k", "all", "-q", *asked, *out).ok().rows
    places = {row["query"] for row in every if row["query_token"].strip(" .") == "bank"}
    places |= {every[-1]["query"]}
    assert some == [row for row in every if row["query"] in places]
    assert 2 < len(places) < len({row["query"] for row in every})
    if picture:
        drawn = (tmp_path / "rollout.svg").read_text()
        assert json.loads((tmp_path / "manifest.json").read_text())["options"]["query"] == "it"
        assert drawn.count("·river") == 2  # the columns alone: none of the rows is one


def test_a_long_text_is_read_in_runs(tmp_path: Path) -> None:
    long = "The river rose and the boats went by. " * 40
    done = call("rollout", "--text", long, "--top-k", "2", "--out", str(tmp_path)).ok()
    assert "3 tokens; --group tokens" in done.err
    assert json.loads((tmp_path / "manifest.json").read_text())["rollout"]["units"] <= 200
    apart = call("rollout", "--text", long, "--top-k", "1", "--group", "tokens")
    assert len(apart.rows) > 400
    assert "--group" not in apart.err


def test_layers_without_attention_are_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "hybrid", "granitemoehybrid", vocab_size=2000)
    done = call("rollout", "--text", "the river bank", "--model", str(folder), "--out", str(tmp_path / "out")).ok()
    assert "layers 0,2 have no attention" in done.err
    said = json.loads((tmp_path / "out" / "manifest.json").read_text())["rollout"]
    assert (said["layers"], said["passed_over"]) == ([1, 3], [0, 2])
