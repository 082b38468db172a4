"""What the figures of effects and of a pruning show."""

import math
from dataclasses import replace

import numpy as np
import pytest

from attnscope.errors import UsageError
from attnscope.export.study_figures import Shown, costs_of, effect_panels, holds_zero, save_ablation, save_effects
from attnscope.figures import About, SetCost, Style, save_sets
from attnscope.figures.curves import pruning_figure, save_pruning
from attnscope.figures.fonts import Fonts
from attnscope.figures.metrics import metrics_figure
from attnscope.figures.pictures import Grid, grid_figure
from attnscope.figures.style import UNSURE
from attnscope.figures.writer import drawing
from attnscope.studies.ablation import Ablation, HeadSets
from helpers.figures import pixels, plain_drawing

HEADS = [(0, 0), (0, 1), (2, 0), (2, 1)]
ALONE = Shown("alone", "nats", {(0, 0): 0.08, (0, 1): -0.01, (2, 0): 0.66, (2, 1): 0.0}, "nats")
TOGETHER = Shown("together", "nats", {(0, 0): 8.5, (2, 0): 12.34}, "nats")
SIGNED = Shown("direct", "logits", {(0, 0): -2.0, (2, 1): math.nan, (2, 0): 1.0}, "logits")


def words(ax):
    return [text.get_text() for text in ax.texts]


def test_panels_hold_the_heads_numbers_and_share_a_scale():
    alone, together, direct = effect_panels(HEADS, [ALONE, TOGETHER, SIGNED])
    np.testing.assert_array_equal(alone.values_LH, [[0.08, -0.01], [0.66, 0.0]])
    np.testing.assert_array_equal(together.values_LH, [[8.5, np.nan], [12.34, np.nan]])
    assert (alone.low, alone.high) == (together.low, together.high) == (-0.01, 12.34)
    assert (direct.low, direct.high, direct.quantity) == (-2.0, 2.0, "logit")  # as far to both sides
    assert alone.quantity == "weight"


def test_effects_of_both_signs_have_a_map_centred_on_0():
    for least, quantity in ((-0.04, "logit"), (-0.004, "weight"), (0.0, "weight")):
        [panel] = effect_panels(HEADS, [Shown("lost", "share", {(0, 0): least, (2, 1): 1.0}, "a")])
        assert (panel.quantity, panel.high) == (quantity, 1.0)
        assert panel.low == (-1.0 if quantity == "logit" else least)


def test_heads_whose_interval_holds_0_are_hatched_and_the_foot_says_so():
    low, high = np.array([-0.1, 0.1, np.nan, np.nan, np.nan]), np.array([0.1, 0.2, 0.1, -0.1, np.nan])
    assert holds_zero(low, high).tolist() == [True, False, True, False, False]
    unsure = frozenset({(0, 1), (2, 0)})
    panels = effect_panels(HEADS, [replace(ALONE, unsure=unsure), replace(SIGNED, unsure=unsure), TOGETHER])
    assert [None if panel.hatched_LH is None else panel.hatched_LH.tolist() for panel in panels] == [
        [[False, True], [True, False]],
        [[False, True], [True, False]],
        None,
    ]
    with drawing(Fonts()):
        figure = metrics_figure(panels, Style(), ["0", "2"])
        bare = metrics_figure(effect_panels(HEADS, [ALONE]), Style(), ["0", "2"])
    light, dark = ([patch.get_edgecolor() for patch in ax.patches] for ax in (figure.axes[0], figure.axes[2]))
    assert len(light) == len(dark) == 2
    assert min(light[0][:3]) > 0.9 > 0.3 > max(dark[0][:3]), "0 is dark on one map and light on the other"
    assert [UNSURE in " ".join(text.get_text() for text in each.texts) for each in (figure, bare)] == [True, False]


def test_panels_of_one_scale_have_one_colour_bar(tmp_path):
    lost, back = (Shown(name, "share", {head: 0.1 * place for place, head in enumerate(HEADS)}, "a") for name in "ab")
    with drawing(Fonts()):
        for shown, bars in (([lost, back], 1), ([lost, SIGNED], 2), ([lost], 1)):
            figure = metrics_figure(effect_panels(HEADS, shown), Style(), ["0", "2"])
            assert sum(ax.get_visible() for ax in figure.axes[1::2]) == bars
        figure = metrics_figure(effect_panels(HEADS, [lost, back]), Style(), ["0", "2"])
        whole = plain_drawing(figure)
    path = save_effects(tmp_path / "a.png", HEADS, [lost, back], Style(), title=figure.texts[0].get_text())
    assert np.abs(pixels(path) - whole).max() <= 2


def test_a_grid_has_one_colour_bar_and_hatches_what_is_unsure():
    value_LP = np.array([[0.5, -0.2, 0.0], [0.1, 0.0, 1.0]])
    hatched = np.array([[False, False, True], [True, True, False]])
    grid = Grid(["L0", "L1"], ["a", "b", "c"], {"lost": value_LP, "back": value_LP}, "share", {"lost": hatched})
    with drawing(Fonts()):
        figure = grid_figure(grid, Style(), "Which")
    first, bar, second, none = figure.axes
    assert (bar.get_visible(), none.get_visible()) == (True, False)
    boxes = [(*patch.get_xy(), patch.get_width()) for patch in first.patches]
    assert boxes == [(2, 0, 1), (0, 1, 2)]
    assert not second.patches
    assert first.collections[0].get_clim() == (-1.0, 1.0)
    assert UNSURE in [text.get_text() for text in figure.texts]


