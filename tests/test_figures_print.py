"""Figures for a paper, and what a reader is to see at a glance: sizes, scales, labels, colours, marks."""

import json
import math
import re
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

import attnscope
from attnscope.cli.app import make_command
from attnscope.cli.batch_options import BatchRun
from attnscope.cli.figure_options import Look
from attnscope.cli.option_groups import parameters
from attnscope.errors import UsageError
from attnscope.export.study_figures import costs_of, minus, probe_rows, save_probes, shown_of
from attnscope.figures import About, Maps, Panel, Patches, PatchSheet, SetCost, Style, layout
from attnscope.figures.colours import cmap_of, find_cmap, greys_of
from attnscope.figures.curves import (
    DOT_GREY,
    BudgetLine,
    Course,
    CourseSheet,
    Dots,
    DotSheet,
    budget_lines_figure,
    courses_figure,
    dots_figure,
    sets_figure,
)
from attnscope.figures.fonts import Fonts
from attnscope.figures.heads import HeadFigure, prepare_heads
from attnscope.figures.layout import NUMBER, number_size, wrapped
from attnscope.figures.metrics import metrics_figure
from attnscope.figures.overview import overview_figure
from attnscope.figures.pictures import patches_figure
from attnscope.figures.style import DPI, Axis, ordinal
from attnscope.figures.writer import COLOURS, drawing
from attnscope.studies.atlas import Finding
from attnscope.utils.display import model_name
from helpers.atlases import made_atlas
from helpers.command_line import call
from helpers.commands import COMMANDS
from helpers.figures import bank_maps, causal, first_tokens, layer_figure, numbered, shown, words

COLUMN, PAGE = Style(width="column"), Style(width="page")
SAID = About(line="demo, “the bank”, 9 tokens")


def head_figure(maps: Maps, style: Style) -> HeadFigure:
    """The figure of the first head, in the width that the style asks for."""
    [head, *_] = prepare_heads([(Path("x.png"), maps, 0)], style)
    with drawing(Fonts()):
        built = HeadFigure.of(head, style)
        built.show(head)
    return built


def many(tokens: int) -> Maps:
    return Maps(0, (0,), causal(1, tokens), numbered(tokens), numbered(tokens))


def points(figure) -> set[float]:
    """The sizes of the texts that are drawn, without those of numbers in cells."""
    return {
        round(float(text.get_fontsize()), 3)
        for text in figure.findobj(Text)
        if text.get_text().strip() and text.get_visible() and text.get_label() != NUMBER
    }


# A paper


@pytest.mark.parametrize("tokens", [2, 150, *(pytest.param(tokens, marks=pytest.mark.e2e) for tokens in (9, 60))])
def test_a_map_fills_the_column_with_text_that_can_be_read(tokens: int) -> None:
    built = head_figure(many(tokens), COLUMN.of(SAID))
    wide, box = built.figure.bbox.width, built.ax.get_window_extent()
    assert wide / built.figure.dpi == pytest.approx(3.25, abs=0.03)
    assert box.width / wide > 0.6
    assert points(built.figure) <= {7.0, 8.0} | {size for size in points(built.figure) if 7 < size < 8}
    assert all(not text.get_text() for text in built.figure.texts), "neither title nor caption"
    reach = built.figure.get_tightbbox()
    assert reach.x0 >= -0.02
    assert reach.x1 <= 3.27, "nothing is cut off"


def test_numbers_are_printed_where_they_fit() -> None:
    few = head_figure(many(5), COLUMN).map.numbers
    sizes = {float(text.get_fontsize()) for text in few}
    assert len(few) == 15
    assert 5 <= min(sizes) <= max(sizes) <= 8
    assert not head_figure(many(12), COLUMN).map.numbers, "numbers that nobody can read are left out"
    assert len(shown(many(12), Style()).map.numbers) == 78, "as ever on a screen"
    assert number_size(10, Style()) == 3.0
    assert number_size(10, COLUMN) == 0.0


def test_title_and_caption_are_drawn_where_they_are_asked_for() -> None:
    style = Style(width="column", title="Mine").of(SAID)
    maps = first_tokens(bank_maps(heads=1), 3)
    titled = head_figure(maps, style)
    assert titled.words.title.get_text().replace("\n", " ") == "Mine: L27H0 (kv 0)"
    assert titled.words.foot.get_text() == ""
    foot = head_figure(maps, replace(style, caption=True)).words.foot
    assert "demo" in foot.get_text()
    assert head_figure(maps, Style(caption=False).of(SAID)).words.foot.get_text() == ""
    assert head_figure(maps, Style(width=5).of(SAID)).words.foot.get_text(), "a width in inches is no paper's"


