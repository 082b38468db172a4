"""The page in a browser: what it shows is what the tables say, and it asks nobody for anything."""

import re

import numpy as np
import pytest

import attnscope
from attnscope.model.loading import wrap
from attnscope.steps.traced import explain_head
from helpers.atlases import made_atlas
from helpers.browsing import DESKTOP, PAUSE, PHONE, VIEWS, visiting
from helpers.pages import read
from helpers.parity_models import roused_model

NUMBER = re.compile(r"(?<![<\d.])\d\.\d{3}(?!\d)")
ROUNDED = 5.1e-4  # of a weight that is said with three decimals


def numbers(text: str) -> list[float]:
    return [float(found) for found in NUMBER.findall(text)]


def step_of(subject, at: int, head: int) -> float:
    """What the page's weights of a head are multiples of."""
    [side] = read(subject.path).said["sides"]
    [entry] = [entry for entry in side["maps"] if (entry["at"], entry["head"]) == (at, head)]
    return entry["scale"]


def strong(subject, count: int = 4) -> list[dict]:
    """The strongest relation of a few heads of different layers, without the first query, whose weight is 1."""
    rows = sorted((row for row in subject.relations if row["query"] > 1), key=lambda row: -row["weight"])
    by_head = {(row["layer"], row["head"]): row for row in reversed(rows)}
    layers = sorted({layer for layer, _ in by_head})
    return [by_head[layer, number % 3] for number, layer in enumerate((layers * count)[:count])]


def close(subject, row: dict, shown: float) -> bool:
    """A weight of the CSV to the page's precision: half a step, and what three decimals round."""
    return abs(shown - row["weight"]) <= step_of(subject, row["layer"], row["head"]) / 2 + ROUNDED


def named(row: dict, axis: str, seen) -> str:
    """A token as the page names it."""
    return f"{row[axis]} {seen.prompt.labels[row[axis]]}"


SOME = (1, pytest.param(4, marks=pytest.mark.e2e))  # heads

# What must not happen is seen


def test_a_page_that_asks_or_complains_is_caught(browser, tmp_path):
    bad = {
        "request": "<img src=http://example.org/a.png>",
        "dialog": "<script>alert(1)</script>",
        "error": "<script>throw Error('broken')</script>",
        "console": "<script>console.warn('broken')</script>",
    }
    page = tmp_path / "page.html"
    page.write_text("".join(bad.values()))

    def all_is_noticed(visit):
        while {line.partition(":")[0] for line in visit.wrong} < bad.keys():
            visit.page.wait_for_timeout(PAUSE)

    with pytest.raises(AssertionError, match="request: "), visiting(browser, page) as visit:
        all_is_noticed(visit)


# Views


@pytest.mark.parametrize("views", [VIEWS[:3], VIEWS[3:]], ids=["heads", "tokens"])
def test_every_view_opens(browser, subject, views):
    with visiting(browser, subject.path) as visit:
        tabs = visit.page.locator("[role=tab]")
        assert [tabs.nth(place).get_attribute("data-view") for place in range(tabs.count())] == list(VIEWS)
        for view in views:
            visit.page.locator(f"[role=tab][data-view={view}]").click()
            visit.settled(view=view)
            panel = visit.view(view)
            panel.locator("canvas, .piece, table").first.wait_for(state="visible")
            assert visit.page.locator("section[data-view]:visible").count() == 1
            assert panel.bounding_box()["height"] > 50
            assert visit.page.evaluate("document.scrollingElement.scrollWidth - innerWidth") <= 0, view


