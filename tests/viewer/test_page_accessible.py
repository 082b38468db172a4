"""The page without a pointer or without sight: names, contrast, keys. scripts/external/page.py asks axe-core."""

import re
from itertools import product
from pathlib import Path

import pytest

import attnscope
from helpers.browsing import NAMELESS, OUTSIDE, UNSAID, VIEWS, visiting

STYLE = Path(attnscope.__file__).parent / "viewer" / "src" / "style.css"
GROUNDS = ("paper", "panel", "raised", "accent-soft", "query-soft", "key-soft")
WORDS = ("ink", "muted", "faint", "accent", "query", "key", "warn", "made")
LEAST = 4.5  # WCAG 2.2, 1.4.3: the contrast of text with what is behind it

UNSPOKEN = """() => {
  const words = (text) => ` ${text.toLowerCase().split(/[^\\p{L}\\p{N}]+/u).filter(Boolean).join(" ")} `;
  const seen = (one) => one.nodeType === Node.TEXT_NODE ? one.data
    : one.ariaHidden === "true" || !one.checkVisibility() ? "" : [...one.childNodes].map(seen).join("");
  return [...document.querySelectorAll("button[aria-label]")].filter((one) => one.checkVisibility())
    .filter((one) => words(seen(one)).trim() && !words(one.ariaLabel).includes(words(seen(one))))
    .map((one) => one.outerHTML);
}"""


def colours(theme: str) -> dict[str, str]:
    """The style sheet's own colours by name."""
    style = STYLE.read_text()
    opening = ":root {" if theme == "light" else ':root[data-theme="dark"] {'
    block = style[style.index(opening) :].partition("}")[0]
    return dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", block))


def luminance(colour: str) -> float:
    """WCAG's relative luminance of #rrggbb."""
    total = 0.0
    for share, place in ((0.2126, 1), (0.7152, 3), (0.0722, 5)):
        value = int(colour[place : place + 2], 16) / 255
        total += share * (value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4)
    return total


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_what_wcag_says():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)  # its best known example: too faint


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_are_read_on_every_ground(theme):
    found = colours(theme)
    assert [pair for pair in product(WORDS, GROUNDS) if contrast(*(found[name] for name in pair)) < LEAST] == []


@pytest.mark.parametrize("views", [("head",), pytest.param(VIEWS, marks=pytest.mark.e2e)], ids=["one", "all"])
def test_what_can_be_reached_has_a_name_and_stands_in_a_landmark(browser, subject, views):
    with visiting(browser, subject.path, "view=model") as visit:
        for view in views:
            visit.go(view=view, at=1, head=1, query=5, key=2)
            visit.view(view).locator("canvas, .piece, table").first.wait_for(state="visible")
            assert visit.page.evaluate(NAMELESS) == []
            assert visit.page.evaluate(OUTSIDE) == []
            assert visit.view(view).locator("h2").first.inner_text().lower() == view
        visit.page.evaluate("document.querySelector('.bar').append(document.createElement('button'))")
        visit.page.evaluate("document.getElementById('app').append('', document.createElement('button'))")
        assert len(visit.page.evaluate(NAMELESS)) == 2
        assert len(visit.page.evaluate(OUTSIDE)) == 1


@pytest.mark.e2e
def test_a_name_has_the_words_that_are_seen(browser, subject):
    """WCAG 2.2, 2.5.3: who speaks to a page says what stands on the button."""
    with visiting(browser, subject.path, "view=head&at=1&head=1") as visit:
        for view in ("head", "metrics"):
            visit.go(view=view, at=1, head=1, query=5, key=2)
            visit.view(view).locator("canvas, .piece, table").first.wait_for(state="visible")
            assert visit.page.evaluate(UNSPOKEN) == []
        visit.page.evaluate("document.querySelector('.tools button').ariaLabel = 'Save and copy'")
        assert len(visit.page.evaluate(UNSPOKEN)) == 1


@pytest.mark.e2e
def test_a_head_is_called_by_its_number_too(browser, subject):
    with visiting(browser, subject.path, "view=metrics&metric=entropy") as visit:
        cell = visit.view("metrics").locator('.grid-cells > button[data-head="1.2"]')
        cell.wait_for()
        score = subject.seen.columns.scores["entropy"].value[subject.seen.columns.layer.tolist().index(1) + 2]
        assert cell.get_attribute("aria-label").split(", ")[:2] == ["L1H2", f"{score:.3f}"]
        assert visit.page.evaluate(UNSAID) == []


@pytest.mark.e2e
def test_tokens_are_walked_with_keys(browser, subject):
    with visiting(browser, subject.path, "view=head&at=1&head=1&query=5") as visit:
        visit.view("head").locator("[data-token]").first.wait_for()
        for key, state in (
            ("j", {"query": 6, "key": None}),
            ("k", {"query": 5}),
            ("J", {"query": 5, "key": 5}),  # the first key is the query itself
            ("K", {"key": 4}),
            ("K", {"key": 3}),
            ("J", {"key": 4}),
        ):
            visit.page.keyboard.press(key)
            visit.settled(**state)
        status = visit.page.locator("[role=status][aria-label=Selection]")
        visit.until("() => document.querySelector('[data-role=weight]').textContent.startsWith('weight')")
        labels = subject.seen.prompt.labels
        assert f"5 {labels[5]}" in status.inner_text()
        assert f"4 {labels[4]}" in status.inner_text()
        visit.go(view="head", at=1, head=1, query=0)
        visit.settled(query=0)
        visit.page.keyboard.press("k")
        visit.page.keyboard.press("ArrowRight")
        visit.settled(query=0, head=2)
