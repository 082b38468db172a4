"""What a page has chosen: one query and key everywhere, heads overlaid, steps through queries, and room for all."""

import itertools
from pathlib import Path

import numpy as np
import pytest

import attnscope
from attnscope.model.loading import wrap
from helpers.browsing import PHONE, visiting
from helpers.command_line import call
from helpers.made_tokenizers import bert_words
from helpers.pages import read
from helpers.rows import csv_rows
from helpers.stack_families import tiny

FIRST, SECOND = "the bank is on the river", "a hill"
WINDOW = (1280, 800)
STORY = Path(__file__).parents[2] / "examples" / "story.txt"


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A text of some 300 tokens that ends with empty lines, read from a file."""
    folder = tmp_path_factory.mktemp("long")
    (folder / "story.txt").write_text((STORY.read_text() * 3)[:1200].rsplit(".", 1)[0] + ".\n\n")
    call("view", "--file", str(folder / "story.txt"), "-o", str(folder / "page.html")).ok()
    return folder / "page.html"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A text and what the model made of it."""
    path = tmp_path_factory.mktemp("made") / "page.html"
    call("view", "--text", "The cat sat on the mat. The cat", "--generate", "4", "-o", str(path)).ok()
    return path


def test_header_and_footer_name_one_query_and_one_key(browser, subject):
    labels, last = subject.seen.prompt.labels, len(subject.seen.prompt) - 1
    key = int(subject.seen.weights[2][1, last].argmax())
    with visiting(browser, subject.path, "view=token&at=2&head=1") as visit:
        title = visit.view("token").locator("h2").last
        title.filter(has_text="at").wait_for()
        visit.until("() => document.querySelector('[data-role=weight]').textContent.startsWith('weight')")
        said = [visit.page.locator(f".status .token.{axis}").inner_text() for axis in ("query", "key")]
        assert said == [f"{last} {labels[last]}", f"{key} {labels[key]}"]
        assert all(one in title.inner_text() for one in said)
        assert title.inner_text().count("(suggested)") == 2
        assert visit.token("token", key, "key").get_attribute("aria-pressed") == "true"
        assert visit.page.locator(".status").inner_text().count("(suggested)") == 2
        visit.token("token", 0, "key").click()
        visit.settled(key=0)
        visit.until("() => document.querySelector('.status').innerText.split('(suggested)').length === 2")
        assert title.inner_text().count("(suggested)") == 1


@pytest.mark.e2e
def test_a_file_opens_at_its_last_word(browser, long):
    with visiting(browser, long, "view=text&at=1&head=5") as visit:
        chosen = visit.view("text").locator(".piece.chosen")
        chosen.wait_for()
        assert any(map(str.isalpha, chosen.inner_text()))
        after = visit.view("text").locator(f".piece[data-token='{int(chosen.get_attribute('data-token')) + 1}']")
        assert after.inner_text().strip() in (".", "")


@pytest.mark.e2e
def test_heads_of_a_layer_lie_over_one_another(browser, subject):
    heads = subject.seen.kv_of[next(iter(subject.seen.kv_of))][0]
    with visiting(browser, subject.path, "view=head&at=1&head=1&query=5&pin=1") as visit:
        squares = visit.view("head").locator(".square")
        squares.first.wait_for()
        assert squares.count() == heads
        squares.nth(0).click()
        visit.settled(heads="1.0")
        visit.page.locator("[data-role=all-heads]").click()
        visit.until(f"() => document.querySelectorAll('.square[aria-pressed=true]').length === {heads}")
        colours = squares.evaluate_all("all => all.map((one) => one.style.backgroundColor)")
        assert len(set(colours)) == heads
        bands = visit.token("head", 3, "key").locator(".band")
        visit.until(f"() => JSON.parse(document.querySelector('.rows .key .band').dataset.bands).length === {heads}")
        drawn = bands.evaluate("one => JSON.parse(one.dataset.bands)")
        np.testing.assert_allclose([share for _, share, _ in drawn], subject.seen.weights[1][:, 5, 3], atol=0.003)
        assert [one for *_, one in sorted(drawn, key=lambda one: one[1])] == sorted(one for *_, one in drawn)
        boxes = (
            visit.view("head")
            .locator(".rows .key .band")
            .evaluate_all("all => all.map(({style}) => [style.backgroundSize, style.backgroundPosition])")
        )
        assert len(set(map(tuple, boxes))) == 1  # of all tokens, so that a head's are below one another
        places = [float(place.split()[1].removesuffix("px")) for place in boxes[0][1].split(", ")]
        width = float(boxes[0][0].split("px")[0])
        assert all(left + width < right for left, right in itertools.pairwise(places))
        assert places[-1] + width <= bands.bounding_box()["width"]
        visit.page.keyboard.press("ArrowDown")  # they go along to the next layer
        visit.settled(at=2, head=1)
        assert visit.view("head").locator(".square[aria-pressed=true]").count() == heads
        squares.nth(1).click()  # the chosen one is hidden: another is chosen
        visit.until("() => document.querySelectorAll('.square')[1].getAttribute('aria-pressed') === 'false'")
        visit.until("() => !location.hash.includes('head=1&')")
        squares.nth(2).dblclick()
        visit.settled(head=2, heads=None)


