"""Tiles and compiled kernel against the dense operator: the same answers from q and k, with no matrix ever made.

Shapes: B text, H head, G kv head, Q query, K key, D head dim.
"""

import math
from collections.abc import Container, Iterable, Iterator, Sequence

import pytest
import torch
from torch.testing import assert_close

from attnscope.attention import tiles
from attnscope.attention.kernels_cpu import CompiledAttention
from attnscope.attention.kernels_cpu import sweep as sweeping
from attnscope.attention.operator import DenseAttention
from attnscope.attention.questions import (
    AbsoluteDistance,
    Back,
    Distance,
    Entropy,
    Features,
    GroupMass,
    Holding,
    MaxWeight,
    RowSum,
    Strongest,
    SumOfSquares,
    TopK,
    Window,
)
from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.attention.tile_readers import READERS, RowReader
from attnscope.attention.tiling import TILE_BYTES, SmallAttention, TiledAttention
from attnscope.errors import MemoryLimitError
from attnscope.hooks.engines import ENGINES, Engine
from attnscope.hooks.listen import listen
from attnscope.metrics.metrics import METRICS, Texts, measure, questions, stacked_means
from attnscope.observe.collectors import collect_layer
from attnscope.observe.collectors.entries import TopKeys
from attnscope.observe.collectors.heads import HeadScores, TopRelation
from attnscope.observe.collectors.tokens import RolloutCollector
from attnscope.observe.request import Layer, LayerKey
from helpers.dispatched import largest_tensor, thread_count
from helpers.families import FEW, MODEL_TYPES, tiny_model
from helpers.seconds import once

TOKENS = 24
OF_ROWS = [
    *(RowSum(), Entropy(), Entropy(skip_key0=True), SumOfSquares(), MaxWeight(), Holding(90)),
    *(MaxWeight(skip_key0=True), Distance(), AbsoluteDistance(), Back(0), Window(7), TopK(3)),
]
LEAST = torch.finfo(torch.float32).min


def random_mask(queries: int, texts: int = 1) -> torch.Tensor:
    """Causal with holes; some rows see nothing, one column is never seen."""
    mask = (torch.rand(texts, 1, queries, queries, generator=torch.Generator().manual_seed(1)) > 0.4).tril()
    mask[..., 5] = False
    mask[:, :, 7] = False
    return mask


def infinite_mask() -> torch.Tensor:
    """Additive; of rows that it hides whole one is all -inf, and one half -inf and half float32's least number."""
    mask = torch.zeros(1, 1, 60, 60).masked_fill(~random_mask(60), -torch.inf)
    mask[:, :, 11], mask[:, :, 13] = -torch.inf, LEAST
    mask[:, :, 13, ::2] = -torch.inf
    return mask


CASES: dict[str, dict] = {
    "plain": {},
    "three texts": {"texts": 3, "queries": 67},
    "window": {"window": 9, "queries": 133},
    "looks ahead": {"causal": False},
    "soft-cap": {"softcap": 3.0},
    "sink logits": {"sinks": torch.linspace(-2, 3, 8).view(1, 8, 1)},
    "a sink a query": {"sinks": torch.linspace(-2, 3, 8 * 70).view(1, 8, 70)},
    "boolean mask": {"mask": random_mask(60, 2), "texts": 2, "queries": 60},
    "additive mask": {"mask": torch.zeros(1, 1, 60, 60).masked_fill(~random_mask(60), LEAST), "queries": 60},
    "infinite mask": {"mask": infinite_mask(), "queries": 60},
    "mask with bias": {
        "mask": (torch.arange(60.0) * -0.1).expand(1, 8, 60, 60).masked_fill(~random_mask(60), LEAST),
        "queries": 60,
    },
    "position bias": {"bias": torch.randn(1, 8, 70, 70, generator=torch.Generator().manual_seed(2))},
    "wide values": {"value_dim": 24},
    "one kv head a head": {"groups": 8},
    "multi-query": {"groups": 1, "queries": 200},
}


