"""`attnscope text`: its numbers against sums over `output_attentions`, and what is printed decoded back to them."""

import io
import math
import re

import numpy as np
import pytest
import torch
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from attnscope.errors import UsageError
from attnscope.figures.colours import Limits
from attnscope.figures.terminal import RAMP, Prose
from attnscope.hooks.engines import ENGINES
from attnscope.inputs.prompt import from_text
from attnscope.observe.collect import observe
from attnscope.observe.observation import token_table
from attnscope.observe.request import Request, View
from helpers.command_line import SENTENCE, call
from helpers.dispatched import largest_tensor
from helpers.own import attentions

ESCAPE = "\x1b"
BARS = "▁▂▃▄▅▆▇█"
N = 9  # tokens of the sentence
BANKS, LAST = (3, 8), (8,)


@pytest.fixture(scope="module")
def matrices(demo):
    """(L, H, Q, K) of the sentence, as Hugging Face gives them."""
    return torch.stack(attentions(demo.model, from_text(demo.tokenizer, SENTENCE).ids)).double().numpy()


def received(matrix, queries):
    """The mean weight on every key, as loops sum it; NaN for what none of the queries sees."""
    return [sum(matrix[i][j] for i in queries) / len(queries) if j <= max(queries) else math.nan for j in range(N)]


def given(matrix, keys):
    """The mass of every query on some keys; NaN for what sees none of them."""
    return [sum(matrix[i][j] for j in keys) if i >= min(keys) else math.nan for i in range(N)]


def ran(*arguments, **environment):
    """A quiet run that went well and said nothing."""
    return call("text", "--text", SENTENCE, "--quiet", *arguments, **environment).silent()


def printed_by(*arguments, **environment):
    return ran(*arguments, **environment).out.decode()


# The numbers


