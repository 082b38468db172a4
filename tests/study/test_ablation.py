"""Heads taken away: against hooks on the output projection, shared against unshared, counted, padded."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

import attnscope
from attnscope.cli.study_tables import ablation_notes
from attnscope.errors import InputError, ModelError
from attnscope.hooks.engines import ENGINES
from attnscope.hooks.listen import listen
from attnscope.interventions.base import replacing
from attnscope.interventions.passes import CPU_TOKENS, measured, prepared
from attnscope.interventions.spec import HeadSet, Task
from attnscope.model.loading import wrap
from attnscope.studies.ablation import copy
from helpers.families import tiny_model

ALIKE = "the bank of the river", "the bank of the field", "the man of the river"  # of as many tokens
UNEVEN = "the bank", "the bank of the river, the bank of the", "the cat sat on the mat", "the old man of the sea"
PAGE = Path(__file__).parents[2] / "docs" / "ablate.md"
FAMILIES = ["llama", "gpt2", "gemma3_text"]
PROJECTIONS = {"llama": "o_proj", "gpt2": "c_proj", "gemma3_text": "o_proj"}
SETS = [HeadSet("b", ((1, 1), (2, 3))), HeadSet("a", ((0, 2),)), HeadSet("none", ()), HeadSet("c", ((3, 0), (3, 1)))]


def random_task(*lengths, words=128, seed=0):
    generator = np.random.default_rng(seed)
    ids = tuple(tuple(int(one) for one in generator.integers(6, words, length)) for length in lengths)
    return Task("random", ids, tuple(tuple(range(2, length - 1)) for length in lengths))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, demo):
    """A tiny model of 4 layers x 4 heads, its weights large enough that heads matter."""
    words = len(demo.tokenizer)
    loaded = wrap(tiny_model(request.param, initializer_range=0.2, vocab_size=words), demo.tokenizer)
    for one in projections(loaded):
        if getattr(one, "bias", None) is not None:  # GPT-2's, which stays when all heads are gone
            torch.nn.init.normal_(one.bias)
    return loaded


def projections(loaded):
    name = PROJECTIONS[loaded.geometry.model_type]
    return [module for path, module in loaded.model.named_modules() if path.endswith(f"attn.{name}")]


def heads_of(loaded, ids):
    """What every layer's output projection is given, (T, heads, width) each."""
    given = []
    handles = [
        one.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0][0].unflatten(-1, (4, -1))))
        for one in projections(loaded)
    ]
    with torch.no_grad():
        loaded.model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return given


def loss_by_hooks(loaded, ids, rows, instead):
    """The loss of one text, alone, with {(layer, head): (T, width)} written where the output projection reads."""

    def cut(layer):
        def before(module, inputs):
            heads = inputs[0].clone().unflatten(-1, (4, -1))
            for (where, head), value in instead.items():
                if where == layer:
                    heads[0, :, head] = value
            return (heads.flatten(-2),)

        return before

    handles = [one.register_forward_pre_hook(cut(layer)) for layer, one in enumerate(projections(loaded))]
    with torch.no_grad():
        log = loaded.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    for handle in handles:
        handle.remove()
    return -np.mean([float(log[row, ids[row + 1]]) for row in rows])


def ablated(loaded, texts, **options):
    """(S, sets): nats per token of `SETS`, by the public call; the tokens of each text, and its intact loss."""
    sets = {one.name: str(one).split() for one in SETS if one.heads}
    found = attnscope.ablate(loaded, sets, texts, random=0, **options).found
    ids = [loaded.tokenizer(text)["input_ids"] for text in texts]
    return np.stack([found.effect(one) for one in found.asked.named], 1), ids, found.intact_S


