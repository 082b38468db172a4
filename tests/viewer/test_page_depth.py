"""The page of a depth: its numbers are those of the table, and in a browser each reader, token and stream is chosen."""

from dataclasses import replace

import numpy as np
import pytest

import attnscope
from attnscope.viewer.study_pages import DepthSide
from helpers.browsing import DESKTOP, NAMELESS, OUTSIDE, PHONE, visiting
from helpers.command_line import call
from helpers.hostile import HOSTILE, called, controls, ran_nothing
from helpers.pages import read
from helpers.parity_models import ids_for, rouse, roused_model
from helpers.stack_families import ids as stack_ids
from helpers.stack_families import inputs_of, tiny
from helpers.why_families import wrapped

BANK = "the bank of the river, the bank of the"
WIDE = "document.scrollingElement.scrollWidth - innerWidth"
ROUNDED = 5e-3  # of two decimals
CELLS = """all => all.map((row) => [...row.querySelectorAll("td")].map((one) => one.innerText))"""


def page_of(found, tmp_path, name="depth.html"):
    return found.page().save(tmp_path / name)


def of_family(family, **how):
    ids = ids_for(family)[0].tolist()
    return attnscope.depth(wrapped(roused_model(family)), ids, **how)


def arrays(page):
    """{panel: numbers and norms, (2, readers, blocks)}, and what the page says of them."""
    [side] = page.said["sides"]
    depth = side["depth"]
    shape = 2, len(depth["panels"]), len(depth["readers"]), len(depth["blocks"])
    both = page.array(depth, "<f4", int(np.prod(shape))).reshape(shape)
    return {name: both[:, place] for place, name in enumerate(depth["panels"])}, depth


@pytest.mark.parametrize(
    ("family", "how", "panels"),
    [
        ("llama", {"query": "0,last"}, 2),
        ("inkling2_text", {}, 1),
        ("qwen4_exp_text", {"query": "last"}, 4),
        ("mamba2", {}, 1),
    ],
)
def test_the_page_has_each_row_of_the_table_and_nothing_else(tmp_path, family, how, panels):
    found = of_family(family, **how)
    made, depth = arrays(read(page_of(found, tmp_path)))
    assert len(made) == panels
    rows = found.table().to_pylist()
    name = "weight" if found.parts.measure == "weight" else "share"
    left = {panel: both.copy() for panel, both in made.items()}
    for row in rows:
        panel = [one for one in made if row["token"] is None or f"({row['position']})" in one]
        [panel] = [one for one in panel if row["stream"] is None or one.endswith(f"stream {row['stream']}")]
        layer = "" if row["layer"] is None else f"L{row['layer']} "
        reader = depth["readers"].index(f"{layer}{row['use']}".removesuffix("layer").strip())
        column = depth["blocks"].index(row["block"])
        assert made[panel][:, reader, column] == pytest.approx([row[name], row["norm"]], rel=1e-6)
        left[panel][:, reader, column] = np.nan
    assert all(np.isnan(both).all() for both in left.values())


def test_tokens_of_each_text_are_apart_in_an_encoder_decoder(tmp_path):
    model = tiny("t5", num_layers=2, num_decoder_layers=2)
    rouse(model)
    target = inputs_of(model)["decoder_input_ids"][0].tolist()
    found = attnscope.depth(wrapped(model), stack_ids(12, texts=1)[0].tolist(), target=target, query="0,2")
    made, _ = arrays(read(page_of(found, tmp_path)))
    stacks = [name.partition(" ")[0] for name in made]
    assert stacks == ["encoder", "encoder", "decoder", "decoder"]
    for (name, both), stack in zip(made.items(), stacks, strict=True):
        position = int(name.rpartition("(")[2].rstrip(")"))
        rows = [row for row in found.table().to_pylist() if (row["stack"], row["position"]) == (stack, position)]
        numbers = both[0][~np.isnan(both[0])]
        assert sorted(numbers) == pytest.approx(sorted(row["share"] for row in rows), rel=1e-6)


def test_tokens_that_have_no_room_are_left_out_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(DepthSide, "most", staticmethod(lambda readers, blocks: 3))
    made, depth = arrays(read(page_of(of_family("llama", query="*"), tmp_path)))
    assert len(made) == 3
    assert "3 of 24 tokens and streams have room" in depth["notes"]
    monkeypatch.undo()
    assert DepthSide.most(33, 65) > 256  # of 32 layers


@pytest.mark.e2e
def test_a_reader_and_a_token_are_chosen(browser, tmp_path):
    folder = tmp_path / "depth"
    call("depth", BANK, "--query", "river,last", "--out", str(folder)).ok()
    page = read(folder / "depth.html")
    made, depth = arrays(page)
    assert page.said["title"] == f"demo: “{BANK}”"
    assert depth["command"] == f"attnscope depth --model demo --text '{BANK}' --query river,last"
    with visiting(browser, folder / "depth.html", size=DESKTOP) as visit:
        view = visit.view("depth")
        view.locator("tr[data-reader]").first.wait_for()
        assert visit.page.locator("[role=tab]").all_inner_texts() == ["Depth"]
        assert not visit.page.locator(".filters, .status").locator("visible=true").count()
        for name in depth["panels"]:
            view.locator("select").select_option(name)
            view.locator(f"td[title*='{made[name][1, 1, 1]:#.3g}']").first.wait_for()
            cells = view.locator("tr[data-reader]").evaluate_all(CELLS)
            for row, numbers in zip(cells, made[name][0], strict=True):
                assert [text == "" for text in row] == np.isnan(numbers).tolist()
                shown = [float(text.replace("−", "-") or "nan") for text in row]
                assert shown == pytest.approx(numbers.tolist(), abs=ROUNDED, nan_ok=True)
        assert view.locator("aside h2").inner_text() == "Reader final"
        view.get_by_role("button", name="L1").click()
        view.get_by_role("heading", name="Reader L1").wait_for()
        order = np.argsort(-np.abs(made[depth["panels"][-1]][0, 1, :3]))
        assert view.locator("tr[data-block] th").all_inner_texts() == [depth["blocks"][place] for place in order]
        assert visit.page.evaluate("document.activeElement.innerText") == "L1"
        assert visit.page.evaluate(NAMELESS) == visit.page.evaluate(OUTSIDE) == []
        visit.page.keyboard.press("s")
        recipe = visit.page.locator("[data-recipe='Command of this view']")
        assert recipe.inner_text() == depth["command"]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("script", [PHONE]), *(pytest.param(name, [DESKTOP, PHONE], marks=pytest.mark.e2e) for name in sorted(HOSTILE))],
)
def test_hostile_words_are_shown_as_text(browser, tmp_path, name, sizes):
    text = HOSTILE[name]
    found = of_family("qwen4_exp_text", query="last")
    points = tuple(replace(point, blocks=tuple(text + block for block in point.blocks)) for point in found.parts.points)
    stack = points[-1].stack
    read_as = {stack: found.texts[stack]._replace(prompt=called(found.texts[stack], [text, "b"]))}
    hostile = replace(found, source=text, texts=read_as, parts=replace(found.parts, points=points))
    path = page_of(hostile, tmp_path)
    for size in sizes:
        with visiting(browser, path, size=size) as visit:
            visit.view("depth").locator("tr[data-reader]").first.wait_for()
            assert ran_nothing(visit)
            assert not controls(visit)
            assert visit.page.evaluate(WIDE) <= 0