@pytest.mark.parametrize("heads", SOME)
def test_the_head_view_tells_the_csvs_weights(browser, subject, heads):
    with visiting(browser, subject.path) as visit:
        for row in strong(subject, heads):
            visit.go(view="head", at=row["layer"], head=row["head"])
            visit.view("head").locator(f'.chip [data-head="{row["layer"]}.{row["head"]}"]').wait_for()
            query, key = (visit.token("head", row[axis], axis) for axis in ("query", "key"))
            query.hover()
            told = visit.tip(f"{named(row, 'query', subject.seen)} looks at")
            assert named(row, "key", subject.seen) in told
            assert close(subject, row, max(numbers(told)))
            query.click()
            visit.settled(query=row["query"], pin=1)
            key.hover()
            [shown] = numbers(visit.tip(f"→ {named(row, 'key', subject.seen)}"))
            assert close(subject, row, shown)
            key.click()
            visit.settled(key=row["key"])
            status = visit.page.locator("[data-role=weight]")
            assert close(subject, row, numbers(status.inner_text())[0])
            held = float(status.get_attribute("title").split()[0])  # all digits of what the page holds
            assert abs(held - row["weight"]) <= step_of(subject, row["layer"], row["head"]) / 2 + 1e-6
            query.click()
            visit.settled(query=None, pin=None)


@pytest.mark.e2e
def test_a_key_is_told_who_looks_at_it(browser, subject):
    [row] = strong(subject, 1)
    weights = subject.seen.weights[row["layer"]][row["head"]].numpy()[:, row["key"]]
    with visiting(browser, subject.path, f"view=head&at={row['layer']}&head={row['head']}") as visit:
        visit.token("head", row["key"], "key").hover()
        told = visit.tip(f"{named(row, 'key', subject.seen)} is looked at by")
        assert named({"query": int(weights.argmax())}, "query", subject.seen) in told
        assert abs(max(numbers(told)) - weights.max()) <= step_of(subject, row["layer"], row["head"]) / 2 + ROUNDED


@pytest.mark.e2e
def test_several_heads_have_a_colour_each(browser, subject):
    with visiting(browser, subject.path, "view=head&at=1&head=1&query=5&pin=1") as visit:
        visit.page.locator("[data-role=add-head]").select_option("2.0")
        visit.settled(heads="2.0")
        chips = visit.view("head").locator(".chip .dot")
        colours = {chips.nth(place).evaluate("dot => dot.style.backgroundColor") for place in range(2)}
        assert len(colours) == chips.count() == 2
        visit.token("head", 3, "key").hover()
        told = visit.tip("→ 3")
        shown = [float(subject.seen.weights[at][head][5, 3]) for at, head in ((1, 1), (2, 0))]
        assert "L1H1" in told
        assert "L2H0" in told
        for one, (at, head), expected in zip(numbers(told), ((1, 1), (2, 0)), shown, strict=False):
            assert abs(one - expected) <= step_of(subject, at, head) / 2 + ROUNDED
        visit.page.get_by_label("without L2H0").click()
        visit.settled(heads=None)


@pytest.mark.e2e
def test_of_several_heads_the_tooltip_tells_the_strongest_key_of_each(browser, subject):
    with visiting(browser, subject.path, "view=head&at=1&head=1&heads=2.0") as visit:
        visit.token("head", 5, "query").hover()
        told = visit.tip(f"{named({'query': 5}, 'query', subject.seen)} looks at").splitlines()[1:]
        for at, head in ((1, 1), (2, 0)):
            strongest = int(subject.seen.weights[at][head][5].argmax())
            assert f"L{at}H{head} {named({'key': strongest}, 'key', subject.seen)}" in " ".join(" ".join(told).split())
        assert len(visit.page.locator(".tooltip .pair").all()) == 2


@pytest.mark.parametrize("heads", SOME)
def test_the_map_tells_the_csvs_weights(browser, subject, heads):
    for row in strong(subject, heads):
        with visiting(browser, subject.path, f"view=matrix&at={row['layer']}&head={row['head']}") as visit:
            visit.page.wait_for_selector(".top-canvas[data-cells]")
            place = visit.cell(row["query"], row["key"])
            visit.page.mouse.move(*place)
            told = visit.tip(named(row, "query", subject.seen))
            assert named(row, "key", subject.seen) in told
            assert close(subject, row, numbers(told)[0])
            visit.page.mouse.click(*place)
            visit.settled(query=row["query"], key=row["key"])
            visit.page.mouse.move(*visit.cell(2, 4))
            assert "not visible" in visit.tip("not visible")