def test_a_papers_files_are_written_with_fine_dots(tmp_path: Path) -> None:
    asked = ("--text", "the river", "--select", "1.4", "--figures", "heads", "--set", "width=column")
    call("draw", *asked, "--out", str(tmp_path)).ok()
    with Image.open(tmp_path / "heads" / "L01H04.png") as found:
        assert found.info["dpi"][0] == pytest.approx(300, abs=0.05)
        assert found.size[0] == pytest.approx(3.25 * 300, abs=4)
    assert Look(width="column", dpi=200).figure_style().dpi == 200
    assert Look(width="5").figure_style().dpi == DPI


@pytest.mark.parametrize("style", [COLUMN, pytest.param(PAGE, marks=pytest.mark.e2e)])
def test_every_other_figure_of_a_paper_has_its_sizes_and_its_width(style: Style) -> None:
    style, layers = style.of(SAID), [replace(bank_maps(heads=6), layer=layer) for layer in range(2)]
    panels = [Panel(f"metric {n}", np.random.default_rng(n).random((4, 6)), 0, 1, "share") for n in range(3)]
    course = Course("induction", "above other", np.random.default_rng(0).random((3, 6)), [1, 2])
    costs = [SetCost("induction", 2.5, (2.2, 2.8), (0.0, 0.4)), SetCost("sink", 0.1)]
    with drawing(Fonts()):
        figures = [
            layer_figure(layers[0], style),
            overview_figure(layers, style),
            metrics_figure(panels, style, ["0", "1", "2", "3"]),
            courses_figure(CourseSheet([course], list("abcdef"), ["1", "2", "3"], "a note"), style, 350),
            sets_figure(costs, style, ("a title", "a note", "nats"), 250),
        ]
        for figure in figures:
            figure.canvas.draw()
            assert min(points(figure)) >= 7 <= max(points(figure)) <= 8, figure
            assert figure.get_size_inches()[0] <= style.inches + 0.02, figure
    for figure in figures[:2]:
        assert figure.get_size_inches()[0] > 0.93 * style.inches, "layers and overview fill it"
        reach, (wide, high) = figure.get_tightbbox(), figure.get_size_inches()
        assert min(reach.x0, reach.y0) >= -0.01, "and nothing is cut off"
        assert reach.x1 <= wide + 0.01
        assert reach.y1 <= high + 0.01


@pytest.mark.parametrize("style", [Style(font_size=14), replace(COLUMN, font_size=5)])
def test_every_text_has_the_size_that_is_asked_for(style: Style) -> None:
    layers = [replace(bank_maps(heads=6), layer=layer) for layer in range(2)]
    panels = [Panel("metric", np.random.default_rng(0).random((4, 6)), 0, 1, "share")]
    with drawing(Fonts()):
        figures = [
            head_figure(many(60), style.of(SAID)).figure,
            layer_figure(layers[0], style),
            overview_figure(layers, style),
            metrics_figure(panels, style, ["0", "1", "2", "3"]),
        ]
        for figure in figures:
            figure.canvas.draw()
            assert points(figure) == {style.font_size}
        labels = [text.get_window_extent() for text in figures[0].axes[0].get_yticklabels() if text.get_text()]
    assert len(labels) < 60
    assert all(one.y0 >= other.y1 - 1 or one.y1 <= other.y0 + 1 for one, other in pairwise(labels)), "none on another"


def test_a_size_or_a_colour_that_does_not_exist_is_refused() -> None:
    for given in ({"font_size": 3}, {"font_size": math.nan}):
        with pytest.raises(UsageError, match="font_size: expected points from 4 to 24"):
            Style(**given)
    with pytest.raises(UsageError, match="'blau' is not a colour; write names or #rrggbb"):
        head_figure(many(5), Style(cmap="white,blau"))


def test_colours_by_commas_are_a_map() -> None:
    cmap = find_cmap("white,#0072b2, black")
    assert [to_hex(cmap(at)) for at in (0.0, 1.0)] == ["#ffffff", "#000000"]
    assert cmap(0.5)[:3] == pytest.approx(to_rgb("#0072b2"), abs=0.01)
    assert cmap(np.ma.masked_invalid([np.nan]))[0][3] == 0, "what no query sees stays blank"


