"""The page of a knockout in a browser: each kind of cut, what is heard and pointed at, hostile words, both widths."""

import json
from dataclasses import replace
from itertools import product

import pytest

import attnscope
from attnscope.viewer.study_pages import Again, cuts_page
from helpers.browsing import DESKTOP, NAMELESS, OUTSIDE, PHONE, UNSAID, visiting
from helpers.command_line import call
from helpers.hostile import HOSTILE, STEERING, called, controls, ran_nothing
from helpers.pages import read

BANK = "the bank of the river, the bank of the"
WIDE = "document.scrollingElement.scrollWidth - innerWidth"
E2E = pytest.mark.e2e
ALL = ("heads", "window:2", "keys", "none", "kv", "layers")
KINDS = [*ALL[:2], *(pytest.param(kind, marks=E2E) for kind in ALL[2:])]
TEXTS = HOSTILE | {"steering": STEERING}


@pytest.fixture(scope="module")
def cut(demo):
    """A knockout over a kind of cut, each computed once."""
    known = {}

    def over(kind, **how):
        key = {} if kind == "keys" else {"key": "river"}
        name = f"{kind} {how}"
        if name not in known:
            asked = {"answer": " river", "random": 3, **key, **how}
            known[name] = attnscope.knockout(demo, BANK, over=kind, **asked)
        return known[name]

    return over


@pytest.fixture
def opened(browser, demo, tmp_path):
    def visit(found, state="", **how):
        path = cuts_page(found, demo.geometry).save(tmp_path / "knockout.html")
        return visiting(browser, path, state, **how)

    return visit


def view(visit):
    found = visit.view("cuts")
    found.locator("table.heads").wait_for()
    return found


def digits(value):
    """As the page writes an effect of some size: three digits, those of zeros too, and a sign."""
    size = abs(value)
    text = f"{size:.3f}" if size < 1 else f"{size:#.3g}"
    return f"{'+' if value > 0 else '−'}{text}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cut_has_its_picture_and_its_table(opened, cut, kind):
    found = cut(kind)
    with opened(found) as visit:
        shown = view(visit)
        assert visit.page.locator("[role=tab]").all_inner_texts() == ["Cuts"]
        assert shown.locator(".grid button").count() == (24 if kind in ("heads", "kv") else 0)
        assert shown.locator(".curve-steps button").count() == (4 if kind in ("layers", "window:2") else 0)
        assert shown.locator("tr[data-cut]").count() == len(found.asked)
        assert shown.locator(".piece.asked").all_inner_texts() == [" the"]
        assert shown.locator(".piece.cut").all_inner_texts() == ([] if kind == "keys" else [" river"])
        coloured = [
            one for one in shown.locator(".piece").all() if "background-color" in (one.get_attribute("style") or "")
        ]
        assert len(coloured) == (11 if kind == "keys" else 0)
        said = shown.locator(".cut-facts").inner_text()
        for words in ("·river", "10 ·the", "mask: the rest of the row takes the weight"):
            assert words in said
        assert not visit.page.locator(".filters, .status").locator("visible=true").count()
        rows = found.table().to_pylist()
        best = max(rows, key=lambda row: row["effect"])
        assert shown.locator(".beside h3").inner_text() == f"{best['set']}: {digits(best['effect'])} nats"


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["heads", "none"])
def test_the_table_has_columns_for_what_was_compared(opened, cut, kind):
    found = cut(kind)
    rows = found.table().to_pylist()
    with opened(found) as visit:
        titles = view(visit).locator("table.heads th").all_inner_texts()
        kinds = {"other keys": "n_permuted", "other heads": "n_heads"}
        drawn = [name for name, count in kinds.items() if any(row[count] for row in rows)]
        assert ("other heads" in drawn) == (kind == "heads"), "where all heads are cut there are no others"
        assert titles == [
            "cut",
            "mass",
            "effect",
            *(f"{name}: {what}" for name in drawn for what in ("mean", "95 %", "p")),
        ]
        assert view(visit).locator("tr[data-cut]").first.locator("td").count() == len(titles)


