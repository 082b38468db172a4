"""Two texts side by side in the browser: values of both, their difference, and the heads where it is largest."""

import numpy as np
import pytest

import attnscope
from helpers.browsing import visiting
from helpers.command_line import call
from helpers.pages import read

FIRST, SECOND = "Mary gave John a book and she was glad", "Mary gave John a book and he was glad"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    page = tmp_path_factory.mktemp("compare") / "page.html"
    call("view", "--text", FIRST, "--compare-text", SECOND, "-o", str(page)).ok()
    return page


@pytest.mark.parametrize("align", ["position", "text"])
def test_the_page_says_how_tokens_are_paired(tmp_path, align):
    page = tmp_path / "page.html"
    swapped = ("--text", "Mary saw John", "--compare-text", "John saw Mary", "--align", align)
    call("view", *swapped, "-o", str(page)).ok()
    said = read(page).said
    counts = [len(side["tokens"]["text"]) for side in said["sides"]]
    one_to_one = [[place, place] for place in range(counts[0])]
    assert counts[0] == counts[1] > 3
    assert said["title"].endswith(f"| aligned by {'position' if align == 'position' else 'characters'}")
    assert f"--align {align}" in said["command"]
    assert (said["aligned"] == one_to_one) == (align == "position")
    alone = call("view", *swapped[:2], *swapped[4:], "-o", str(page))
    assert (alone.code, "pairs two texts" in alone.err) == (2, True)


@pytest.fixture(scope="module")
def weights(demo):
    """Of both texts, layer by layer (H, Q, K)."""
    return [[layer.numpy() for layer in attnscope.capture(demo, text).weights.values()] for text in (FIRST, SECOND)]


def test_the_difference_is_the_second_minus_the_first(browser, path, weights):
    aligned = read(path).said["aligned"]
    steps = {side: {(one["at"], one["head"]): one["scale"] for one in data["maps"]}
             for side, data in enumerate(read(path).said["sides"])}  # fmt: skip
    a, b = weights[0][1][4], weights[1][1][4]
    row = len(aligned) - 1
    column = max(
        range(row), key=lambda place: abs(b[aligned[row][1], aligned[place][1]] - a[aligned[row][0], aligned[place][0]])
    )
    (query, other_query), (key, other_key) = aligned[row], aligned[column]
    expected = [a[query, key], b[other_query, other_key], b[other_query, other_key] - a[query, key]]
    with visiting(browser, path, "view=compare&at=1&head=4") as visit:
        visit.page.locator("figure[data-side=diff] .top-canvas[data-cells]").wait_for()
        visit.page.mouse.move(*visit.cell(row, column, plot=2))
        told = visit.tip(f"{query} ")
        shown = [
            0.0 if line[0] in "<>" else float(line.replace("−", "-"))
            for line in told.split()
            if line.lstrip("+−<>").replace(".", "").isdecimal() and "." in line
        ]
        slack = sum(scales[1, 4] for scales in steps.values()) / 2 + 5.1e-4  # of three decimals, or below 0.001
        np.testing.assert_allclose(shown, expected, atol=slack)
        visit.page.mouse.click(*visit.cell(other_query, other_key, plot=1))
        visit.settled(side=1, query=other_query, key=other_key)
        visit.page.keyboard.press("3")
        visit.token("head", other_query, "query").wait_for()


@pytest.mark.e2e
def test_the_heads_are_listed_by_their_largest_difference(browser, path, weights):
    aligned = np.array(read(path).said["aligned"])
    rows, others = aligned[:, 0], aligned[:, 1]
    largest = {
        (layer, head): np.abs(b[head][np.ix_(others, others)] - a[head][np.ix_(rows, rows)]).max()
        for layer, (a, b) in enumerate(zip(*weights, strict=True))
        for head in range(len(a))
    }
    with visiting(browser, path, "view=compare&at=1&head=4") as visit:
        listed = visit.view("compare").locator("[data-role=differences] tr[data-head]")
        visit.until("count => document.querySelectorAll('[data-role=differences] tr[data-head]').length === count", 24)
        found = [float(text.strip(" +−")) for text in listed.locator("td:nth-child(2)").all_inner_texts()]
        assert found == sorted(found, reverse=True)
        np.testing.assert_allclose(found, sorted(largest.values(), reverse=True), atol=0.006)
        first = listed.first.get_attribute("data-head")
        at, head = map(int, first.split("."))
        assert largest[at, head] > max(largest.values()) - 0.006
        listed.first.click()
        visit.settled(at=at, head=head)
