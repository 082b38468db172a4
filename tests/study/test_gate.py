"""The gate of `compare`: kernels with a fault beside sound ones, counted by loops, and runs that may not flap."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.mistral.modeling_mistral import eager_attention_forward

import attnscope
from attnscope.attention.operator import DenseAttention
from attnscope.attention.spec import Visibility
from attnscope.errors import InputError, UsageError
from attnscope.export import study_figures
from attnscope.hooks.engines import ENGINES
from attnscope.inputs.prompt import from_ids
from attnscope.metrics.divergence import KeyChanges, key_changes, least_mass
from attnscope.metrics.roles import NONE
from attnscope.model.loading import wrap
from attnscope.studies.baseline import beside_baseline, read_baseline, read_numbers
from attnscope.studies.comparison import Changes, Comparison, OneSide, compare_heads
from attnscope.studies.gate import Condition, judge, parse_gate
from attnscope.studies.intervals import FEWEST
from helpers.command_line import call
from helpers.families import tiny_model
from helpers.made_tokenizers import byte_level

OFF_BY_ONE = "window_off_by_one"
NARROWER = replace(ENGINES["eager"], name=OFF_BY_ONE, implementation=OFF_BY_ONE)


def ids_of(length, seed=0):
    return torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def windowed(width):
    """A model whose layers all see the last `width` keys; a single head where that is many."""
    torch.manual_seed(0)
    few = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1} if width > 1000 else {}
    model = tiny_model("mistral", sliding_window=width, max_position_embeddings=2 * width + 32, **few)
    return wrap(model.eval(), byte_level())


def beside(first, other, lengths, engines=("eager", "eager")):
    """Both sides on random texts of some lengths, with what a gate asks."""

    def side(loaded, engine, length, seed):
        how = ENGINES[engine] if isinstance(engine, str) else engine
        return OneSide(loaded, from_ids(loaded.tokenizer, ids_of(length, seed)), how)

    pairs = [
        (side(first, engines[0], length, seed), side(other, engines[1], length, seed))
        for seed, length in enumerate(lengths)
    ]
    return compare_heads(pairs, changes=True)


def with_config(loaded, **values):
    """The same weights under another config."""
    model = copy.deepcopy(loaded.model)
    for name, value in values.items():
        setattr(model.config, name, value)
    for module in model.modules():
        if hasattr(module, "sliding_window"):
            module.sliding_window = values.get("sliding_window", module.sliding_window)
    return wrap(model, loaded.tokenizer)


@pytest.fixture
def off_by_one():
    """An attention function that hides the last key of a window: what a wrong kernel does, under the right mask."""

    def attend(module, query, key, value, attention_mask, sliding_window, **rest):
        queries, keys = (torch.arange(part.shape[2]) for part in (query, key))
        last = queries[:, None] - keys == sliding_window - 1
        mask = attention_mask.masked_fill(last, torch.finfo(query.dtype).min)
        return eager_attention_forward(module, query, key, value, mask, **rest)

    AttentionInterface.register(OFF_BY_ONE, attend)
    AttentionMaskInterface.register(OFF_BY_ONE, eager_mask)
    yield NARROWER
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(OFF_BY_ONE)


WIDTHS = [8, 128, pytest.param(4096, marks=pytest.mark.e2e)]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_window_off_by_one_moves_every_head_by_one_key_a_row(width):
    """At any width, and where no divergence shows it: one key of 128 moves JS by less than 0.01 bits."""
    length = width + 12
    first = windowed(width)
    heads = sum(first.geometry.heads_by_layer.values())
    other = with_config(first, sliding_window=width - 1)
    comparison = beside(first, other, [length])
    verdict = judge(comparison, parse_gate("visible=same"))
    assert not verdict.holds
    assert len(verdict.moved) == heads > 0
    rows = length - width + 1  # that see a whole window
    assert comparison.changes.keys.gone[0].tolist() == [rows] * heads
    assert not comparison.changes.keys.gained.any()
    assert (comparison.changes.keys.hidden[0] == rows).all()
    assert f"0 keys more and {rows} fewer have mass, the masks differ in {rows} pairs" in verdict.lines[0]
    assert f"first query {width - 1}, key 0" in verdict.lines[0]
    assert judge(comparison, parse_gate("js<0.01")).holds == (width > 8)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_kernel_that_is_off_by_one_under_the_right_mask_moves(width, off_by_one):
    length = width + 12
    loaded = windowed(width)
    for engines in (("eager", off_by_one), (off_by_one, "eager")):
        comparison = beside(loaded, loaded, [length], engines)
        verdict = judge(comparison, parse_gate("visible=same"))
        pairs = comparison.changes.keys.gained + comparison.changes.keys.gone
        assert pairs[0].tolist() == [length - width + 1] * len(comparison.heads)
        assert "the masks are equal" in verdict.lines[0]
        assert (comparison.js.effect > 0).all()
        assert not verdict.holds
    again = beside(loaded, loaded, [length], (off_by_one, off_by_one))
    assert judge(again, parse_gate("visible=same")).holds
    assert not again.js.effect.any()


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss", "gemma2", "bloom", "deepseek_v3"])
def test_a_family_beside_itself_does_not_move(family):
    """Sinks, a soft-cap, a bias by distance, and what is heard by hooks; by two engines where there are two."""
    loaded = wrap(tiny_model(family), byte_level())
    engines = ("eager", "fused") if family != "bloom" else ("eager", "eager")
    comparison = beside(loaded, loaded, [24], engines)
    verdict = judge(comparison, parse_gate("visible=same,js<1e-6,weight<1e-4"))
    assert verdict.holds, verdict.lines


@pytest.mark.parametrize("width", [8, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engines", [("eager", "fused"), ("fused", "eager"), None])
def test_half_precision_again_does_not_move(width, dtype, engines):
    """By another kernel, and beside float32 (None): rounding leaves every key its mass."""
    whole = windowed(width)
    half = wrap(copy.deepcopy(whole.model).to(dtype), whole.tokenizer)
    sides = (half, half, [width + 12], engines) if engines else (whole, half, [width + 12])
    comparison = beside(*sides)
    assert judge(comparison, parse_gate("visible=same,js<0.001")).holds
    assert not np.max([own.max() for own in comparison.changes.own])


def test_a_matrix_that_its_own_mask_does_not_tell_is_counted(monkeypatch):
    """The model's own eager function loses a key: both sides have the same q, k and mask."""
    from transformers.models.mistral import modeling_mistral

    loaded = windowed(8)

    def losing(module, query, key, value, attention_mask, **rest):
        attention_mask = attention_mask.clone()
        attention_mask[..., 5, 3] = torch.finfo(query.dtype).min
        return eager_attention_forward(module, query, key, value, attention_mask, **rest)

    monkeypatch.setattr(modeling_mistral, "eager_attention_forward", losing)
    comparison = beside(loaded, loaded, [20], ("eager", "fused"))
    count = len(comparison.heads)
    assert [own.tolist() for own in comparison.changes.own] == [[[1] * count], [[0] * count]]
    assert "1 by a side's own matrix" in judge(comparison, parse_gate("visible=same")).lines[0]


