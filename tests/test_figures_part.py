"""The part of a map that belongs to the tokens that were asked about: its numbers, its labels, its gaps, its scale."""

import re
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest

import attnscope
from attnscope.attention.operator import DenseAttention
from attnscope.attention.tiling import TiledAttention
from attnscope.export.drawing import layer_maps
from attnscope.figures import Maps, Part, Style, save_head_maps, save_layer, save_overview
from attnscope.figures.fonts import Fonts
from attnscope.figures.overview import overview_figure
from attnscope.figures.style import TAKEN, alone, split_sink
from attnscope.figures.writer import drawing
from attnscope.observe.request import CaptureSpec, Request, View
from attnscope.observe.run import prepare
from helpers.command_line import SENTENCE, call
from helpers.figures import causal, layer_figure, numbered, pixels, places, plain_drawing, shown, words
from helpers.own import attentions

LONG = "the river bank is green and the old boat lies still near the mill . " * 17
EITHER_ENGINE = pytest.mark.parametrize("engine", ["eager", "fused"])


def part(queries: tuple[int, ...], keys: tuple[int, ...], heads: int = 2, tokens: int = 9) -> Maps:
    """Rows and columns of made-up maps."""
    values = causal(heads, tokens)[:, queries][:, :, keys]
    labels = numbered(tokens)
    return Maps(
        1,
        tuple(range(heads)),
        values,
        tuple(labels[query] for query in queries),
        tuple(labels[key] for key in keys),
        starts_Q=queries,
        starts_K=keys,
        part=Part("queries x (some)", queries, keys),
    )


# Numbers


@EITHER_ENGINE
@pytest.mark.parametrize("by_kv", [False, True])
@pytest.mark.parametrize(("query", "key"), [("bank", "the"), (None, "bank"), ("-1", None), ("bank", "bank")])
def test_a_part_is_the_models_own_weights(demo, engine: str, query: str, key: str, by_kv: bool) -> None:
    request = Request(view=View(by_kv=by_kv), metrics=(), maps="all", query=query, key=key)
    seen = attnscope.capture(demo, SENTENCE, request=request, engine=engine)
    every = range(len(seen.prompt))
    queries, keys = (
        [len(every) - 1] if word == "-1" else every if word is None else places(seen.prompt, word)
        for word in (query, key)
    )
    for (layer, _), values_HQK in seen.maps.values.items():
        expected = attentions(demo.model, seen.prompt.ids)[layer].numpy()
        expected = expected.reshape(3, 2, *expected.shape[1:]).mean(1) if by_kv else expected
        assert values_HQK.shape == (len(expected), len(queries), len(keys))
        for r, i in enumerate(queries):
            for c, j in enumerate(keys):
                if j > i:
                    assert np.isnan(values_HQK[:, r, c]).all()
                else:
                    np.testing.assert_allclose(values_HQK[:, r, c], expected[:, i, j], atol=1e-5)


@EITHER_ENGINE
def test_a_small_part_of_a_long_text_is_not_binned_and_reads_its_rows_alone(demo, engine: str, monkeypatch) -> None:
    read = set()
    for kind in (DenseAttention, TiledAttention):
        monkeypatch.setattr(
            kind, "rows", lambda self, a, b, rows=kind.rows: read.update(range(a, b)) or rows(self, a, b)
        )
    run = prepare(demo, CaptureSpec(LONG, Request(metrics=(), maps="all", query="bank", key="green"), engine=engine))
    read.clear()  # of what was compared with eager
    seen = run.observe()
    queries, keys = places(seen.prompt, "bank"), places(seen.prompt, "green")
    assert len(seen.prompt) > 240
    assert seen.maps.values[2].shape == (6, len(queries), len(keys)) == (6, 17, 17)
    expected = attentions(demo.model, seen.prompt.ids)[2].numpy()[:, queries][:, :, keys]
    np.testing.assert_allclose(np.nan_to_num(seen.maps.values[2]), expected, atol=1e-5)
    if engine == "fused":  # eager has the matrix, and its other questions are read off it
        assert read == set(queries)


@EITHER_ENGINE
@pytest.mark.parametrize("rule", ["sum", pytest.param("max", marks=pytest.mark.e2e)])
def test_the_long_side_of_a_part_is_binned_alone(demo, engine: str, rule: str) -> None:
    request = Request(metrics=(), maps="all", key="bank", bin_rule=rule)
    seen = attnscope.capture(demo, LONG, request=request, engine=engine)
    count, keys, [maps, *_] = len(seen.prompt), places(seen.prompt, "bank"), layer_maps(seen)
    assert (maps.bin_queries, maps.bin_size, maps.labels_K) == (2, 1, ("·bank",) * len(keys))
    assert "2 x 1 tokens a cell" in shown(maps, Style()).words.note.get_text().replace("\n", " ")
    weights = attentions(demo.model, seen.prompt.ids)[0].numpy()
    for row, first in enumerate(range(0, count, 2)):
        rows = range(first, min(count, first + 2))
        for column, key in enumerate(keys):
            cell = weights[:, rows, key]
            if rows[-1] < key:
                assert np.isnan(maps.values_HQK[:, row, column]).all()
            else:
                expected = cell.mean(1) if rule == "sum" else cell.max(1)
                np.testing.assert_allclose(maps.values_HQK[:, row, column], expected, atol=1e-5)