@pytest.mark.parametrize("engine", ["eager", "fused"])
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (("--query", "last"), lambda one: received(one, LAST)),
        (("--query", "bank"), lambda one: received(one, BANKS)),
        (("--query", "5", "--key", "bank"), lambda one: received(one, (5,))),
        ((), lambda one: received(one, range(N))),
        (("--key", "bank"), lambda one: given(one, BANKS)),
        (("--key", "first"), lambda one: given(one, (0,))),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, tuple) else "",  # an address would differ in every process
)
def test_a_row_per_token_says_its_weight(demo, matrices, asked, expected, engine):
    rows = ran(*asked, "--select", "1.4,3", "--format", "jsonl", "--engine", engine).records
    heads = [(1, 4), *((3, head) for head in range(6))]
    assert [(row["layer"], row["head"], row["kv_head"]) for row in rows[::N]] == [(*one, one[1] // 2) for one in heads]
    tokens = from_text(demo.tokenizer, SENTENCE).tokens
    assert [(row["position"], row["token"]) for row in rows] == [*enumerate(tokens)] * len(heads)
    weight = np.array([math.nan if row["weight"] is None else row["weight"] for row in rows]).reshape(-1, N)
    np.testing.assert_allclose(weight, [expected(matrices[one]) for one in heads], atol=1e-5)
    uniform = np.array([math.nan if row["uniform"] is None else row["uniform"] for row in rows]).reshape(-1, N)
    spread = [[float(j <= i) / (i + 1) for j in range(N)] for i in range(N)]
    np.testing.assert_allclose(uniform, [expected(np.array(spread))] * len(heads), atol=1e-6)


@pytest.mark.parametrize("engine", ["eager", "fused"])
def test_heads_are_averaged_in_a_layer_or_all(matrices, engine):
    def weights(*arguments):
        rows = ran(*arguments, "--query", "last", "--engine", engine).rows
        return [{row["layer"] for row in rows}, {row["head"] for row in rows}], [float(row["weight"]) for row in rows]

    which, found = weights()
    assert which == [{""}, {""}]
    np.testing.assert_allclose(found, matrices.mean((0, 1))[8], atol=1e-5)
    which, found = weights("--select", "1,3", "--mean", "layer")
    assert which == [{"1", "3"}, {""}]
    np.testing.assert_allclose(np.reshape(found, (2, N)), matrices[[1, 3]].mean(1)[:, 8], atol=1e-5)
    which, found = weights("--select", "1.0-1", "--by", "kv")
    np.testing.assert_allclose(found, matrices[1, :2].mean(0)[8], atol=1e-5)


def test_a_token_outside_a_window_has_no_weight(demo, matrices):
    """Of a mean, it has what the heads that see it give it."""
    from attnscope.observe.observation import head_tokens
    from attnscope.observe.records import TokenWeights
    from attnscope.observe.request import LayerKey, PerLayer

    prompt = from_text(demo.tokenizer, SENTENCE)
    seen = observe(demo, [prompt], Request(metrics=(), per_token=True, query="last", view=View(heads={0: [0, 1]})))[0]
    weight = seen.per_token[0].weight.clone()
    weight[1, :4] = math.nan
    weight[:, 0] = math.nan
    kept = {LayerKey(0): TokenWeights([0, 1], weight, seen.per_token[0].uniform)}
    found = head_tokens(seen.keeping(per_token=PerLayer(kept)), "all")[0].weight_T
    expected = [math.nan, *(matrices[0, 0, 8, 1:4] / 2), *matrices[0, :2, 8, 4:].mean(0)]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_prompts_of_a_batch_have_their_own_tokens(demo):
    texts = [SENTENCE, "the bank"]
    prompts = [from_text(demo.tokenizer, text) for text in texts]
    for wanted in (Request(metrics=(), per_token=True, query="last"), Request(metrics=(), per_token=True, key="bank")):
        together = observe(demo, prompts, wanted)
        for prompt, seen in zip(prompts, together, strict=True):
            alone = observe(demo, [prompt], wanted)[0]
            for layer in range(4):
                found, expected = seen.per_token[layer].weight, alone.per_token[layer].weight
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=0, equal_nan=True)


def test_a_long_text_takes_no_matrix(demo):
    loaded, text = demo, "the river bank " * 500
    prompt = from_text(loaded.tokenizer, text, max_tokens=1500, truncate="right")
    request = Request(metrics=(), per_token=True, query="last")
    with largest_tensor() as largest:
        observe(loaded, [prompt], request, engine=ENGINES["fused"])
    assert largest[0] < 4 * 6 * 1500 * 1500 / 4


def test_who_asks_for_nothing_keeps_nothing(demo):
    seen = observe(demo, [from_text(demo.tokenizer, SENTENCE)], Request(metrics=()))[0]
    assert not seen.per_token
    with pytest.raises(UsageError, match="per_token=True"):
        token_table(seen)


def test_out_writes_the_numbers_and_from_repeats_them(tmp_path):
    asked = ("--query", "bank", "--select", "1.4")
    printed = printed_by(*asked, "--out", str(tmp_path / "a"), "--format", "csv")
    assert (tmp_path / "a" / "text.csv").read_text() == printed
    again = call("text", "--from", str(tmp_path / "a" / "manifest.json"), "-q", "--format", "csv")
    assert (again.code, again.out.decode()) == (0, printed)


# What is printed


def texts(printed):
    """The lines of each text on a screen: title, body, and the line of the scale."""
    return [part.splitlines() for part in printed.strip("\n").split("\n\n")]


def painted(printed):
    """(token, how far up the scale) of every run with a background, by rich's own reading of the codes."""
    found = []
    for line in printed.splitlines():
        text = Text.from_ansi(line)
        for span in text.spans:
            colour = getattr(span.style, "bgcolor", None)
            if colour is not None:
                green = colour.get_truecolor()[1]
                found.append(
                    (text.plain[span.start : span.end], float(np.interp(-green, -RAMP[:, 1], np.linspace(0, 1, 5))))
                )
    return found


def test_colours_read_back_are_the_weights(demo, matrices):
    screen = printed_by("--query", "last", "--select", "1.4", columns=80, COLORTERM="truecolor")
    title, body, scale = Text.from_ansi(screen).plain.strip().splitlines()
    assert title == "L1H4"
    assert body == "<s>the financial bank is located on river »bank«"
    row = matrices[1, 4, 8]
    assert scale.endswith(f"{row.max():.2f}  largest {row.max():.2f} located(5), sink <s>(0) {row[0]:.2f}, »query«")
    found = painted(screen.splitlines()[1])
    words = [token.strip() for token in from_text(demo.tokenizer, SENTENCE).tokens]
    expected = [(word, weight / row.max()) for word, weight in zip(words, row, strict=True) if weight >= row.max() / 16]
    assert [word for word, _ in found] == [word for word, _ in expected] == ["located", "on", "river"]
    np.testing.assert_allclose([level for _, level in found], [level for _, level in expected], atol=0.02)


@pytest.mark.parametrize("scale", ["linear", "sqrt", "log"])
def test_bars_read_back_are_the_weights(matrices, scale):
    printed = printed_by("--key", "bank", "--select", "1.4,3.3", "--format", "table", "--set", f"scale={scale}")
    assert ESCAPE not in printed
    for (layer, head), (title, body, bars, legend) in zip([(1, 4), (3, 3)], texts(printed), strict=True):
        assert title == f"L{layer}H{head}"
        assert body == "<s>the financial ‹bank› is located on river ‹bank›"
        mass = given(matrices[layer, head], BANKS)
        telling = [one for one in mass if not math.isnan(one)]
        high = max(telling) if max(telling) < 0.9 else 1.0
        low = 10.0 ** math.floor(math.log10(min(telling)))
        words = re.finditer(r"\w+", body.replace("<s>", "   "))
        for word, weight in zip(words, mass[1:], strict=True):
            bar = bars.ljust(len(body))[word.start() : word.end()]
            assert len(set(bar)) == 1
            if math.isnan(weight):
                assert set(bar) == {" "}
                continue
            up = {
                "linear": weight / high,
                "sqrt": math.sqrt(weight / high),
                "log": math.log(weight / low) / math.log(high / low),
            }[scale]
            level = BARS.index(bar[0]) + 1 if bar.strip() else 0
            assert level == pytest.approx(up * 8, abs=0.51)
        assert "‹key›" in legend
        assert "sink" not in legend


def test_a_sink_can_be_left_out(matrices):
    kept, masked = (
        printed_by("--query", "last", "--select", "3.0", "--format", "table", *how)
        for how in ((), ("--set", "sink=mask"))
    )
    row = matrices[3, 0, 8]
    assert row.argmax() == 0
    assert f"largest {row[0]:.2f} <s>(0), sink <s>(0) {row[0]:.2f}," in kept
    assert f"largest {row[1:].max():.2f} " in masked
    assert f"sink <s>(0) {row[0]:.2f} (left out)" in masked
    assert texts(kept)[0][2].startswith("███")
    assert texts(masked)[0][2].startswith("   ")
    assert BARS[-1] in masked
    refused = call("text", "--text", SENTENCE, "--key", "first", "--set", "sink=mask")
    assert refused.code == 2
    assert "with --key alone, queries are coloured" in refused.err


def test_the_share_of_the_chosen_keys_is_said(matrices):
    printed = printed_by("--query", "last", "--key", "5", "--select", "1.4", "--format", "table")
    assert f"keys {matrices[1, 4, 8, 5]:.2f}, »query«, ‹key›" in printed
    assert "is ‹located› on river »bank«" in printed


def test_a_query_that_sees_one_key_sets_no_scale(matrices):
    """It looks at key 0 whatever the head does."""
    printed = printed_by("--key", "first", "--select", "1.4", "--format", "table")
    largest = matrices[1, 4, 1:, 0].max()
    assert f"█ {largest:.2g}  " in printed


def test_lines_stay_lines_and_a_break_with_weight_is_seen():
    plain = ("One", "\n", "two\r\n", "\n\n", "\tthree", "\n")
    console = Console(file=io.StringIO(), width=40, color_system=None)
    weights = np.array([1.0, 0.0, 0.0, 0.5, 0.0, 0.0])
    console.print(Prose(plain, weights, Limits(0.0, 1.0), marked={5: "query"}))
    _, *lines, _ = console.file.getvalue().rstrip("\n").split("\n")
    assert lines == ["One", "███", "two⇤", "↵", "▄", "↵", "▄", "    three»↵«"]


HOSTILE = (
    "<script>alert('x')</script></style>\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp.exe\x00\x85\u2028\r\tend"
    + "日本👩‍👩‍👧e\u0301🇩🇪"
)


COLOURS = [{"NO_COLOR": "1"}, {"COLORTERM": "truecolor"}, {}]
BY_DEFAULT = [(20, 0), (20, 1), (20, 2), (33, 0), (80, 1), (200, 2)]


@pytest.mark.parametrize(
    ("columns", "colour"),
    [
        pytest.param(columns, colour, marks=[] if (columns, place) in BY_DEFAULT else pytest.mark.e2e)
        for columns in (20, 33, 80, 200)
        for place, colour in enumerate(COLOURS)
    ],
    ids=str,
)
def test_nothing_steers_the_terminal_or_is_wider_than_it(tmp_path, columns, colour):
    (tmp_path / "text").write_text(f"the bank {HOSTILE} " + "x" * 250)
    result = call("text", "-f", str(tmp_path / "text"), "-q", "--query", "last", columns=columns, **colour).silent()
    printed = re.sub(r"\x1b\[[0-9;]*m", "", result.out.decode())
    assert ("NO_COLOR" in colour) == (printed == result.out.decode())
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]", printed)
    assert "⟨001B⟩" in printed.replace("\n", "")
    assert all(cell_len(line) <= columns for line in printed.splitlines())