def test_what_a_dtype_rounds_to_0_is_no_change():
    """Masses near the least number of float16 are there in one run and 0 in another."""
    visible = Visibility(2, 3, causal=False)

    def stored(dtype, last):
        return DenseAttention(torch.tensor([[1.0, 0, 0], [1 - last, 0, last]], dtype=dtype)[None, None], visible)

    half, least = torch.float16, 2.0**-24
    zero, small, large = stored(half, 0.0), stored(half, 4 * least), stored(half, 2000 * least)
    assert least_mass(zero) == 2.0**-14
    assert not key_changes(zero, small).gained.any()
    assert key_changes(zero, large).gained.tolist() == [1]
    assert key_changes(large, zero).gone.tolist() == [1]
    assert (key_changes(zero, large).query.tolist(), key_changes(zero, large).key.tolist()) == ([1], [2])
    single = torch.float32
    assert not key_changes(stored(single, 0.0), stored(single, 1e-36)).gained.any()
    assert key_changes(stored(single, 0.0), stored(single, 1e-30)).gained.tolist() == [1]
    assert key_changes(zero, stored(single, 1e-6)).gained.tolist() == [0]  # the coarser of both decides


@pytest.mark.parametrize(
    ("text", "conditions"),
    [
        ("visible=same", [("visible", None)]),
        ("visible = same, js<0.01,role=same", [("visible", None), ("js", 0.01), ("role", None)]),
        ("entropy < 5e-2,weight<.5,lost<1", [("entropy", 0.05), ("weight", 0.5), ("lost", 1.0)]),
    ],
)
def test_a_gate_is_read(text, conditions):
    read = parse_gate(text)
    assert [tuple(condition) for condition in read] == conditions
    assert parse_gate(",".join(condition.text for condition in read)) == read


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a condition is empty; write it as visible=same"),
        ("js<0.01,", "a condition is empty"),
        ("jss<0.01", "no condition on 'jss'; did you mean js?"),
        ("entropi<1", "did you mean entropy?"),
        ("js", "expected js<NUMBER, got 'js'"),
        ("js>0.01", "expected js<NUMBER, got 'js>0.01'"),
        ("js=same", "expected js<NUMBER, got 'js=same'"),
        ("js<nan", "expected js<NUMBER, got 'js<nan'"),
        ("js<-1", "expected js<NUMBER"),
        ("js<0", "above 0 to 1"),
        ("js<2", "above 0 to 1"),
        ("entropy<0", "expected entropy<NUMBER above 0, got"),
        ("visible<3", "expected visible=same, got 'visible<3'"),
        ("role=induction", "expected role=same, got 'role=induction'"),
        ("js<0.1,js<0.2", "js has two conditions"),
        ("\x1b[31m<1", "there is no condition on"),
    ],
)
def test_what_is_no_gate_is_refused(text, message):
    with pytest.raises(UsageError) as refused:
        parse_gate(text)
    assert message in refused.value.for_shell()
    assert "\x1b" not in refused.value.for_shell()