# Scales and labels


def test_the_overview_of_a_long_text_is_lifted_and_says_so() -> None:
    def drawn(maps: Maps, style: Style = Style()):
        with drawing(Fonts()):
            figure = overview_figure([maps], style)
        return figure.axes[0].images[-1].norm, figure.axes[1].get_ylabel()

    norm, label = drawn(many(64))
    assert isinstance(norm, PowerNorm)
    assert label == "weight, square-root scale"
    assert not isinstance(drawn(many(63))[0], PowerNorm)
    for style in (Style(scale="linear"), Style(per_head_scale=True)):
        assert not isinstance(drawn(many(64), style)[0], PowerNorm)
    signed = replace(many(64), quantity="difference")
    assert not isinstance(drawn(signed)[0], PowerNorm), "a root has no sign"
    binned = replace(many(40), bin_size=2, starts_Q=tuple(range(0, 80, 2)), starts_K=tuple(range(0, 80, 2)))
    assert isinstance(drawn(binned)[0], PowerNorm), "80 tokens in 40 cells"


def test_axes_say_how_many_tokens_lie_between_labels() -> None:
    assert Axis("key", numbered(9)).named(1) == "key"
    assert Axis("key", numbered(9)).named(5) == "key (every 5th labelled)"
    assert Axis("key", numbered(9), size=2).named(5) == "key (every 10th token labelled)"
    assert Axis("key", numbered(9), size=3).named(1) == "key (every 3rd token labelled)"
    assert [ordinal(number) for number in (1, 2, 3, 11, 12, 21, 102)] == [
        "1st",
        "2nd",
        "3rd",
        "11th",
        "12th",
        "21st",
        "102nd",
    ]
    starts = tuple(range(0, 280, 2))
    maps = replace(many(140), bin_size=2, starts_Q=starts, starts_K=starts)
    ax = shown(maps, Style()).ax
    first, second = (int(label.get_text().split()[0]) for label in ax.get_xticklabels()[:2])
    assert ax.get_xlabel() == f"key (every {ordinal(second - first)} token labelled)"


def test_zero_is_light_on_paper_and_what_is_not_seen_is_darker(tmp_path: Path) -> None:
    values = np.zeros((1, 9, 9), np.float32)
    values[0][np.triu_indices(9, 1)], values[0, 8, 0] = np.nan, 1.0
    maps = replace(bank_maps(heads=1), heads=(0,), kv_heads=(), values_HQK=values, quantity="difference")
    with drawing(Fonts()):
        beneath, cells = layer_figure(maps, Style()).axes[0].images
    assert np.min(cells.cmap(cells.norm(0.0))[:3]) > 0.95
    assert to_hex(beneath.cmap(beneath.norm(0.0))) == greys_of("difference")[0]
    assert greys_of("difference") != greys_of("weight")


def test_a_signed_map_names_both_sides() -> None:
    def pair(texts: tuple[str, str], models: tuple[str, str] = ("demo", "demo")):
        sides = [SimpleNamespace(loaded=SimpleNamespace(name=name)) for name in models]
        read = ("", "decoder", *(SimpleNamespace(text=text) for text in texts))
        return type("Made", (tuple,), {"texts": [read]})(sides)

    assert minus(pair(("Mary left", "Anna left"))) == "“Anna left” − “Mary left”"
    assert minus(pair(("a", "a"), ("demo", "/models/lora"))) == "lora − demo"
    assert minus(pair(("a", "a"))) == "the other side − the first"
    long = "the town lies where two rivers meet and nobody knows "
    said = minus(pair((f"{long}why", f"{long}when")))
    assert said.count("… ") == 2
    assert "when” − “" in said
    assert said.endswith("why”")


def test_a_path_is_named_by_its_folder() -> None:
    paths = ("/a/models/tiny", "./tiny", "~/models/tiny/", "C:\\models\\tiny", "a/b/tiny")
    assert {model_name(path) for path in paths} == {"tiny"}
    for name in ("demo", "Qwen/Qwen3-0.6B", "/", ""):
        assert model_name(name) == name
    assert Style().of_model("/a/models/tiny").about == About(line="tiny", model="/a/models/tiny")


def test_notes_are_broken_between_phrases() -> None:
    lines = wrapped("queries “last” (1 of 9), keys “bank#1” (1 of 9)", 240, 9.0).split("\n")
    assert lines == ["queries “last” (1 of 9),", "keys “bank#1” (1 of 9)"]
    assert len(wrapped("one phrase of many words that no line can hold", 150, 9.0).split("\n")) > 1


