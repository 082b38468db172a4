"""The page's frame, and its views of the model, the metrics and one token, in a browser."""

import numpy as np
import pytest

from helpers.browsing import PHONE, visiting
from helpers.command_line import call
from helpers.pages import read

TEXT = "the financial bank is located on river bank"
WATCHED = """
  const plain = DecompressionStream;
  window.tabsThere = [];
  window.DecompressionStream = function (kind) {
    tabsThere.push(document.querySelectorAll("[role=tab]").length);
    return new plain(kind);
  };
"""


@pytest.fixture(scope="module")
def asked(subject, tmp_path_factory):
    """The page of a question: which head looks from the last token at a text that stands in several places?"""
    path = tmp_path_factory.mktemp("asked") / "page.html"
    key = "bank" if subject.folder == "demo" else "an"
    question = ("--query", "-1", "--key", key, "-o", str(path))
    call("view", "--model", subject.folder, "--text", TEXT, *question).ok()
    return path


ROUNDED = 5.1e-4  # of a number with three decimals, and of one below 0.001


def number(text: str) -> float:
    """A number as the page says it, `<0.001` too."""
    return 0.0 if text == "<0.001" else float(text.removeprefix("<"))


def rows_of(table) -> dict[tuple[int, int], list[str]]:
    """What stands in a table of heads, in its order: {(at, head): cells}."""
    table.locator("tr[data-head]").first.wait_for()
    rows = table.locator("tr[data-head]").evaluate_all(
        "rows => rows.map(row => [row.dataset.head, ...[...row.cells].map(one => one.innerText.trim())])"
    )
    return {tuple(map(int, name.split("."))): cells for name, *cells in rows}


def test_the_question_of_the_command_is_answered(browser, subject, asked):
    keys = read(asked).said["asked"]["key"]["positions"]
    assert keys != list(range(keys[0], keys[-1] + 1))
    query = len(subject.seen.prompt) - 1
    mass = [subject.seen.weights[at][:, query, keys].sum(-1).numpy() for at in range(len(subject.seen.kv_of))]
    with visiting(browser, asked) as visit:
        found = rows_of(visit.view("token").locator(".ranked"))
        for token in keys:
            assert visit.token("token", token, "key").get_attribute("aria-pressed") == "true"
        visit.token("token", keys[0], "key").click()  # one of them alone
        visit.until("wanted => document.querySelector('.status .key').textContent.startsWith(wanted)", f"{keys[0]} ")
    assert len(found) > 10
    for (at, head), (_, _, value, uniform, _) in found.items():
        assert abs(number(value) - mass[at][head]) <= 0.5 / 255 * len(keys) + ROUNDED
        assert number(uniform) == pytest.approx(len(keys) / (query + 1), abs=ROUNDED)
    shown = np.array([number(cells[2]) for cells in found.values()])
    assert (np.diff(shown) <= 0).all()
    assert shown[0] >= max(map(np.max, mass)) - 0.01


def test_the_table_of_heads_is_heads_csv_in_the_order_that_was_asked_for(browser, subject):
    score = subject.seen.columns.scores["entropy"]
    with visiting(browser, subject.path, "view=metrics&metric=focus") as visit:
        metrics = visit.view("metrics")
        metrics.locator("th button").filter(has_text="entropy").click()
        visit.settled(metric="entropy")
        visit.until("() => document.querySelector('th[aria-sort=descending]').innerText.startsWith('entropy')")
        headings = [one.strip(" ▾▴") for one in metrics.locator("th").all_inner_texts()]
        falling = rows_of(metrics)
        metrics.locator("th button").filter(has_text="entropy").click()
        visit.until("() => document.querySelector('th[aria-sort=ascending]')")
        rising = rows_of(metrics)
        first = next(iter(falling))
        metrics.locator(f'button[data-head="{first[0]}.{first[1]}"]').hover()
        told = visit.tip("uniform attention").split()
    found = [number(cells[headings.index("entropy")]) for cells in falling.values()]
    assert float(told[told.index("entropy") + 1]) == pytest.approx(score.value.max(), rel=5e-3)
    np.testing.assert_allclose(found, sorted(score.value, reverse=True)[: len(found)], rtol=6e-3, atol=ROUNDED)
    assert [number(cells[headings.index("entropy")]) for cells in rising.values()] == sorted(found)


@pytest.mark.e2e
def test_the_frame_is_there_before_anything_is_unpacked(browser, subject):
    context = browser.new_context()
    try:
        page = context.new_page()
        page.add_init_script(WATCHED)
        page.goto(subject.path.resolve().as_uri())
        page.locator("[data-role=weight]").filter(has_text="weight").wait_for()  # which is unpacked
        assert page.evaluate("tabsThere.length > 0 && Math.min(...tabsThere) > 0")
    finally:
        context.close()


@pytest.mark.e2e
def test_a_text_over_several_tokens_is_found_and_becomes_a_key(browser, subject):
    plain = subject.seen.prompt.plain
    start = len("".join(plain).split("river")[0])
    reached = np.cumsum([len(one) for one in plain])
    tokens = [token for token, stop in enumerate(reached) if start < stop and stop - len(plain[token]) < start + 5]
    with visiting(browser, subject.path, "view=model") as visit:
        visit.view("model").locator("[data-head]").first.wait_for()
        visit.page.keyboard.press("/")
        visit.page.keyboard.type("RIVER")
        visit.page.keyboard.press("Shift+Enter")
        visit.settled(key=tokens[0], keyEnd=tokens[-1] + 1 if len(tokens) > 1 else None)


@pytest.mark.e2e
def test_the_way_back_leads_to_the_head_before(browser, subject):
    with visiting(browser, subject.path, "view=model&at=0&head=0") as visit:
        visit.view("model").locator('[data-head="1.2"]').click()
        visit.settled(view="head", at=1, head=2)
        visit.page.go_back()
        visit.settled(view="model", at=0, head=0)
        visit.until("() => document.querySelector('[role=tab][aria-selected=true]').dataset.view === 'model'")


@pytest.mark.e2e
def test_further_heads_are_added_and_let_go(browser, subject):
    with visiting(browser, subject.path, "view=metrics&at=0&head=0") as visit:
        for name in ("1.0", "0.1"):
            visit.view("metrics").locator(f'button[data-head="{name}"]').click(modifiers=["Shift"])
        visit.settled(view="metrics", heads="1.0,0.1")
        visit.page.keyboard.press("Escape")
        visit.settled(heads=None)


@pytest.mark.e2e
def test_filters_open_on_a_phone_and_the_header_holds_no_token_that_cannot_be_seen(browser, tmp_path):
    path = tmp_path / "page.html"
    call("view", "--text", "abc \u202egnp.exe\u200b", "-o", str(path)).ok()
    with visiting(browser, path, size=PHONE) as visit:
        assert "⟨202E⟩gnp.exe⟨200B⟩" in visit.page.locator(".quote").inner_text()
        box = visit.page.get_by_label("whole words")
        assert not box.is_visible()
        visit.page.get_by_role("button", name="Filters").click()
        box.check()
        visit.settled(words=1)
        assert visit.page.get_by_role("button", name="Filters (1)").is_visible()