def made(first_roles, other_roles, js_SN):
    """A comparison of numbers that were made."""
    js_SN = np.asarray(js_SN, np.float64)
    none_SN = np.zeros_like(js_SN)
    keys = [none_SN.astype(int)] * 3 + [none_SN.astype(int) - 1] * 2 + [none_SN]
    roles = tuple(np.array(of, dtype=object) for of in (first_roles, other_roles))
    changes = Changes(roles, (none_SN.astype(int),) * 2, KeyChanges(*keys))
    heads = tuple((0, head) for head in range(js_SN.shape[1]))
    stacks = ("decoder",) * js_SN.shape[1]
    return Comparison(heads, stacks, js_SN, none_SN + 1, none_SN, none_SN, {}, (), changes=changes)


def test_a_number_has_moved_where_its_interval_is_beyond_the_bound():
    """The mean of the first head is beyond the bound, and texts vary too much to say it of others."""
    generator = np.random.default_rng(0)
    spread_S = generator.uniform(0, 0.03, FEWEST * 2)
    js_SN = np.stack([spread_S, np.full(FEWEST * 2, 0.02)], 1)
    roles = [["sink"] * 2] * len(js_SN)
    comparison = made(roles, roles, js_SN)
    assert comparison.js.effect[0] > 0.0125
    assert comparison.js.low_all[0] < 0.0125 < comparison.js.low_all[1]
    verdict = judge(comparison, parse_gate("js<0.0125"))
    assert list(verdict.moved) == [1]
    assert "L0H1 (sink): js 0.02 [" in verdict.lines[0]
    assert "bound 0.0125" in verdict.lines[0]
    few = made(roles[:9], roles[:9], js_SN[:9])
    assert few.js.effect[0] > 0.0125
    verdict = judge(few, parse_gate("js<0.0125"))
    assert list(verdict.moved) == [0, 1]
    assert "too few texts for intervals, means decided" in verdict.line
    assert "[" not in verdict.lines[0]


