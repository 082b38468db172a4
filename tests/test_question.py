"""Asking about tokens: every number against Python loops over output_attentions, on both engines.

Shapes: L layer, H head, Q query, K key.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import attnscope
from attnscope.errors import UsageError
from attnscope.hooks.engines import ENGINES
from attnscope.inputs.prompt import Prompt, from_text
from attnscope.inputs.tokens import TokenMatch, TokenSelection
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import load
from attnscope.model.options import LoadOptions
from attnscope.observe.collect import observe
from attnscope.observe.observation import Observation
from attnscope.observe.request import Request, View
from helpers import own
from helpers.command_line import call
from helpers.parity_models import as_loaded, roused_model

# Plain, a window, sink logits, chunks, a mask that differs from head to head, a bias by distance.
FAMILIES = ["llama", "mistral", "gpt_oss", "llama4_text", "doge", "bloom"]
EITHER_ENGINE = pytest.mark.parametrize("engine", ["eager", "fused"])


def prompt_of(tokens: int, seed: int = 0) -> Prompt:
    """A text whose words are its ids, with repetitions."""
    ids = torch.randint(6, 20, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    words = tuple(f"w{one}" for one in ids)
    plain = (words[0], *(f" {word}" for word in words[1:]))
    return Prompt(" ".join(words), tuple(ids), words, words, (False,) * len(words), plain, ())


def chosen_of(query: Sequence[int] | None = None, key: Sequence[int] | None = None) -> TokenSelection:
    return TokenSelection(*(None if one is None else TokenMatch("these", tuple(one)) for one in (query, key)))


def attentions(loaded: LoadedModel, prompt: Prompt) -> np.ndarray:
    """The plain model's own weights, (L, H, Q, K)."""
    return torch.stack(own.attentions(loaded.model, prompt.ids)).double().numpy()


def mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else math.nan


def mass_by_loops(row_QK: np.ndarray, queries: Iterable[int], keys: Sequence[int]) -> tuple[float, float]:
    """The mass of one head, and what uniform attention over the same keys would have; every visible key has weight."""
    masses, uniform = [], []
    for query in queries:
        seen = [key for key in range(row_QK.shape[1]) if row_QK[query, key] > 0]
        named = [key for key in keys if key in seen]
        if named:
            masses.append(sum(row_QK[query, key] for key in named))
            uniform.append(len(named) / len(seen))
    return mean(masses), mean(uniform)


def seen_by(engine: str, loaded: LoadedModel, prompt: Prompt, chosen: TokenSelection, **wanted: object) -> Observation:
    return observe(loaded, [prompt], Request(**wanted), engine=ENGINES[engine], chosen=[chosen])[0]


def assert_mass(seen: Observation, weights_LHQK: np.ndarray, queries: Iterable[int], keys: Sequence[int]) -> None:
    """Of every head, mass and uniform are what the loops find."""
    found = [(head.mass, head.uniform) for head in seen.heads]
    expected = [mass_by_loops(matrix, list(queries), keys) for layer in weights_LHQK for matrix in layer]
    np.testing.assert_allclose(np.array(found, float), np.array(expected), atol=2e-6, rtol=0)


QUESTIONS = [([39], [3, 4, 30]), (None, [0, 17]), ([5, 20, 39], [12]), ([2], [2]), ([3, 4], [30])]


@EITHER_ENGINE
@pytest.mark.parametrize(
    ("family", "query", "key"),
    [
        pytest.param(family, *question, marks=pytest.mark.families if place > 1 and family != "llama" else ())
        for family in FAMILIES
        for place, question in enumerate(QUESTIONS)
    ],
)
def test_mass_is_the_mean_of_sums_over_the_chosen_keys_that_a_query_sees(
    engine: str, family: str, query: list[int] | None, key: list[int]
) -> None:
    loaded, prompt = as_loaded(roused_model(family)), prompt_of(40)
    seen = seen_by(engine, loaded, prompt, chosen_of(query, key))
    assert_mass(seen, attentions(loaded, prompt), range(40) if query is None else query, key)


def test_a_wrong_mass_is_noticed() -> None:
    loaded, prompt = as_loaded(roused_model("mistral")), prompt_of(40)
    seen = seen_by("eager", loaded, prompt, chosen_of([5, 37], [3, 30]))
    with pytest.raises(AssertionError):
        assert_mass(seen, attentions(loaded, prompt), [5, 36], [3, 30])