# Studies


def test_sets_have_bars_intervals_and_random_bands() -> None:
    rows = {
        "set": ["@induction", "L3H0", "@induction", "@induction"],
        "condition": ["together", "together", "alone", "random"],
        "heads": ["L3H0 L3H1", "L3H0", "L3H0", "L0H0 L0H1"],
        "effect": [2.5, 0.1, 0.1, 0.02],
        "low_all": [2.2, None, None, None],
        "high_all": [2.8, None, None, None],
        "random_low": [0.0, None, None, None],
        "random_high": [0.4, None, None, None],
    }
    costs = costs_of(rows)
    assert [one.name for one in costs] == ["@induction, 2 heads", "L3H0"]
    with drawing(Fonts()):
        figure = sets_figure(costs, Style(), ("a title", "a note", "nats per token"))
    ax = figure.axes[0]
    band, *bars = ax.patches
    assert [bar.get_width() for bar in bars] == [2.5, 0.1]
    assert (band.get_x(), band.get_width()) == (0.0, 0.4)
    assert words(ax.texts) == ["2.50", "0.10"]
    ends = [line.get_segments()[0][:, 0].tolist() for line in ax.collections[:1]]
    assert ends == [[2.2, 2.8]]
    assert ax.get_xlabel() == "nats per token"
    assert "random sets: 99 % of them" in words(figure.texts)


def test_an_interval_with_an_open_end_reaches_from_its_value_to_the_other() -> None:
    open_high = SetCost("L3H0", 2.5, (2.2, math.nan))
    line = BudgetLine("stream", np.array([1, 2]), np.array([0.5, 0.2]), np.array([math.nan, 0.1]), np.array([0.7, 0.4]))
    with drawing(Fonts()):
        bars, lines = (
            sets_figure([open_high], Style(), ("", "", "")),
            budget_lines_figure([line], Style(), "", unit="nats"),
        )
    [interval, caps] = [one.get_segments() for one in bars.axes[0].collections]
    assert interval[0][:, 0].tolist() == [2.2, 2.5]
    assert [one[0, 0] for one in caps if one.size] == [2.2]
    assert [one[:, 1].tolist() for one in lines.axes[0].collections[0].get_segments()] == [[0.5, 0.7], [0.1, 0.4]]


@pytest.mark.parametrize(
    ("name", "probes"),
    [
        ("@previous-token", ["offset 1"]),
        ("previous-token", ["offset 1"]),
        ("@induction,@self", ["induction p50", "offset 0"]),
        ("3.0-1", []),
    ],
)
def test_the_scores_of_an_ablation_are_of_the_probe_that_named_the_set(name: str, probes: list[str]) -> None:
    effects = SimpleNamespace(effect=np.array([0.9, 0.1]))
    pairs = [("induction p10", "other"), ("induction p50", "other"), ("induction p50", "shuffled")]
    pairs += [(f"offset {steps}", "best other offset") for steps in (0, 1)]
    findings = [SimpleNamespace(probe=probe, against=against, effects=effects) for probe, against in pairs]
    atlas = SimpleNamespace(findings=findings, heads=((0, 0), (0, 1)))
    asked = SimpleNamespace(named=(SimpleNamespace(name=name, heads=((0, 0),)),))
    facts = {"task": {"period": 50}, "measure": {"unit": "nats"}}
    found = SimpleNamespace(asked=asked, facts=facts, effects={((0, 0),): np.array([1.0])}, direct=None)
    panels = shown_of(found, atlas)
    assert [one.name for one in panels] == [*probes, "alone"]
    assert all(one.values == {(0, 0): 0.9, (0, 1): 0.1} for one in panels[:-1])


def test_what_is_hatched_keeps_its_colour() -> None:
    hatched = np.array([[True, True, False], [False, True, True]])
    panel = Panel("offset 1", np.arange(6.0).reshape(2, 3) / 6, 0, 1, hatched_LH=hatched)
    with drawing(Fonts()):
        ax = metrics_figure([panel], Style(), ["0", "1"]).axes[0]
    assert len(ax.images) == 1, "no veil over the colours"
    boxes = [(*patch.get_xy(), patch.get_width()) for patch in ax.patches if patch.get_hatch()]
    assert boxes == [(-0.5, -0.5, 2), (0.5, 0.5, 2)]