def operators(
    texts: int = 1,
    heads: int = 8,
    groups: int = 4,
    queries: int = 70,
    dim: int = 16,
    value_dim: int = 16,
    mask: torch.Tensor | None = None,
    window: int | None = None,
    causal: bool = True,
    sinks: torch.Tensor | None = None,
    kind: type[TiledAttention] = TiledAttention,
    **extras,
) -> tuple[DenseAttention, TiledAttention, torch.Tensor]:
    """The same attention twice, and its values."""
    generator = torch.Generator().manual_seed(queries)
    q_BHQD = torch.randn(texts, heads, queries, dim, generator=generator) * 2
    k_BGKD = torch.randn(texts, groups, queries, dim, generator=generator) * 2
    v_BGKD = torch.randn(texts, groups, queries, value_dim, generator=generator)
    visible = Visibility(queries, queries, mask, causal, window)
    spec = AttentionSpec(q_BHQD, k_BGKD, v_BGKD, 0.5, visible, sinks=sinks, **extras)
    rows = spec.logits(0, queries)
    if sinks is not None:
        rows = torch.cat([rows, sinks.expand(rows.shape[:3])[..., None]], -1)
    weights_BHQK = rows.softmax(-1)[..., :queries].nan_to_num(0.0)
    return DenseAttention(weights_BHQK, visible, spec), kind(spec, with_output=True), v_BGKD


SMALL, LARGE = 2**12, 2**21  # bytes of a tile