@EITHER_ENGINE
def test_a_query_that_sees_no_chosen_key_does_not_count_and_without_one_mass_is_null(engine: str) -> None:
    loaded, prompt = as_loaded(roused_model("llama")), prompt_of(40)
    beside = seen_by(engine, loaded, prompt, chosen_of([3, 39], [30]))
    alone = seen_by(engine, loaded, prompt, chosen_of([39], [30]))
    assert [head.mass for head in beside.heads] == [head.mass for head in alone.heads]
    assert {layer["sees_key"] for layer in beside.support.values()} == {1}
    none = seen_by(engine, loaded, prompt, chosen_of([3], [30]))
    assert all(math.isnan(head.mass) and math.isnan(head.uniform) for head in none.heads)
    assert none.unmeasured[-1].startswith("mass: no query")
    assert not [line for line in alone.unmeasured if line.startswith("mass")]
    assert none.table("mass").select(["mass", "uniform"]).to_pylist() == [{"mass": None, "uniform": None}] * 16
    assert not math.isnan(none.heads[0].score["entropy"])


@EITHER_ENGINE
def test_a_sink_logits_share_is_lost(engine: str) -> None:
    loaded, prompt = as_loaded(roused_model("gpt_oss")), prompt_of(40)
    seen = seen_by(engine, loaded, prompt, chosen_of([39], range(40)))
    lost = [1 - head.score["off_token_mass"] for head in seen.heads]
    assert [head.mass for head in seen.heads] == pytest.approx(lost, abs=1e-6)
    assert max(lost) < 0.995
    assert [head.uniform for head in seen.heads] == pytest.approx([1.0] * 16)