def test_a_binned_part_says_the_mean_mass_of_key_0_over_its_own_queries(demo) -> None:
    request = Request(metrics=(), maps="all", query="bank", map_side=5, split_sink=True)
    seen = attnscope.capture(demo, LONG, request=request)
    queries = places(seen.prompt, "bank")
    for maps, weights in zip(layer_maps(seen), attentions(demo.model, seen.prompt.ids), strict=True):
        assert maps.bin_queries == 4
        assert list(maps.key0) == pytest.approx(weights[:, queries, 0].mean(1).tolist(), abs=1e-5)


# What is drawn


def test_labels_say_where_the_tokens_stand() -> None:
    figure = shown(part((3, 4, 8), (0, 1, 7)), Style())
    assert words(figure.ax.get_yticklabels()) == ["3 t3", "4 t4", "8 t8"]
    assert words(figure.ax.get_xticklabels()) == ["0 t0", "1 t1", "7 t7"]
    assert figure.words.note.get_text() == "queries x (some)"
    many = part(tuple(range(1, 150, 2)), (0, 1), tokens=151)
    assert words(shown(many, Style()).ax.get_yticklabels())[:2] == ["1 t1", "5 t5"], "every second row"


def test_a_white_line_stands_where_tokens_are_left_out(tmp_path: Path) -> None:
    values = np.full((1, 3, 4), 0.5, np.float32)
    maps = replace(part((5, 6, 8), (0, 1, 2, 4), heads=1), values_HQK=values)
    whole = replace(maps, starts_Q=(5, 6, 7), starts_K=(0, 1, 2, 3), part=Part("x", (5, 6, 7), (0, 1, 2, 3)))
    assert (maps.axis_Q.gaps, maps.axis_K.gaps, whole.axis_K.gaps) == ([2], [3], [])
    style = Style(annotate=False)
    for name, save in {
        "head": lambda path, one: save_head_maps([(path, one, 0)], style),
        "layer": lambda path, one: save_layer(path, one, style),
        "overview": lambda path, one: save_overview(path, [one], style),
    }.items():
        pictures = []
        for stem, one in (("gaps", maps), ("whole", whole)):
            save(tmp_path / f"{name}-{stem}.png", one)
            pictures.append(pixels(tmp_path / f"{name}-{stem}.png"))
        colour = commonest(pictures[1])
        cell = (pictures[1] == colour).all(-1)
        rows, columns = (np.flatnonzero(cell.sum(axis) > cell.sum(axis).max() / 2) for axis in (1, 0))  # no colour bar
        box = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        white = (pictures[0][box] == 255).all(-1)
        side = len(rows) // 3
        assert np.flatnonzero(white.all(1)).tolist() == [2 * side - 1, 2 * side], name
        assert np.flatnonzero(white.all(0)).tolist() == [3 * side - 1, 3 * side], name
        assert white.sum() == 2 * (4 * side) + 2 * (3 * side) - 4, name


def commonest(picture: np.ndarray) -> np.ndarray:
    """The colour that most pixels have, white and greys aside."""
    values, counts = np.unique(picture[np.ptp(picture, axis=-1) > 30], axis=0, return_counts=True)
    return values[counts.argmax()]


@pytest.mark.parametrize(
    "style",
    [
        Style(sink="mask", per_head_scale=True),
        *(pytest.param(one, marks=pytest.mark.e2e) for one in (Style(), Style(dpi=150))),
    ],
)
def test_a_part_painted_by_cells_is_the_plain_drawing(tmp_path: Path, style: Style) -> None:
    maps = part((1, 2, 5, 8), (0, 1, 4, 6), heads=5)
    paths = [save_layer(tmp_path / "layer.png", maps, style), save_overview(tmp_path / "over.png", [maps], style)]
    with drawing(Fonts()):
        if matplotlib.__version_info__ < (3, 11):
            pytest.skip("matplotlib 3.10 draws the edge between two rows of cells a pixel off")
        for path, figure in zip(paths, (layer_figure(maps, style), overview_figure([maps], style)), strict=True):
            figure.set_dpi(style.dpi)
            assert np.abs(pixels(path) - plain_drawing(figure)).max() <= 2, path.name


