"""The view "why" of a page: the numbers of `attnscope why` for the heads, queries and keys that the page holds."""

import re
import shlex
from dataclasses import replace

import numpy as np
import pytest

import attnscope
from attnscope.studies.attribution import key_parts
from attnscope.viewer.page import About, Plan, page_of
from attnscope.viewer.study_pages import WhySide
from helpers.browsing import DESKTOP, NAMELESS, OUTSIDE, PHONE, UNSAID, visiting
from helpers.command_line import call
from helpers.hostile import HOSTILE, called, ran_nothing
from helpers.pages import read
from helpers.rows import csv_rows

TEXT = "the bank of the river, the bank of the"
QUERY, KEY = 10, 5
ROUNDED = 6e-4  # of three decimals
WIDE = "document.scrollingElement.scrollWidth - innerWidth"
CELLS = """all => all.map((row) => [
  row.dataset.component, ...[...row.querySelectorAll("td")].map((one) => one.innerText)
])"""
RECIPES = "all => Object.fromEntries(all.map((one) => [one.dataset.recipe, one.innerText]))"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    page = tmp_path_factory.mktemp("why") / "page.html"
    call("view", TEXT, "--why", "L3H0,L2H1", "--query", "9,last", "-o", str(page)).ok()
    return page


def rows_of(visit):
    """{component: contrast, contribution} of the rows that are shown."""
    rows = visit.view("why").locator("tr[data-component]")
    rows.first.wait_for()
    cells = rows.evaluate_all(CELLS)
    return {name: [float(row[place].replace("−", "-")) for place in (1, 3)] for name, *row in cells}


def own_rows(loaded, head, query, key):
    table = attnscope.why(loaded, TEXT, head, query=query, key=key).table().to_pylist()
    return {row["component"]: [row["contrast"], row["contribution"]] for row in table}


def differences(found, expected):
    return max(np.abs(np.subtract(found[name], expected[name])).max() for name in found)


@pytest.mark.parametrize(("head", "at", "number"), [pytest.param("L3H0", 3, 0, marks=pytest.mark.e2e), ("L2H1", 2, 1)])
def test_the_view_has_the_numbers_of_why(browser, demo, path, head, at, number):
    with visiting(browser, path, f"view=why&at={at}&head={number}&query={QUERY}&key={KEY}") as visit:
        expected = own_rows(demo, head, QUERY, KEY)
        found = rows_of(visit)
        assert list(found) == list(expected)[: len(found)]
        assert differences(found, expected) < ROUNDED
        assert differences(found, own_rows(demo, head, QUERY, KEY - 1)) > 100 * ROUNDED
        assert visit.view("why").locator("[data-role=check]").inner_text().startswith("✓")
        more = visit.view("why").get_by_role("button", name=re.compile("^All"))
        if more.count():
            more.press("Enter")
            visit.view("why").get_by_role("button", name="Largest alone").wait_for()
            assert visit.page.evaluate("document.activeElement.textContent") == "Largest alone"
        assert list(rows_of(visit)) == list(expected)


@pytest.mark.e2e
def test_any_key_is_answered_and_a_hidden_one_is_said(browser, demo, path):
    with visiting(browser, path, f"view=why&at=3&head=0&query=9&key={KEY}") as visit:
        rows_of(visit)
        visit.token("why", 2, "key").click()
        visit.settled(key=2)
        visit.view("why").locator("h2").filter(has_text="at 2 ").wait_for()
        assert differences(rows_of(visit), own_rows(demo, "L3H0", 9, 2)) < ROUNDED
        says = attnscope.why(demo, TEXT, "L3H0", query=9, key=2)
        largest = re.findall(r"(L\d \w+|L\dH\d|\w+) [+-]\d", says.line.split("largest: ")[1])
        line = visit.view("why").locator("[data-role=line]").inner_text()
        assert all(name in line for name in largest)
        visit.token("why", 10, "key").click()
        visit.view("why").get_by_text("This query does not see this key").wait_for()


COLUMNS = """table => [...table.querySelectorAll("[data-key]")].map((one, place) => [
  Number(one.dataset.key),
  Object.fromEntries([...table.querySelectorAll("tbody tr")].map((row) => [
    row.querySelector("th").innerText, row.querySelectorAll("td")[place].innerText
  ]))
])"""


def test_the_keys_with_the_largest_logits_stand_next_to_it_with_their_contrasts(browser, demo, path):
    with visiting(browser, path, f"view=why&at=3&head=0&query={QUERY}&key={KEY}", (1440, 900)) as visit:
        shown = rows_of(visit)
        compared = visit.view("why").locator("aside table")
        columns = dict(compared.evaluate(COLUMNS))
        assert compared.locator("th:not([scope])").count() == 0
        rows = {key: own_rows(demo, "L3H0", QUERY, key) for key in range(QUERY + 1)}
        logits = {key: sum(contribution for _, contribution in of.values()) for key, of in rows.items()}
        assert list(columns) == sorted(logits, key=logits.get, reverse=True)[:10]
        for key, column in columns.items():
            numbers = {name: float(value.replace("−", "-")) for name, value in column.items()}
            contrasts = {name: contrast for name, (contrast, _) in rows[key].items()}
            assert numbers.pop("logit") == pytest.approx(sum(contrasts.values()), abs=ROUNDED)
            others = [numbers.pop(name) for name in list(numbers) if name.endswith(" others")]
            assert list(numbers) == list(shown)
            assert numbers == pytest.approx({name: contrasts[name] for name in numbers}, abs=ROUNDED)
            assert others == pytest.approx([sum(contrasts.values()) - sum(numbers.values())], abs=20 * ROUNDED)
        first, second = (
            visit.view("why")
            .locator("tr.sum")
            .evaluate_all("all => all.map((one) => one.getBoundingClientRect().toJSON())")
        )
        assert (first["y"], first["right"] < second["x"]) == (pytest.approx(second["y"], abs=1), True)
        assert second["right"] > 0.8 * 1440, "the width is used"
        least = min(set(rows) - set(columns))
        visit.go(view="why", at=3, head=0, query=QUERY, key=least)
        visit.view("why").locator(f"aside [data-key='{least}'][aria-pressed=true]").wait_for()
        other = next(key for key in columns if key != KEY)
        compared.locator(f"[data-key='{other}']").click()
        visit.settled(key=other)
        visit.view("why").locator("h2").filter(has_text=f"at {other} ").wait_for()


