"""Budgets of a KV cache in rows of attention, against transformers' own 4-D mask and attention as a plain loop."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from attnscope.attention.rows import RowsAgain, padded
from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.errors import UsageError
from attnscope.hooks.engines import UNCHECKED
from attnscope.hooks.listen import listen
from attnscope.interventions.kv_cache import BudgetedHeads, CacheBudget, HeadBudget, policy_of
from attnscope.interventions.spec import written_budget, written_budgets
from attnscope.model.selection import DECODER
from helpers.budgeted import budgeted
from helpers.families import tiny_model
from test_rows_again import EQUAL, POSITIONS

TOKENS, END = 14, 9
ONCE = ("received:4", "snap:5@3", "snap:3@3")
EACH = ("stream:2+4", "stream:0+3", "top:3", "h2o:5", "h2o:1")
# Grouped heads, windows and soft-cap, sink logits, latent attention, hybrids.
FAMILIES = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next")


def ids_of(texts=1, seed=1):
    return torch.randint(10, 100, (texts, TOKENS), generator=torch.Generator().manual_seed(seed))


def every_head(model):
    found = {}
    listen(model, ids_of(), lambda call: found.setdefault((call.stack, call.layer), call.P.heads), engine=UNCHECKED)
    return [(layer, head) for (stack, layer), heads in found.items() if stack == DECODER for head in range(heads)]


def modules(model):
    """{layer: its attention module}."""
    found = {}
    listen(model, ids_of(), lambda call: found.setdefault(call.layer, call.module), engine=UNCHECKED)
    return found


def logits(model, *budgets, ids=None, ends=(END,)):
    """(1 + K, T, V): logits of one text, intact and with each budget; budgets: (heads, how it is written)."""
    ids = ids_of() if ids is None else ids
    sets = [HeadBudget(str(at), tuple(heads), keep) for at, (heads, keep) in enumerate(budgets)]
    layers = {layer for one in sets for layer, _ in one.heads}
    heads = {at: tuple(sorted({head for one in sets for layer, head in one.heads if layer == at})) for at in layers}
    cache = CacheBudget(tuple(ends), (TOKENS,) * len(ids), heads)
    engine = cache.over(UNCHECKED, sets, [TOKENS] * len(ids), range(len(ids)))
    every = ids.repeat(1 + len(sets), 1)
    return listen(model, every, lambda call: None, engine=engine, logits_at=list(range(TOKENS))).logits


def expected(model, heads, keep, end=END):
    """Logits of the text with attention as a plain loop, (T, V)."""
    at = {id(module): layer for layer, module in modules(model).items()}
    with torch.no_grad(), budgeted(model, keep, lambda module, head: (at[id(module)], head) in heads, end):
        return model(ids_of(), use_cache=False).logits[0]


def stream_mask(first, last):
    """A 4-D mask of the first keys and the last ones."""
    mask = torch.full((TOKENS, TOKENS), -torch.inf)
    for row in range(TOKENS):
        for key in range(row + 1):
            if key < first or row - key < last:
                mask[row, key] = 0.0
    return mask[None, None]


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gpt2", "deepseek_v3"),
        *(pytest.param(family, marks=pytest.mark.families) for family in ("qwen3", "phi3", "olmo2")),
    ],
)
def test_stream_in_all_heads_equals_a_4d_mask(family):
    model = tiny_model(family)
    with torch.no_grad():
        masked = model(ids_of(), attention_mask=stream_mask(2, 4), use_cache=False).logits[0]
    intact, found = logits(model, (every_head(model), "stream:2+4"))
    assert_close(found, masked, atol=1e-5, rtol=0)
    assert (masked - intact).abs().max() > 1e-4  # the check can fail


@pytest.mark.slow
@pytest.mark.parametrize("family", EQUAL)
def test_stream_equals_a_4d_mask_in_every_family_that_takes_one(family):
    """`test_rows_again` shows that a causal 4-D mask changes nothing there."""
    model = tiny_model(family)
    given = {"position_ids": torch.arange(TOKENS)[None]} if family in POSITIONS else {}
    with torch.no_grad():
        masked = model(ids_of(), attention_mask=stream_mask(2, 4), use_cache=False, **given).logits[0]
    intact, found = logits(model, (every_head(model), "stream:2+4"))
    assert_close(found, masked, atol=1e-5, rtol=0)
    assert (masked - intact).abs().max() > 2e-5  # the check can fail


DEFAULT = {  # of each kind of budget one or two families
    "llama": (*EACH, *ONCE),
    "gemma2": ("h2o:5", "snap:5@3"),
    "gpt_oss": ("top:3", "received:4"),
    "deepseek_v3": ("stream:0+3", "snap:3@3"),
    "qwen3_next": ("stream:2+4",),
}


@pytest.mark.parametrize(
    ("family", "keep"),
    [
        pytest.param(family, keep, marks=[] if keep in DEFAULT[family] else [pytest.mark.families])
        for family in FAMILIES
        for keep in (*EACH, *ONCE)
    ],
)
def test_a_budget_in_some_heads_equals_a_plain_loop(family, keep):
    """One head of the first layer, all but one of the last: what a layer chooses depends on those below."""
    model = tiny_model(family)
    every = every_head(model)
    heads = {every[1], *[one for one in every if one[0] == every[-1][0]][1:]}
    intact, found = logits(model, (sorted(heads), keep))
    looped = expected(model, heads, keep)
    assert_close(found, looped, atol=1e-5, rtol=0)
    assert (looped - intact).abs().max() > 1e-4
    if keep in ONCE:
        assert_close(found[:END], intact[:END], atol=1e-6, rtol=0)


def test_many_budgets_share_a_pass_and_texts_have_prompts_of_their_own():
    model, ids = tiny_model("llama"), ids_of(2)
    one = every_head(model)[5:6]
    both = [(one, "received:3"), (one, "stream:1+2")]
    together = logits(model, *both, ids=ids, ends=(5, 9)).unflatten(0, (3, 2))
    for number, end in enumerate((5, 9)):
        for at, budget in enumerate(both, start=1):
            alone = logits(model, budget, ids=ids[number : number + 1], ends=(end,))
            assert_close(together[at, number], alone[1], atol=1e-5, rtol=0)
            assert (alone[1] - alone[0]).abs().max() > 1e-4


@pytest.mark.parametrize("keep", ["stream:0+14", "stream:7+7", "top:14", "h2o:14", "received:9", "snap:9@9"])
def test_a_budget_of_the_whole_text_changes_nothing(keep):
    model = tiny_model("gpt_oss")
    intact, found = logits(model, (every_head(model), keep))
    assert torch.equal(intact, found)


def drawn_call(seed=0, heads=4, kv_heads=2, tokens=9):
    sizes = (1, heads, tokens, 4), (1, kv_heads, tokens, 4), (1, kv_heads, tokens, 4)
    generator = torch.Generator().manual_seed(seed)
    return AttentionSpec(*(torch.randn(size, generator=generator) for size in sizes), 1.0, Visibility(tokens, tokens))


def test_heads_of_one_kv_head_keep_the_same_keys_by_the_mean_of_their_scores():
    spec = drawn_call()
    weights = spec.weights(0, 9)[0]
    for head in range(4):
        column = weights[head // 2 * 2 : head // 2 * 2 + 2].sum((0, 1)) / torch.arange(9, 0, -1)
        [[kept_K]] = policy_of("received:3").chosen(spec, (head,), (9,))
        assert set(kept_K.nonzero()[:, 0].tolist()) == set(column.topk(3).indices.tolist())
    alone = [set((weights[head].sum(0) / torch.arange(9, 0, -1)).topk(3).indices.tolist()) for head in range(4)]
    assert alone[0] != alone[1]  # by itself a head would keep other keys


def test_the_sum_is_of_what_is_left_and_what_was_evicted_does_not_return():
    """Blocks of rows carry the cache from one to the next."""
    spec = drawn_call()
    pair = torch.tensor([0]), torch.tensor([0])

    def dropped(*sizes):
        drop = policy_of("h2o:4").over(BudgetedHeads(spec, (1,), (9,), *pair))
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        parts = [padded([range(at, at + size)], spec.device) for at, size in zip(starts, sizes, strict=True)]
        return torch.cat([drop(block) for part in parts for block in RowsAgain(spec, (1,)).blocks(part)], 1)[0]

    whole = dropped(9)
    assert torch.equal(whole, dropped(2, 3, 4))
    kept = [set((~whole[row, : row + 1]).nonzero()[:, 0].tolist()) for row in range(9)]
    assert all(len(one) == min(4, row + 1) for row, one in enumerate(kept))
    assert all({row, row - 1} <= one for row, one in enumerate(kept) if row)
    assert all(after - before <= {row} for row, (before, after) in enumerate(itertools.pairwise(kept), 1))


@pytest.mark.parametrize(
    "text",
    [
        *("", "stream", "stream:4", "stream:4+0", "stream:-1+4", "stream:4+64;top:3", "top:0", "top:x", "top:4+4"),
        *("top:9999999999", "top:٣", "h2o:", "received:1e3", "recent:8", "snap:8", "snap:8@0", "snap:8@9"),
    ],
)
def test_what_is_no_budget(text):
    with pytest.raises(UsageError) as found:
        written_budget(text)
    assert "\n" not in str(found.value)


def test_budgets_are_listed_by_commas_each_once():
    assert list(written_budgets("stream:4+64, top:8,stream:4+64")) == ["stream:4+64", "top:8"]
    assert [one.once for one in written_budgets("h2o:3,snap:8@4,received:3").values()] == [False, True, True]
    with pytest.raises(UsageError, match="expected a budget stream:A"):
        written_budgets("top:8,")