def test_the_fast_picture_of_a_head_is_the_plain_drawing(tmp_path: Path) -> None:
    maps = part((1, 2, 5, 8), (0, 1, 4, 6))
    paths = save_head_maps([(tmp_path / f"{index}.png", maps, index) for index in range(2)], Style())
    with drawing(Fonts()):
        whole = plain_drawing(shown(maps, Style(), 1).figure)
    assert np.abs(pixels(paths[1]) - whole).max() <= 2


def test_a_long_thin_part_keeps_cells_that_can_be_seen() -> None:
    maps = part((150,), tuple(range(151)), heads=1, tokens=151)
    with drawing(Fonts()):
        for figure in (overview_figure([maps], Style()), layer_figure(maps, Style())):
            box = figure.axes[0].get_window_extent()
            assert box.width / 26 <= box.height <= box.width / 6


def test_two_keys_of_a_long_text_stay_two_columns() -> None:
    maps = part(tuple(range(200)), (0, 150), heads=64, tokens=200)
    with drawing(Fonts()):
        figure = overview_figure([maps], Style())
    assert "each cell the greatest of 5 x 1" in figure.texts[1].get_text()


# Scales


def test_a_row_that_sees_more_than_is_drawn_sets_the_scale() -> None:
    """Of keys 2 and 8 a row before 8 shows one, and is no row with one key."""
    maps = part(tuple(range(9)), (2, 8))
    seen = [float(v) for q in range(9) for v in maps.values_HQK[:, q].ravel() if not np.isnan(v)]
    high = max(seen)
    assert shown(maps, Style()).map.mesh.get_clim() == pytest.approx((0, high if high < 0.9 else 1))
    first = part(tuple(range(9)), (0,))
    first.values_HQK[:, 1:] *= 0.1
    rest = float(first.values_HQK[:, 1:].max())
    assert shown(first, Style()).map.mesh.get_clim() == pytest.approx((0, rest)), "query 0 sees key 0 alone"
    assert alone([part((1, 2), (0, 1))], Style()) == 0


# Sinks


def test_a_sink_that_is_not_drawn_is_not_taken_out() -> None:
    style = Style(sink="mask")
    maps = part((3, 4, 8), (2, 3, 7))
    assert split_sink(maps, style) == (maps, None)
    with_key0, sink_HQ = split_sink(part((3, 4, 8), (0, 3, 7)), style)
    assert with_key0.starts_K == (3, 7)
    np.testing.assert_array_equal(sink_HQ, causal(2, 9)[:, [3, 4, 8], 0])
    own = replace(maps, sinks=((7, 0.6), (1, 0.5)))
    rest, sink_HQ = split_sink(own, style)
    assert (rest.values_HQK[0, :, 2] == TAKEN).tolist() == [False, False, True]
    assert np.isfinite(rest.values_HQK[1]).sum() == np.isfinite(maps.values_HQK[1]).sum()
    assert np.isnan(sink_HQ[1]).all()
    figure = shown(own, style, 1)
    assert "its sink, key 1, is not among these" in figure.words.note.get_text().replace("\n", " ")
    with drawing(Fonts()):
        assert words(layer_figure(own, style).axes[0].texts) == ["H0 · t7(7) 0.60", "H1"]


def test_a_single_query_tells_no_sink(demo) -> None:
    """What one token looks at most is what was asked for; a head rests on a key over many rows."""
    request = Request(metrics=(), maps="all", query="-1")
    assert all(maps.sinks == () for maps in layer_maps(attnscope.capture(demo, SENTENCE, request=request)))


# The command


@pytest.mark.parametrize(
    "more",
    [
        ("--by", "kv", "--engine", "fused"),
        *(pytest.param(one, marks=pytest.mark.e2e) for one in ((), ("--weights", "scores"), ("--sink", "mask"))),
    ],
)
def test_the_command_draws_the_part(tmp_path: Path, more: tuple[str, ...]) -> None:
    arguments = ("--query", "bank", "--key", "financial", "--image", "svg", "--select", "1.1", *more)
    call("draw", "--text", SENTENCE, *arguments, "--out", str(tmp_path)).ok()
    said = "queries “bank” (2 of 9), keys “financial” (1 of 9)"
    drawn = {path: path.read_text() for path in tmp_path.rglob("*.svg")}
    assert len(drawn) == 3
    for path, text in drawn.items():
        assert said in " ".join(re.sub("<[^>]*>", " ", text).split()), path
        if path.name != "overview.svg":
            assert ">3 ·bank</text>" in text
            assert ">river</text>" not in text


def test_a_picture_in_python_is_the_part(demo) -> None:
    seen = attnscope.capture(demo, SENTENCE, query="bank", key="financial")
    whole = attnscope.capture(demo, SENTENCE)
    assert seen.heatmap(1, 4).png != whole.heatmap(1, 4).png
    assert [maps.labels_Q for maps in layer_maps(seen)] == [("·bank", "·bank")] * 4