def test_lines_of_checkpoints_differ_by_marker_too() -> None:
    course = Course("induction", "", np.random.default_rng(0).random((3, 20)), range(16))
    with drawing(Fonts()):
        sheet = CourseSheet([course], [f"L0H{n}" for n in range(20)], ["a", "b", "c"])
        figure = courses_figure(sheet, Style(), 1240)
    looks = [(line.get_color(), line.get_marker()) for line in figure.axes[0].lines if line.get_linewidth() > 1]
    assert len(looks) == len(set(looks)) == 16
    assert len({marker for _, marker in looks[:8]}) == 8


def test_weights_over_a_picture_let_it_be_seen_and_share_a_bar() -> None:
    box_N4 = np.array([[0, 0, 0.5, 1], [0.5, 0, 1, 1]])
    heads = tuple(Patches(np.array([0.0, weight]), f"L0H{n}") for n, weight in enumerate((0.1, 0.4, 0.8)))
    sheet = PatchSheet(Image.new("RGB", (40, 20)), box_N4, heads)
    with drawing(Fonts()):
        one, each = (patches_figure(sheet, Style(per_head_scale=own)) for own in (False, True))
        one.canvas.draw()
    bars = [[ax for ax in figure.axes[1::2] if ax.axison] for figure in (one, each)]
    assert list(map(len, bars)) == [1, 3]
    assert bars[0][0].get_ylabel() == "attention weight"
    mesh = one.axes[6].collections[0]
    opacity = mesh.cmap(mesh.norm(np.array([0.0, 0.8])))[:, 3]
    assert opacity[0] == 0
    assert 0.4 < opacity[1] < 0.7
    assert bars[0][0].get_tightbbox().x1 <= one.bbox.width


# The commands


def test_whatever_draws_takes_the_same_section_of_a_file() -> None:
    draws = ("heads", "draw", "rollout", "explain", "batch", "scan", "compare", "ablate")
    for name in draws:
        found = parameters(*COMMANDS[name][0].groups)
        assert {"image", *parameters(Look), "config"} <= set(found), name
        listed = [option for option in make_command(name).params if not option.hidden and option.name != "help"]
        assert len(listed) <= 45, name


@pytest.fixture
def looks(tmp_path: Path) -> Path:
    """A file of options that says how pictures look."""
    file = tmp_path / "looks.yaml"
    file.write_text("figures:\n  width: column\n  scale: log\n  cmap: magma\n  image: svg\n  per_head_scale: true\n")
    return file


@pytest.mark.parametrize(
    "arguments",
    [
        ("scan", "demo", "--sequences", "2", "--dry-run"),
        ("ablate", "demo", "--select", "3.0", "--random", "0", "--sequences", "2", "--dry-run"),
    ],
    ids=lambda one: one[0],
)
def test_a_study_takes_that_section(looks: Path, arguments: tuple[str, ...]) -> None:
    call(*arguments, "--config", str(looks)).ok()


@pytest.mark.parametrize("paper", [False, pytest.param(True, marks=pytest.mark.e2e)])
def test_a_picture_is_drawn_as_that_section_says(looks: Path, tmp_path: Path, paper: bool) -> None:
    if not paper:  # a width is found by drawing ten times
        looks.write_text(looks.read_text().replace("  width: column\n", ""))
    call("explain", "--toy", "--head", "L0H0", "--out", str(tmp_path), "--config", str(looks)).ok()
    drawn = (tmp_path / "toy-L0H0.svg").read_text()
    assert ("what scaling does" in drawn) != paper, "a paper has its own title"
    assert "attnscope explain" in drawn


def test_a_name_that_section_does_not_have_is_refused_with_the_nearest(looks: Path) -> None:
    looks.write_text("figures:\n  widht: column\n")
    refused = call("ablate", "demo", "--select", "3.0", "--dry-run", "--config", str(looks))
    assert (refused.code, "'widht'" in refused.err, "'width'" in refused.err) == (2, True, True)


def test_a_dataset_is_held_to_the_looks_of_its_pictures() -> None:
    plain = BatchRun(sources=["a"], out=Path("o"), figures="overview")
    other = replace(plain, cmap="magma", sink="mask")
    assert plain.looks == {}
    assert {name: value for name, value in other.held().items() if name not in plain.held()} == {
        "cmap": "magma",
        "sink": "mask",
    }
    assert other.job(None).output.pictures.style.cmap == "magma"
    assert other.job(None).request.split_sink