def test_a_head_says_its_effect_to_a_pointer_to_keys_and_to_those_who_hear(opened, cut):
    found = cut("heads")
    [row] = [row for row in found.table().to_pylist() if row["set"] == "L3H0"]
    with opened(found) as visit:
        head = view(visit).locator('[data-head="3.0"]')
        assert head.get_attribute("aria-label") == f"L3H0, {row['effect']:+.2f}"
        head.hover()
        tip = visit.tip("weight that was cut")
        for words in ("L3H0", f"{row['mass']:.3f}", "p against other keys", "p against other heads"):
            assert words in tip
        visit.page.mouse.move(1, 1)
        visit.page.locator("[role=tab]").focus()
        for _ in range(4):
            visit.page.keyboard.press("Tab")
            if head.evaluate("one => one === document.activeElement"):
                break
        assert "L3H0" in visit.tip("weight that was cut")
        visit.page.keyboard.press("ArrowRight")
        visit.settled(at=3, head=1)
        assert view(visit).locator(".beside h3").inner_text().startswith("L3H1: +")


@pytest.mark.e2e
def test_an_effect_is_a_colour_light_at_zero_and_none_where_nothing_is_seen(opened, demo, cut):
    found = attnscope.knockout(demo, BANK, query=5, over="keys", random=0)
    with opened(found) as visit:
        pieces = view(visit).locator(".piece")
        unseen = [place for place in range(11) if "unseen" in pieces.nth(place).get_attribute("class").split()]
        assert unseen == [6, 7, 8, 9, 10]  # behind the query
        assert "seen by no query" in view(visit).locator(".legend").inner_text()
        assert view(visit).locator("tr[data-cut='6'] td").nth(2).inner_text() == "–"
    light = """one => {
      const [r, g, b] = getComputedStyle(one).backgroundColor.match(/\\d+/g).map(Number);
      return [r + g + b, r - b];
    }"""
    with opened(cut("heads")) as visit:
        cells = view(visit)
        zero, strong = (cells.locator(f'[data-head="{name}"]').evaluate(light) for name in ("0.1", "3.0"))
        assert zero[0] > 700 > strong[0]
        assert abs(zero[1]) < 20 < strong[1]  # grey, and orange


@pytest.mark.e2e
def test_a_curve_is_walked_with_arrows_and_saved_as_lines(opened, cut):
    with opened(cut("window:2")) as visit:
        steps = view(visit).locator(".curve-steps button")
        first = steps.nth(0)
        first.hover()
        assert "L0-1" in visit.tip("weight that was cut")
        first.click()
        visit.settled(at=0)
        first.press("ArrowRight")
        visit.settled(at=1)
        assert view(visit).locator(".beside h3").inner_text().startswith("L1-2: ")
        assert steps.nth(1).evaluate("one => one === document.activeElement")
        visit.page.keyboard.press("s")
        with visit.page.expect_download() as download:
            visit.page.locator("[data-save=svg]").click()
        saved = download.value
        assert saved.suggested_filename == "attnscope-cuts-over-window-2.svg"
        text = saved.path().read_text("utf-8")
        for words in (">L3</text>", "layer in the middle of a window", "<path"):
            assert words in text


@pytest.mark.e2e
def test_a_key_is_chosen_in_the_text(opened, cut):
    with opened(cut("keys")) as visit:
        view(visit).locator('.piece[data-token="5"]').click()
        visit.settled(key=5)
        assert view(visit).locator(".beside h3").inner_text().startswith("river(5): +")
        assert view(visit).locator("tr[aria-selected=true] td").first.inner_text() == "river(5)"
        view(visit).locator('.piece[data-token="10"]').hover()
        assert "a query too" in visit.tip("this token")


@pytest.mark.parametrize(
    ("kind", "theme", "sizes"),
    [
        ("heads", "dark", [PHONE]),
        *(pytest.param(*one, [DESKTOP, PHONE], marks=E2E) for one in product(ALL, ("light", "dark"))),
    ],
)
def test_names_landmarks_and_widths(opened, cut, kind, theme, sizes):
    for size in sizes:
        with opened(cut(kind), size=size, theme=theme) as visit:
            assert view(visit).locator("h2").first.inner_text().lower() == "cuts"
            assert visit.page.evaluate(NAMELESS) == []
            assert visit.page.evaluate(OUTSIDE) == []
            assert visit.page.evaluate(UNSAID) == []
            assert visit.page.evaluate(WIDE) <= 0


