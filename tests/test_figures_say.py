"""What a figure says of itself: of what it is, on which scale, and how it fits a page."""

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm, to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

import attnscope
from attnscope.errors import UsageError
from attnscope.export.drawing import layer_maps, score_panels
from attnscope.figures import (
    About,
    Maps,
    Panel,
    Style,
    fonts,
    layout,
    save_head_maps,
    save_layer,
    save_layers,
    save_metrics,
    save_overview,
)
from attnscope.figures.colours import cmap_of, find_limits, greys_of, luminance
from attnscope.figures.explain import EffectSheet, effect_figure, scaling_effect
from attnscope.figures.fonts import Fonts, shown_label
from attnscope.figures.heads import HeadFigure
from attnscope.figures.metrics import metrics_figure
from attnscope.figures.mosaic import prepare_heads
from attnscope.figures.overview import Layer, LayerFigure, grid_columns, overview_figure
from attnscope.figures.style import TAKEN, split_sink
from attnscope.figures.writer import drawing, press_images, save_figure
from helpers.command_line import SENTENCE, call
from helpers.figures import (
    BANK,
    bank_maps,
    causal,
    first_tokens,
    layer_figure,
    numbered,
    pixels,
    plain_drawing,
    shown,
    words,
)

ABOUT = About("demo, “the bank”, 9 tokens", "demo", "ab12", "attnscope heads --select 1.4")


@pytest.fixture(scope="module")
def seen():
    return attnscope.capture(attnscope.load("demo"), SENTENCE)


def long_maps(tokens: int = 130) -> Maps:
    labels = tuple(f"·t{index % 7}" for index in range(tokens))
    starts = tuple(range(tokens))
    return Maps(0, (0,), causal(1, tokens), labels, labels, starts_Q=starts, starts_K=starts)


# Of what


def test_every_picture_carries_model_text_and_command(tmp_path: Path) -> None:
    maps, style = first_tokens(bank_maps(heads=2), 3), Style(about=ABOUT)
    panel = Panel("sink", np.random.default_rng(0).random((1, 4)), 0, 1)
    save_head_maps([(tmp_path / "head.png", maps, 0)], style)
    save_layer(tmp_path / "layer.png", maps, style)
    save_overview(tmp_path / "overview.png", [maps], style)
    save_metrics(tmp_path / "metrics.png", [panel], style, layer_labels=[0])
    for path in list(tmp_path.iterdir()):
        said = Image.open(path).text
        facts = said["Title"], said["Model"], said["Text-SHA256"], said["Command"]
        assert facts == (ABOUT.line, "demo", "ab12", "attnscope heads --select 1.4"), path


def test_every_figure_says_of_what_it_is() -> None:
    maps, style = bank_maps(), Style(about=ABOUT, title="Mine")
    panel = Panel("sink", np.random.default_rng(0).random((1, 4)), 0, 1)
    with drawing(Fonts()):
        figures = {
            "Mine: Layer 27": layer_figure(maps, style),
            "Mine: 1 layer × 4 heads": overview_figure([maps], style),
            "Mine: Metrics of 4 heads in 1 layer": metrics_figure([panel], style, ["0"]),
        }
    figures["Mine: L27H0 (kv 0)"] = shown(maps, style).figure
    for title, figure in figures.items():
        said = words(figure.texts)
        assert said[0].replace("\n", " ") == title
        assert any(text.startswith(ABOUT.line) for text in said), title


def test_the_command_tells_model_text_and_itself(tmp_path: Path, seen) -> None:
    arguments = ("--select", "1.4", "--title", "A head", "--figures", "heads")
    call("draw", "--text", SENTENCE, *arguments, "--out", str(tmp_path)).ok()
    said = Image.open(tmp_path / "heads" / "L01H04.png").text
    assert said["Command"] == "attnscope draw --select 1.4 --set 'title=A head' --figures heads"
    assert said["Text-SHA256"] == seen.prompt.sha256
    assert said["Title"] == f"demo, “{SENTENCE}”, 9 tokens"


def test_a_long_text_and_a_long_name_are_shortened() -> None:
    model = attnscope.load("demo")
    long = attnscope.capture(model, "the bank \u202e" * 40, request=attnscope.Request())
    line = score_about(long)
    assert len(line) < 130
    assert line.isprintable()


def score_about(seen) -> str:
    from attnscope.export.drawing import about

    return about(seen).line


def test_long_words_never_widen_a_picture() -> None:
    maps, note = bank_maps(heads=2), "a subtitle that goes on " * 20
    with drawing(Fonts()):
        short, long = overview_figure([maps], Style()), overview_figure([maps], Style(), note)
        long.canvas.draw()
    assert long.bbox.width <= short.bbox.width + 1
    assert "\n" in long.texts[1].get_text()
    assert all(text.get_window_extent().x1 <= long.bbox.width for text in long.texts)