BANDS = """all => Object.fromEntries(all.map((row) =>
  [row.dataset.token, JSON.parse(row.querySelector(".band").dataset.bands).map(([, weight]) => weight)]))"""


def test_the_boxes_under_the_pointer_have_the_weights_of_the_csv(browser, tmp_path):
    text, layer, query, key = "the old boat lies by the river bank", 1, 6, 2
    call("view", text, "--precision", "16", "-o", str(tmp_path / "page.html")).ok()
    table = call("relations", text, "--select", str(layer), "--top-k", "all", "--format", "csv", "-q").ok().out
    cells = {
        tuple(int(row[name]) for name in ("head", "query", "key")): float(row["weight"]) for row in csv_rows(table)
    }
    heads, tokens = (1 + max(places) for places in list(zip(*cells, strict=True))[:2])
    of_query, of_key, of_next = (
        np.array([[cells.get((head, *cell), 0.0) for head in range(heads)] for cell in of])
        for of in (
            [(query, token) for token in range(tokens)],
            [(token, key) for token in range(tokens)],
            [(query + 1, token) for token in range(tokens)],
        )
    )
    with visiting(browser, tmp_path / "page.html", f"view=head&at={layer}&head=0&sink=1") as visit:
        visit.page.locator("[data-role=all-heads]").click()
        for axis, token, other, expected in (("query", query, "key", of_query), ("key", key, "query", of_key)):
            visit.token("head", token, axis).hover()
            visit.until(f"() => document.querySelector('.rows .{axis}.focus')?.dataset.token === '{token}'")
            visit.until(
                f"() => JSON.parse(document.querySelector('.rows .{other} .band').dataset.bands).length === {heads}"
            )
            shown = visit.view("head").locator(f".rows .{other}").evaluate_all(BANDS)
            shown = np.array([shown[str(place)] for place in range(tokens)])
            assert np.abs(shown - expected).max() < 5e-4, "to three decimals"
            assert np.abs(shown - of_next).max() > 0.1


SHARE = "document.querySelector('.rows .key[data-token=\"0\"] .band')?.dataset.bands"  # what key 0 gets


@pytest.mark.e2e
def test_the_lines_of_a_long_text_open_without_a_sink_and_say_so(browser, tmp_path):
    page = tmp_path / "page.html"
    call("view", "--file", str(STORY), "-o", str(page)).ok()
    side, maps = read(page).said["sides"][0], read(page).maps()
    resting = next(one for one in side["heads"] if one["top_key"] == 0 and one["top_key_mass"] > 0.3)
    free = next(one for one in side["heads"] if one["top_key_mass"] <= 0.3)
    at, head = resting["at"], resting["head"]
    query = 1 + int(maps[at, head][1:, 0].argmax())
    with visiting(browser, page, f"view=head&at={at}&head={head}&query={query}&pin=1") as visit:
        box, told = visit.page.locator(".filters input[type=checkbox]").first, visit.page.locator("[data-role=sink]")
        visit.token("head", query, "query").wait_for()
        visit.page.locator(".scroller").evaluate("one => one.scrollTop = 0")
        visit.until(f"() => {SHARE}")
        assert not box.is_checked()
        assert f"hidden: 0 {side['tokens']['label'][0]} has {resting['top_key_mass']:.3f}" in told.inner_text()
        assert visit.page.evaluate(f"JSON.parse({SHARE})[0][1]") == 0
        visit.token("head", 0, "key").click()  # a chosen key is shown
        visit.settled(key=0)
        assert box.is_checked()
        visit.go(view="head", at=at, head=head, query=query, pin=1)
        box.check()
        visit.settled(sink=1)
        visit.until(f"() => {SHARE} && JSON.parse({SHARE})[0]?.[1] > 0")
        assert told.inner_text() == ""
        for view, one in (("matrix", resting), ("head", free)):
            visit.go(view=view, at=one["at"], head=one["head"])
            visit.until("() => document.querySelector('.filters input[type=checkbox]').checked")