INK = """(places) => {
  const [x, y, cell] = document.querySelector('.top-canvas').dataset.cells.split(' ').map(Number);
  const base = document.querySelector('.plot canvas');
  const copy = Object.assign(document.createElement('canvas'), { width: base.width, height: base.height });
  const pen = copy.getContext('2d', { willReadFrequently: true });
  pen.drawImage(base, 0, 0);
  const scale = base.width / base.clientWidth;
  const at = ([row, column]) => [(x + column * cell) * scale, (y + row * cell) * scale].map(Math.floor);
  return places.map((place) => [...pen.getImageData(...at(place), 1, 1).data.slice(0, 3)]);
}"""  # the colours of a map at rows and columns


@pytest.fixture(
    scope="module", params=[("gemma3_text", "window"), pytest.param(("llama4_text", "chunk"), marks=pytest.mark.slow)]
)
def windowed(request, demo, tmp_path_factory):
    """The kind of a window, an observation of a model that has one, and its page."""
    family, window = request.param
    model, text = (
        roused_model(family, vocab_size=2000).eval(),
        "the financial bank is located on river bank and Mary saw",
    )
    seen = attnscope.capture(wrap(model, demo.tokenizer, family), text, request=attnscope.Request(weights=True))
    return window, seen, seen.page().save(tmp_path_factory.mktemp("windowed") / "page.html")


@pytest.mark.e2e
def test_the_map_draws_the_edge_of_a_window_and_none_where_a_layer_sees_all(browser, windowed):
    window, seen, page = windowed
    with visiting(browser, page, "view=matrix&at=0&head=0") as visit:
        visit.page.wait_for_selector(".top-canvas[data-cells]")
        assert f"edge of a {window}" in visit.page.locator(".legend").inner_text()
        first = {query: query - 7 if window == "window" else 8 for query in range(8, 12)}
        line = visit.page.evaluate(INK, [[query + 0.5, key] for query, key in first.items()])
        beside = visit.page.evaluate(INK, [[query + 0.5, key - 0.5] for query, key in first.items()])
        assert max(map(max, line)) < 60, "a dark line left of the first key"
        assert min(map(max, beside)) > 180
        full = next(at for at, key in enumerate(seen.kv_of) if seen.visible[key] == "full")
        visit.go(view="matrix", at=full, head=0)
        visit.until("() => !document.querySelector('.legend').innerText.includes('edge of')")


@pytest.mark.e2e
def test_the_map_zooms_about_the_pointer(browser, subject):
    row = strong(subject)[0]
    with visiting(browser, subject.path, f"view=matrix&at={row['layer']}&head={row['head']}") as visit:
        visit.page.wait_for_selector(".top-canvas[data-cells]")
        place, before = (
            visit.cell(row["query"], row["key"]),
            visit.page.locator(".top-canvas").get_attribute("data-cells"),
        )
        visit.page.mouse.move(*place)
        visit.page.mouse.wheel(0, -100)
        visit.drawn()
        assert visit.page.locator(".top-canvas").get_attribute("data-cells") == before, (
            "the wheel alone scrolls the page"
        )
        place = visit.cell(row["query"], row["key"])
        visit.page.mouse.move(*place)
        visit.page.keyboard.down("Control")
        visit.page.mouse.wheel(0, -100)
        visit.page.keyboard.up("Control")
        visit.until("before => document.querySelector('.top-canvas').dataset.cells !== before", before)
        visit.page.mouse.move(place[0] + 1, place[1])
        assert named(row, "key", subject.seen) in visit.tip(named(row, "query", subject.seen))
        visit.page.get_by_role("button", name="Whole map").click()
        visit.until("before => document.querySelector('.top-canvas').dataset.cells === before", before)