@pytest.mark.parametrize(
    ("kind", "name", "sizes"),
    [
        ("heads", "closed script", [PHONE]),
        *(pytest.param(*one, [DESKTOP, PHONE], marks=E2E) for one in product(("heads", "keys"), TEXTS)),
    ],
)
def test_hostile_words_are_shown_as_text(browser, demo, cut, tmp_path, kind, name, sizes):
    text = TEXTS[name]
    found = cut(kind)
    case = found.cases[0]
    prompt = called(case, [text, "b"])
    facts = {**found.facts, "model": {**found.facts["model"], "name": text}, "select": text}
    asked = [replace(one, cut=replace(one.cut, name=text)) for one in found.asked]
    case = replace(case, prompt=prompt, answer_text=text, foil_text=text, queries=(2,))
    hostile = replace(found, cases=(case,), facts=facts, asked=tuple(asked))
    page = cuts_page(hostile, demo.geometry, [text], Again(text, text, [text]))
    path = page.save(tmp_path / "page.html")
    for size in sizes:
        with visiting(browser, path, size=size) as visit:
            visit.hover(view(visit).locator('.piece[data-token="2"]'))
            visit.tip("a query")
            assert ran_nothing(visit)
            assert not controls(visit)
            assert visit.page.evaluate(WIDE) <= 0
            visit.page.keyboard.press("s")
            visit.page.get_by_role("dialog", name="Save and copy").wait_for()
            assert ran_nothing(visit)


def test_texts_are_listed_each_with_its_own_marks(browser, tmp_path):
    path = tmp_path / "facts.jsonl"
    rows = [
        {"text": BANK, "key": "river", "answer": " river", "foil": " bank"},
        {"text": "a river and a bank, a river and a", "key": "bank", "answer": " bank", "foil": " river"},
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    page = tmp_path / "knockout.html"
    call("knockout", "--texts", str(path), "--over", "heads", "--random", "0", "--html", str(page)).ok()
    said = read(page).said
    assert said["title"] == "demo: 2 texts"
    assert [text["answer"] for text in said["sides"][0]["cuts"]["texts"]] == ["·river", "·bank"]
    with visiting(browser, page) as visit:
        shown = view(visit)
        assert shown.locator(".piece.cut").all_inner_texts() == [" river", " bank"]
        assert shown.locator(".cut-answer").all_inner_texts() == [" → ·river, foil ·bank", " → ·bank, foil ·river"]
        assert "marked in each text" in shown.locator(".cut-facts").inner_text()
        assert "2 texts" in visit.page.locator("header").inner_text()


def test_the_page_copies_the_command_with_its_text(tmp_path):
    asked = ("--key", "river", "--over", "heads", "--random", "2", "--seed", "3")
    first = call("knockout", BANK, *asked, "--html", str(tmp_path / "one.html"), "-q").ok()
    side = read(tmp_path / "one.html").said["sides"][0]
    assert side["cuts"]["command"] == (
        f"attnscope knockout --model demo --text '{BANK}' --key river --over heads --seed 3 --random 2"
    )
    names = {}
    exec("\n".join(side["cuts"]["python"]), names)
    again = names["found"].table().to_pylist()
    assert [f"{row['effect']:.4f}" for row in again] == [f"{float(row['effect']):.4f}" for row in first.rows]
    call("knockout", "-", *asked, "--html", str(tmp_path / "two.html"), "-q", stdin=BANK.encode()).ok()
    assert f"--text '{BANK}'" in read(tmp_path / "two.html").said["sides"][0]["cuts"]["command"]


def test_the_page_alone(tmp_path):
    asked = ("knockout", BANK, "--key", "river", "--random", "2", "--quiet")
    first = call(*asked, "--out", str(tmp_path / "one")).ok()
    second = call(*asked, "--html", str(tmp_path / "cuts.html")).ok()
    assert first.out == second.out
    assert (tmp_path / "cuts.html").read_bytes() == (tmp_path / "one" / "knockout.html").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cuts.html", "one"]
    refused = call("knockout", BANK, "--keep", "stream:2+4", "--html", str(tmp_path / "cuts.html"))
    assert (refused.code, "there is no page of cache budgets" in refused.err) == (2, True)