# How it fits a page


def test_vector_files_carry_them_too_with_text_as_text_and_truetype_fonts(tmp_path: Path) -> None:
    maps, style = first_tokens(bank_maps(heads=2), 3), Style(about=ABOUT)
    pdf = save_layer(tmp_path / "a.pdf", maps, replace(style, image="pdf")).read_bytes()
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    assert b"Model: demo; Text-SHA256: ab12" in pdf
    svg = save_layer(tmp_path / "a.svg", maps, replace(style, image="svg")).read_text()
    assert ">Layer 27</text>" in svg
    assert "Model: demo; Text-SHA256: ab12; Command: attnscope heads --select 1.4" in svg


WIDTHS = {"column": 3.25, "page": 6.75, "5": 5, 4.5: 4.5}


def test_a_width_is_a_name_or_inches() -> None:
    assert {width: Style(width=width).inches for width in WIDTHS} == WIDTHS


@pytest.mark.parametrize(
    ("width", "inches"),
    [one if one[0] == "column" else pytest.param(*one, marks=pytest.mark.e2e) for one in WIDTHS.items()],
)
def test_a_width_is_kept(tmp_path: Path, width: str | float, inches: float) -> None:
    style, maps = Style(width=width), first_tokens(bank_maps(heads=6), 5)
    panels = [Panel(f"metric {n}", np.random.default_rng(n).random((4, 6)), 0, 1) for n in range(3)]
    save_head_maps([(tmp_path / "a.png", maps, 0)], style)
    save_layer(tmp_path / "b.png", maps, style)
    save_overview(tmp_path / "c.png", [replace(maps, layer=layer) for layer in range(4)], style)
    save_metrics(tmp_path / "d.png", panels, style, layer_labels=range(4))
    for path in sorted(tmp_path.iterdir()):
        assert 0.6 * inches * 120 <= Image.open(path).size[0] <= inches * 120 + 1, path