def tiles_of(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TILE_BYTES, "cpu", size)
    monkeypatch.setattr(sweeping, "JOB_SCORES", (size // 4,) * 2)
    monkeypatch.setattr(sweeping, "_numbers", lambda: size // 4)


@pytest.fixture
def tile_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles_of(request.param, monkeypatch)


@pytest.fixture
def tiles_and_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    size, threads = request.param
    tiles_of(size, monkeypatch)
    with thread_count(threads):
        yield


KINDS = (TiledAttention, CompiledAttention, SmallAttention)
EITHER_KIND = pytest.mark.parametrize("kind", KINDS)
IN_ONE_TILE = ("plain", "three texts", "sink logits", "additive mask", "multi-query")  # those of these by default


def named(size: int) -> str:
    return "small tiles" if size == SMALL else "large tiles"


def under_every_case(kinds: Sequence[type[TiledAttention]] = ()) -> pytest.MarkDecorator:
    """Each case, and with each kind where there are some; one whose matrix is made once has no tiles to differ in."""
    return pytest.mark.parametrize(
        ("tiles_and_threads", "case", "kind") if kinds else ("tiles_and_threads", "case"),
        [
            pytest.param(
                (size, threads),
                case,
                *([kind] if kind else []),
                id=", ".join([named(size), f"{threads} threads", case, *([kind.__name__] if kind else [])]),
                marks=[]
                if (size, threads) == (SMALL, 3)
                or ((size, threads) == (LARGE, 1) and case in IN_ONE_TILE and kind is not SmallAttention)
                else [pytest.mark.families],
            )
            for size in (SMALL, LARGE)
            for threads in (1, 3)
            for case in CASES
            for kind in kinds or [None]
        ],
        indirect=["tiles_and_threads"],
    )


def in_tiles_of_two_sizes(cases: Iterable[str], large: Container[str]) -> pytest.MarkDecorator:
    """Each case with each kind; by default in large tiles too where the case is among those."""
    return pytest.mark.parametrize(
        ("tile_size", "case", "kind"),
        [
            pytest.param(
                size,
                case,
                kind,
                id=f"{named(size)}-{case}-{kind.__name__}",
                marks=[] if size == SMALL or (case in large and kind is not SmallAttention) else [pytest.mark.families],
            )
            for size in (SMALL, LARGE)
            for case in cases
            for kind in KINDS
        ],
        indirect=["tile_size"],
    )


def texts_of(dense: DenseAttention) -> Texts:
    ids_BT = torch.randint(0, 9, (dense.batch, dense.queries), generator=torch.Generator().manual_seed(0))
    return Texts(ids_BT, torch.full((dense.batch,), dense.queries))


@once
def measured(case: str) -> dict[str, torch.Tensor]:
    """What the matrix says, for each kind and size of tiles."""
    dense, _, _ = operators(**CASES[case])
    return measure(dense, texts_of(dense), list(METRICS))


@under_every_case(KINDS)
@pytest.mark.usefixtures("tiles_and_threads")
def test_answers_equal_the_matrix(case: str, kind: type[TiledAttention]) -> None:
    dense, asked, v_BGKD = operators(**CASES[case], kind=kind)
    texts = texts_of(dense)
    every, some = TopK(5), TopK(3, (1, 6), skip_key0=True)
    answers = asked.together([*questions(list(METRICS), texts), every, some])
    expected = measured(case)
    found = dict(zip(METRICS, stacked_means(asked, texts, answers, list(METRICS)), strict=True))
    for name in METRICS:
        assert_close(
            found[name], expected[name], atol=1e-5, rtol=1e-5, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert_same_keys(answers[every], dense.topk(5), dense)
    assert_same_keys(answers[some], dense.topk(3, [1, 6], skip_key0=True), dense, [1, 6])
    assert_same_keys(asked.topk(5), dense.topk(5), dense)  # and alone
    groups_BT = (torch.arange(dense.queries) // 7 - 1).expand(dense.batch, -1)  # the first seven are in none
    keys_BT = torch.randint(-1, 4, (dense.batch, dense.queries), generator=torch.Generator().manual_seed(2))
    masses = GroupMass(groups_BT, keys_BT)
    assert_close(asked.ask(masses), dense.ask(masses), atol=1e-5, rtol=1e-5)
    share_BQ = torch.rand(dense.batch, dense.queries, generator=torch.Generator().manual_seed(3))
    for share in (None, share_BQ):
        assert_close(asked.received(share), dense.received(share), atol=1e-5, rtol=1e-5)
    v_BHKD = v_BGKD.repeat_interleave(dense.heads // v_BGKD.shape[1], 1)
    assert_close(asked.output(), (dense.dense() @ v_BHKD).transpose(1, 2), atol=1e-5, rtol=1e-5)
    assert set(asked.answered_by.values()) == {asked.kernel or "tiles"}


HIDING = ("boolean mask", "additive mask", "infinite mask", "mask with bias")  # whole rows


@in_tiles_of_two_sizes(CASES, HIDING)
@pytest.mark.usefixtures("tile_size")
def test_the_squares_of_every_row(case: str, kind: type[TiledAttention]) -> None:
    """Of rows that see nothing too, which no metric counts: 0."""
    dense, asked, _ = operators(**CASES[case], kind=kind)
    assert_close(asked.ask(SumOfSquares()), dense.ask(SumOfSquares()), atol=1e-5, rtol=1e-5)


NAN_CASES = ["plain", "window", "looks ahead", "sink logits", "boolean mask", "additive mask", "infinite mask"]


@in_tiles_of_two_sizes(NAN_CASES, ("plain", "additive mask"))
@pytest.mark.usefixtures("tile_size")
@pytest.mark.parametrize("key", [0, 20])
def test_a_key_of_nan_makes_the_rows_nan_that_see_it(key: int, case: str, kind: type[TiledAttention]) -> None:
    """And no others: a row that sees nothing stays 0, one that hides the key keeps its numbers."""
    _, asked, _ = operators(**CASES[case], kind=kind)
    asked.spec.k_BGKD[:, :, key] = torch.nan
    dense = DenseAttention(asked.spec.weights(0, asked.queries), asked.visible, asked.spec)
    seen_BHQ = asked.visible.at(torch.full((1, asked.queries), key)).expand(asked.batch, asked.heads, -1)
    for question, found in asked.together(OF_ROWS).items():
        expected = dense.ask(question)
        found, expected = (one[0] if isinstance(question, TopK) else one for one in (found, expected))
        assert bool(found[seen_BHQ].isnan().all()), question
        assert_close(found, expected, atol=1e-4, rtol=1e-5, equal_nan=True, msg=lambda m, q=question: f"{q}: {m}")


@under_every_case(KINDS)
@pytest.mark.usefixtures("tiles_and_threads")
def test_keys_of_each_text_and_how_many_hold_a_row(case: str, kind: type[TiledAttention]) -> None:
    """Where rounding decides which key is the last of 95 %, a row differs by one."""
    dense, asked, _ = operators(**CASES[case], kind=kind)
    generator = torch.Generator().manual_seed(6)
    for texts in {1, dense.batch}:
        key_BQ = torch.randint(-1, dense.keys, (texts, dense.queries), generator=generator)
        assert_close(asked.at(key_BQ), dense.at(key_BQ), atol=1e-5, rtol=1e-5)
    difference = (asked.ask(Holding(95)) - dense.ask(Holding(95))).abs()
    assert difference.max() <= 1
    assert difference.mean() < 1e-3


@pytest.mark.parametrize("case", ["boolean mask", "plain"])
def test_a_row_that_sees_nothing_has_no_entropy(case: str) -> None:
    dense, asked, _ = operators(**CASES[case])
    for question in (Entropy(), Entropy(True), SumOfSquares()):
        assert_close(asked.ask(question), dense.ask(question), atol=1e-5, rtol=1e-5)


def assert_same_keys(found: tuple, expected: tuple, dense: DenseAttention, heads: list[int] | None = None) -> None:
    """The same weights in the same order; another key only where it carries the same weight."""
    assert_close(found[0], expected[0], atol=1e-6, rtol=1e-6, equal_nan=True)
    weights = dense.dense() if heads is None else dense.dense()[:, heads]
    there = ~expected[0].isnan()
    at_found = weights.gather(-1, found[1].long())[there]
    assert_close(at_found, expected[0][there], atol=1e-6, rtol=1e-6)
    keys = torch.where(there, found[1].long(), -1 - torch.arange(there.shape[-1]))
    assert all(len(set(row.tolist())) == len(row) for row in keys.flatten(0, -2))


@under_every_case()
@pytest.mark.usefixtures("tiles_and_threads")
def test_the_strongest_of_chosen_queries_and_keys_are_those_of_a_loop(case: str) -> None:
    """Every text with queries and keys of its own; rows that see fewer of the keys end in NaN."""
    dense, asked, _ = operators(**CASES[case])
    numbers = torch.Generator().manual_seed(5)
    places = [
        sorted(torch.randperm(dense.queries, generator=numbers)[:count].tolist()) for count in (9, 1, 5, 30, 2, 7)
    ]
    query = tuple(tuple(one) for one in places[: dense.batch])
    key = tuple(tuple(one) for one in places[3 : 3 + dense.batch])
    every = (range(dense.queries),) * dense.batch
    weights = dense.dense().tolist()
    seen = dense.visible.rows(0, dense.queries).expand(dense.batch, dense.heads, -1, -1).tolist()
    for heads, query_, key_ in (((5, 0, 6), query, key), ((3,), every, key), ((7,), query, every)):
        question = Strongest(3, heads, query_, key_)
        for P in (dense, asked):
            for text, (found_hqk, key_hqk) in enumerate(P.ask(question)):
                assert found_hqk.shape == (len(heads), len(query_[text]), min(3, len(key_[text])))
                found, chosen_hqk = found_hqk.tolist(), key_hqk.tolist()
                for h, head in enumerate(heads):
                    for q, i in enumerate(query_[text]):
                        row = weights[text][head][i]
                        visible = [j for j in key_[text] if seen[text][head][i][j]]
                        strongest = sorted((row[j] for j in visible), reverse=True)[:3]
                        there = [place for place, one in enumerate(found[h][q]) if not math.isnan(one)]
                        assert close([found[h][q][place] for place in there], strongest)
                        chosen = [int(chosen_hqk[h][q][place]) for place in there]
                        assert len(set(chosen)) == len(chosen)
                        assert set(chosen) <= set(visible)
                        assert close([row[j] for j in chosen], strongest)


def close(found: list[float], expected: list[float]) -> bool:
    """Within 1e-6, and as many."""
    return len(found) == len(expected) and all(
        abs(one - other) <= 1e-6 for one, other in zip(found, expected, strict=True)
    )


def test_a_broken_tile_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The assertions above fail when the causal edge is off by one key."""
    good = tiles._hide_future
    monkeypatch.setattr(
        tiles, "_hide_future", lambda logits, query, low, visible: good(logits, query - 1, low, visible)
    )
    with pytest.raises(AssertionError):
        test_answers_equal_the_matrix("plain", TiledAttention)


def test_an_error_in_a_tile_ends_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked, _ = operators(queries=300)

    class Broken(RowReader):
        def visit(self, tile: tiles.Tile) -> None:
            raise RuntimeError("broken tile")

    with thread_count(3):
        with monkeypatch.context() as patched:
            patched.setitem(READERS, RowSum, Broken)
            with pytest.raises(RuntimeError, match="broken tile"):
                asked.row_sum()
        assert torch.get_num_threads() == 3
        assert_close(asked.row_sum(), torch.ones_like(asked.row_sum()))


@pytest.mark.parametrize("room", [2**18, 2**10])
def test_memory_that_runs_out_makes_tiles_smaller(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """As many halvings as it takes, then the whole layer again; or one clear error."""
    dense, asked, _ = operators(queries=300)
    taken: list[int] = []
    make = tiles.Tiling.tile

    def tight(tiling: tiles.Tiling, *rest: object) -> tiles.Tile:
        taken.append(tiling.tile_bytes)
        if tiling.tile_bytes > room and len(taken) % 3 == 0:  # some tiles were answered before
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return make(tiling, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(tiles.Tiling, "tile", tight)
    monkeypatch.setitem(TILE_BYTES, "cpu", 2**20)
    if room < 2**16:
        with pytest.raises(MemoryLimitError, match="memory ran out over 300 tokens"):
            asked.entropy()
        return
    assert_close(asked.entropy(), dense.entropy(), atol=1e-5, rtol=1e-5)
    assert list(dict.fromkeys(taken)) == [2**20, 2**19, 2**18]


def test_one_pass_answers_every_probe_and_gives_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked, _ = operators()
    passes: list[int] = []
    each = tiles.Tiling.each
    monkeypatch.setattr(tiles.Tiling, "each", lambda tiling, visit: (passes.append(1), each(tiling, visit))[1])
    texts = Texts(torch.zeros(1, 70, dtype=torch.long), torch.tensor([70]))
    runs = [RolloutCollector(torch.arange(70)[None]), HeadScores(), TopRelation(), TopKeys(3)]
    probes = {str(number): probe for number, probe in enumerate(runs)}
    collect_layer(probes, Layer(LayerKey(0), asked, 4, texts))
    asked.output()
    assert len(passes) == 1


def test_a_question_that_the_tiles_cannot_read_is_read_off_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, asked, _ = operators()
    monkeypatch.delitem(READERS, Entropy)
    answers = asked.together([Entropy(), RowSum()])
    assert_close(answers[Entropy()], dense.entropy(), atol=1e-5, rtol=1e-5)
    assert_close(answers[RowSum()], dense.row_sum(), atol=1e-5, rtol=1e-5)


def test_no_tensor_grows_with_the_square_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor that a pass makes, watched through the dispatcher, stays far below N x N."""
    monkeypatch.setitem(TILE_BYTES, "cpu", TILE_BYTES["cpu"] // 16)
    _, asked, _ = operators(queries=1024, heads=4, groups=2)
    with largest_tensor() as largest:
        asked.together([Entropy(), TopK(8), Strongest(8, (0, 3), (range(1024),), (tuple(range(0, 1024, 16)),))])
    assert largest[0] <= 2 * TILE_BYTES["cpu"]
    assert largest[0] * 8 < 4 * 4 * 1024 * 1024


@EITHER_KIND
@pytest.mark.parametrize("largest_logit", [12.0, 150.0])
def test_half_precision_entropy_is_that_of_float64(largest_logit: float, kind: type[TiledAttention]) -> None:
    """bf16 q and k, logits up to 150: entropy within 1e-3 nats of float64 over the same q and k."""
    q, k = (torch.randn(1, 2, 300, 64, generator=torch.Generator().manual_seed(s)) + 0.5 for s in (0, 1))
    reach = (q @ k.mT).abs().max()
    q, k = (q * (largest_logit / reach)).bfloat16(), k.bfloat16()
    found = kind(AttentionSpec(q, k, k, 1.0, Visibility(300, 300))).entropy()
    causal = torch.ones(300, 300, dtype=torch.bool).tril()
    logits = (q.double() @ k.double().mT).masked_fill(~causal, -torch.inf)
    assert logits[..., causal].abs().max() > 0.9 * largest_logit
    expected = torch.special.entr(logits.softmax(-1)).sum(-1)
    assert_close(found.double(), expected, atol=1e-3, rtol=0)


# What does not hold to the common tolerance, and why.
LARGE_LOGITS = {"gemma4": 3e-5, "gemma4_text": 3e-5}  # unscaled logits up to 77: fp32 rounds them to 5e-6
# The tiles call the BLAS that eager calls, and round as it does; of the same q and k both are within 1e-5, see below.
LARGE_LOGITS |= dict.fromkeys(("gemma4_unified, numba", "gemma4_unified_text, numba"), 3e-5)
OTHER_KEYS = {"blt", "deepseek_v4"}  # some of their calls attend to keys that are not tokens
# Families that the fused engine does not answer, and the routes by which their calls are heard instead.
HOOKED = [
    *(
        "big_bird",
        "bloom",
        "codegen",
        "cpmant",
        "falcon",
        "git",
        "gpt_neo",
        "gpt_neox_japanese",
        "gptj",
        "megatron-bert",
        "mpt",
    ),
    *("mvp", "openai-gpt", "prophetnet", "rembert", "roformer", "trocr", "xglm", "xlm", "xlnet"),
]
UNHEARD = ["falcon_mamba", "mamba", "mamba2", "reformer", "rwkv", "xlstm"]
ROUTES = {family: {"hook"} for family in HOOKED} | {family: set() for family in UNHEARD}


OTHERS = {  # masks a head, chunks, sinks of the output, shared keys, large logits, keys that are no tokens, hybrids
    *("deepseek_v4", "doge", "gemma3n_text", "gemma4_text", "granite_swa", "jamba", "llama4_text", "longcat_flash"),
    *("mamba", "mimo_v2_flash", "minimax_m3_vl_text", "mpt", "xlnet"),
}


def marks_of(family: str) -> list[pytest.MarkDecorator]:
    return [] if family in {*FEW, *OTHERS} else [pytest.mark.families]


QUICK = ["llama", "gpt2", "gemma2", "gpt_oss", "deepseek_v3", "t5gemma"]  # the rest of the compiled ones are slow
ANSWERED = [
    *(pytest.param(family, ENGINES["tiles"], marks=marks_of(family)) for family in MODEL_TYPES),
    *(
        pytest.param(family, ENGINES["numba"], marks=[] if family in QUICK else pytest.mark.slow)
        for family in MODEL_TYPES
        if family not in ROUTES
    ),
]


@pytest.mark.parametrize(("family", "engine"), ANSWERED, ids=lambda value: getattr(value, "name", value))
def test_fused_equals_eager_in_every_family(family: str, engine: Engine) -> None:
    """Weights, metrics and strongest keys, the model answered by attnscope against its own eager attention."""
    ids_BT = torch.randint(6, 30, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    texts = Texts(ids_BT, torch.tensor([TOKENS]))
    eager = {}

    def hear_eager(call) -> None:
        if call.P.keys == call.P.queries == TOKENS:
            eager[call.path, call.layer, call.call] = measure(call.P, texts, list(METRICS)), call.P, call.P.topk(3)

    routes = {check.route for check in listen(tiny_model(family), ids_BT, hear_eager).calls}
    assert routes == ROUTES.get(family, {"interface"})
    if family in ROUTES:
        return
    heard = len(eager)

    def hear_fused(call) -> None:
        if call.P.keys != call.P.queries or call.P.queries != TOKENS:
            return
        answers = call.P.together([*questions(list(METRICS), texts), TopK(3)])
        expected, dense, top = eager.pop((call.path, call.layer, call.call))
        tolerance = LARGE_LOGITS.get(family, LARGE_LOGITS.get(f"{family}, {engine.name}", 1e-5))
        assert_close(call.P.dense(), dense.dense(), atol=tolerance, rtol=0)
        for name, score in zip(METRICS, stacked_means(call.P, texts, answers, list(METRICS)), strict=True):
            allowed = 1e-4 if name in ("entropy", "effective_keys", "distance") else 10 * tolerance
            assert_close(score, expected[name], atol=allowed, rtol=1e-5, equal_nan=True)
        assert_close(answers[TopK(3)][0], top[0], atol=tolerance, rtol=0, equal_nan=True)

    report = listen(fused_model(family), ids_BT, hear_fused, engine=engine)
    assert heard > 0
    assert eager == {}
    assert (heard < len(report.calls)) == (family in OTHER_KEYS)
    assert {check.route for check in report.calls} == {"answered"}
    assert {who for check in report.calls for who in check.answered_by.values()} == {engine.name}
    assert max(check.value_error for check in report.calls) < 1e-4  # the model's own attention on sampled rows


@EITHER_KIND
@pytest.mark.parametrize("family", ["gemma4_text", "gemma4_unified_text"])
def test_large_logits_are_softmaxed_as_exactly_as_float32_can(family: str, kind: type[TiledAttention]) -> None:
    """Of q and k that eager had, against float64: what an engine rounds otherwise grows from layer to layer."""
    largest = []

    def hear(call) -> None:
        q, k = call.spec.q_BHQD.double(), call.spec.k_BGKD.double()
        logits = q @ k.repeat_interleave(call.P.heads // call.spec.kv_heads, 1).mT * call.spec.scale
        visible = call.visible.rows(0, TOKENS)
        largest.append(logits.masked_fill(~visible, 0).abs().max())
        expected = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        P = kind(call.spec)
        assert_close(P.ask(Features(torch.eye(TOKENS))).double(), expected, atol=1e-5, rtol=0)
        assert set(P.answered_by.values()) == {P.kernel or "tiles"}

    listen(tiny_model(family), torch.randint(6, 30, (1, TOKENS), generator=torch.Generator().manual_seed(0)), hear)
    assert max(largest) > 70


def fused_model(family: str) -> torch.nn.Module:
    """Under sdpa, as the engine loads it; eager where the family has no sdpa."""
    try:
        return tiny_model(family, attention="sdpa")
    except (ValueError, ImportError):
        return tiny_model(family)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "deepseek_v3", "qwen3", "falcon_h1"])
def test_answered_models_give_their_own_hidden_states(family: str) -> None:
    model = fused_model(family)
    ids_BT = torch.randint(6, 30, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    expected, found = [], []
    handle = model.base_model.register_forward_hook(lambda module, args, output: found.append(output[0]))
    with torch.no_grad():
        expected.append(model.base_model(ids_BT, use_cache=False)[0])
    found.clear()
    listen(model, ids_BT, lambda call: None, engine=ENGINES["tiles"])
    handle.remove()
    assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