@pytest.mark.parametrize("replacement", ["mean", "zero", "resample"])
def test_the_loss_is_that_of_a_model_whose_projection_reads_something_else(family, replacement):
    effects, texts, intact = ablated(family, ALIKE, replace=replacement)
    assert {len(ids) for ids in texts} == {len(texts[0])}
    heads = [heads_of(family, ids) for ids in texts]  # [text][layer] (T, heads, width)

    def instead(text, layer, head):
        others = [heads[other][layer][:, head] for other in range(3) if other != text]
        if replacement == "resample":
            return heads[(text + 1) % 3][layer][:, head]
        return torch.stack(others).mean(0) * (replacement == "mean")

    for text, ids in enumerate(texts):
        rows = range(len(ids) - 1)
        whole = loss_by_hooks(family, ids, rows, {})
        assert intact[text] == pytest.approx(whole, abs=1e-5)
        for place, one in enumerate(one for one in SETS if one.heads):
            loss = loss_by_hooks(family, ids, rows, {head: instead(text, *head) for head in one.heads})
            assert effects[text, place] == pytest.approx(loss - whole, abs=1e-5)
    assert np.abs(effects).max(0).min() > 1e-3


def test_shared_passes_equal_unshared_ones_under_every_engine(family):
    task = random_task(9, 9, 9)
    shared, unshared = (prepared(family, task, SETS, shared=one) for one in (True, False))
    assert (shared.why_not, shared.layers is None, unshared.layers is None) == ("", False, True)
    expected = unshared.measured(SETS)
    assert shared.measured(SETS) == pytest.approx(expected, abs=1e-5)
    for engine in (ENGINES["eager"], ENGINES["tiles"]):
        assert prepared(family, task, SETS, engine=engine).measured(SETS) == pytest.approx(expected, abs=1e-5)


def layers_of(loaded):
    backbone = loaded.model.base_model
    return backbone.h if hasattr(backbone, "h") else backbone.layers


def counted(loaded, passes, sets):
    """Tokens that pass through all decoder layers, by hooks, and what the passes said they take."""
    tokens, said = [], []
    handles = [
        layer.register_forward_hook(
            lambda module, args, out: tokens.append((out[0] if type(out) is tuple else out)[..., 0].numel())
        )
        for layer in layers_of(loaded)
    ]
    passes.measured(sets, said.append)
    for handle in handles:
        handle.remove()
    return sum(tokens), sum(said)


def test_token_layers_are_those_of_the_formula(family):
    """All one-head sets of L equal layers take (L + 1) / 2L of what they take unshared; the intact rows come on top."""
    layers, heads = 4, 4
    task = random_task(9, 9, 9)
    sets = [HeadSet(f"L{layer}H{head}", ((layer, head),)) for layer in range(layers) for head in range(heads)]
    intact = task.tokens * layers
    shared, said = counted(family, prepared(family, task, sets), sets)
    unshared, said_unshared = counted(family, prepared(family, task, sets, shared=False), sets)
    assert (said, said_unshared) == (shared, unshared)
    assert unshared - intact == intact * len(sets)
    assert (shared - intact) * 2 * layers == (unshared - intact) * (layers + 1)


def test_right_padding_leaves_the_loss_and_the_means(family):
    mean, texts, intact = ablated(family, UNEVEN)
    zero, _, _ = ablated(family, UNEVEN, replace="zero")
    assert len({len(ids) for ids in texts}) > 2
    for place, text in enumerate(UNEVEN):
        alone, _, intact_alone = ablated(family, [text], replace="zero")
        assert alone[0] == pytest.approx(zero[place], abs=1e-5)
        assert intact_alone[0] == pytest.approx(intact[place], abs=1e-5)
    heads = [heads_of(family, ids) for ids in texts]
    text, (layer, head) = 1, SETS[1].heads[0]
    others = [heads[other][layer][:, head] for other in (0, 2, 3)]
    first, later = torch.stack([one[0] for one in others]).mean(0), torch.cat([one[1:] for one in others]).mean(0)
    instead = {(layer, head): torch.stack([first, *[later] * (len(texts[text]) - 1)])}
    loss = loss_by_hooks(family, texts[text], range(len(texts[text]) - 1), instead)
    assert mean[text, 1] == pytest.approx(loss - intact[text], abs=1e-5)