@EITHER_ENGINE
@pytest.mark.parametrize("family", ["llama", "doge"])
def test_kv_heads_have_the_mean_mass_of_their_heads(engine: str, family: str) -> None:
    loaded, prompt = as_loaded(roused_model(family)), prompt_of(40)
    seen = seen_by(engine, loaded, prompt, chosen_of([20, 39], [3, 11]), view=View(by_kv=True))
    weights = attentions(loaded, prompt)
    expected = [[mass_by_loops(matrix, [20, 39], [3, 11])[0] for matrix in layer] for layer in weights]
    grouped = np.array(expected).reshape(len(weights), len(seen.heads) // len(weights), -1).mean(-1)
    assert [head.mass for head in seen.heads] == pytest.approx(grouped.ravel().tolist(), abs=2e-6, nan_ok=True)


# The other numbers are means over the chosen queries.


@EITHER_ENGINE
def test_metrics_are_means_over_the_chosen_queries(engine: str) -> None:
    loaded, prompt, queries = as_loaded(roused_model("llama")), prompt_of(40), [7, 21, 39]
    seen = seen_by(engine, loaded, prompt, chosen_of(queries))
    weights = attentions(loaded, prompt)
    for head in seen.heads:
        matrix = weights[head.layer, head.head]
        assert head.mass is head.uniform is None
        assert head.score["sink"] == pytest.approx(mean(matrix[i, 0] for i in queries), abs=2e-6)
        assert head.score["previous_token"] == pytest.approx(mean(matrix[i, i - 1] for i in queries), abs=2e-6)
        assert head.score["confidence"] == pytest.approx(mean(matrix[i].max() for i in queries), abs=2e-6)
        entropies = [-sum(a * math.log(a) for a in matrix[i] if a > 0) for i in queries]
        assert head.score["entropy"] == pytest.approx(mean(entropies), abs=1e-5)
        assert head.top_key_mass == pytest.approx(matrix[queries].mean(0).max(), abs=2e-6)
        assert head.top_key == matrix[queries].mean(0).argmax()
        excess = {(i, j): matrix[i, j] - 1 / (i + 1) for i in queries for j in range(1, i + 1)}
        assert (head.strongest.query, head.strongest.key) == max(excess, key=excess.get)
    np.testing.assert_allclose(seen.received, weights[..., queries, :].mean((0, 1, 2)), atol=2e-6)


def test_roles_are_not_shown_by_few_queries() -> None:
    loaded, prompt = as_loaded(roused_model("llama")), prompt_of(80)
    seen = seen_by("eager", loaded, prompt, chosen_of([79], [3]))
    assert {head.role for head in seen.heads} == {"-"}
    assert {head.near_uniform for head in seen.heads} == {None}
    assert {layer["two_keys"] for layer in seen.support.values()} == {1}
    every = seen_by("eager", loaded, prompt, chosen_of(range(80)))
    plain = seen_by("eager", loaded, prompt, TokenSelection())
    assert [head.role for head in every.heads] == [head.role for head in plain.heads]
    assert every.table().equals(plain.table())


# Ranking.


def test_heads_rank_by_how_far_mass_is_above_uniform() -> None:
    loaded, prompt = as_loaded(roused_model("mistral", sliding_window=8)), prompt_of(40)
    seen = seen_by("eager", loaded, prompt, chosen_of([39], [35, 36]))
    assert seen.ranked_by == "mass"
    above = [head.mass - head.uniform for head in seen.kept_heads("mass")]
    assert above == sorted(above, reverse=True)
    assert seen.kept_heads("-mass") == seen.kept_heads("mass")[::-1]
    assert seen.table("mass").column_names[-4:] == ["mass", "uniform", "stack", "type"]


def test_texts_of_one_pass_have_the_mass_that_they_have_alone() -> None:
    loaded = as_loaded(roused_model("llama"))
    prompts = [prompt_of(length, seed) for seed, length in enumerate((9, 40, 23))]
    chosen = [chosen_of([8], [1, 2]), chosen_of([39, 4], [3]), chosen_of(None, [22])]
    for engine in ("eager", "fused"):
        together = observe(loaded, prompts, Request(), engine=ENGINES[engine], chosen=chosen)
        for prompt, asked, seen in zip(prompts, chosen, together, strict=True):
            alone = seen_by(engine, loaded, prompt, asked)
            for name, score in alone.columns.scores.items():
                found = seen.columns.scores[name]
                np.testing.assert_allclose(found.value, score.value, atol=1e-5, rtol=0, err_msg=name)
                np.testing.assert_allclose(found.null, score.null, atol=1e-6, rtol=0, err_msg=name)


# The grammar, end to end: `<s> M ary ·s a w ·J o h n ·in ·the ·garden , ·and ·J o h n ·gave ·M ary ·a ·book`.

STORY = "Mary saw John in the garden, and John gave Mary a book"
MARY, JOHN = [1, 2, 20, 21], [6, 7, 8, 9, 15, 16, 17, 18]
FORMS = {
    "8": [8],
    "-1": [23],
    "3:7": [3, 4, 5, 6],
    "-2:": [22, 23],
    "3-7": [3, 4, 5, 6, 7],
    "first": [0],
    "last": [23],
    "special": [0],
    "Mary": MARY,
    "gard": [12],
    "g*": [12, 19],
    "/J.h/": [6, 7, 8, 15, 16, 17],
    "Mary#2": [20, 21],
    "John#-1": JOHN[4:],
    '"John in"': [6, 7, 8, 9, 10],
    "garden,last": [12, 23],
    "^special": list(range(1, 24)),
    "2:,^Mary": [at for at in range(2, 24) if at not in MARY],
    "them": [*MARY, *JOHN],
}


@pytest.fixture(scope="module")
def of_story(demo) -> np.ndarray:
    """The plain model's weights of the story, (L, H, Q, K)."""
    return attentions(demo, from_text(demo.tokenizer, STORY))


@pytest.mark.parametrize(
    ("form", "engine"),
    [
        pytest.param(form, engine, marks=[] if engine == "eager" or form in ("last", "them") else pytest.mark.e2e)
        for form in FORMS
        for engine in ("eager", "fused")
    ],
)
def test_every_form_of_the_grammar_names_the_keys_and_the_queries_of_the_mass(
    demo, of_story: np.ndarray, form: str, engine: str
) -> None:
    wanted = {"engine": engine, "request": Request(), "define": {"them": "Mary,John"}}
    keys = attnscope.capture(demo, STORY, query="last", key=form, **wanted)
    assert_mass(keys, of_story, [23], FORMS[form])
    queries = attnscope.capture(demo, STORY, query=form, key="Mary", **wanted)
    assert_mass(queries, of_story, FORMS[form], MARY)


@EITHER_ENGINE
def test_turns_of_a_chat_are_named_too(engine: str) -> None:
    loaded = load(LoadOptions())
    loaded.tokenizer.chat_template = "{% for one in messages %}{{ one.role + ': ' + one.content + '\n' }}{% endfor %}"
    chat = [{"role": "user", "content": "the bank"}, {"role": "assistant", "content": "a river bank"}]
    wanted = {"chat": True, "engine": engine, "request": Request()}
    seen = attnscope.capture(loaded, json.dumps(chat), query="assistant", key="user", **wanted)
    user, assistant = ([*range(turn.start, turn.stop)] for turn in seen.prompt.turns)
    assert "".join(seen.prompt.plain[at] for at in user).strip() == "user: the bank"
    assert_mass(seen, attentions(loaded, seen.prompt), assistant, user)


# The command.


def ranked(*arguments: str, columns: int | None = None) -> tuple[list[str], str]:
    """What `heads` prints of the story, line by line, and what it says."""
    done = call("heads", "--text", STORY, *arguments, columns=columns).ok()
    return done.out.decode().splitlines(), done.err


def test_heads_ranks_by_mass_and_says_which_tokens_were_meant(of_story: np.ndarray) -> None:
    lines, said = ranked("--query", "last", "--key", "Mary", "--format", "jsonl")
    rows = [json.loads(line) for line in lines]
    masses = of_story[:, :, 23, MARY].sum(-1)
    assert [row["mass"] for row in rows] == pytest.approx(sorted(masses.ravel().tolist(), reverse=True), abs=1e-6)
    assert all(row["mass"] == pytest.approx(masses[row["layer"], row["head"]], abs=1e-6) for row in rows)
    assert [row["uniform"] for row in rows] == pytest.approx([4 / 24] * 24)
    assert "query last: book(23)\nkey Mary: Mary(1-2), Mary(20-21)\n" in said
    assert "no text roles: they need at least 16 queries, got 1" in said
    order = [
        row["layer"] for row in map(json.loads, ranked("--key", "Mary", "--sort", "layer", "--format", "jsonl")[0])
    ]
    assert order == sorted(order)


@pytest.mark.parametrize("columns", [60, pytest.param(80, marks=pytest.mark.e2e), 200])
def test_the_table_always_has_mass_and_uniform(columns: int) -> None:
    for order in ((), ("--sort", "entropy")):
        lines, said = ranked("--query", "last", "--key", "Mary", *order, columns=columns)
        assert "mass" in lines[1]
        assert "uniform" in lines[1]
        assert ("mass ▾" in lines[1]) == (not order)
        assert "mass: what the queries give the keys" in " ".join(said.split())
    assert "mass" not in ranked("--query", "last", columns=200)[0][1]


def test_it_says_so_where_no_query_sees_a_key() -> None:
    assert "mass -: no query" in ranked("--query", "first", "--key", "last", columns=120)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sort", "mass"), "--sort mass needs keys; name them with --key"),
        (("--query", "Bob"), "Bob"),
        (("--key", "/(/"), "is not a regular expression"),
        (("--define", "Mary"), "a group is a name and what it means"),
    ],
)
def test_what_cannot_be_asked_is_said_in_a_line(arguments: tuple[str, ...], message: str) -> None:
    done = call("heads", "--text", STORY, *arguments)
    assert message in done.err.splitlines()[-1]
    assert done.code in (2, 4)