def test_other_texts_do_not_make_a_gate_flap():
    """At its bound, what is no change fails a gate by means in most samples of texts, and by intervals in few."""
    generator, by_means, by_intervals, caught = np.random.default_rng(1), 0, 0, 0
    roles = [["sink"] * 8] * FEWEST
    for _ in range(20):
        js_SN = generator.gamma(1.0, 1e-4, (FEWEST, 8))
        by_means += bool((js_SN.mean(0) >= 1e-4).any())
        comparison = made(roles, roles, js_SN)
        by_intervals += not judge(comparison, [Condition("js", 1e-4)]).holds
        caught += len(judge(comparison, [Condition("js", 2.5e-5)]).moved) == 8  # a fourth of what there is
    assert by_means >= 15
    assert by_intervals <= 2
    assert caught >= 18


@pytest.mark.parametrize(
    ("first", "other", "moved"),
    [
        (["induction"] * 40, ["induction"] * 40, False),
        (["induction"] * 40, ["other"] * 40, True),
        (["induction"] * 40, [NONE] * 40, True),
        ([NONE] * 30 + ["sink"] * 10, [NONE] * 40, True),
        ([NONE] * 37 + ["sink"] * 3, [NONE] * 40, False),  # three of forty: the interval of their share reaches 0
        (["sink"] * 21 + ["other"] * 19, ["sink"] * 19 + ["other"] * 21, False),  # at its threshold in two texts
        (["sink"] * 3, ["other"] * 3, True),
        (["sink", "sink", "other"], ["sink", "other", "sink"], False),
    ],
)
def test_a_role_has_moved_where_most_texts_show_another(first, other, moved):
    comparison = made([[role] for role in first], [[role] for role in other], [[0.0]] * len(first))
    verdict = judge(comparison, parse_gate("role=same"))
    assert bool(verdict.moved) == moved
    assert verdict.holds == (not moved)


def test_a_gate_that_no_text_can_show_does_not_hold():
    comparison = made([[NONE]] * 3, [[NONE]] * 3, [[0.0]] * 3)
    verdict = judge(comparison, parse_gate("role=same,js<0.1"))
    assert not verdict.holds
    assert verdict.unjudged == (Condition("role"),)
    assert verdict.lines == ["role=same: no head can show it on these texts"]
    assert verdict.line.startswith("gate is not shown: 1 head over 3 texts")
    assert verdict.facts["unjudged"] == ["role=same"]


def test_a_head_is_called_by_an_atlas_where_there_is_one():
    comparison = made([["sink", "self"]], [["other", "other"]], [[0.5, 0.0]])
    verdict = judge(comparison, parse_gate("js<0.1,role=same"), atlas={(0, 0): ("induction", "copying"), (0, 1): ()})
    assert [line.partition(":")[0] for line in verdict.lines] == ["L0H0 (induction, copying)", "L0H1 (self)"]
    assert "js 0.5, bound 0.1; role sink, on the other side other" in verdict.lines[0]
    alone = judge(comparison, parse_gate("js<0.1,role=same"), places=[1])
    assert [move.place for move in alone.moves] == [1]
    assert (alone.facts["heads"], len(alone.facts["moved"])) == (1, 1)


TEXTS = "the river bank is green, and the river bank is wide\nMary saw John, and John gave Mary a book\n"


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "texts.txt").write_text(TEXTS)
    return str(tmp_path / "texts.txt")