def test_probes_that_name_nobody_are_left_out(tmp_path: Path) -> None:
    atlas = made_atlas(tmp_path, {(0, 1): ("previous-token",)}, model="/a/models/demo")
    [nobody] = atlas.findings
    one = np.where(np.arange(24) == 1, 0.9, 0.0)
    named = Finding("offset 1", "best other offset", replace(nobody.effects, effect=one, low_all=one))
    said = save_probes(replace(atlas, findings=[named, nobody]), tmp_path, "/a/models/demo", Style(image="svg"))
    drawn = said.read_text()
    assert ">offset 1</text>" in drawn
    assert ">sink</text>" not in drawn
    assert "not drawn, since no head's bound reaches 0.3: sink</text>" in drawn
    assert ">demo</text>" in drawn
    save_probes(atlas, tmp_path, "demo", Style(image="svg"))
    assert ">sink</text>" in said.read_text(), "where no probe names a head, all are drawn"
    both = replace(atlas, findings=[named, nobody])
    save_probes(both, tmp_path, "demo", Style(image="svg"), probe="sink")
    assert ">sink</text>" in said.read_text(), "what was asked for is drawn"


def test_dots_and_intervals_of_probes_are_their_effects() -> None:
    effect, low, high = np.array([0.0, 0.9, -0.5]), np.array([-0.1, 0.4, -0.6]), np.array([0.1, 1.0, np.nan])
    probes = [Dots(name, "above other", effect, low, high, low >= 0.3) for name in ("induction p10", "sink")]
    heads = ["L0H0", "L0H1", "L1H0"]
    with drawing(Fonts()):
        sheet = DotSheet(probes, heads, [0, 1, 2], 0.3, ("Probes", "a note", "a list"))
        figure = dots_figure(sheet, Style(), 1000)
    ax = figure.axes[0]
    [intervals, dots] = ax.collections
    np.testing.assert_array_equal(dots.get_offsets(), np.stack([effect, np.arange(3)], 1))
    ends = [segment[:, 0].tolist() for segment in intervals.get_segments()]
    assert ends == [[-0.1, 0.1], [0.4, 1.0], [-0.6, -0.5]], "an open end is drawn no farther than the dot"
    assert [to_hex(colour) for colour in dots.get_facecolors()] == [DOT_GREY, COLOURS[0], DOT_GREY]
    assert words(ax.get_yticklabels()) == heads
    assert figure.texts[0].get_text() == "Probes"
    assert any("a list" in text.get_text() for text in figure.texts)


def test_heads_without_a_row_are_dots_in_one_row() -> None:
    effect = np.linspace(-1, 1, 40)
    probe = Dots("sink", "above uniform", effect, effect, effect, effect > 0.9)
    rows = probe_rows([probe])
    assert rows == [37, 38, 39]
    with drawing(Fonts()):
        sheet = DotSheet([probe], [f"L0H{head}" for head in range(40)], rows, 0.3, ("", "", ""))
        figure = dots_figure(sheet, Style(), 1000)
    ax = figure.axes[0]
    assert words(ax.get_yticklabels()) == [*(f"L0H{head}" for head in rows), f"{40 - len(rows)} others"]
    [others] = [line for line in ax.lines if len(line.get_xdata()) == 40 - len(rows)]
    np.testing.assert_array_equal(np.sort([*others.get_xdata(), *effect[rows]]), effect)
    few = Dots("sink", "above uniform", effect[:9], effect[:9], effect[:9], effect[:9] > 0.9)
    assert probe_rows([few]) == list(range(9))
    named = Dots("a", "b", np.ones(80), np.ones(80), np.ones(80), np.ones(80, bool))
    assert len(probe_rows([named, replace(probe, effect_N=np.arange(80.0), named_N=named.named_N)])) == 32


@pytest.mark.parametrize("width", ["column", "page"])
def test_names_of_probes_do_not_run_into_each_other(width: str) -> None:
    effect = np.zeros(24)
    probes = [Dots(f"offset {place}", "above best other offset", *[effect] * 3, effect > 0) for place in range(7)]
    heads = [f"L0H{head}" for head in range(24)]
    with drawing(Fonts()):
        style = Style(width=width)

        def build(room: float) -> Figure:
            return dots_figure(DotSheet(probes, heads, range(24), 0.3, ("", "", "")), style, room)

        figure = layout.fitted(build, 1000, style, lambda figure: figure)
        boxes = [text.get_window_extent() for ax in figure.axes for text in ax.texts]
        assert figure.get_size_inches()[0] <= style.inches + 0.01
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert max(box.x1 for box in boxes) <= figure.bbox.x1