@pytest.mark.parametrize("heads", SOME)
def test_the_text_is_coloured_by_the_csvs_weights(browser, subject, heads):
    prompt = subject.seen.prompt
    for row in strong(subject, heads):
        state = f"view=text&at={row['layer']}&head={row['head']}&query={row['query']}"
        with visiting(browser, subject.path, state) as visit:
            text = visit.view("text").locator(".piece:not(.special)")
            plain = [shown for shown, special in zip(prompt.plain, prompt.special, strict=True) if not special]
            text.first.wait_for()
            assert text.all_text_contents() == plain
            visit.token("text", row["key"], "key").hover()
            [shown] = numbers(visit.tip(named(row, "key", subject.seen)))
            assert close(subject, row, shown)
            visit.token("text", 4, "key").click()
            visit.settled(query=4)
            visit.page.get_by_role("button", name="who looks at it").click()
            visit.settled(**{"from": "key"})


@pytest.mark.parametrize("over", ["layer", pytest.param("all", marks=pytest.mark.e2e)])
def test_the_text_shows_means_over_heads(browser, subject, over):
    weights = [layer.numpy() for layer in subject.seen.weights.values()]
    mean = np.concatenate(weights).mean(0) if over == "all" else weights[1].mean(0)
    key = int(mean[8].argmax())
    steps = [entry["scale"] for entry in read(subject.path).said["sides"][0]["maps"]]
    with visiting(browser, subject.path, f"view=text&at=1&head=0&query=8&over={over}") as visit:
        visit.view("text").locator("h2").filter(has_text="mean").wait_for()
        visit.token("text", key, "key").hover()
        [shown] = numbers(visit.tip(f"{key} "))
        assert abs(shown - mean[8, key]) <= max(steps) / 2 + ROUNDED


def test_the_steps_are_explains_words_and_numbers(browser, subject):
    layer, head, query = 1, 2, 8
    loaded = attnscope.load(subject.folder)
    expected = explain_head(loaded, subject.seen.prompt, layer, head, query)
    with visiting(browser, subject.path, f"view=steps&at={layer}&head={head}&query={query}") as visit:
        steps = visit.view("steps").locator("[data-step]")
        steps.first.wait_for()
        names = [steps.nth(place).get_attribute("data-step") for place in range(steps.count())]
        assert names == [step.name for step in expected.steps if step.name in names]
        assert {"scores", "scaling", "mask", "softmax", "weighted values"} <= set(names)
        told = [step for step in expected.steps if step.name in names]
        for place, step in enumerate(told):
            shown = steps.nth(place)
            assert (shown.locator("code").text_content(), shown.locator("p").first.text_content()) == (
                step.formula,
                step.why,
            )
            titles = " ".join(shown.locator("th, [data-vector]").all_text_contents())
            assert all(array.name in titles for array in step.numbers)
        cells = {
            "scores": (-1, expected.raw_QK[query]),
            "scaling": (-1, expected.raw_QK[query] * expected.scale),
            "softmax": (-2, expected.weights_QK[query]),
        }
        for name, (column, wanted) in cells.items():
            rows = visit.page.locator(f"[data-step={name}] tr[data-token]")
            keys = [int(rows.nth(row).get_attribute("data-token")) for row in range(rows.count())]
            found = [rows.nth(row).locator("td").nth(column).inner_text().replace("−", "-") for row in range(len(keys))]
            assert len(keys) >= 9
            found = ["0" if one == "<0.001" else one for one in found]
            np.testing.assert_allclose([float(one) for one in found], wanted[keys], atol=1e-3, rtol=0.06)
        assert visit.page.locator("[data-role=check]").inner_text().startswith("✓ equal to the map's weights")


def test_steps_and_maps_have_the_same_three_decimals(browser, subject):
    at, head, query = 1, 2, 8
    held = read(subject.path).maps()[at, head][query]
    with visiting(browser, subject.path, f"view=steps&at={at}&head={head}&query={query}&key=3") as visit:
        rows = visit.page.locator("[data-step=softmax] tr[data-token]")
        rows.first.wait_for()
        keys = [int(rows.nth(row).get_attribute("data-token")) for row in range(rows.count())]
        shown = [rows.nth(row).locator("td").nth(-2).inner_text() for row in range(len(keys))]
        assert shown == ["<0.001" if held[key] < 5e-4 and key <= query else f"{held[key]:.3f}" for key in keys]
        assert visit.page.locator("[data-role=weight]").inner_text() == f"weight {shown[keys.index(3)]}"