@pytest.mark.e2e
def test_of_a_pair_of_texts_one_may_look_at_the_other(browser, tmp_path):
    tokenizer = bert_words(*FIRST.split(), *SECOND.split())
    seen = attnscope.capture(wrap(tiny("bert", vocab_size=len(tokenizer)), tokenizer), FIRST, pair=SECOND)
    page, second, count = tmp_path / "page.html", seen.prompt.segments[1].start, len(seen.prompt)
    seen.page().save(page)
    with visiting(browser, page, "view=head&at=1&head=2") as visit:
        visit.page.locator("label:has-text('pair') select").select_option("ab")
        visit.settled(pair="ab")
        tokens = ".rows .{} .name"
        for axis, expected in (("query", range(second)), ("key", range(second, count))):
            names = visit.view("head").locator(tokens.format(axis))
            visit.until(f"() => document.querySelectorAll('.rows .{axis}').length === {len(expected)}")
            assert names.all_inner_texts() == [seen.prompt.labels[token] for token in expected]
        assert visit.page.locator(".quote").inner_text() == f"{FIRST} | {SECOND}"
        visit.page.keyboard.press("4")
        visit.settled(view="matrix", pair="ab")
        shown = seen.weights[1][2].numpy()
        visit.page.mouse.move(*visit.cell(1, 0))
        told = visit.tip("weight").split()
        assert float(told[told.index("weight") + 1]) == pytest.approx(float(shown[1, second]), abs=3e-3)
        visit.page.keyboard.press("1")
        visit.settled(view="model", pair="ab")
        assert visit.view("model").locator("[data-role=enlarged] canvas").first.is_visible()


@pytest.mark.e2e
@pytest.mark.parametrize("which", ["short", "long"])
def test_the_map_is_in_the_window(browser, subject, long, which):
    path = subject.path if which == "short" else long
    with visiting(browser, path, "view=matrix&at=1&head=1&query=5&key=3", WINDOW) as visit:
        canvas = visit.page.locator(".matrix-view .top-canvas[data-cells]")
        canvas.wait_for()
        box, foot = canvas.bounding_box(), visit.page.locator(".status").bounding_box()
        assert box["y"] + box["height"] <= foot["y"]
        assert box["height"] > 400
        beside = visit.page.locator(".matrix-view .beside").bounding_box()
        assert box["x"] + box["width"] <= beside["x"] < box["x"] + box["width"] + 40
        assert beside["x"] + beside["width"] > WINDOW[0] - 60


@pytest.mark.e2e
@pytest.mark.parametrize("view", ["model", "metrics"])
def test_a_head_that_is_pointed_at_is_enlarged(browser, subject, view):
    with visiting(browser, subject.path, f"view={view}&at=1&head=1", WINDOW) as visit:
        shown = visit.view(view)
        enlarged = shown.locator("[data-role=enlarged]")
        shown.locator("[data-role=enlarged][data-head='1.1']").wait_for()
        shown.locator(".grid [data-head='2.3']").hover()
        shown.locator("[data-role=enlarged][data-head='2.3']").wait_for()
        assert enlarged.locator("h2").inner_text().startswith("L2H3")
        grid, box = shown.locator(".grid").bounding_box(), enlarged.bounding_box()
        assert box["width"] > 280
        assert box["x"] + box["width"] > WINDOW[0] - 40, "the width is used"
        last = shown.locator(".grid-row").last.bounding_box()
        assert last["y"] + last["height"] <= visit.page.locator(".status").bounding_box()["y"]
        assert grid["x"] + grid["width"] <= box["x"]
        visit.page.mouse.move(5, 5)
        shown.locator("[data-role=enlarged][data-head='1.1']").wait_for()


@pytest.mark.e2e
def test_a_narrow_window_has_the_table_of_metrics_and_no_enlarged_head(browser, subject):
    with visiting(browser, subject.path, "view=metrics", PHONE) as visit:
        enlarged = visit.view("metrics").locator("[data-role=enlarged]")
        visit.view("metrics").locator("table.heads").wait_for()
        assert not enlarged.is_visible()
        assert enlarged.locator("h2").text_content(), "a heading without words"
        visit.page.set_viewport_size({"width": WINDOW[0], "height": WINDOW[1]})
        visit.view("metrics").locator("[data-role=enlarged][data-head] .top-canvas[data-cells]").wait_for()