# A style file

PAPER = """# a paper's looks
font.family: serif
font.serif: "Nonesuch, DejaVu Serif"
font.size: 7
axes.prop_cycle: cycler('color', ['#cc3311', '0077BB'])
lines.linewidth: 2.5   # thick
axes.edgecolor: .3
axes.spines.top: True
text.color: 224488
image.cmap: "white,#0072b2"
"""


def test_a_style_file_gives_fonts_colours_lines_and_axes(tmp_path: Path) -> None:
    path = tmp_path / "paper.mplstyle"
    path.write_text(PAPER)
    style = Style(style=path)
    assert style == replace(style, title="")  # what was read goes along, and not the path
    line = BudgetLine("top", np.array([0.5, 1.0]), np.array([1.0, 0.0]), *[np.full(2, np.nan)] * 2)
    with drawing(Fonts(), style.sheet):
        figure = budget_lines_figure([line, line], style, "Cost", unit="nats")
        head = head_figure(bank_maps(), style)
    ax = figure.axes[0]
    assert [(to_hex(drawn.get_color()), drawn.get_linewidth()) for drawn in ax.lines[:2]] == [
        ("#cc3311", 2.5),
        ("#0077bb", 2.5),
    ]
    assert ax.spines["top"].get_visible()
    assert to_hex(ax.spines["top"].get_edgecolor()) == to_hex("0.3")
    title = figure.texts[0]
    assert (to_hex(title.get_color()), title.get_fontsize()) == ("#224488", 7)
    assert title.get_fontname() == "DejaVu Serif", "the first of its fonts that is installed"
    assert to_hex(head.map.cmap(0.0)) == "#ffffff"
    assert to_hex(head.map.cmap(1.0)) == "#0072b2"
    with drawing(Fonts()):
        plain = budget_lines_figure([line], Style(), "Cost", unit="nats")
    assert to_hex(plain.axes[0].lines[0].get_color()) == COLOURS[0]
    assert not plain.axes[0].spines["top"].get_visible()


def test_what_is_asked_for_wins_over_a_style_file(tmp_path: Path) -> None:
    path = tmp_path / "paper.mplstyle"
    path.write_text(PAPER)
    style = Style(style=path, font_size=9, cmap="magma")
    assert style.points == (9, 9)
    assert cmap_of(style, "weight").name == "magma"
    signed = Style(style=path)
    assert cmap_of(signed, "difference").name == "RdBu_r", "a map of one sign says nothing of two"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("text.usetex: True", "text.usetex of"),
        ("text.latex.preamble: \\input{x}", "text.latex.preamble of"),
        ("backend: agg\nfigure.figsize: 3, 3", "backend, figure.figsize of"),
        ("savefig.directory: /tmp", "savefig.directory of"),
        ("axes.labelsize: 90", "axes.labelsize of {}: expected points from 4 to 24, got 90"),
        ("font.size: 20\nxtick.labelsize: xx-large", "xtick.labelsize of {}: expected points from 4 to 24, got 34.56"),
        ("legend.fontsize: huge", "legend.fontsize of {}"),
        ("ytick.labelsize: nan", "ytick.labelsize of {}"),
        ("font.family: /etc/fonts/x.ttf", "font.family of {} names a file"),
        ("font.size: 90", "expected points from 4 to 24, got 90"),
        ("lines.linewidth: 1e9", "lines.linewidth of {}"),
        ("axes.linewidth: nan", "axes.linewidth of {}"),
        ("text.color: nocolour", "text.color of {}"),
        ("axes.prop_cycle: __import__('os').getcwd()", "axes.prop_cycle of {}"),
        ("axes.prop_cycle: cycler('color', [open('x')])", "axes.prop_cycle of {}"),
        ("axes.prop_cycle: " + "(" * 100_000, "axes.prop_cycle of {}"),
        ("axes.prop_cycle: cycler('color', ['C0'])", "axes.prop_cycle of {}"),
        ("axes.prop_cycle: cycler('color', [" + "'red'," * 300 + "])", "axes.prop_cycle of {} has"),
        ("font.family: " + "x," * 600, "font.family of {} has 1200 letters"),
        ("text.color: " + "-" * 900 + "1", "text.color of {}"),
        ("grid.linestyle: (0, (1e-9, 1e-9))", "grid.linestyle of {}"),
        ("grid.alpha: 1.5", "grid.alpha of {}"),
        ("xtick.major.pad: 50", "xtick.major.pad of {}"),
        ("image.cmap: nomap", "image.cmap of {}"),
        ("just words", "line 1: expected NAME: VALUE"),
        ("#" * (1 << 20) + "#", "cannot be read"),
        (None, "No such file"),
    ],
)
def test_other_settings_of_a_style_file_are_refused_by_name(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "bad.mplstyle"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError) as refused:
        Style(style=str(path))
    said = str(refused.value)
    assert words.format(path) in said
    assert "\n" not in said
    assert len(said) < 400 + len(str(path))


