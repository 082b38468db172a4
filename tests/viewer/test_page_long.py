"""A text of 4,000 tokens in the page: it opens, scrolls, and what is in sight are the right tokens and weights."""

import pytest

from helpers.browsing import spelled, visiting
from helpers.command_line import call
from helpers.folders import saved
from helpers.pages import read

pytestmark = pytest.mark.e2e
TOKENS = 4000
STEPS = 24  # of scrolling from the first to the last token
SIZES = {"num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "head_dim": 16}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The page of random weights: 4 layers of 6 heads with 4,096 positions."""
    folder = tmp_path_factory.mktemp("long")
    model = saved(folder / "model", "llama", vocab_size=2048, max_position_embeddings=4096, **SIZES)
    (folder / "ids.txt").write_text(" ".join(["1", *(str(3 + number * 7919 % 1900) for number in range(TOKENS - 1))]))
    page = folder / "page.html"
    call("view", "--model", str(model), "--ids", str(folder / "ids.txt"), "--engine", "fused", "-o", str(page)).ok()
    return page


def shown(weight: float) -> str:
    """A weight as the page writes it."""
    return f"{weight:.3f}" if weight >= 0.0005 else "<0.001"


@pytest.fixture(scope="module")
def side(path):
    return read(path).said["sides"][0]


def test_the_head_view_scrolls_to_the_right_tokens(browser, path, side):
    with visiting(browser, path, "view=head&at=1&head=4") as visit:
        rows = visit.view("head").locator(".rows [data-axis=query]")
        rows.first.wait_for()
        assert rows.count() < 100  # the others are not there
        assert visit.frames(".scroller", STEPS) >= STEPS
        last = visit.token("head", TOKENS - 1, "query")
        last.wait_for(state="visible")
        assert side["tokens"]["label"][-1] in last.inner_text()
        keys, weights = read(path).relations()[1, 4]
        visit.hover(last)
        told = visit.tip(f"{TOKENS - 1} ")
        assert f"{keys[-1][0]} " in told
        assert shown(weights[-1][0]) in told
        visit.go(view="head", at=1, head=4, query=2000)
        visit.token("head", 2000, "query").wait_for(state="visible")


def test_the_text_view_scrolls_to_the_right_tokens(browser, path, side):
    with visiting(browser, path, "view=text&at=1&head=4") as visit:
        pieces = visit.view("text").locator(".piece")
        pieces.first.wait_for()
        assert pieces.all_text_contents()[1:] == [spelled(plain) for plain in side["tokens"]["plain"][1:]]
        assert visit.frames(None, 6) >= 6
        pieces.nth(TOKENS - 1).wait_for(state="visible")
        pieces.nth(TOKENS - 5).click()
        visit.settled(query=TOKENS - 5)
        keys, _ = read(path).relations()[1, 4]
        strongest = pieces.nth(int(keys[TOKENS - 5][0]))
        visit.until(
            "token => document.querySelectorAll('.piece')[token].style.backgroundColor !== ''", int(keys[TOKENS - 5][0])
        )
        assert strongest.evaluate("piece => piece.style.backgroundColor")
        assert pieces.nth(TOKENS - 1).evaluate("piece => piece.classList.contains('unseen')")


def test_the_map_is_binned_and_shows_tokens_where_it_has_them(browser, path, side):
    [entry] = [entry for entry in side["maps"] if (entry["at"], entry["head"]) == (1, 4)]
    bins, size = read(path).map(entry), entry["bin"]
    assert size > 1
    keys, weights = read(path).relations()[1, 4]
    with visiting(browser, path, "view=matrix&at=1&head=4") as visit:
        visit.view("matrix").get_by_text(f"Cells are {size} × {size} tokens").wait_for()
        row, column = entry["rows"] // 2, entry["rows"] // 3
        visit.page.mouse.move(*visit.cell(row, column))
        told = visit.tip(f"{row * size}–{row * size + size - 1}")
        assert shown(bins[row, column]) in told
        query, key = row * size, int(keys[row * size][0])
        visit.page.mouse.move(*visit.cell(query // size, key // size))
        visit.page.keyboard.down("Control")
        for _ in range(12):
            visit.page.mouse.wheel(0, -300)
        visit.page.keyboard.up("Control")
        visit.until(
            "size => Number(document.querySelector('.top-canvas').dataset.cells.split(' ')[2]) > 6 * size", size
        )
        left, top, cell = map(float, visit.page.locator(".top-canvas").get_attribute("data-cells").split())
        box = visit.page.locator(".top-canvas").bounding_box()
        visit.page.mouse.move(box["x"] + left + (key + 0.5) / size * cell, box["y"] + top + (query + 0.5) / size * cell)
        told = visit.tip(f"{query} ")
        assert shown(weights[query][0]) in told