def test_a_token_of_100_000_characters_is_printed_whole():
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(Prose(("x" * 100_000, "日" * 1000), np.array([0.5, 1.0]), Limits(0.0, 1.0)))
    printed = console.file.getvalue()
    assert printed.count("x") == 100_000
    assert printed.count("日") == 1000
    assert max(map(cell_len, printed.splitlines())) == 80


def test_bars_stand_below_their_own_columns():
    """Wide characters take two; marks, joiners and pieces of a character stand with the character they belong to."""
    plain = ("日", "", "e", "\u0301", "👩", "\u200d", "👧", "x")
    weights = np.array([0.125, 0.125, 0.0, 0.5, 0.25, 0.25, 0.25, 0.0])
    family = cell_len("👩\u200d👧")  # 2 from rich 14.3 on
    for summed, expected in ((True, "▂▂▄" + family * "▆"), (False, "▁▁▂" + family * "▂")):
        console = Console(file=io.StringIO(), width=40, color_system=None)
        console.print(Prose(plain, weights, Limits(0.0, 1.0), summed=summed))
        _, text, bars, _ = console.file.getvalue().rstrip("\n").split("\n")
        assert text == "".join(plain)
        assert bars == expected


def test_a_pipe_gets_numbers_unless_the_text_is_asked_for():
    assert printed_by("--query", "last").startswith("layer,head,kv_head,position,token,weight,uniform,stack\n")
    plain = printed_by("--query", "last", "--format", "table", "--select", "1.4", COLUMNS="60")
    coloured = printed_by("--query", "last", "--format", "table", "--select", "1.4", COLUMNS="60", FORCE_COLOR="1")
    assert ESCAPE not in plain
    assert painted(coloured) or re.search(r"48;5;\d+", coloured)
    assert BARS[3] not in Text.from_ansi(coloured).plain.splitlines()[2]
    assert ESCAPE not in printed_by("--query", "last", columns=80, NO_COLOR="1", COLORTERM="truecolor")
    assert ESCAPE not in printed_by("--query", "last", columns=80, TERM="dumb")