def test_a_run_writes_down_what_was_meant(tmp_path: Path) -> None:
    arguments = ("--query", "last", "--key", "Mary", "--define", "who=John")
    ranked(*arguments, "--top", "1", "--figures", "heads", "--out", str(tmp_path), "-q")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert {name: manifest["options"][name] for name in ("query", "key", "define", "sort")} == {
        "query": "last",
        "key": "Mary",
        "define": ["who=John"],
        "sort": None,
    }
    assert manifest["export"]["sort"] == "mass"
    assert manifest["chosen"] == {
        "query": {"expression": "last", "positions": [23], "notes": []},
        "key": {"expression": "Mary", "positions": MARY, "notes": []},
    }
    header = (tmp_path / "heads.csv").read_text().splitlines()[0]
    assert header.endswith(",focus,mass,uniform,stack,type")


def test_a_folder_of_another_question_is_refused_in_python_too(demo, tmp_path: Path) -> None:
    wanted = {"request": Request()}
    attnscope.capture(demo, STORY, key="Mary", **wanted).export(tmp_path, figures=())
    attnscope.capture(demo, STORY, key="Mary", **wanted).export(tmp_path, figures=())
    with pytest.raises(UsageError, match="key was 'Mary', now 'John'"):
        attnscope.capture(demo, STORY, key="John", **wanted).export(tmp_path, figures=())