@pytest.mark.e2e
def test_the_text_has_what_every_head_gives_next_to_it(browser, subject):
    with visiting(browser, subject.path, "view=text&at=1&head=1&query=6&key=2", (1440, 900)) as visit:
        heads = visit.view("text").locator("[data-role=heads]")
        heads.locator("h2").filter(has_text="6 ").wait_for()
        cells = "[...document.querySelectorAll('.text-view [data-role=heads] [data-head]')]"
        visit.until(f"() => {cells}.every((one) => one.textContent)")
        for layer, weights in subject.seen.weights.items():
            for head in range(len(weights)):
                weight = heads.locator(f"[data-head='{layer.layer}.{head}']").inner_text()
                assert float(weight) == pytest.approx(float(weights[head, 6, 2]), abs=6e-4)
        text, box = visit.view("text").locator(".reading").bounding_box(), heads.bounding_box()
        assert text["y"] <= box["y"] < text["y"] + 20, "next to the text, not below it"
        heads.locator("[data-head='2.3']").click()
        visit.settled(view="text", at=2, head=3)
        visit.view("text").locator("h2").filter(has_text="L2H3").wait_for()


@pytest.mark.e2e
def test_a_slider_steps_through_the_queries_and_marks_the_answer(browser, made):
    with visiting(browser, made, "view=head&at=1&head=1&query=3") as visit:
        slider = visit.page.locator("[data-role=queries]")
        slider.focus()
        visit.page.keyboard.press("ArrowRight")
        visit.settled(query=4)
        assert slider.get_attribute("aria-valuetext").endswith(", prompt")
        slider.evaluate("one => { one.value = one.max; one.dispatchEvent(new Event('input')); }")
        visit.settled(query=slider.get_attribute("max"))
        visit.until("() => document.querySelector('[data-role=queries]').ariaValueText?.endsWith(', answer') ?? true")
        assert slider.get_attribute("aria-valuetext").endswith(", answer")
        assert visit.page.locator(".made-mark").is_visible()
        visit.page.get_by_role("button", name="Query before (k)").click()
        visit.settled(query=int(slider.get_attribute("max")) - 1)
        rows = visit.view("head").locator(".rows .query.made")
        assert rows.count() == 4
        visit.page.keyboard.press("4")
        visit.settled(view="matrix")
        assert "the answer begins" in visit.view("matrix").inner_text()
        visit.page.keyboard.press("5")
        visit.settled(view="text")


def test_the_answer_is_marked_in_the_text(browser, made):
    with visiting(browser, made, "view=text&at=1&head=1&query=3") as visit:
        visit.view("text").locator(".piece.made").first.wait_for(state="visible")
        assert visit.view("text").locator(".piece.made").count() == 4


@pytest.mark.e2e
def test_nothing_is_warned_of_that_is_as_it_should_be(browser, long, subject):
    with visiting(browser, long, "view=matrix&at=1&head=1") as visit:
        assert visit.page.locator(".left-out").count() == 0
        greyed = visit.page.locator("[role=tab][aria-disabled=true]")
        assert greyed.inner_text() == "Steps"
        assert "up to 256 tokens" in greyed.get_attribute("aria-label")
        greyed.click(force=True)  # Playwright waits for what is not disabled
        assert "up to 256 tokens" in visit.tip("Steps")
        visit.settled(view="matrix")
    with visiting(browser, subject.path, "view=steps&at=1&head=1") as visit:
        assert visit.page.locator("[role=tab][aria-disabled=true]").count() == 0


@pytest.mark.e2e
def test_one_place_is_one_place(browser, subject):
    with visiting(browser, subject.path, "view=model") as visit:
        visit.view("model").locator("[data-head]").first.wait_for()
        visit.page.keyboard.press("/")
        dialog = visit.page.get_by_role("dialog", name="Find a token")
        dialog.locator("input").fill("financial")
        assert dialog.locator("[role=status]").inner_text() == "1 place"
        dialog.locator("input").fill("")
        assert dialog.locator("[role=status]").inner_text() == f"{len(subject.seen.prompt)} places"


@pytest.mark.parametrize(
    "view", ["matrix", *(pytest.param(view, marks=pytest.mark.e2e) for view in ("model", "head", "text", "token"))]
)
def test_a_phone_scrolls_down_alone(browser, made, view):
    with visiting(browser, made, f"view={view}&at=1&head=1&query=9&key=3", PHONE, "dark") as visit:
        visit.view(view).locator("canvas, .piece, table").first.wait_for(state="visible")
        assert visit.page.evaluate("document.scrollingElement.scrollWidth - innerWidth") <= 0


@pytest.mark.e2e
def test_bars_of_a_list_begin_below_one_another(browser, made):
    with visiting(browser, made, "view=text&at=2&head=1&query=9&key=3", PHONE) as visit:
        bars = visit.view("text").locator(".ranking .share")
        bars.first.wait_for()
        values = visit.page.locator(".ranking b").all_inner_texts()
        assert len({len(value) for value in values}) > 1, "as wide as 0.940 and as <0.001"
        assert len(set(bars.evaluate_all("all => all.map(e => Math.round(e.getBoundingClientRect().left))"))) == 1
