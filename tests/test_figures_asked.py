"""Figures that are drawn where they are named, and the roles that frame an overview."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.text import Text
from PIL import Image

import attnscope
from attnscope.cli.figure_options import FIGURES as OFFERED
from attnscope.errors import UsageError
from attnscope.export.drawing import ASKED_FOR, FIGURES, Drawing, DrawingOptions, head_sheet, layer_maps, mass_panels
from attnscope.export.manifest import OURS
from attnscope.figures import Maps, Panel, Style, save_metrics, save_overview
from attnscope.figures.colours import DARK_INK, LIGHT_INK
from attnscope.figures.curves import Depth, depth_figure
from attnscope.figures.fonts import Fonts
from attnscope.figures.layout import NUMBER
from attnscope.figures.metrics import metrics_figure
from attnscope.figures.overview import grid_columns, overview_figure
from attnscope.figures.style import ROLE_COLOURS, Part
from attnscope.figures.writer import drawing
from attnscope.metrics.metrics import KNOWN
from attnscope.metrics.roles import ROLES
from attnscope.observe.request import Request, View
from attnscope.studies.atlas import RULES
from helpers.command_line import SENTENCE, call
from helpers.figures import BANK, bank_maps, causal, layer_figure, pixels, places, plain_drawing, words
from helpers.own import attentions

STORY = (Path(__file__).parents[1] / "examples" / "story.txt").read_text()


@pytest.fixture(scope="module")
def asked():
    return attnscope.capture(attnscope.load("demo"), SENTENCE, query="bank", key="the")


# Roles


def test_every_role_of_a_text_and_of_a_scan_has_a_colour_and_no_other() -> None:
    assert set(ROLE_COLOURS) == {role.name for role in ROLES} | {rule.role for rule in RULES}


# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
DEFICIENCIES = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def lab(colour: str, seen_by: np.ndarray) -> np.ndarray:
    """CIE L*a*b* (D65) of a colour as a reader sees it."""
    rgb = np.array(to_rgb(colour))
    linear = np.clip(np.array(seen_by) @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4), 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    f = np.cbrt(xyz / np.array([0.95047, 1, 1.08883]))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def nearest(colours: list[str], deficiency: str) -> float:
    """The smallest difference (CIE 1976) between two of the colours, white among them."""
    seen = [lab(colour, DEFICIENCIES[deficiency]) for colour in (*colours, "#ffffff")]
    return min(float(np.linalg.norm(a - b)) for place, a in enumerate(seen) for b in seen[:place])


def test_the_page_gives_the_roles_the_same_colours() -> None:
    source = (Path(attnscope.__file__).parent / "viewer" / "src" / "colours.js").read_text(encoding="utf-8")
    found = re.findall(r'"?([\w-]+)"?: \{ light: "(#\w+)"', source)
    assert dict(found) == ROLE_COLOURS


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_colour_blind_readers_tell_the_roles_apart(deficiency: str) -> None:
    assert nearest(list(ROLE_COLOURS.values()), deficiency) > 10
    if deficiency == "deuteranopia":
        assert nearest(["#d62728", "#2ca02c", "#8c564b"], deficiency) < 10, "the measure sees red and green"


@pytest.mark.parametrize(
    "styles",
    [[Style(sink="mask", dpi=150)], pytest.param([Style(), Style(sink="mask"), Style(dpi=150)], marks=pytest.mark.e2e)],
    ids=["one", "all"],
)
def test_the_overview_frames_heads_by_role(tmp_path: Path, styles: list[Style]) -> None:
    roles = ("induction", "other", "-", "sink")
    layers = [replace(bank_maps(layer=0), roles=roles), replace(bank_maps(layer=1), roles=("-",) * 4)]
    for style in styles:
        path = save_overview(tmp_path / "overview.png", layers, style)
        with drawing(Fonts()):
            figure = overview_figure(layers, style)
            figure.set_dpi(style.dpi)
            whole = plain_drawing(figure)
        painted = pixels(path)
        assert np.abs(painted - whole).max() <= 2
        ax = figure.axes[0]
        tall = len(painted) - ax.get_window_extent().y0  # below that only the foot stands
        for role, colour in ROLE_COLOURS.items():
            ours = (painted == np.rint(255 * np.array(to_rgb(colour)))).all(-1)
            ours[: int(len(painted) - ax.get_window_extent().y1) - 10] = False  # the legend
            rows, columns = np.flatnonzero(ours.any(1)), np.flatnonzero(ours.any(0))
            assert (rows.size > 0) == (role in roles), role
            if rows.size:
                assert ours[rows[1]].sum() >= columns[-1] - columns[0], "a whole side"
                assert ours[(rows[0] + rows[-1]) // 2].sum() < 20, "and nothing inside"
                assert rows[-1] < tall
        assert words(figure.texts)[3:] == ["■", "induction", "■", "sink"]
    assert len(overview_figure([replace(bank_maps(), roles=("other",) * 4)], Style()).texts) == 3


@pytest.mark.parametrize("style", [Style(), Style(width=2), pytest.param(Style(width="column"), marks=pytest.mark.e2e)])
def test_a_legend_stays_inside_and_apart(style: Style) -> None:
    maps = replace(bank_maps(heads=len(ROLE_COLOURS)), roles=tuple(ROLE_COLOURS), roles_by="a scan of the model")
    with drawing(Fonts()):
        figure = overview_figure([maps], style)
        boxes = [text.get_window_extent() for text in figure.texts]
    assert len(boxes) == 3 + 2 * len(ROLE_COLOURS)
    assert all(box.x1 <= figure.bbox.width and box.x0 >= 0 for box in boxes)
    boxes = [box for box in boxes if box.width]
    assert not any(one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[:place])


def test_the_overview_of_a_text_that_shows_roles_says_them(demo, tmp_path: Path) -> None:
    seen = attnscope.capture(demo, STORY, request=Request(maps="all"))
    found = {role for maps in layer_maps(seen) for role in maps.roles}
    assert found == {head.role.strip("-") for head in seen.heads} > {"induction", "previous-token", "offset-2"}
    by_kv = attnscope.capture(demo, STORY, request=Request(view=View(by_kv=True), maps="all"))
    assert [len(maps.roles) for maps in layer_maps(by_kv)] == [3] * 4
    file = tmp_path / "story.txt"
    file.write_text(STORY)
    call("draw", "--file", str(file), "--image", "svg", "--figures", "overview", "--out", str(tmp_path / "run")).ok()
    drawn = (tmp_path / "run" / "overview.svg").read_text()
    assert all(f">{role}</text>" in drawn for role in found - {""})
    assert "frames: roles by a scan of the model" in drawn
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["manifest.json", "overview.svg"]


# Mass


def test_the_picture_of_the_mass_is_the_models_own(demo, asked) -> None:
    (panel,), note = mass_panels(asked)
    queries, keys = places(asked.prompt, "bank"), places(asked.prompt, "the")
    expected = [
        [sum(float(weights[head, i, j]) for i in queries for j in keys if j <= i) / len(queries) for head in range(6)]
        for weights in attentions(demo.model, asked.prompt.ids)
    ]
    np.testing.assert_allclose(panel.values_LH, expected, atol=1e-5)
    uniform = sum(sum(j <= i for j in keys) / (i + 1) for i in queries) / len(queries)
    assert panel.uniform == (pytest.approx(uniform, abs=1e-3),)
    ranked = sorted(np.ndindex(4, 6), key=lambda place: -expected[place[0]][place[1]])
    assert list(panel.first) == ranked[:5]
    layer, head = ranked[0]
    assert f"1 L{layer}H{head} {expected[layer][head]:.2f}, 2 L" in note
    assert note.startswith("queries “bank” (2 of 9), keys “the” (1 of 9)\n")
    assert mass_panels(attnscope.capture(demo, SENTENCE)) == ((), "")


def test_heads_without_a_query_that_sees_the_keys_are_grey(demo) -> None:
    assert mass_panels(attnscope.capture(demo, SENTENCE, query="the", key="bank")) == ((), "")
    some = attnscope.capture(demo, SENTENCE, query="bank", key="the", select="1.0-2,3")
    (panel,), _ = mass_panels(some)
    assert np.isfinite(panel.values_LH).tolist() == [[True] * 3 + [False] * 3, [True] * 6]
    assert all(np.isfinite(panel.values_LH[place]) for place in panel.first)


def test_where_uniform_attention_differs_the_difference_is_drawn_too(asked) -> None:
    score = asked.columns.scores["mass"]
    null = np.where(asked.columns.layer == 2, 0.5, score.null)  # as in a layer with a window
    columns = replace(asked.text_columns, scores={**asked.text_columns.scores, "mass": replace(score, null=null)})
    mass, above = mass_panels(replace(asked, text_columns=columns))[0]
    np.testing.assert_allclose(above.values_LH[2], mass.values_LH[2] - 0.5)
    assert above.low == -above.high < 0
    with drawing(Fonts()):
        figure = metrics_figure([mass, above], Style(), ["0", "1", "2", "3"])
    assert [ax.images[0].get_cmap().name for ax in figure.axes[::2]] == ["viridis", "RdBu_r"]


def test_the_first_heads_are_framed_and_cells_hold_values(tmp_path: Path) -> None:
    values = np.linspace(0, 1, 12).reshape(3, 4)
    panel = Panel("mass", values, 0, 1, first=((2, 3), (0, 1)), always=True)
    with drawing(Fonts()):
        figure = metrics_figure([panel], Style(), ["0", "1", "2"], "Mass", "a note")
    ax = figure.axes[0]
    boxes = [(*patch.get_xy(), patch.get_width()) for patch in ax.patches]
    assert np.allclose(boxes, [(2.54, 1.54, 0.92), (0.54, -0.46, 0.92)]), "within the cells"
    assert [to_hex(patch.get_edgecolor()) for patch in ax.patches] == [DARK_INK, LIGHT_INK], "dark on yellow"
    numbers = {text.get_position(): text.get_text() for text in ax.texts if text.get_label() == NUMBER}
    assert numbers == {(head, layer): f"{values[layer, head]:.2f}" for layer, head in np.ndindex(3, 4)}
    assert words(figure.texts)[:2] == ["Mass", "a note"]
    crowded = replace(panel, values_LH=np.zeros((3, 90)))
    with drawing(Fonts()):
        small = metrics_figure([replace(crowded, values_LH=np.eye(3, 90))], Style(), ["0", "1", "2"])
    assert len(small.axes[0].patches) == 2
    assert not any(text.get_label() == NUMBER for text in small.axes[0].texts), "no room for a number"
    assert save_metrics(tmp_path / "a.png", [panel], Style(), layer_labels=range(3)).stat().st_size > 5000


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        (("--metrics", "keys_95"), ["keys that hold 95 %"]),
        (("--sort", "-induction", "--metrics", "keys_95"), ["induction", "keys that hold 95 %"]),
        (("--sort", "off_token_mass"), ["off-token mass"]),
        pytest.param((), ["focus", "sink", "entropy", "confidence"], marks=pytest.mark.e2e),
    ],
)
def test_the_panels_of_metrics_are_those_that_are_asked_for(tmp_path: Path, options, drawn) -> None:
    call("heads", STORY, "--figures", "metrics", *options, "--image", "svg", "--out", str(tmp_path), "-q").ok()
    texts = re.findall(">([^<>]+)</text>", (tmp_path / "metrics.svg").read_text())
    named = [text for text in texts if text in {metric.title for metric in KNOWN.values()}]
    assert named == drawn if options else set(named) > set(drawn)


# The sheet


def test_the_sheet_holds_the_first_heads_with_role_and_score(demo) -> None:
    seen = attnscope.capture(demo, STORY, request=Request(maps="all"))
    maps = layer_maps(seen)
    sheet = head_sheet(seen, maps, "focus", 5)
    best = sorted(seen.heads, key=lambda head: -head.score["focus"])[:5]
    assert "-" in {head.role for head in best}
    assert list(sheet.titles) == [
        f"{head.name}{'' if head.role == '-' else f' {head.role}'}, focus {head.score['focus']:.2f}" for head in best
    ]
    assert sheet.name == "First 5 of 24 heads by focus"
    for values_QK, head in zip(sheet.values_HQK, best, strict=True):
        np.testing.assert_array_equal(values_QK, maps[head.layer].values_HQK[head.head])
    lowest = head_sheet(seen, maps, "-entropy", 1)
    assert lowest.titles[0].startswith(min(seen.heads, key=lambda head: head.score["entropy"]).name)
    with drawing(Fonts()):
        figure = layer_figure(sheet, Style(sink="mask"))
    assert [text.split(" · ")[0] for text in words(figure.axes[0].texts)] == list(sheet.titles)
    assert figure.texts[0].get_text() == sheet.name


def test_titles_never_run_into_each_other_or_the_colour_bar() -> None:
    titles = tuple(f"L{head}H1 duplicate-token, focus 0.12" for head in range(6))
    maps = Maps(0, tuple(range(6)), causal(6, 9)[:, :, :2], BANK, BANK[:2], titles=titles)
    for style in (Style(), Style(width="page")):
        with drawing(Fonts()):
            figure = layer_figure(maps, style)
            figure.canvas.draw()
            boxes = [text.get_window_extent() for text in figure.axes[0].texts]
            bar = figure.axes[1].get_window_extent()
        for place, one in enumerate(boxes):
            assert not any(one.overlaps(other) for other in (*boxes[:place], bar)), style.width


def test_maps_of_one_weight_fill_a_sheet_that_is_no_tower() -> None:
    titles = tuple(f"L{head // 6}H{head % 6} induction, mass 0.12" for head in range(20))
    maps = bank_maps(1)
    part = replace(
        maps,
        heads=tuple(range(20)),
        kv_heads=(),
        values_HQK=np.full((20, 1, 1), 0.5),
        labels_Q=BANK[:1],
        labels_K=BANK[:1],
        part=Part("x", (0,), (0,)),
        starts_Q=(0,),
        starts_K=(0,),
        titles=titles,
    )
    with drawing(Fonts()):
        wide, high = layer_figure(part, Style()).get_size_inches()
    assert 0.5 < wide / high < 2


def test_small_shares_keep_a_third_decimal_and_larger_ones_two() -> None:
    values = np.array([[0.013, 0.009], [0.0, 0.002]])
    for scale, shown in ((1, ["0.013", "0.009", "0.000", "0.002"]), (10, ["0.13", "0.09", "0.00", "0.02"])):
        with drawing(Fonts()):
            panel = Panel("mass", scale * values, 0, 0.013 * scale, uniform=(0.008 * scale,), always=True)
            drawn = words(metrics_figure([panel], Style(), ["0", "1"]).axes[0].texts)
        assert [text for text in drawn if text[:1].isdigit()] == shown
        assert ("uniform 0.008" if scale == 1 else "uniform 0.08") in drawn


def test_a_line_of_one_head_a_layer_has_no_bands_in_its_legend() -> None:
    null = np.full(4, 0.1)
    for layers, bands in (([0, 1, 2, 3], False), ([0, 0, 1, 1], True)):
        depth = Depth("focus", "share", np.array(layers), np.array([0.1, 0.4, 0.2, 0.3]), null)
        with drawing(Fonts()):
            figure = depth_figure([depth], Style(), "", 600)
        shown = [text.get_text() for text in figure.findobj(Text)]
        assert any("middle half" in text for text in shown) == bands
        assert "mean of the heads" in " ".join(shown)


def test_tall_maps_stand_side_by_side() -> None:
    assert grid_columns(20, (), 0.25) > grid_columns(20, ()) > grid_columns(20, (), 4.0)
    assert grid_columns(19, ()) == 6


# The commands


def test_a_figure_is_drawn_where_it_is_named(tmp_path: Path) -> None:
    base = ("draw", "--text", SENTENCE, "--query", "bank", "--key", "the", "--out", str(tmp_path))
    done = call(*base, "--figures", "top,mass", "--top", "3").ok()
    names = [Path(line).relative_to(tmp_path).as_posix() for line in done.out.decode().splitlines()]
    assert names == ["mass.png", "top.png"]
    assert {path.name for path in tmp_path.iterdir()} == {*names, "manifest.json"}
    for name in names:
        assert OURS.fullmatch(name)
        assert Image.open(tmp_path / name).text["Command"].startswith("attnscope draw --query bank --key the")
    call(*base, "--force").ok()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"overview.png", "layers", "manifest.json"}, "what the run before drew is gone"


def test_heads_draws_what_is_named_beside_its_tables(tmp_path: Path) -> None:
    arguments = ("heads", "--text", SENTENCE, "--key", "the", "--out", str(tmp_path))
    call(*arguments, "--figures", "mass,top", "--top", "2").ok()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"heads.csv", "relations.csv", "mass.png", "top.png", "manifest.json"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("draw", "--figures", "mass", "--out", "x"), "--figures mass shows the mass on named keys; name them with"),
        (
            ("draw", "--figures", "mas", "--out", "x"),
            "--figures: expected some of overview, layers, heads, metrics, mass, top",
        ),
        (("draw", "--figures", ",", "--out", "x"), "--figures names no figure; write"),
        (("heads", "--figures", "overview"), "--figures are files; name a folder with --out DIR"),
    ],
)
def test_a_figure_that_cannot_be_drawn_is_refused_before_a_model_is_loaded(arguments: tuple, says: str) -> None:
    done = call(arguments[0], "--model", "./none", "--text", SENTENCE, *arguments[1:])
    assert done.code == 2
    assert says in done.err


def test_python_refuses_them_too(demo, tmp_path: Path, asked) -> None:
    assert OFFERED == FIGURES
    with pytest.raises(UsageError, match="shows the mass on named keys; name them with key"):
        attnscope.capture(demo, SENTENCE).export(tmp_path, figures=("mass",))
    written = asked.export(tmp_path, figures=ASKED_FOR, tables=False)
    assert [path.name for path in written] == ["mass.png", "top.png", "depth.png", "manifest.json"]
    assert Drawing.of(asked).sheet is None, "no copy of maps that nobody asked for"
    assert Drawing.of(asked, DrawingOptions(top=None)).sheet.name == "First 24 of 24 heads"