def test_steps_show_which_dimensions_make_a_score(browser, subject):
    layer, head, query, key = 1, 2, 8, 3
    loaded = attnscope.load(subject.folder)
    [scores] = [
        step for step in explain_head(loaded, subject.seen.prompt, layer, head, query).steps if step.name == "scores"
    ]
    q, k = (array.values.reshape(-1, array.values.shape[-1]) for array in scores.numbers[:2])
    q_D, k_D = q[query if len(q) > 1 else 0], k[key]
    largest = sorted(range(len(k_D)), key=lambda at: -abs(q_D[at] * k_D[at]))
    with visiting(browser, subject.path, f"view=steps&at={layer}&head={head}&query={query}&key={key}") as visit:
        strips = visit.page.locator(f"[data-step=scores] tr[data-token='{key}'] canvas")
        strips.first.wait_for()
        said = strips.nth(1).get_attribute("aria-label")
        assert said.startswith(f"q × k of {key} ")
        assert re.findall(r"dimension (\d+)", said) == [str(at) for at in largest[:3]]
        line = visit.page.locator("[data-role=products]").inner_text()
        assert line.endswith(said.partition(": ")[2] + ".")
        score = re.search(r"q · k = (\S+),", line).group(1).replace("−", "-")
        assert float(score) == pytest.approx(q_D @ k_D, abs=1e-3)
        box = strips.nth(1).bounding_box()
        visit.page.mouse.move(box["x"] + (largest[0] + 0.5) * box["width"] / len(k_D), box["y"] + box["height"] / 2)
        told = [value.replace("−", "-") for value in visit.tip(f"dimension {largest[0]}").split()[2:]]
        expected = (q_D[largest[0]], k_D[largest[0]], q_D[largest[0]] * k_D[largest[0]])
        found = [float(one) for one in told if re.fullmatch(r"-?[\d.]+", one)]
        np.testing.assert_allclose(found, expected, atol=6e-4)


@pytest.mark.e2e
def test_a_head_is_chosen_in_the_overviews(browser, subject):
    with visiting(browser, subject.path, "view=model") as visit:
        visit.view("model").locator('[data-head="2.1"]').click()
        visit.settled(at=2, head=1)
        visit.go(view="metrics")
        visit.view("metrics").locator('tr[data-head="1.3"]').click()
        visit.settled(at=1, head=3)


# Filters


@pytest.mark.e2e
def test_what_an_atlas_names_is_shown_on_a_phone_too(browser, demo, tmp_path):
    atlas = made_atlas(None, {(3, 0): ("induction", "previous-token")})
    seen = attnscope.capture(demo, "the bank", request=attnscope.Request(weights=True), atlas=atlas)
    path = seen.page().save(tmp_path / "page.html")
    with visiting(browser, path, "view=metrics&at=3&head=0", PHONE) as visit:
        chosen = visit.page.locator(".chosen-head .role")
        assert chosen.inner_text() == "induction, previous-token"
        assert chosen.get_attribute("title").startswith("by a scan of the model; this text cannot show")
        assert visit.view("metrics").locator("td .role", has_text="induction, previous-token").count() == 1
        assert "text role" in visit.view("metrics").locator("th").all_inner_texts()
        box = visit.page.locator(".chosen-head .role").bounding_box()
        assert box["x"] + box["width"] <= PHONE[0]


def test_what_a_filter_takes_out_is_said(browser, subject):
    [row] = strong(subject, 1)
    weights = subject.seen.weights[row["layer"]][row["head"]].numpy()[row["query"]]
    state = f"view=head&at={row['layer']}&head={row['head']}&query={row['query']}&pin=1"
    with visiting(browser, subject.path, f"{state}&least=0.2") as visit:
        removed = numbers(visit.view("head").get_by_text("taken out").inner_text())[0]
        slack = len(weights) * step_of(subject, row["layer"], row["head"]) + ROUNDED
        assert abs(removed - weights[weights < 0.2].sum()) <= slack
        weak = int(weights[: row["query"] + 1].argmin())
        visit.token("head", weak, "key").hover()
        assert "<0.2" in visit.tip(f"→ {weak} ")
        visit.page.evaluate("state => { location.hash = state }", f"{state}&special=0")
        visit.settled(special=0, least=None)
        visit.token("head", 0, "key").hover()
        assert "taken out" in visit.tip("→ 0 ")


