"""`--show`: maps in the terminal, their colours and shades decoded back to `output_attentions`; where they go."""

import io
import re
from itertools import groupby
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import torch
from rich.cells import cell_len
from rich.color import Color, ColorSystem
from rich.console import Console
from rich.text import Text

from attnscope.export.drawing import coarser, layer_maps, terminal_maps
from attnscope.figures import Maps, Style
from attnscope.figures.mosaic import prepare_heads
from attnscope.figures.terminal import HeadMaps
from attnscope.inputs.prompt import from_text
from attnscope.observe.collect import observe
from attnscope.observe.request import Request
from helpers import own
from helpers.command_line import SENTENCE, call, on_terminal, spawn

ESCAPE = "\x1b"
SHADES = "·░▒▓█"
LONG = "The river bank is green. The old boat lies still by the bank and we sat there. " * 20
VIRIDIS = (mpl.colormaps["viridis"](np.arange(256), bytes=True)[:, :3]).astype(int)
COLOUR, PLAIN = {"COLORTERM": "truecolor"}, {"NO_COLOR": "1"}


@pytest.fixture(scope="module")
def attend(demo):
    """text, tokens -> (L, H, Q, K), as Hugging Face gives them."""

    def attentions(text, most=None):
        ids = from_text(demo.tokenizer, text, max_tokens=most, truncate="right").ids
        return torch.stack(own.attentions(demo.model, ids)).numpy()

    return attentions


def shown(*arguments, columns=80, text=SENTENCE, **environment):
    result = call("draw", "--text", text, "--show", "-q", *arguments, columns=columns, **environment)
    return result.silent().out.decode()


def pixels(screen):
    """(P, P, 3) of what half blocks paint, -1 for the terminal's own colour, by rich's own reading of the codes."""
    rows = []
    for line in screen.splitlines():
        text = Text.from_ansi(line)
        top, bottom = np.full((2, len(text.plain), 3), -1)
        for span in text.spans:
            upper, lower = getattr(span.style, "color", None), getattr(span.style, "bgcolor", None)
            for place in range(span.start, span.end):
                if text.plain[place] == "▀" and upper:
                    top[place] = upper.triplet
                    bottom[place] = lower.triplet if lower else -1
                elif text.plain[place] == "▄":
                    bottom[place] = upper.triplet
        if (top >= 0).any():
            rows += [top, bottom]
    wide = max(map(len, rows))
    return np.stack([np.pad(row, ((0, wide - len(row)), (0, 0)), constant_values=-1) for row in rows])


def level(colour):
    """How far up the scale a colour of viridis is; NaN for the terminal's own."""
    if colour[0] < 0:
        return np.nan
    distance = abs(VIRIDIS - colour).sum(-1)
    assert distance.min() == 0
    return distance.argmin() / 255


def cells(screen, size):
    """The values of one map, from its pixels, each cell of size x size."""
    painted = pixels(screen)
    first = np.flatnonzero((painted >= 0).all(-1).any(0))[0]
    found = painted[::size, first::size]
    for row in range(size):
        for column in range(size):
            assert (painted[row::size, first + column :: size][: len(found), : found.shape[1]] == found).all()
    return np.array([[level(colour) for colour in row] for row in found])


def triangle(matrix):
    return np.where(np.tri(len(matrix), dtype=bool), matrix, np.nan)


def test_the_colours_of_a_short_text_are_its_weights(attend):
    found = cells(shown("--select", "1.4", **COLOUR), 2)
    np.testing.assert_allclose(found, triangle(attend(SENTENCE)[1, 4]), atol=1 / 255)


def test_the_colours_of_a_longer_text_are_its_weights(attend):
    """One pixel a cell; an odd number of rows leaves half of the last line blank."""
    found = cells(shown("--select", "2.1", text=LONG[:220], columns=120, **COLOUR), 1)
    expected = triangle(attend(LONG[:220])[2, 1])
    assert 32 < len(expected) < 100
    assert len(expected) % 2 == 1
    np.testing.assert_allclose(found[: len(expected)], expected, atol=1 / 255)
    assert np.isnan(found[len(expected) :]).all()


@pytest.mark.parametrize("engine", ["eager", "fused"])
def test_a_long_text_is_binned_to_the_screen_and_says_so(attend, engine):
    screen = shown("--select", "2.1", "--engine", engine, text=LONG, **COLOUR)
    matrix = attend(LONG)[2, 1]
    size = int(re.search(r"(\d+) x \1 tokens a cell: sum over keys, mean over queries", screen)[1])
    starts = range(0, len(matrix), size)
    expected = np.array([[matrix[i : i + size, j : j + size].sum(-1).mean() for j in starts] for i in starts])
    found = cells(screen, 1)[: len(starts)]
    high = np.nanmax(expected[1:]) if np.nanmax(expected[1:]) < 0.9 else 1.0
    assert len(starts) > 40
    np.testing.assert_allclose(found, np.minimum(triangle(expected) / high, 1), atol=1.5 / 255)