def test_the_command_ends_with_1_and_a_line_for_each_head_that_moved(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(study_figures, "save_differences", lambda *given: ())
    out = tmp_path / "out"
    flags = ("compare", "--texts", texts, "--compare-dtype", "bfloat16", "--select", "0-1")
    held = call(*flags, "--gate", "visible=same,js<0.01,role=same,weight<0.1", "--out", str(out))
    assert held.code == 0
    assert held.err.splitlines()[-1].startswith("gate holds: 12 heads over 2 texts: visible=same,js<0.01,")
    assert json.loads((out / "compare.json").read_text())["gate"]["holds"] is True
    moved = call(*flags, "--gate", "js<1e-7", "--out", str(out), "-q")  # over the same folder: the numbers are the same
    assert moved.code == 1
    assert moved.out == held.out  # the table is the table
    lines = moved.err.splitlines()
    assert len(lines) == 12
    assert lines[0].startswith("moved: L0H0")
    assert [line.split()[1][:4] for line in lines] == [f"L{layer}H{head}" for layer in (0, 1) for head in range(6)]
    facts = json.loads((out / "compare.json").read_text())["gate"]
    assert (facts["schema"], facts["holds"], facts["heads"], facts["texts"]) == ("gate/1", False, 12, 2)
    first = facts["moved"][0]
    assert (first["layer"], first["head"], first["stack"], first["condition"]) == (0, 0, "decoder", "js<1e-07")
    row = next(row for row in moved.rows if (row["layer"], row["head"]) == ("0", "0"))
    assert first["value"] == pytest.approx(float(row["js"]), rel=1e-6)
    assert (first["low"], first["high"]) == (None, None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_model_in_half_precision_does_not_move_under_another_engine(texts, dtype):
    flags = (
        "--dtype",
        dtype,
        "--engine",
        "eager",
        "--compare-engine",
        "fused",
        "--gate",
        "visible=same,js<0.001,role=same",
    )
    result = call("compare", "--texts", texts, *flags, "-q")
    assert (result.code, result.err) == (0, "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--text", "a", "--compare-text", "b", "--gate", "js<0.1"), "--gate holds two models to each other"),
        (("--text", "a", "--compare-model", "demo", "--gate", "jss<0.1"), "did you mean js?"),
        (("--text", "a", "--gate", "js<0.1"), "nothing to compare with"),
        (("--text", "a", "--compare-text", "b", "--compare-dtype", "float16"), "--compare-text is of one model"),
        (("--text", "a", "--save-baseline", "b.json", "--gate", "js<0.1"), "--gate needs two sides"),
        (("--text", "a", "--save-baseline", "b.json", "--out", "o"), "--save-baseline writes one file"),
        (("--text", "a", "--save-baseline", "b.txt"), "b.txt"),
        (("--text", "a", "--compare-text", "b", "--compare-attention", "eager"), "--compare-text is of one model"),
        (("--text", "a", "--compare-attention", "fast"), "transformers has no attention named fast"),
        (("--text", "a", "--compare-engine", "fast"), "expected auto, eager, fused or probe, got 'fast'"),
    ],
)
def test_what_the_command_refuses_of_a_gate(flags, message):
    result = call("compare", *flags, "-q")
    assert (result.code, result.out, len(result.err.splitlines())) == (2, b"", 1)
    assert message in result.err


def test_the_kernel_that_is_deployed_is_held_to_eager():
    flags = ("--engine", "probe", "--compare-attention", "eager", "--gate", "visible=same,weight<1e-5")
    done = call("compare", "--text", "the cat sat on the mat", *flags).ok()
    assert "engine probe (sdpa)" in done.err
    assert "engine probe (eager)" in done.err
    assert "gate holds" in done.err


def test_python_has_the_verdict(demo):
    result = attnscope.compare(demo, demo, "the financial bank", gate="visible=same,js<0.1", compare_engine="eager")
    assert result.verdict.holds
    assert "gate holds: 24 heads over 1 text" in result.line
    assert attnscope.compare(demo, demo, "the financial bank").verdict is None
    with pytest.raises(UsageError, match="two texts differ"):
        attnscope.compare(demo, demo, "a bank", compare_text="a boat", gate="js<0.1")


def test_other_tokens_have_no_keys_to_hold(demo):
    other = wrap(tiny_model("llama", hidden_size=96, num_attention_heads=6, vocab_size=330), byte_level())
    with pytest.raises(UsageError, match="the two sides have other tokens"):
        attnscope.compare(demo, other, "the financial bank", gate="visible=same")