# Keyboard and state


HEADS = [
    ("ArrowRight", {"at": 1, "head": 2}),
    ("ArrowLeft", {"at": 1, "head": 1}),
    ("ArrowDown", {"at": 2, "head": 1}),
    ("ArrowUp", {"at": 1, "head": 1}),
    ("]", {"at": 2}),
    ("[", {"at": 1}),
]
LOOKS = [("4", {"view": "matrix"}), ("5", {"view": "text"}), ("3", {"view": "head"}), ("t", {"theme": "dark"})]


@pytest.mark.parametrize(
    "keys",
    [[*HEADS[:1], *LOOKS[1:2], *LOOKS[3:]], *(pytest.param(keys, marks=pytest.mark.e2e) for keys in (HEADS, LOOKS))],
    ids=["some", "heads", "looks"],
)
def test_keys_work(browser, subject, keys):
    with visiting(browser, subject.path, "view=head&at=1&head=1") as visit:
        visit.page.wait_for_selector("section[data-view=head] [data-token]")
        for key, state in keys:
            visit.page.keyboard.press(key)
            visit.settled(**state)
        theme = "light" if keys is HEADS else "dark"
        assert visit.page.evaluate("document.documentElement.dataset.theme") == theme


@pytest.mark.e2e
def test_help_and_search_are_opened_with_keys(browser, subject):
    with visiting(browser, subject.path, "view=head&at=1&head=1") as visit:
        press = visit.page.keyboard.press
        visit.page.wait_for_selector("section[data-view=head] [data-token]")
        press("?")
        visit.page.get_by_role("dialog", name="Keys and help").wait_for()
        press("Escape")
        press("/")
        visit.page.get_by_role("dialog", name="Find a token").locator("input").fill("bank")
        press("Enter")
        visit.settled(query=last_of(subject.seen, "bank"))
        press("Escape")
        visit.settled(pin=None, key=None)


def last_of(seen, word: str) -> int:
    """The token that holds the last letter of the first place of a word."""
    end = "".join(seen.prompt.plain).index(word) + len(word)
    return next(place for place in range(len(seen.prompt)) if len("".join(seen.prompt.plain[: place + 1])) >= end)


@pytest.mark.e2e
def test_the_state_survives_a_reload(browser, subject):
    state = "view=head&at=2&head=1&query=6&key=3&heads=1.0&pin=1&log=1&least=0.01&theme=dark"
    with visiting(browser, subject.path, state) as visit:
        beside = visit.view("head").locator(".beside").get_by_text("6 ")
        beside.first.wait_for()
        before = visit.state, visit.view("head").inner_text()
        visit.page.reload()
        beside.first.wait_for()
        assert (visit.state, visit.view("head").inner_text()) == before
        assert before[0] == dict(part.split("=") for part in state.split("&"))
        visit.page.keyboard.press("4")
        visit.settled(view="matrix", query="6")
        visit.page.go_back()
        visit.settled(view="head", query="6")


# How it looks


@pytest.mark.e2e
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["1280", "390"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_is_wider_than_the_window(browser, subject, tmp_path, size, theme):
    with visiting(browser, subject.path, "at=1&head=4&query=8&key=3", size, theme) as visit:
        for view in VIEWS:
            visit.go(view=view, at=1, head=4, query=8, key=3)
            visit.view(view).locator("canvas, .piece, table").first.wait_for(state="visible")
            visit.drawn()
            assert visit.page.evaluate("document.scrollingElement.scrollWidth - innerWidth") <= 0, view
            visit.page.screenshot(path=tmp_path / f"{subject.path.stem}-{view}-{size[0]}-{theme}.png")