def test_a_style_file_has_a_size_for_each_kind_of_text(tmp_path: Path) -> None:
    path = tmp_path / "sizes.mplstyle"
    sizes = "figure.titlesize: 15\naxes.labelsize: 13\nxtick.labelsize: 6\nytick.labelsize: {}\n"
    path.write_text("font.size: 12\n" + sizes.format("small"))
    maps = bank_maps()
    head = shown(maps, Style(style=path))
    ticks = {side: {text.get_fontsize() for text in labels} for side, labels in ticks_of(head.ax).items()}
    small = 12 * 0.833
    assert ticks["x"] == {6}
    assert list(ticks["y"]) == [pytest.approx(small)]
    assert {head.ax.xaxis.label.get_fontsize(), head.bar.ax.yaxis.label.get_fontsize()} == {13}
    assert [*{text.get_fontsize() for text in head.bar.ax.get_yticklabels()}] == [pytest.approx(small)]
    assert head.words.title.get_fontsize() == 15
    assert head.words.foot.get_fontsize() == 12, "font.size is that of all other texts"
    asked = shown(maps, Style(style=path, font_size=9))
    assert {text.get_fontsize() for labels in ticks_of(asked.ax).values() for text in labels} == {9}
    assert asked.words.title.get_fontsize() == 9, "a size that is asked for wins over the file"
    path.write_text(sizes.format("large"))
    alone = shown(maps, Style(style=path))
    assert alone.words.title.get_fontsize() == 15
    assert [*{text.get_fontsize() for text in ticks_of(alone.ax)["y"]}] == [pytest.approx(12)], "larger than 10 points"
    assert alone.words.foot.get_fontsize() == shown(maps, Style()).words.foot.get_fontsize()


def ticks_of(ax: Axes) -> dict[str, list[Text]]:
    return {"x": ax.get_xticklabels(), "y": ax.get_yticklabels()}


def test_a_style_file_is_one_setting_in_shell_config_redrawing_and_python(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("paper.mplstyle").write_text("text.color: 224488\nfont.size: 6\n")
    Path("c.yaml").write_text("figures:\n  style: paper.mplstyle\n")
    Path("bad.mplstyle").write_text("text.usetex: True\n")
    made_atlas(tmp_path, {(0, 1): ("sink",)}).save(tmp_path / "atlas")
    text = ("heatmap", "the bank", "--select", "1.4", "--figures", "heads", "--image", "svg", "-q", "--out")
    call(*text, "a", "--style", "paper.mplstyle").ok()
    call(*text, "b", "--config", "c.yaml").ok()
    call("heatmap", "atlas", "--set", "style=paper.mplstyle", "--image", "svg", "--out", "c", "-q").ok()
    for path in ("a/heads/L01H04.svg", "b/heads/L01H04.svg", "c/probes.svg"):
        drawn = Path(path).read_text()
        assert "#224488" in drawn
        assert set(re.findall(r"font(?:-size)?: ([0-9.]+)px", drawn)) == {"6"}
    sheet = json.loads(Path("a/manifest.json").read_text())["export"]["style"]
    assert sheet == {"name": "paper.mplstyle", "settings": [["text.color", "224488"], ["font.size", "6"]]}
    seen = attnscope.capture(attnscope.load("demo"), "the bank", request=attnscope.Request(maps="all"))
    assert seen.heatmap("L1H4", style="paper.mplstyle").png != seen.heatmap("L1H4").png
    refused = call(*text, "d", "--style", "bad.mplstyle")
    assert (refused.code, "text.usetex" in refused.err, refused.err.count("\n")) == (2, True, 1)
    assert not Path("d").exists()