# a baseline


@pytest.fixture(scope="module")
def baseline(demo, tmp_path_factory):
    """A baseline of two texts, as the command saves it."""
    folder = tmp_path_factory.mktemp("baseline")
    (folder / "texts.txt").write_text(TEXTS)
    call("compare", "--texts", str(folder / "texts.txt"), "--save-baseline", str(folder / "base.json")).ok()
    return folder


def beside_it(baseline, *flags):
    texts, path = str(baseline / "texts.txt"), str(baseline / "base.json")
    return call("compare", "--texts", texts, "--baseline", path, *flags, "-q")


def test_a_run_again_is_what_its_baseline_says(baseline):
    held = beside_it(baseline, "--gate", "visible=same,role=same,entropy<1e-12")
    assert held.code == 0
    assert {(row["js"], row["entropy_difference"], row["texts"]) for row in held.rows} == {("", "0.0", "2")}
    moved = beside_it(baseline, "--dtype", "bfloat16", "--gate", "visible=same,entropy<1e-5")
    assert moved.code == 1
    assert all("entropy" in line and "visible" not in line for line in moved.err.splitlines())


def test_a_terminal_has_no_column_of_what_a_baseline_lacks(baseline):
    shown = beside_it(baseline, "--format", "table", "--top", "2").ok().out.decode()
    assert "Δ entropy" in shown
    assert "L0H1" in shown
    assert "JS" not in shown
    assert "lost" not in shown


def test_python_takes_a_baseline_in_place_of_the_other_model(baseline, demo):
    path, texts = baseline / "base.json", TEXTS.splitlines()
    result = attnscope.compare(demo, None, texts, baseline=path, gate="visible=same,entropy<1e-9")
    assert result.verdict.holds
    assert "most apart" not in result.line
    with pytest.raises(UsageError, match="takes the place of the other side"):
        attnscope.compare(demo, demo, texts, baseline=path)
    with pytest.raises(UsageError, match="expected a LoadedModel, got NoneType"):
        attnscope.compare(demo, None, texts)


def test_numbers_of_a_baseline_are_those_of_the_other_side(baseline):
    """A baseline of one model beside another is the comparison of both."""
    flags = ("--texts", str(baseline / "texts.txt"), "-q")
    other = call("compare", *flags, "--dtype", "bfloat16", "--compare-dtype", "float32").ok()
    names = [name for name in other.rows[0] if name.endswith("_difference")]
    by_head = {(row["layer"], row["head"]): row for row in other.rows}
    for row in beside_it(baseline, "--dtype", "bfloat16").ok().rows:
        whole = by_head[row["layer"], row["head"]]
        assert [row[name] for name in names] == [whole[name] for name in names]


@pytest.mark.parametrize("engine", ["eager", "fused"])
def test_a_baseline_knows_which_keys_the_mask_showed(engine):
    first = windowed(8)
    narrower = with_config(first, sliding_window=7)

    def numbers(loaded, engine="eager"):
        sides = [OneSide(loaded, from_ids(loaded.tokenizer, ids_of(20, seed)), ENGINES[engine]) for seed in (0, 1)]
        return read_numbers(sides)

    before = numbers(first)
    assert judge(beside_baseline(numbers(first, engine), before), parse_gate("visible=same")).holds
    verdict = judge(beside_baseline(numbers(narrower, engine), before), parse_gate("visible=same"))
    assert len(verdict.moved) == len(before.heads)
    assert "visible: the mask shows other keys in 2 texts" in verdict.lines[0]


