"""The table of heads on a terminal: its columns at every width, its rows of uniform attention, what is said below."""

import re
from pathlib import Path

import pytest
import torch

from attnscope.metrics.metrics import METRICS
from attnscope.metrics.roles import ROLES
from helpers import own
from helpers.command_line import SENTENCE, call
from helpers.folders import saved

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LONG_TOKEN = "counterrevolutionaries"
TEXT = "The river bank is wide and green. The old mill stands by the river and the bank. " * 5


def lines_of(*arguments, columns):
    """The printed table, without colours, and the talk."""
    result = call(*arguments, columns=columns).ok()
    return CODES.sub("", result.out.decode()).splitlines(), result.err.splitlines()


def heads_in(lines):
    return [line for line in lines if re.match(r"\s*L\d+(H|KV)\d+ ", line)]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """Three layers with a window of 16 tokens and one without, and a kv head for every head."""
    folder = tmp_path_factory.mktemp("windowed")
    changes = {"vocab_size": 2000, "sliding_window": 16, "num_key_value_heads": 4}
    return str(saved(folder, "gemma3_text", max_position_embeddings=512, **changes))


@pytest.fixture(scope="module")
def long_words(tmp_path_factory, windowed):
    """A model whose tokens are whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = saved(tmp_path_factory.mktemp("words"), vocab_size=8)
    words = ["<unk>", LONG_TOKEN * 9, "a", "bank"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return str(folder)


def test_what_the_strongest_relation_is_ranked_by_is_said(demo):
    """L1H1 has a larger weight early in the text, where the query sees few keys."""
    story = Path(__file__).parents[1] / "examples" / "story.txt"
    lines, talk = lines_of("heads", "--file", str(story), "--top", "all", columns=120)
    assert any("strongest relation: largest weight minus 1 / keys that the query sees" in line for line in talk)
    [row] = [line for line in heads_in(lines) if "L1H1" in line]
    assert re.search(r"the\(67\) → \.\(60\) +0\.99", row)
    ids = demo.tokenizer(story.read_text(encoding="utf-8"))["input_ids"]
    weights_QK = own.attentions(demo.model, ids)[1][1].clone()
    weights_QK[:, 0], weights_QK[0] = 0, 0
    assert weights_QK.argmax() != 67 * len(weights_QK) + 60
    uniform_Q1 = 1 / torch.arange(1, len(weights_QK) + 1)[:, None]
    assert (weights_QK - uniform_Q1).argmax() == 67 * len(weights_QK) + 60


@pytest.mark.parametrize(
    "columns", [60, 120, *(pytest.param(columns, marks=pytest.mark.e2e) for columns in (80, 100, 200))]
)
@pytest.mark.parametrize("sort", ["distance", "loc 32", "-entr norm"])
def test_the_column_that_sorts_and_the_weight_are_there_at_every_width(sort, columns):
    lines, _ = lines_of("heads", "--text", SENTENCE, "--sort", sort, columns=columns)
    short = {**METRICS, **{metric.short: metric for metric in METRICS.values()}}[sort.lstrip("-")].short
    header = next(line for line in lines if "strongest relation" in line)
    assert f"{short} {'▴' if sort.startswith('-') else '▾'}" in header
    assert header.rstrip().endswith("weight")
    assert all(re.search(r" (0\.\d\d|1\.00|-)$", line.rstrip()) for line in heads_in(lines))
    assert max(map(len, lines)) <= columns


def test_a_long_token_is_cut_and_the_metrics_stay(long_words):
    text = f"a bank {LONG_TOKEN * 9} a bank {LONG_TOKEN * 9} a"
    lines, _ = lines_of("heads", "--model", long_words, "--text", text, columns=120)
    header = next(line for line in lines if "strongest relation" in line)
    assert all(METRICS[name].short in header for name in ("focus", "previous_token", "induction"))
    assert LONG_TOKEN not in "".join(lines)
    assert any(f"{LONG_TOKEN[:15]}…(" in line for line in lines)


def test_a_row_of_uniform_attention_for_every_kind_of_layer(windowed):
    lines, said = lines_of("heads", "--model", windowed, "--text", TEXT, "--top", "99", columns=240)
    rows = {line.split()[1:3][0]: line.split() for line in lines if line.strip().startswith("uniform")}
    assert [line.split()[1] for line in lines if line.strip().startswith("uniform")] == ["window", "full"]
    assert "window 16" in "".join(lines)
    assert rows["window"][3:] != rows["full"][2:]
    [local] = [line for line in said if "local" in line]
    assert re.match(r"not judged in layers 0-2 \(window 16\): local: .*16 tokens", local)


def test_one_row_of_uniform_attention_where_the_text_is_within_the_window(windowed):
    lines, _ = lines_of("heads", "--model", windowed, "--text", "the bank by the river", columns=200)
    assert len([line for line in lines if line.strip().startswith("uniform")]) == 1
    assert "window 16" not in "".join(lines)


def test_kv_heads_have_a_column_only_where_they_are_shared(windowed, demo_without_atlas):
    own, _ = lines_of("heads", "--model", windowed, "--text", SENTENCE, columns=120)
    grouped = ("heads", "--model", demo_without_atlas, "--text", SENTENCE)
    shared, _ = lines_of(*grouped, columns=120)
    averaged, _ = lines_of(*grouped, "--by", "kv", columns=120)
    headers = [next(line for line in lines if "strongest" in line).split()[1] for lines in (own, shared, averaged)]
    assert headers == ["role", "kv", "role"]


def test_near_uniform_heads_wear_a_mark_and_no_role(windowed):
    lines, said = lines_of("heads", "--model", windowed, "--text", TEXT, columns=120)
    assert "unif" in next(line for line in lines if "strongest" in line).split()
    assert all("≈" in line for line in heads_in(lines))
    assert any("unif ≈: nearly uniform" in line for line in said)


def test_what_stands_below_the_table(tmp_path, demo_without_atlas, monkeypatch):
    monkeypatch.chdir(Path(demo_without_atlas).parent)
    _, said = lines_of("heads", "--model", "./demo", "--text", SENTENCE, columns=120)
    [words, relation] = [line for line in said if line.startswith(("uniform: ", "strongest relation: "))]
    assert "role -" in words
    assert "key 0" in relation
    assert [line for line in said if line.startswith("20 of 24 heads shown; --top N ")]
    [short] = [line for line in said if line.startswith("not judged: ")]
    assert short.startswith("not judged: induction, previous-token, self, duplicate-token, sink, local: ")
    assert "; attnscope scan ./demo --out DIR " in short
    _, said = lines_of("heads", "--text", SENTENCE, columns=120)
    assert [line for line in said if line.startswith("uniform: ") and line.endswith("by a scan of the model")]
    assert not [line for line in said if "attnscope scan" in line]
    _, said = lines_of("heads", "--text", SENTENCE, "--top", "24", columns=120)
    assert not [line for line in said if "heads shown" in line]
    heads = ("--figures", "heads", "--out", str(tmp_path))
    _, said = lines_of("heads", "--text", SENTENCE, "--top", "3", *heads, columns=120)
    assert said[-1].startswith("drew 3 of 24 heads one by one, the first; --figures heads ")


def test_the_demo_configuration_names_the_heads_that_it_speaks_of(tmp_path):
    drawn = ("--figures", "overview", "--out", str(tmp_path))
    result = call("heads", "--config", "configs/demo.yaml", "--top", "all", "--format", "jsonl", *drawn, "-q")
    rows = result.records
    named = {role: {f"L{row['layer']}H{row['head']}" for row in rows if row["text_role"] == role} for role in NAMED}
    assert named == NAMED
    assert "-" not in {row["text_role"] for row in rows}


NAMED = {"induction": {"L3H0", "L3H1"}, "previous-token": {"L1H5", "L2H1"}}


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize(
    "command", [("relations", "--text", SENTENCE), ("rollout", "--text", SENTENCE), ("parity",)], ids=lambda one: one[0]
)
def test_numbers_end_below_each_other(command, columns):
    lines, _ = lines_of(*command, columns=columns)
    ends = {len(line.rstrip()) for line in lines[3:] if re.search(r"\d$", line.rstrip())}
    assert len(ends) == 1


MEANT = {
    "focus": "focus: ",
    "prev": "prev: ",
    "induct": "induct: ",
    "sink": "sink: ",
    "entropy": "entropy: ",
    "kv": "kv: ",
}


@pytest.mark.parametrize("columns", [80, pytest.param(100, marks=pytest.mark.e2e), 200])
@pytest.mark.parametrize("asked", [(), ("--query", "last", "--key", "bank#1")], ids=["all", "asked"])
def test_every_word_of_the_first_table_is_defined_where_it_is_shown(asked, columns):
    lines, said = lines_of("heads", "--text", SENTENCE, *asked, columns=columns)
    header = next(line for line in lines if "strongest relation" in line).split()
    below = "\n".join(said)
    assert {word for word, meaning in MEANT.items() if meaning in below} == {word for word in MEANT if word in header}
    assert ("mass: " in below) == ("mass" in header)
    defined = [line for line in said if re.match(r"(focus|prev|induct|sink|entropy|kv|mass|uniform): ", line)]
    assert "uniform: " in below
    assert len(defined) <= 5


@pytest.mark.parametrize(
    "columns", [60, 100, 200, *(pytest.param(columns, marks=pytest.mark.e2e) for columns in (80, 120))]
)
def test_columns_that_have_no_room_are_counted(columns):
    every, _ = lines_of("heads", "--text", SENTENCE, columns=400)
    lines, said = lines_of("heads", "--text", SENTENCE, columns=columns)
    titles = [re.split(r"\s\s+", next(line for line in some if "weight" in line).strip()) for some in (every, lines)]
    left_out = len(titles[0]) - len(titles[1])
    counted = [line for line in said if "a wider terminal, --sort METRIC or a pipe shows them" in line]
    assert [int(line.split()[0]) for line in counted] == [left_out] * bool(left_out)


def test_metrics_are_listed_in_short_first():
    lines, _ = lines_of("metrics", columns=120)
    first = [line for line in lines if line[1:2].strip(" ─")]  # of each row, the others continue its last column
    for line, metric in zip(first[1:], METRICS.values(), strict=False):
        assert line.split()[0] == metric.id
        assert f" {metric.short} " in line
    assert any("near_uniform" in line for line in lines)


def test_the_table_of_metrics_is_whole_at_80_columns_and_says_where_the_rest_is():
    lines, _ = lines_of("metrics", columns=80)
    shown = " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= 80
    assert "…" not in shown
    for metric in METRICS.values():
        first = metric.reading.split()[0]
        assert re.search(rf" {metric.id} +{re.escape(metric.short)} .*{re.escape(first)}", "\n".join(lines))
        assert metric.reading.split()[-1] in shown
    assert all(role.name in shown for role in ROLES)
    assert "formula, rows, unit and source of a metric: attnscope metrics ID" in shown
    assert "formula" not in shown.partition("formula, rows")[0]
    one, _ = lines_of("metrics", "induction", columns=80)
    assert METRICS["induction"].source in " ".join(" ".join(one).split())
    assert "stacks all" in " ".join(" ".join(lines_of("metrics", "sink", columns=80)[0]).split())


@pytest.mark.parametrize("columns", [80, 200])
def test_headings_of_parity_are_whole(columns):
    lines, _ = lines_of("parity", columns=columns)
    head = " ".join(lines[: next(place for place, line in enumerate(lines) if "───" in line)])
    assert "…" not in head
    assert {"output", "relative", "masked", "weight", "row", "sum", "error"} <= set(head.split())