def test_a_long_list_of_sets_takes_several_passes_and_gives_the_same(demo, monkeypatch):
    task = random_task(9, 9)
    sets = [HeadSet("", (head,)) for head in OTHERS]
    whole = measured(demo, task, sets)
    monkeypatch.setattr("attnscope.interventions.passes.CPU_TOKENS", 7 * task.lengths[0])
    passes = prepared(demo, task, sets)
    assert max(len(part) for _, part in passes.chunks(sets)) == 6
    assert passes.measured(sets) == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize(("replacement", "lengths"), [("zero", (9, 8)), ("mean", (9, 8)), ("resample", (9, 9, 9))])
def test_without_room_for_several_sets_each_row_has_a_pass(family, monkeypatch, replacement, lengths):
    """Eight sets share an intact row, which keeps what they need of it: a mean leaves out what its own text gave."""
    task, sets = random_task(*lengths), [*SETS, *(HeadSet(f"{one}", ((one % 4, one % 3),)) for one in range(6))]
    together = prepared(family, task, sets, replacement, shared=False).measured(sets)
    monkeypatch.setattr("attnscope.interventions.passes.CPU_TOKENS", 9)
    apart, rows = prepared(family, task, sets, replacement), []
    assert (apart.apart, apart.why_not) == (True, "")
    handle = layers_of(family)[0].register_forward_hook(lambda module, args, output: rows.append(len(args[0])))
    assert apart.measured(sets) == pytest.approx(together, abs=1e-5)
    handle.remove()
    assert set(rows) == {1}
    assert np.abs(together[:, 1:] - together[:, :1]).max(0)[[0, 1, 3]].min() > 1e-3
    tokens, stated = counted(family, apart, sets)
    assert tokens == stated == apart.token_layers(sets) == task.tokens * 4 * (2 + len(sets))