def test_dpi_scales_the_same_picture(tmp_path: Path) -> None:
    maps = first_tokens(bank_maps(heads=1), 3)
    sizes = []
    for dpi in (120, 300):
        [path] = save_head_maps([(tmp_path / f"{dpi}.png", maps, 0)], Style(dpi=dpi))
        image = Image.open(path)
        sizes.append(image.size[0] / dpi)
        assert image.info["dpi"][0] == pytest.approx(dpi, abs=0.02)
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"width": "wide"}, "width: .*column or page, .*from 1 to 60, got 'wide'"),
        ({"width": 0.1}, "width: .*got 0.1"),
        ({"dpi": 1}, "dpi: .*from 10 to 1200, got 1"),
        ({"floor": 0.001}, "linear"),
        ({"floor": 2.0, "scale": "log"}, "between 0 and 1"),
    ],
)
def test_wrong_looks_are_named(wrong: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Style(**wrong)


def test_wrong_looks_are_refused_before_a_model_is_loaded() -> None:
    for arguments, says in (
        (("--cmap", "virids"), "viridis"),
        (("--set", "width=wide"), "column or page"),
    ):
        done = call("draw", "--model", "./none", "--text", "a", "--out", "never", *arguments)
        assert done.code == 2
        assert says in done.err


# Scales


def test_a_square_root_scale_lies_between_linear_and_log() -> None:
    maps = bank_maps()
    figure = shown(maps, Style(scale="sqrt"))
    norm = figure.map.mesh.norm
    assert isinstance(norm, PowerNorm)
    assert norm(0.25 * norm.vmax) == pytest.approx(0.5)
    ticks = [float(tick.get_text()) for tick in figure.bar.ax.get_yticklabels()]
    assert ticks[0] == 0
    assert len(ticks) >= 4
    assert figure.bar.ax.get_ylabel() == "weight, square-root scale"
    with pytest.raises(UsageError, match="logarithms"):
        find_limits([np.ones((2, 2))], Style(scale="sqrt"), "logit")


def test_a_log_scale_begins_at_the_floor() -> None:
    values = np.array([[1e-5, 0.4]])
    assert find_limits([values], Style(scale="log")).low == pytest.approx(1e-5)
    limits = find_limits([values], Style(scale="log", floor=1e-3))
    assert (limits.low, limits.below) == (1e-3, True)


def test_a_scale_of_its_own_is_printed() -> None:
    values = np.array([[[1, np.nan], [0.1, 0.2]], [[1, np.nan], [0.4, 0.52]]], np.float32)
    maps, style = Maps(0, (0, 1), values, ("a", "b"), ("a", "b")), Style(per_head_scale=True)
    assert shown(maps, style, 1).words.title.get_text() == "L0H1, max 0.52"
    with drawing(Fonts()):
        assert words(layer_figure(maps, style).axes[0].texts) == ["H0, max 0.2", "H1, max 0.52"]


def test_logits_have_a_map_that_diverges_and_a_scale_per_file() -> None:
    values = np.stack([np.full((3, 3), 2.0), np.full((3, 3), -20.0)]).astype(np.float32)
    maps = Maps(0, (0, 1), values, numbered(3), numbered(3), quantity="logit")
    assert shown(maps, Style(), 0).map.mesh.get_clim() == (-2, 2)
    assert shown(maps, Style(), 1).map.mesh.get_clim() == (-20, 20)
    cmap = cmap_of(Style(), "logit")
    low, middle, high = (luminance(np.array(cmap(place))) for place in (0.0, 0.5, 1.0))
    assert middle > 0.9 > 0.2 > max(low, high)
    blank = luminance(np.array(to_rgba(greys_of("logit")[0])))
    assert middle - blank > 0.3, "0 is not taken for a blank cell"
    assert shown(maps, Style(), 0).ax.get_facecolor() == to_rgba(greys_of("logit")[0])
    assert cmap_of(Style(cmap="magma"), "logit").name == "magma"


def test_ticks_are_round() -> None:
    for high in (0.37, 0.68, 0.75, 9.3, 130):
        values = np.array([[[high, np.nan], [high / 3, high]]])
        figure = shown(Maps(0, (0,), values, numbered(2), numbered(2)), Style())
        ticks = [float(tick.get_text()) for tick in figure.bar.ax.get_yticklabels()]
        step = float(f"{ticks[1] - ticks[0]:.6g}")
        assert float(f"{step:.0e}") == step
        assert f"{step:.0e}"[0] in "125"


# Labels


def test_positions_stand_beside_tokens_where_not_all_are_labelled() -> None:
    figure = shown(long_maps(), Style(sink="mask"))
    assert figure.strip is not None
    queries, keys = words(figure.strip.ax.get_yticklabels()), words(figure.ax.get_xticklabels())
    assert queries[:3] == ["0 ·t0", "5 ·t5", "10 ·t3"]
    assert keys == queries[1:], "both axes name the same tokens"
    assert [tick - 0.5 for tick in figure.ax.get_xticks()] == list(range(4, 129, 5))
    few = shown(replace(long_maps(9)), Style())
    assert words(few.ax.get_xticklabels()) == [f"·t{index % 7}" for index in range(9)]


def test_bins_keep_the_text_of_their_first_token() -> None:
    starts = tuple(range(0, 260, 2))
    labels = tuple(f"·t{start}" for start in starts)
    maps = replace(long_maps(), labels_Q=labels, labels_K=labels, starts_Q=starts, starts_K=starts, bin_size=2)
    assert words(shown(maps, Style()).ax.get_xticklabels())[:3] == ["0 ·t0", "10 ·t10", "20 ·t20"]


def test_the_observation_gives_first_tokens_and_positions(seen) -> None:
    text = "the river bank is green and the old boat lies still " * 20
    long = attnscope.capture(attnscope.load("demo"), text, request=attnscope.Request(maps="all"))
    maps = layer_maps(long)[0]
    assert maps.bin_size == 2
    assert maps.starts_K[:3] == (0, 2, 4)
    assert maps.labels_K[:3] == tuple(long.prompt.labels[start] for start in (0, 2, 4))


def test_rollout_of_sentences_numbers_them(tmp_path: Path) -> None:
    text = "Lily was very happy and played. She loved the garden."
    arguments = ("rollout", "--text", text, "--group", "sentences", "--image", "svg", "--out", str(tmp_path))
    call(*arguments).ok()
    drawn = (tmp_path / "rollout.svg").read_text()
    for label in ("S1 Lily was ver…", "S2 She loved th…", "sentence", "attributed to"):
        assert f">{label}</text>" in drawn, label
    assert ">query</text>" not in drawn


@pytest.mark.parametrize(
    ("heads", "kv_heads", "columns"),
    [(4, 1, 2), (64, 8, 8), (24, 8, 6), (32, 8, 8), (6, 3, 2), (12, 12, 4), (14, 2, 7), (1, 1, 1), (5, 5, 3)],
)
def test_layer_grids_hold_whole_groups(heads: int, kv_heads: int, columns: int) -> None:
    assert grid_columns(heads, [head * kv_heads // heads for head in range(heads)]) == columns


def test_turns_of_a_chat_are_thin_lines() -> None:
    maps = replace(bank_maps(), turns=(3, 6))
    figure = shown(maps, Style())
    assert [line.get_ydata()[0] for line in figure.turns[::2]] == [3, 6]
    assert [line.get_xdata()[0] for line in figure.turns[1::2]] == [3, 6]
    rest, _ = split_sink(maps, Style(sink="mask"))
    masked = shown(maps, Style(sink="mask"))
    assert rest.turns == (3, 6)
    assert [line.get_xdata()[0] for line in masked.turns[1::2]] == [2, 5]


@pytest.mark.usefixtures("no_other_font")
def test_a_character_without_a_font_is_drawn_as_its_number(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "attnscope"):
        found = fonts.fonts_for(["\U0001f469"])
    assert found.missing == {"\U0001f469"}
    assert shown_label("\U0001f469") == "⟨1F469⟩"
    assert "drawn as ⟨1F469⟩; install one that has them, such as Symbola" in caplog.text


FSI, PDI = "\u2068", "\u2069"


@pytest.fixture
def no_other_font(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The font that comes with matplotlib, and no other."""
    monkeypatch.setattr(fonts.font_manager, "findSystemFonts", list)
    monkeypatch.setattr(fonts, "_missing", set())
    fonts._cover.cache_clear()
    yield
    fonts._cover.cache_clear()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("4 ·bank", "4 ·bank"),
        ("4 ·ل·2/2", f"4 ·{FSI}ل{PDI}·2/2"),
        ("ל/bank, שלום (2)", f"{FSI}ל{PDI}/bank, {FSI}שלום{PDI} (2)"),
        ("שלום, בנק 85", f"{FSI}שלום, בנק{PDI} 85"),
        ("ב\u05b0·1/2", f"{FSI}ב\u05b0{PDI}·1/2"),  # a vowel sign goes with its letter
        ("demo, “البنك المالي”, 56 tokens", f"demo, “{FSI}البنك المالي{PDI}”, 56 tokens"),
        ("demo, “the בנק on 5”, 9 tokens", f"demo, “{FSI}the בנק on 5{PDI}”, 9 tokens"),
        ("“the bank” − “שלום”", f"“the bank” − “{FSI}שלום{PDI}”"),
    ],
)
def test_what_runs_from_right_to_left_is_isolated_in_a_line(
    line: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fonts, "BIDIRECTIONAL", True)
    assert fonts.isolated(line) == fonts.isolated(expected) == expected
    monkeypatch.setattr(fonts, "BIDIRECTIONAL", False)  # an earlier matplotlib draws format characters as boxes
    assert fonts.isolated(line) == line


@pytest.mark.skipif(not fonts.BIDIRECTIONAL, reason="matplotlib 3.10 lays out no text from right to left")
@pytest.mark.parametrize("image", ["png", "svg", "pdf"])
def test_the_number_of_a_token_keeps_its_side(tmp_path: Path, image: str) -> None:
    labels = ("<s>", "ش·1/2", "ש·2/2", "·bank")
    style = Style(image=image, about=replace(ABOUT, line="demo, “البنك”, 4 tokens"))
    figure = shown(Maps(0, (0,), causal(1, 4), labels, labels), style)
    ticks = words(figure.ax.get_xticklabels())
    assert ticks == ["<s>", f"{FSI}ش{PDI}·1/2", f"{FSI}ש{PDI}·2/2", "·bank"]
    assert figure.words.foot.get_text().startswith(f"demo, “{FSI}البنك{PDI}”, 4 tokens\n")
    with drawing(Fonts()):
        save_figure(figure.figure, tmp_path / f"a.{image}", style)
        outlined = {text.get_text() for text in figure.figure.findobj(Text) if text.get_path_effects()}
    formatted = {text.get_text() for text in figure.figure.findobj(Text) if FSI in text.get_text()}
    assert len(formatted) == 3
    assert outlined == (formatted if image == "pdf" else set())
    if image == "svg":
        assert f">{FSI}ש{PDI}·2/2<" in (tmp_path / "a.svg").read_text(encoding="utf-8")


@pytest.mark.skipif(not fonts.BIDIRECTIONAL, reason="matplotlib 3.10 lays out no text from right to left")
def test_an_isolated_label_ends_with_its_number() -> None:
    def ink(text: str) -> np.ndarray:
        with drawing(Fonts()):
            figure = Figure(figsize=(1, 0.3), dpi=100)
            FigureCanvasAgg(figure)
            figure.text(0.98, 0.3, text, ha="right")
            return plain_drawing(figure)[:, 75:]

    number = ink("x2/2")
    assert (ink(fonts.isolated("ל2/2")) == number).all()
    assert (ink("ל2/2") != number).any()


@pytest.mark.parametrize(
    ("text", "drawn", "label"),
    [
        ("银行", "“⟨CJK⟩”", "7"),
        ("银·1/3", "“⟨CJK⟩·1/3”", "7"),
        ("·bank/银行", "“·bank/⟨CJK⟩”", "·bank/⟨CJK⟩"),
        ("the 银行 位于 bank", "“the ⟨CJK⟩ bank”", "the ⟨CJK⟩ bank"),
        ("とても 本", "“⟨CJK, Hiragana⟩”", "7"),
        ("。·1/3", "“⟨CJK⟩·1/3”", "7"),
        ("「银」、", "“⟨CJK⟩”", "7"),
        ("मत", "“⟨Devanagari⟩”", "7"),
        ("\U0001f9a5 bank", "“⟨1F9A5⟩ bank”", "⟨1F9A5⟩ bank"),
        ("the bank", "“the bank”", "the bank"),
    ],
)
@pytest.mark.usefixtures("no_other_font")
def test_a_script_without_a_font_is_named_and_its_tokens_are_numbers(text: str, drawn: str, label: str) -> None:
    fonts.fonts_for([text])
    assert fonts.tick_label(text, 7) == label
    assert fonts.shown_text(f"“{text}”") == drawn
    said = f"text in a script without a font ({drawn[2:].partition('⟩')[0]})" if label == "7" else drawn
    assert fonts.caption(f"demo, “{text}”, 9 tokens") == f"demo, {said}, 9 tokens"


@pytest.mark.usefixtures("no_other_font")
def test_a_figure_of_a_script_without_a_font_says_what_its_numbers_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labels = ("<s>", "银·1/3", "银·2/3", "银·3/3", "·bank")
    maps, style = Maps(0, (0,), causal(1, 5), labels, labels), Style(about=replace(ABOUT, line="demo, “银”, 5 tokens"))
    with caplog.at_level(logging.WARNING, "attnscope"):
        save_head_maps([(tmp_path / "a.png", maps, 0)], style)
    assert "(CJK): their tokens are labelled by position; install one" in caplog.text
    assert "such as Noto Sans CJK (fonts-noto-cjk in Debian" in caplog.text
    figure = shown(maps, style)
    assert words(figure.ax.get_xticklabels()) == ["<s>", "1", "2", "3", "·bank"]
    foot = figure.words.foot.get_text().replace("\n", " ")
    assert foot.startswith("demo, text in a script without a font (CJK), 5 tokens")
    assert "a number alone: a token in a script without a font (" in foot
    assert "; install Noto Sans" in foot
    assert "a number alone" not in shown(bank_maps(), style).words.foot.get_text()
    layer = layer_figure(maps, style)
    assert {"1", "2", "3"} <= {tick for ax in layer.figure.axes for tick in words(ax.get_yticklabels())}


def test_the_figure_of_explain_keeps_its_words_apart() -> None:
    rng = np.random.default_rng(0)
    effect = scaling_effect(25 * rng.normal(size=(131, 131)), np.tril(np.ones((131, 131), bool)), 32**-0.5)
    with drawing(Fonts()):
        figure = effect_figure(EffectSheet(effect, numbered(131), "L3H0 of demo", "/ √32"))
        figure.canvas.draw()
    bars = figure.axes[4:]
    for left, right in ((0, 1), (2, 3)):
        assert bars[left].get_tightbbox().x1 < figure.axes[right].get_tightbbox().x0


# Metrics


def test_metrics_stand_on_fixed_scales_with_uniform_attention_marked() -> None:
    rng = np.random.default_rng(0)
    panels = [
        Panel("sink", 0.1 * rng.random((2, 3)), 0, 1, "share of a row", (0.04,)),
        Panel("entropy", np.array([[0.5, 1.5, np.nan]] * 2), 0, math.log(9), "nats", (1.6,), (True, False), "1 row"),
        Panel("off-token mass", np.zeros((2, 3)), 0, 1),
        Panel("local mass", 1 + 1e-8 * rng.random((2, 3)), 0, 1),
        Panel("induction", np.full((2, 3), np.nan), 0, 1),
    ]
    with drawing(Fonts()):
        figure = metrics_figure(panels, Style(), ["0", "3"])
    maps, bars = figure.axes[::2], figure.axes[1::2]
    assert len(maps) == 2, "what is the same for every head is not drawn"
    assert maps[0].images[0].get_clim() == (0, 1)
    assert maps[1].images[0].get_clim() == (0, math.log(9))
    said = [text.get_text() for text in maps[1].texts]
    assert said == ["entropy", "nats", "uniform 1.60, 1 row", *["0.50", "1.50"] * 2]
    assert bars[0].texts[0].get_position()[1] == 0.04
    assert maps[1].images[0].get_array().mask.tolist() == [[False, False, True]] * 2
    assert [patch.get_xy()[1] for patch in maps[1].patches if patch.get_hatch()] == [-0.5], "the first layer's row"
    assert words(figure.texts)[1].splitlines() == [
        "the same for every head: off-token mass 0; local mass 1",
        "no value in this text: induction",
    ]
    assert "hatched colours: too few rows for a role; hatched grey: no value" in words(figure.texts)[2].replace(
        "\n", " "
    )
    with drawing(Fonts()):
        assert len(metrics_figure([Panel("sink", np.array([[0.4]]), 0, 1)], Style(), ["0"]).axes) == 2, "of one head"


def test_layers_with_too_few_rows_are_hatched_in_the_file_too(tmp_path: Path) -> None:
    panel = Panel("sink", np.array([[0.1, 0.9]] * 2), 0, 1)
    paths = [
        save_metrics(tmp_path / f"{few}.png", [replace(panel, few_L=(few, few))], Style(), layer_labels=[0, 1])
        for few in (False, True)
    ]
    plain, hatched = (len(Image.open(path).crop((70, 120, 140, 160)).getcolors(9999)) for path in paths)
    assert plain < hatched


@pytest.mark.parametrize(
    "style",
    [
        Style(sink="mask", per_head_scale=True),
        *(pytest.param(one, marks=pytest.mark.e2e) for one in (Style(), Style(scale="log"))),
    ],
)
def test_a_picture_painted_by_cells_is_the_plain_drawing(tmp_path: Path, style: Style) -> None:
    maps = first_tokens(bank_maps(heads=5), 4)
    with drawing(Fonts()):
        for name, figure in (("layer", layer_figure(maps, style)), ("overview", overview_figure([maps], style))):
            whole = plain_drawing(figure)
            path = save_figure(figure, tmp_path / f"{name}.png", style)
            if name == "layer":
                path = save_layer(path, maps, style)
            painted = pixels(path)
            assert np.abs(painted - whole).max() <= 2, name
            assert painted.std() > 10


@pytest.mark.parametrize("dpi", [120, pytest.param(240, marks=pytest.mark.e2e)])
def test_panels_drawn_in_turn_are_the_plain_drawing(tmp_path: Path, dpi: int) -> None:
    values, grey = np.random.default_rng(0).random((6, 5)), np.zeros((6, 5))
    grey[1:3] = 1
    panels = [
        Panel("sink", values, 0, 1, "share of a row", (0.04, 0.3), (True, True, False, True, False, False), "1 row"),
        Panel("self", values[::-1], 0, 1, first=((0, 1), (3, 4))),
        Panel("effect", values - 0.5, -0.5, 0.5, "nats", quantity="difference", hatched_LH=grey, always=True),
        Panel("entropy", np.where(values[:, ::-1] > 0.8, np.nan, values), 0, math.log(9), "nats", (1.6,)),
    ]
    panels[3].values_LH[:, 0] = panels[3].values_LH[5] = 1  # a tick mark ends beneath the outermost cells
    style = Style(dpi=dpi)
    path = save_metrics(tmp_path / "metrics.png", panels, style, layer_labels=range(6))
    with drawing(Fonts()):
        figure = metrics_figure(panels, style, [str(layer) for layer in range(6)])
        figure.set_dpi(dpi)
        whole = plain_drawing(figure)
    assert np.abs(pixels(path) - whole).max() <= 2


def test_cells_that_are_half_seen_through_are_left_to_the_plain_drawing() -> None:
    with drawing(Fonts()):
        figure = layout.new_figure()
        ax = figure.add_axes((0, 0, 1, 1))
        image = ax.imshow(np.full((2, 2, 4), 0.5), aspect="auto")
        pixels = np.zeros((int(figure.bbox.height), int(figure.bbox.width), 3), np.uint8)
        assert not press_images(pixels, [image])
        assert not pixels.any()
        image.set_data(np.array([[[1, 0, 0, 1], [0, 1, 0, 0]], [[0, 0, 1, 1], [0, 0, 0, 0]]], float))
        assert press_images(pixels, [image])
    corners = pixels[0, 0], pixels[-1, 0], pixels[0, -1], pixels[-1, -1]
    assert np.array(corners).tolist() == [[255, 0, 0], [0, 0, 255], [0, 0, 0], [0, 0, 0]]


def test_layers_that_share_a_figure_are_drawn_as_if_alone(tmp_path: Path) -> None:
    layers = [first_tokens(bank_maps(5, layer, seed=layer), 3) for layer in range(3)]
    layers[2] = replace(layers[2], values_HQK=0.5 * layers[2].values_HQK)  # on a scale of its own
    list(save_layers([(tmp_path / f"{maps.layer}.png", maps) for maps in layers], Style()))
    for maps in layers:
        alone = save_layer(tmp_path / "alone.png", maps, Style()).read_bytes()
        assert (tmp_path / f"{maps.layer}.png").read_bytes() == alone
    assert (tmp_path / "0.png").read_bytes() != (tmp_path / "1.png").read_bytes()


@pytest.mark.parametrize(
    "style",
    [
        Style(sink="mask", per_head_scale=True),
        *(pytest.param(one, marks=pytest.mark.e2e) for one in (Style(sink="mask"), Style(per_head_scale=True))),
    ],
    ids=str,
)
def test_layers_whose_titles_carry_numbers_share_a_figure(
    tmp_path: Path, style: Style, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests = [((0, 0.21), (3, 0.62)), ((3, 0.55), (0, 0.11)), ((5, 0.32), (2, 0.44))]
    maps = [replace(bank_maps(2, layer=n, seed=n), sinks=sinks) for n, sinks in enumerate(rests)]
    maps[2].values_HQK[:] = np.where(np.isfinite(maps[2].values_HQK), 0.37 * maps[1].values_HQK, np.nan)
    built, of = list[Layer](), LayerFigure.of
    monkeypatch.setattr(LayerFigure, "of", lambda layer, style: built.append(layer) or of(layer, style))
    paths = list(save_layers([(tmp_path / f"{one.layer}.png", one) for one in maps], style))
    assert len(built) <= 2, "a layer may have another colour bar"
    assert len({path.read_bytes() for path in paths}) == 3
    others = list(save_layers([(tmp_path / f"other{one.layer}.png", one) for one in maps[::-1]], style))
    assert [path.read_bytes() for path in others[::-1]] == [path.read_bytes() for path in paths], "whatever came before"


def test_the_metrics_that_matter_come_first_and_know_their_range(seen) -> None:
    layers, panels = score_panels(seen)
    named = {panel.name: panel for panel in panels}
    assert layers == (0, 1, 2, 3)
    assert [panel.name for panel in panels][:3] == ["focus", "previous token", "induction"]
    assert (named["entropy"].low, named["entropy"].high) == (0, pytest.approx(math.log(9)))
    assert (named["distance"].low, named["distance"].high) == (0, 8)
    assert named["induction"].few_L == (True,) * 4
    assert named["induction"].support == "1 row, 16 needed"
    expected = sum(1 / visible for visible in range(2, 10)) / 8
    assert named["previous token"].uniform == (pytest.approx(expected, abs=0.005),)
    assert len(panels) == len(seen.columns.scores)


# Sinks


def own_sinks() -> Maps:
    """Four heads, of which head 1 rests on key 3."""
    maps = bank_maps()
    maps.values_HQK[1, 3:] *= 0.1
    maps.values_HQK[1, 3:, 3] = 0.9
    return replace(maps, sinks=((0, 0.2), (3, 0.6), (0, 0.1), (0, 0.4)))


def taken_out(figure: HeadFigure) -> tuple[float, ...]:
    return figure.taken.get_bbox().bounds


def test_mask_takes_out_what_is_the_sink_of_a_head() -> None:
    maps, style = own_sinks(), Style(sink="mask")
    figure = shown(maps, style, 1)  # built for head 0
    assert figure.strip is not None
    plotted, strip = figure.map.mesh.get_array(), figure.strip.mesh.get_array()[:, 0]
    for query in range(9):
        for key in range(9):
            if key > query or key == 3:
                assert plotted.mask[query, key]
            else:
                assert plotted[query, key] == pytest.approx(float(maps.values_HQK[1, query, key]))
        assert strip.mask[query] == (query < 3)
    assert strip[3:].tolist() == pytest.approx([0.9] * 6)
    assert taken_out(figure) == (3, 3, 1, 6)
    assert words(figure.strip.numbers) == ["", "", "", *["0.90"] * 6]
    assert [figure.map.numbers[place].get_text() for place in (0, 9)] == ["1.00", ""], "of keys 0 and 3"
    assert words(figure.ax.get_xticklabels()) == list(BANK)
    assert words(figure.strip.ax.get_xticklabels()) == ["sink"]
    assert figure.words.note.get_text() == "without key 3 (is), mean mass 0.60 (grey strip, 0 to 1)"
    assert "darker grey: the sink, taken out" in figure.words.foot.get_text().replace("\n", " ")
    other, plain = shown(maps, style, 2), shown(maps, Style(), 1)
    assert taken_out(other) == (0, 0, 1, 9)
    assert "without key 0 (the), mean mass" in other.words.note.get_text()
    assert taken_out(plain) == (0, 0, 0, 0)
    assert plain.map.mesh.get_array()[5, 3] == pytest.approx(0.9)


def test_heads_of_different_sinks_share_a_figure_and_a_scale(tmp_path: Path) -> None:
    maps, style = own_sinks(), Style(sink="mask")
    heads = prepare_heads([(tmp_path / f"{index}.png", maps, index) for index in range(4)], style)
    assert len({head.kind for head in heads}) == 1
    rest = [
        float(maps.values_HQK[head, query, key])
        for head in range(4)
        for query in range(1, 9)  # query 0 sees one key
        for key in range(query + 1)
        if key != maps.sinks[head][0]
    ]
    assert heads[0].limits.high == pytest.approx(max(rest) if max(rest) < 0.9 else 1)
    save_head_maps([(head.path, maps, index) for index, head in enumerate(heads)], style)
    for index, head in enumerate(heads[:3]):  # head 1 rests elsewhere than those before and after it
        alone = replace(head, path=tmp_path / "alone.png")
        with drawing(Fonts()):
            figure = HeadFigure.of(alone, style)
            figure.show(alone)
            figure.save(alone.path)
        assert alone.path.read_bytes() == head.path.read_bytes(), index


@pytest.mark.parametrize("per_head_scale", [False, True])
def test_layers_and_overviews_take_each_heads_own_sink_out(per_head_scale: bool) -> None:
    maps, style = own_sinks(), Style(sink="mask", per_head_scale=per_head_scale)
    with drawing(Fonts()):
        layer, overview = layer_figure(maps, style), overview_figure([maps], style)
    titles = [title.split(",")[0] for title in words(layer.axes[0].texts)]
    assert titles[1] == "H1 (kv 0) · is(3) 0.60"
    assert titles[0].startswith("H0 (kv 0) · 0.")
    assert "each head's own sink (key 0 where none is named) taken out" in words(layer.texts)[1].replace("\n", " ")
    assert words(overview.texts)[1] == "each head's own sink taken out (grey strips, 0 to 1)"
    for figure in (layer, overview):
        greys, cells, strips = (image.get_array() for image in figure.axes[0].images)
        assert np.argwhere(greys.filled(0) == 1).shape == (9 + 6 + 9 + 9, 2)
        assert not (cells.filled(-1)[greys.filled(0) == 1] >= 0).any()
        assert (strips.filled(0)[3:9] == np.float32(0.9)).any()


@pytest.mark.parametrize("tokens", [2, 4])
def test_a_bin_goes_with_the_sink_that_it_holds(tokens: int) -> None:
    starts = (0, 1, *range(tokens, 9 * tokens - tokens, tokens))
    maps = replace(own_sinks(), bin_size=tokens, starts_K=starts, starts_Q=starts, sinks=((2 * tokens + 1, 0.6),) * 4)
    figure = shown(maps, Style(sink="mask"))
    assert taken_out(figure) == (3, 3, 1, 6)
    last = 3 * tokens - 1
    said = f"without keys {2 * tokens}–{last}, mean mass 0.60 on key {2 * tokens + 1} (grey strip, 0 to 1)"
    assert figure.words.note.get_text().replace("\n", " ").endswith(said)
    logits = shown(replace(maps, quantity="logit"), Style(sink="mask"))
    assert f"keys {2 * tokens}–{last}, mean of the largest logits" in logits.words.note.get_text().replace("\n", " ")


@pytest.mark.e2e
def test_the_command_takes_out_the_full_stop_that_a_head_rests_on(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "examples" / "story.txt").read_text().splitlines()[0]
    story = attnscope.capture(attnscope.load("demo"), text, request=attnscope.Request(metrics=(), maps="all"))
    [head] = [head for head in story.heads if head.name == "L1H1"]
    assert story.prompt.tokens[head.top_key] == "."
    arguments = ("--text", text, "--sink", "mask", "--image", "svg", "--select", "1.0-1", "--out", str(tmp_path))
    call("draw", *arguments).ok()
    named = f"without key {head.top_key} (.), mean mass {head.top_key_mass:.2f} (grey strip, 0 to 1)"
    assert f">{named}</text>" in (tmp_path / "heads" / "L01H01.svg").read_text()
    assert ">without key 0 (&lt;s&gt;), mean mass" in (tmp_path / "heads" / "L01H00.svg").read_text()
    layer = (tmp_path / "layers" / "L01.svg").read_text()
    assert f">H1 (kv 0) · .({head.top_key}) {head.top_key_mass:.2f}</text>" in layer
    assert ">each head's own sink taken out" in (tmp_path / "overview.svg").read_text()
    masked = [split_sink(maps, Style(sink="mask"))[0].values_HQK for maps in layer_maps(story)]
    assert (masked[1][1][head.top_key :, head.top_key] == TAKEN).all()
    assert all((one == TAKEN).any(1).sum(1).tolist() == [1] * 6 for one in masked), "one key of every head"