def test_a_grid_of_few_cells_is_as_wide_as_its_words_and_as_high_as_its_unit():
    grid = Grid(["L0", "L1"], ["a", "b"], {"mean": np.eye(2)}, "share of the residual")
    style = Style().of(About(line="a model with a long name, 20 tokens and more to say of them"))
    with drawing(Fonts()):
        figure = grid_figure(grid, style, "What each layer reads of earlier blocks")
        boxes = [text.get_window_extent() for text in figure.texts if text.get_text()]
        unit = figure.axes[1].yaxis.label.get_window_extent()
    assert len(boxes) == 2
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)
    title = max(box.y0 for box in boxes)
    assert unit.y1 < title


def test_the_numbers_stand_in_cells_that_have_room():
    panels = effect_panels(HEADS, [TOGETHER])
    with drawing(Fonts()):
        figure = metrics_figure(panels, Style(), ["0", "2"])
        assert {"8.50", "12.3"} <= set(words(figure.axes[0]))
        many = effect_panels([(0, head) for head in range(80)], [Shown("a", "", {(0, 3): 2.5, (0, 4): 1.0}, "a")])
        assert "2.50" not in words(metrics_figure(many, Style(), ["0"]).axes[0])


def test_a_set_whose_heads_are_alike_is_drawn():
    alike = Shown("together", "nats", {(0, 0): 8.5, (2, 0): 8.5}, "nats")
    with drawing(Fonts()):
        figure = metrics_figure(effect_panels(HEADS, [ALONE, alike]), Style(), ["0", "2"])
    assert len(figure.axes) == 4  # two panels with their bars


def test_four_panels_stand_two_by_two():
    with drawing(Fonts()):
        figure = metrics_figure(effect_panels(HEADS, [ALONE, TOGETHER, SIGNED, ALONE]), Style(), ["0", "2"])
        corners = [ax.get_position() for ax in figure.axes[::2]]
    assert len({round(box.x0, 4) for box in corners}) == 2
    assert len({round(box.y0, 4) for box in corners}) == 2


def test_the_curve_has_every_head_and_its_loss():
    with drawing(Fonts()):
        figure = pruning_figure(["L2H4", "L0H1"], [0.04, 0.05, 0.8], [("uniform guess", 6.2)], Style())
        [ax] = figure.axes
        curve, intact, guess = ax.lines
        np.testing.assert_array_equal(curve.get_ydata(), [0.04, 0.05, 0.8])
        assert [label.get_text() for label in ax.get_xticklabels()] == ["intact", "L2H4", "L0H1"]
        assert (intact.get_ydata()[0], guess.get_ydata()[0]) == (0.04, 6.2)
        assert words(ax) == ["intact", "uniform guess"]
        assert len(pruning_figure(["a"] * 100, [1.0] * 101, [], Style()).axes[0].get_xticklabels()) < 20


def test_figures_are_written(tmp_path):
    style = Style(title="Mine", about=About(line="demo"))
    assert save_effects(tmp_path / "a.png", HEADS, [ALONE, TOGETHER], style, "a note").stat().st_size > 5000
    assert save_pruning(tmp_path / "p.png", ["L0H0"], [0.0, 0.3], [], style).stat().st_size > 5000
    with pytest.raises(ValueError, match="expected 2 losses for 1 heads"):
        save_pruning(tmp_path / "p.png", ["L0H0"], [0.3], [], style)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        save_pruning(tmp_path / "file" / "p.png", ["L0H0"], [0.1, 0.3], [], style)


def test_a_set_without_an_effect_is_drawn_without_a_bar(tmp_path):
    """A model whose loss is no number: its effects are null in the table."""
    columns = ("set", "condition", "heads", "effect", "low", "high", "random_low", "random_high")
    rows = [("two", "together", "L0H0 L0H1", None, *[None] * 4), ("one", "together", "L0H2", 1.0, *[None] * 4)]
    costs = costs_of(dict(zip(columns, zip(*rows, strict=True), strict=True)))
    assert np.isnan(costs[0].value)
    assert costs[1].value == 1.0
    for some in (costs, costs[:1]):
        path = save_sets(tmp_path / "sets.png", some, Style(), title="What is lost", note="", unit="nats")
        assert path.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("counted", [(), [(0, 0), (0, 1)]])
def test_only_pictures_that_were_drawn_are_named(tmp_path, counted):
    facts = {"task": {"name": "copy", "sequences": 1}, "replacement": "mean", "intact": 1.0}
    facts |= {"measure": {"unit": "nats"}, "model": {"name": "demo"}}
    found = Ablation(HeadSets((), {}, {}), np.ones(1), {}, facts)
    paths = save_ablation(found, tmp_path, counted, costs=[SetCost("both", 1.0)])
    assert sorted(path for path in paths) == sorted(tmp_path.iterdir())