@pytest.mark.parametrize("texts", [3, 5, 7])
def test_a_text_that_is_left_over_joins_the_batch_before_it(demo, texts):
    """Another's output takes two texts: each is measured once, whatever their number."""
    task, sets = random_task(*[9] * texts), [HeadSet("", (head,)) for head in OTHERS]
    passes = prepared(demo, task, sets, "resample", shared=False)
    batches = passes.batches(CPU_TOKENS)
    assert sorted(place for batch in batches for place in batch) == list(range(texts))
    assert [len(batch) for batch in batches] == [*[2] * (texts // 2 - 1), 3]


def test_a_family_that_hands_keys_between_layers_is_run_unshared_and_says_so(demo):
    loaded = wrap(tiny_model("gemma3n_text", vocab_size=len(demo.tokenizer)), demo.tokenizer)
    found = attnscope.ablate(loaded, "3.0", ALIKE, random=0).found
    assert found.intact_S.shape == (3,)
    assert any(line.startswith("the passes were unshared: its layers") for line in ablation_notes(found))


def test_what_cannot_be_replaced_is_refused(demo):
    bloom = wrap(tiny_model("bloom", vocab_size=len(demo.tokenizer)), demo.tokenizer)
    with pytest.raises(ModelError, match="bloom attends outside the attention interface"):
        attnscope.ablate(bloom, "1.0", ALIKE)
    with pytest.raises(InputError, match="lengths differ"):
        attnscope.ablate(demo, "1.0", UNEVEN, replace="resample")
    with pytest.raises(InputError, match="there is one"):
        attnscope.ablate(demo, "1.0", ALIKE[:1])


def test_half_precision_tells_what_two_intact_rows_differ_by(demo):
    words = len(demo.tokenizer)
    loaded = wrap(tiny_model("llama", initializer_range=0.2, vocab_size=words).to(torch.bfloat16), demo.tokenizer)
    found = attnscope.ablate(loaded, {"two": ["L1H1", "L2H0"]}, ALIKE, random=2).found
    assert 0 <= found.facts["spread"] < 0.1
    sizes = sorted(abs(row["effect"]) for row in found.table().to_pylist() if row["condition"] != "random")
    for count, spread in ((1, sizes[1]), (3, 2 * sizes[2])):
        [line] = [
            line
            for line in ablation_notes(replace(found, facts=found.facts | {"spread": spread}))
            if "intact rows" in line
        ]
        assert line.startswith(
            f"two intact rows of one pass differ by up to {spread:.1g} nats, and {count} of 3 effects"
        )
    equal = ablation_notes(replace(found, facts=found.facts | {"spread": 0.0}))
    assert any(line.startswith("two intact rows of one pass are equal, but rounding to bfloat16") for line in equal)


# the demo's circuit

INDUCTION, PREVIOUS = HeadSet("induction", ((3, 0), (3, 1))), HeadSet("previous-token", ((1, 5), (2, 1)))
OTHERS = [(layer, head) for layer in range(4) for head in range(6) if (layer, head) not in INDUCTION.heads]


def induction_scores(demo, task, sets, texts=2):
    """The induction score of L3H0 in the first texts, intact and while heads are away: the mean weight on the first
    copy's successor."""
    instead, found = prepared(demo, task, sets, shared=False).intervention.instead, []

    def on_call(call):
        if call.layer == 3:
            query = torch.arange(51, 101)
            found.append(call.P.dense()[:, 0, query, query - 49].mean(-1).view(-1, texts).mean(1))

    engine = replace(ENGINES["eager"], change=replacing(sets, task.lengths[:texts], instead))
    listen(demo.model, torch.tensor(task.ids[:texts] * (1 + len(sets))), on_call, engine=engine)
    return found[0].tolist()


def test_without_the_previous_token_heads_induction_is_gone(demo):
    controls = [HeadSet("", ((1, one), (2, other))) for one in (0, 2, 3) for other in (0, 3, 5)]
    sets = [PREVIOUS, HeadSet("L2H1", ((2, 1),)), *controls]
    intact, together, alone, *others = induction_scores(demo, copy(demo, sequences=16), sets)
    assert intact == pytest.approx(0.93, abs=0.03)
    assert together < 0.15
    assert alone == pytest.approx(0.46, abs=0.06)
    assert np.median(others) == pytest.approx(intact, abs=0.05)


@pytest.mark.e2e
def test_the_page_says_how_far_induction_falls(demo):
    """Over all sequences of the task, of which the test above reads two."""
    sets = [PREVIOUS, HeadSet("L2H1", ((2, 1),))]
    intact, together, alone = induction_scores(demo, copy(demo), sets, texts=64)
    said = f"falls from {intact:.2f} to {together:.2f}, without `L2H1` alone to {alone:.2f}: induction reads"
    assert said in " ".join(PAGE.read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("sequences", "of", "step"),
    [
        (1, 8, 16),
        pytest.param(1, 64, 1, marks=pytest.mark.e2e),
        pytest.param(64, 64, 1, marks=pytest.mark.slow),
    ],
)
def test_together_they_cost_far_more_than_every_other_pair(demo, sequences, of, step):
    """Means over 64 sequences, or 8; every pair, or every sixteenth."""
    pairs = [HeadSet("", pair) for pair in combinations(OTHERS, 2)]
    assert len(pairs) == 231
    pairs = pairs[::step]
    passes = prepared(demo, copy(demo, sequences=of), [INDUCTION, *pairs])
    effects = []
    for _, part in passes.chunks([INDUCTION, *pairs]):
        loss = np.concatenate([passes.run([place], part) for place in range(sequences)])
        effects += (loss[:, 1:] - loss[:, :1]).mean(0).tolist()
    together, others = effects[0], effects[1:]
    assert len(others) == len(pairs)
    assert together >= 20 * np.mean(others)
    assert together >= 100 * np.median(others)