def test_shades_are_the_weights_in_fifths(attend):
    lines = shown("--select", "3.0", **PLAIN).splitlines()
    matrix = attend(SENTENCE)[3, 0]
    for row, line in enumerate(lines[1 : 1 + len(matrix)]):
        signs = line[15:].ljust(18)
        assert [signs[2 * key] for key in range(9)] == [signs[2 * key + 1] for key in range(9)]
        expected = [SHADES[min(int(weight * 5), 4)] for weight in matrix[row, : row + 1]]
        assert signs[::2].rstrip() == "".join(expected)
    assert "· to 0.2  ░ to 0.4  ▒ to 0.6  ▓ to 0.8  █ to 1" in " ".join(lines)


def test_labels_stand_beside_and_below_their_tokens(demo):
    title, *lines = shown("--select", "3.0", **PLAIN).splitlines()
    labels = from_text(demo.tokenizer, SENTENCE).labels
    assert title.strip().startswith("L3H0 (kv 0)")
    assert [line[:15].strip() for line in lines[:9]] == list(labels)
    below = [line.ljust(33) for line in lines[9:17]]
    for key, label in enumerate(labels):
        assert "".join(line[15 + 2 * key] for line in below).strip() == label.strip("·")[:8]


def test_heads_stand_side_by_side_where_they_fit(attend):
    wide = shown("--select", "1.4,2.1,3.0", columns=200, **PLAIN).splitlines()
    narrow = shown("--select", "1.4,2.1,3.0", columns=40, **PLAIN).splitlines()
    assert re.fullmatch(r" *L1H4 \(kv 2\)\S* .*L2H1 \(kv 0\).*L3H0 .*", wide[0])
    assert sum(bool(re.match(r" *L\dH\d", line)) for line in narrow) == 3
    painted = pixels(shown("--select", "1.4,2.1", columns=200, **COLOUR))
    gaps = np.flatnonzero(np.diff((painted >= 0).all(-1).any(0).astype(int)) == 1) + 1
    for first, (layer, head) in zip(gaps, [(1, 4), (2, 1)], strict=True):
        found = [[level(colour) for colour in row[first : first + 18 : 2]] for row in painted[::2]]
        np.testing.assert_allclose(found, triangle(attend(SENTENCE)[layer, head]), atol=1 / 255)


def test_the_sink_stands_in_a_strip_of_its_own(attend):
    matrix = attend(SENTENCE)[3, 0]
    plain = shown("--select", "3.0", "--sink", "mask", **PLAIN).splitlines()
    assert plain[1].strip() == "without key 0 (<s>), mean mass"
    assert plain[2].strip() == f"{matrix[1:, 0].mean():.2f} (grey strip, 0 to 1)"
    assert [line[15] for line in plain[3:12]] == [SHADES[min(int(weight * 5), 4)] for weight in matrix[:, 0]]
    assert all(line[17:19] == "  " for line in plain[3:12])
    painted = pixels(shown("--select", "3.0", "--sink", "mask", **COLOUR))[::2, 15:]
    strip, rest = painted[:, 0], painted[:, 4::2]
    assert (strip == strip[:, :1]).all()
    np.testing.assert_allclose((strip[:, 0] - 80) / 128, matrix[:, 0], atol=1 / 128)
    high = matrix[1:, 1:].max()
    found = [[level(colour) for colour in row[: len(matrix) - 1]] for row in rest]
    np.testing.assert_allclose(found, triangle(matrix)[:, 1:] / high, atol=1 / 255)


def test_a_sink_elsewhere_is_taken_out_where_it_stands():
    """Heads that rest on different keys keep the same columns: what was taken out has a sign, or a grey, of its own."""
    values = np.array([[[1, np.nan, np.nan], [0.3, 0.7, np.nan], [0.1, 0.8, 0.1]]] * 2, np.float32)
    maps = Maps(0, (0, 1), values, ("a", "b", "c"), ("a", "b", "c"), sinks=((1, 0.75), (0, 0.4)))
    style = Style(sink="mask")
    drawn = HeadMaps(prepare_heads([(Path(), maps, 0)], style), style)
    plain, coloured = (
        Console(file=io.StringIO(), width=80, color_system=system, force_terminal=bool(system))
        for system in (None, "truecolor")
    )
    plain.print(drawn)
    lines = plain.file.getvalue().splitlines()
    assert [line[13:] for line in lines[3:6]] == ["a     ██    ", "b ▓▓  ██××  ", "c ██  ░░××░░"]
    assert "×: the sink, taken out" in plain.file.getvalue().replace("\n", " ")
    coloured.print(drawn)
    assert (pixels(coloured.file.getvalue())[4:6, 21:23] == 128).all()