def test_a_baseline_of_other_heads_or_texts_is_refused(baseline, demo):
    text = call("compare", "--text", "another text", "--baseline", str(baseline / "base.json"), "-q")
    assert text.code == 4
    assert "1 of 1 texts have tokens that the baseline lacks" in text.err
    other = wrap(tiny_model("llama", vocab_size=2000), demo.tokenizer)
    before, now = (
        read_numbers([OneSide(loaded, from_ids(demo.tokenizer, ids_of(9)), ENGINES["eager"])])
        for loaded in (demo, other)
    )
    with pytest.raises(UsageError, match="baseline has 24 heads in 4 layers, the model 16 in 4"):
        beside_baseline(now, before)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--gate", "js<0.1"), "js takes the weights of both sides"),
        (("--gate", "visible=same,weight<0.1"), "weight takes the weights of both sides"),
        (("--compare-model", "demo"), "--baseline takes the place of a second side"),
        (("--save-baseline", "b.json"), "--baseline and --save-baseline were both given"),
    ],
)
def test_what_a_baseline_cannot_answer_is_refused(baseline, flags, message):
    result = beside_it(baseline, *flags)
    assert (result.code, result.out, len(result.err.splitlines())) == (2, b"", 1)
    assert message in result.err


def spoiled(document, how):
    """The text of a baseline's file with one thing wrong."""
    if isinstance(how, str):
        return how
    field, value = how
    return json.dumps({**document, field: value})


@pytest.mark.parametrize(
    "how",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"schema": 3}',
        ("schema", "compare/2"),
        ("schema", "baseline/9"),
        ("heads", []),
        ("heads", [["decoder", 0, 0]] * 24),
        ("heads", [["nowhere", 0, at] for at in range(24)]),
        ("heads", [[1, 2]] * 24),
        ("texts", ["x"]),
        ("metrics", {}),
        ("metrics", {"entropy": "much"}),
        ("roles", [[99] * 24] * 2),
        ("roles", [[-1] * 24] * 2),
        ("roles", None),
        ("role_names", ["\x1b[31mred"] * 9),
        ("own", [[0.5, "x"]] * 2),
        ("masks", [[7] * 24] * 2),
        ("mask_names", ["../../etc/passwd"]),
    ],
)
def test_a_damaged_baseline_is_one_line(baseline, tmp_path, how):
    path = tmp_path / "base.json"
    path.write_text(spoiled(json.loads((baseline / "base.json").read_text()), how))
    result = call("compare", "--text", "a bank", "--baseline", str(path), "-q")
    assert result.code in (2, 4)
    assert (result.out, len(result.err.splitlines())) == (b"", 1)
    assert "base.json" in result.err
    assert "\x1b" not in result.err


@pytest.mark.parametrize("field", ["own", "roles", "masks"])
def test_numbers_of_another_kind_in_a_baseline_are_refused(baseline, tmp_path, field):
    document = json.loads((baseline / "base.json").read_text())
    read_baseline(baseline / "base.json")
    document[field][0][0] += 0.5
    (tmp_path / "half.json").write_text(json.dumps(document))
    document = json.loads((baseline / "base.json").read_text())
    document["metrics"]["entropy"][0][0] = float("inf")
    (tmp_path / "infinite.json").write_text(json.dumps(document))
    for name in ("half.json", "infinite.json"):
        with pytest.raises(InputError, match="is not a baseline, or is damaged"):
            read_baseline(tmp_path / name)


def test_the_folder_of_a_run_is_a_baseline(tmp_path, demo):
    text, run = "the river bank is green and the river bank", tmp_path / "run"
    attnscope.capture(demo, text).export(run, figures=())
    for path in (run, run / "manifest.json"):
        flags = ("compare", "--text", text, "--baseline", str(path), "-q", "--gate")
        held = call(*flags, "entropy<1e-4,induction<1e-5")
        assert (held.code, held.err, len(held.rows)) == (0, "", 24)
        assert call(*flags, "entropy<1e-4", "--dtype", "bfloat16").code == 1
        refused = call(*flags, "visible=same")
        assert (refused.code, refused.out) == (2, b"")
        assert "does not hold which keys its queries saw; save a baseline with --save-baseline" in refused.err
    (run / "heads.csv").write_text("layer,head\n1,2\n")
    damaged = call("compare", "--text", text, "--baseline", str(run), "-q")
    assert (damaged.code, damaged.out, len(damaged.err.splitlines())) == (4, b"", 1)