@pytest.mark.e2e
def test_a_head_opens_where_it_wrote(browser, path):
    with visiting(browser, path, f"view=why&at=3&head=0&query={QUERY}&key={KEY}") as visit:
        visit.view("why").get_by_role("button", name="L2H1", exact=True).press("Enter")
        visit.settled(view="head", at=2, head=1, query=KEY, key=None)


@pytest.mark.e2e
def test_what_the_page_does_not_hold_is_offered(browser, path):
    with visiting(browser, path, f"view=why&at=1&head=2&query={QUERY}") as visit:
        note = visit.view("why").locator(".note")
        note.filter(has_text="no logits for L1H2: attnscope why --head L1H2 --query 10").wait_for()
        visit.view("why").locator("[data-head='3.0']").click()
        visit.settled(at=3, head=0)
        visit.go(view="why", at=3, head=0, query=4)
        note.filter(has_text="no logits for query 4 ·the of L3H0").wait_for()
        visit.view("why").locator("[data-query='9']").click()
        visit.settled(query=9)
        assert rows_of(visit)


def test_the_page_opens_there_and_its_command_makes_the_numbers(browser, path):
    assert read(path).said["open"] == "view=why&at=2&head=1&query=10"  # the first head, the last query that was named
    with visiting(browser, path, f"view=why&at=3&head=0&query={QUERY}&key={KEY}") as visit:
        found = rows_of(visit)
        visit.page.keyboard.press("s")
        visit.page.get_by_role("dialog", name="Save and copy").wait_for()
        command = visit.page.locator("[data-recipe]").evaluate_all(RECIPES)["Command of this view"]
        visit.page.keyboard.press("Escape")
    program, *words = shlex.split(command)
    assert program == "attnscope"
    rows = csv_rows(call(*words, "--format", "csv", "-q").ok().out)
    expected = {row["component"]: [float(row[name]) for name in ("contrast", "contribution")] for row in rows}
    assert differences(found, expected) < ROUNDED


@pytest.mark.e2e
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_is_named_and_fits(browser, path, theme):
    for size in (DESKTOP, PHONE):
        with visiting(browser, path, f"view=why&at=3&head=0&query={QUERY}&key={KEY}", size, theme) as visit:
            rows_of(visit)
            for names in (NAMELESS, OUTSIDE, UNSAID):
                assert visit.page.evaluate(names) == []
            assert visit.page.evaluate(WIDE) <= 0


@pytest.mark.e2e
@pytest.mark.parametrize(
    "text",
    [pytest.param(text, id=name) for name, text in HOSTILE.items()],
)
def test_a_hostile_token_is_text(browser, demo, tmp_path, text):
    seen = attnscope.capture(demo, TEXT)
    parts = list(key_parts(demo, seen.prompt.ids, 3, {0: [QUERY]}))
    prompt = called(seen, [text, "b"])
    side = WhySide(replace(seen, queries=prompt, keys=prompt), parts)
    page = page_of([side], Plan(), About()).save(tmp_path / "page.html")
    with visiting(browser, page, f"view=why&at=3&head=0&query={QUERY}&key=1") as visit:
        assert rows_of(visit)
        assert prompt.labels[1][:20] in visit.token("why", 1, "key").text_content()
        assert ran_nothing(visit)


def test_of_two_texts_the_first_is_taken_apart(tmp_path):
    out = tmp_path / "page.html"
    call("view", TEXT, "--compare-text", "the old boat", "--why", "L1H1", "-o", str(out)).ok()
    first, second = read(out).said["sides"]
    assert [(one["at"], one["head"], len(one["queries"])) for one in first["why"]] == [(1, 1, 11)]
    assert "why" not in second


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--why", "L3H0", "--dtype", "bfloat16"], "in bfloat16 "),
        (["--why", "*", "--max-mb", "0.1"], "24 heads and 11 queries take 0.2"),
        (["--why", "L9H0"], "layer"),
        (["--why", "@nobody"], "nobody"),
    ],
)
def test_what_cannot_be_taken_apart_is_refused(tmp_path, options, says):
    result = call("view", TEXT, *options, "-o", str(tmp_path / "page.html"))
    assert result.code == 2, result.err
    assert says in result.err
    assert not (tmp_path / "page.html").exists()


def test_tables_hold_no_logits(demo, tmp_path):
    attnscope.capture(demo, TEXT, request=attnscope.Request(relations=True, top_k=1)).export(
        tmp_path / "run", figures=()
    )
    result = call("view", str(tmp_path / "run"), "--from-tables", "--why", "L3H0", "-o", str(tmp_path / "page.html"))
    assert (result.code, "leave out --from-tables" in result.err) == (2, True)