def test_logits_have_the_colours_of_figures_and_no_common_scale():
    screen = shown("--select", "1.4,3.0", "--weights", "scores", **COLOUR)
    assert "-1 " in screen
    assert "+1 times the largest size of each head" in screen
    assert "logit" in screen


# As figures keep the maps, put together for the screen


@pytest.mark.parametrize(
    ("side", "split", "rule"),
    [
        pytest.param(side, split, rule, marks=[] if side == 20 or (split, rule) == (True, "sum") else pytest.mark.e2e)
        for side in (20, 37)
        for split in (False, True)
        for rule in ("sum", "max")
    ],
)
def test_maps_kept_for_figures_are_put_together_as_the_probe_bins(demo, side, split, rule):
    prompt = from_text(demo.tokenizer, LONG, max_tokens=330, truncate="right")

    def maps(most):
        wanted = Request(metrics=(), maps="all", bin_rule=rule, split_sink=split, map_side=most)
        return observe(demo, [prompt], wanted)[0].maps

    fine, found = maps(110), coarser(maps(110), side, split)
    expected = maps(-(-330 // found.bin_size))
    assert fine.bin_size == 3 < found.bin_size == expected.bin_size
    assert found.rows == expected.rows
    assert found.columns == expected.columns
    for layer in expected.values:
        np.testing.assert_allclose(found.values[layer], expected.values[layer], atol=1e-6)
        if split:
            np.testing.assert_allclose(found.key0[layer], expected.key0[layer], atol=1e-6)
    assert coarser(fine, 110, split) is fine


def test_an_unbinned_map_keeps_key_0_apart_when_it_is_put_together(demo):
    prompt = from_text(demo.tokenizer, LONG, max_tokens=100, truncate="right")

    def maps(most):
        wanted = Request(metrics=(), maps="all", split_sink=True, map_side=most)
        return observe(demo, [prompt], wanted)[0].maps

    found, expected = coarser(maps(200), 50, True), maps(50)
    assert (found.rows, found.columns) == (expected.rows, expected.columns)
    for layer in expected.values:
        np.testing.assert_allclose(found.values[layer], expected.values[layer], atol=1e-6)
        np.testing.assert_allclose(found.key0[layer], expected.key0[layer], atol=1e-6)


def test_figures_beside_it_are_those_without_it(tmp_path):
    """They keep finer maps than the screen has room for."""
    command = ("draw", "--text", LONG[:400], "--select", "2.1", "--figures", "heads", "-q")
    call(*command, "--out", str(tmp_path / "a")).ok()
    result = call(*command, "--out", str(tmp_path / "b"), "--show", COLUMNS="80").ok()
    name = "heads/L02H01.png"
    assert result.out.decode().splitlines() == [str(tmp_path / "b" / name)]
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert re.search(r"(\d+) x \1 tokens a cell", result.err)
    assert max(map(cell_len, result.err.splitlines())) <= 80


# Where it goes


def test_in_a_pipe_tables_stay_tables_and_maps_go_to_stderr():
    plain, showing = (call("heads", "--text", SENTENCE, "-q", *how, COLUMNS="80") for how in ((), ("--show",)))
    assert showing.out == plain.out
    assert plain.err == ""
    assert ESCAPE not in showing.err
    titles = re.findall(r"L\dH\d", showing.err)
    ranked = call("heads", "--text", SENTENCE, "-q", columns=80, NO_COLOR="1").out.decode()
    assert titles == re.findall(r"L\dH\d", ranked)[:4]
    assert set("".join(showing.err.split("\n")[1][15:].split())) <= set(SHADES)


def test_maps_alone_are_the_data_of_a_pipe():
    result = call("draw", "--text", SENTENCE, "--show", "--select", "1.4", COLUMNS="60")
    assert "L1H4 (kv 2)" in result.out.decode()
    assert ESCAPE not in result.out.decode() + result.err
    assert "▀" not in result.out.decode()
    coloured = spawn("draw", "--text", SENTENCE, "--show", "--select", "1.4", COLUMNS="60", FORCE_COLOR="1")
    assert "▀" in coloured.out.decode()
    assert re.search(r"\x1b\[38;5;\d+", coloured.out.decode())
    named = call("draw", "--text", SENTENCE, "--show", "--select", "1.4", COLUMNS="60", FORCE_COLOR="1", NO_COLOR="1")
    assert named.out == result.out


def test_on_a_terminal_maps_stand_below_the_table():
    result = call("heads", "--text", SENTENCE, "-q", "--show", "--select", "1.4", columns=80, **PLAIN)
    table, maps = result.out.decode().split("L1H4 (kv 2)")
    assert "strongest relation" in table
    assert "attention weight" in maps
    assert result.err == ""


def test_roles_stand_in_titles(demo):
    seen = observe(demo, [from_text(demo.tokenizer, LONG)], Request(maps="kept", map_side=40))[0]
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(*terminal_maps(seen, ["L2H1", "L0H4"], Style(), 40))
    found = re.findall(r"(L\dH\d) \(kv \d\)  ([\w-]+) (\d.\d\d)", console.file.getvalue())
    assert [name for name, *_ in found] == ["L2H1", "L0H4"]
    for name, role, score in found:
        head = next(head for head in seen.heads if head.name == name)
        assert (role, score) == (head.role, f"{head.score[head.role.replace('-', '_')]:.2f}")
    assert len(layer_maps(seen)) == 4


# Whatever the text, whatever the screen

STEERING = "\x1b[2J\x1b]0;x\x07\x9b31m\u202egnp\x00\x85\u2028\r\n\t"


SCREENS = [COLOUR, PLAIN, {"TERM": "linux"}, {}]
BY_DEFAULT = [(COLOUR, 7), (COLOUR, 80), (PLAIN, 1), (PLAIN, 200), ({"TERM": "linux"}, 20), ({}, 1), ({}, 80)]


@pytest.mark.parametrize(
    ("environment", "columns"),
    [
        pytest.param(one, columns, marks=() if (one, columns) in BY_DEFAULT else pytest.mark.e2e)
        for one in SCREENS
        for columns in (1, 7, 20, 80, 200)
    ],
    ids=str,
)
def test_nothing_steers_the_terminal_or_is_wider_than_it(columns, environment):
    for text in ("日本 bank é 👩‍👩‍👧", f"the <script> {STEERING}</style> bank 日本👩‍👩‍👧e\u0301🇩🇪 " + "x" * 99):
        screen = shown("--select", "1.4,2.1", text=text, columns=columns, **environment)
        printed = re.sub(r"\x1b\[[0-9;]*m", "", screen)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]", printed)
        assert all(cell_len(line) <= columns for line in printed.splitlines())
        if environment in (PLAIN, {"TERM": "linux"}):
            assert "▀" not in printed
        if environment == PLAIN:
            assert printed == screen


@pytest.mark.parametrize("columns", [20, 80])
def test_wide_characters_keep_the_columns(columns):
    """A map begins in the same column on every line, and a wide character below it takes a cell of two."""
    text = "日本 bank é 👩‍👩‍👧 ok"
    lines = shown("--select", "2.1", text=text, columns=columns, **PLAIN).splitlines()
    maps = [line for line in lines if set(line) & set(SHADES[1:]) and " to " not in line]
    first = [cell_len(re.split(rf"(?<= )(?=[{SHADES}]{{2}})", line)[0]) for line in maps]
    assert len(set(first)) == 1
    assert len(maps) > 3


def test_a_terminal_of_256_colours_gets_the_nearest(attend):
    """In a process of its own: rich keeps the codes of a style."""
    arguments = ["draw", "--text", SENTENCE, "--show", "-q", "--select", "1.4"]
    code, screen = on_terminal(arguments, 80, COLORTERM="")
    assert code == 0
    assert "8;2;" not in screen
    [row] = re.findall(r" ·on (.*)\n", screen)
    painted = [int(code) for code in re.findall(r"48;5;(\d+)m", row)]
    weights = attend(SENTENCE)[1, 4, 6]
    expected = [
        Color.from_rgb(*VIRIDIS[round(float(one) * 255)]).downgrade(ColorSystem.EIGHT_BIT).number for one in weights
    ]
    assert [code for code, _ in groupby(painted)] == [code for code, _ in groupby(expected[:7])]


def test_there_must_be_somewhere_to_draw():
    refused = call("draw", "--text", "a")
    assert refused.code == 2
    assert "nowhere to draw; name a folder with --out DIR, or draw in the terminal with --show" in refused.err
