"""Text that somebody else wrote stays text: prompts that would be markup, script or steering, each in a browser."""

import csv
import json
from dataclasses import replace

import pytest

import attnscope
from attnscope.viewer.page import About, Plan, page_of
from attnscope.viewer.page_data import Side
from helpers.browsing import VIEWS, spelled, visiting
from helpers.command_line import call
from helpers.hostile import FOREIGN, HOSTILE, STEERING, called, controls, ran_nothing


@pytest.fixture(scope="module")
def seen(demo):
    """Some observation, whose tokens are then called something else."""
    return attnscope.capture(demo, "the financial bank is located on river bank near the old town and a river")


@pytest.mark.parametrize(
    ("text", "views"),
    [
        *(pytest.param(text, VIEWS[:-1], id=name, marks=pytest.mark.e2e) for name, text in HOSTILE.items()),
    ],
)
def test_a_hostile_token_is_shown_as_text(browser, seen, tmp_path, text, views):
    prompt = called(seen, [text, "b"])
    page = replace(seen, queries=prompt, keys=prompt, facts={**seen.facts, "model": {"name": text}}).page()
    path = page.save(tmp_path / "page.html")
    with visiting(browser, path) as visit:
        for view in views:
            visit.go(view=view, at=1, head=2, query=1, key=1)
            visit.view(view).locator("canvas, .piece, table").first.wait_for(state="visible")
            assert ran_nothing(visit)
        token = visit.view("text").locator('[data-token="1"]').first
        assert token.text_content() == spelled(text)
        visit.go(view="head", at=1, head=2)
        visit.token("head", 1, "query").hover()
        assert "looks at" in visit.tip("looks at")
        assert visit.page.evaluate("document.scrollingElement.scrollWidth - innerWidth") <= 0
        assert ran_nothing(visit)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "text",
    [pytest.param(text, id=name) for name, text in HOSTILE.items() if name != "long"],
)
def test_a_hostile_prompt_opens(browser, tmp_path, text):
    path = tmp_path / "page.html"
    text = text.replace("\x00", "")  # no command line takes it; the test above does
    call("view", "--text", text, "-o", str(path)).ok()
    with visiting(browser, path, "view=text") as visit:
        pieces = visit.view("text").locator(".piece")
        pieces.first.wait_for()
        shown = "".join(pieces.all_text_contents()[1:])
        assert shown.replace(" ", "") == spelled(text).replace(" ", "")
        visit.page.keyboard.press("/")
        visit.page.get_by_role("dialog", name="Find a token").locator("input").fill("script")
        visit.page.get_by_role("button", name="Close").click()
        visit.page.keyboard.press("?")  # says the command, with the prompt in it
        visit.page.get_by_role("dialog", name="Keys and help").wait_for()
        assert ran_nothing(visit)


@pytest.fixture
def hand_made(demo, tmp_path):
    """The folder of a run whose every word is somebody else's."""
    request = attnscope.Request(relations=True, top_k=None)
    attnscope.capture(demo, "the river bank by the river", request=request).export(tmp_path / "run", figures=())
    path = tmp_path / "run" / "manifest.json"
    said = json.loads(path.read_text())
    said["model"] |= {"name": STEERING, "type": STEERING}
    said |= {"engine": STEERING, "dtype": STEERING}
    count = len(said["prompt"]["tokens"])
    said["prompt"] |= {name: [STEERING] * count for name in ("labels", "tokens", "plain")}
    said["prompt"]["text"] = STEERING * count
    path.write_text(json.dumps(said))
    heads = tmp_path / "run" / "heads.csv"
    with heads.open(newline="") as file:
        rows = list(csv.DictReader(file))
    roles = ("role", "text_role", "atlas_roles")  # the demo's own atlas names some
    assert set(roles) <= set(rows[0])
    with heads.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(row | dict.fromkeys(roles, STEERING) for row in rows)
    return tmp_path / "run"


@pytest.mark.parametrize(
    "views", [("metrics", "token"), pytest.param(VIEWS[:-1], marks=pytest.mark.e2e)], ids=["some", "all"]
)
def test_no_word_of_a_hand_made_run_steers_the_page(browser, hand_made, tmp_path, views):
    path = tmp_path / "page.html"
    call("view", str(hand_made), "--from-tables", "-o", str(path), "-q").ok()
    with visiting(browser, path) as visit:
        for view in views:
            visit.go(view=view, at=1, head=2, query=3, key=1)
            visit.view(view).locator("canvas, .piece, table").first.wait_for(state="visible")
            assert not controls(visit), view
        visit.page.keyboard.press("/")
        visit.page.get_by_role("dialog", name="Find a token").locator("li").first.wait_for()
        assert not controls(visit)
        assert "⟨202E⟩" in visit.page.evaluate(FOREIGN)


@pytest.mark.e2e
def test_two_hostile_texts_beside_each_other_steer_no_page(browser, seen, tmp_path):
    prompt = called(seen, [STEERING, "b"])
    one = Side(
        replace(seen, queries=prompt, keys=prompt, facts={**seen.facts, "model": {"name": STEERING, "type": STEERING}})
    )
    asked = ("\u202eb", (1, 2))
    said = About("attnscope view --text '\u202eb'", "view=compare", {"\u202e": (1,)}, asked, asked)
    path = page_of([one, one], Plan(), said).save(tmp_path / "page.html")
    with visiting(browser, path) as visit:
        for view in ("compare", "token"):
            visit.go(view=view, at=1, head=2, query=3)
            visit.view(view).locator("canvas, table").first.wait_for(state="visible")
            assert not controls(visit)


@pytest.mark.parametrize(
    "state",
    [
        "view=<script>&at=-1&head=99",
        *(
            pytest.param(one, marks=pytest.mark.e2e)
            for one in ("at=1e9&query=NaN&key=99999&heads=9.9,x", "%00%ff&least=2&theme=<b>")
        ),
    ],
)
def test_a_hostile_address_chooses_nothing(browser, seen, tmp_path, state):
    path = seen.page().save(tmp_path / "page.html")
    with visiting(browser, path, state) as visit:
        visit.page.locator("[role=tab][aria-selected=true]").wait_for()
        assert ran_nothing(visit)
