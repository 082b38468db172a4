"""What is copied from a page makes the same numbers again; what is saved is a picture of the view, offline."""

import csv
import io
import shlex
from xml.etree import ElementTree

import pytest
from PIL import Image

from attnscope.inputs.prompt import Prompt
from helpers.browsing import visiting
from helpers.command_line import call
from helpers.pages import read

TEXT = "the financial bank is located on river bank"
AT, HEAD, QUERY, KEY = 1, 4, 8, 3
ALL = ("model", "metrics", "head", "matrix", "text", "token", "steps")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    page = tmp_path_factory.mktemp("share") / "page.html"
    call("view", TEXT, "--set", "listen=true", "-o", str(page)).ok()
    return page


def copied(visit) -> dict[str, str]:
    """What the dialog has to copy, by name."""
    visit.page.keyboard.press("s")
    visit.page.get_by_role("dialog", name="Save and copy").wait_for()
    found = visit.page.locator("[data-recipe]").evaluate_all(
        "all => all.map((one) => [one.dataset.recipe, one.innerText])"
    )
    visit.page.keyboard.press("Escape")
    return dict(found)


def run(command: str, out) -> bytes:
    """The stdout of a copied command, which writes into a folder of the test's."""
    program, *words = shlex.split(command)
    assert program == "attnscope"
    if "--out" in words:
        words[words.index("--out") + 1] = str(out)
    return call(*words, "-q").ok().out


def rows(out: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(out.decode())))


VIEWS = ("head", "token")  # that most is copied from


@pytest.mark.parametrize("views", [VIEWS, pytest.param(ALL, marks=pytest.mark.e2e)], ids=["some", "all"])
def test_what_is_copied_makes_the_same_numbers(browser, path, tmp_path, views):
    chosen = f"at={AT}&head={HEAD}&query={QUERY}&key={KEY}"
    with visiting(browser, path, f"view=head&{chosen}") as visit:
        visit.until("() => document.querySelector('[data-role=weight]').textContent.startsWith('weight')")
        shown = float(visit.page.locator("[data-role=weight]").get_attribute("title").split()[0])
        found = {}
        for view in views:
            visit.go(view=view, at=AT, head=HEAD, query=QUERY, key=KEY)
            visit.settled(view=view)
            found[view] = copied(visit)
        assert found["head"]["Address of what is seen"].endswith(f"#view=head&{chosen}")
    commands = {view: one["Command of this view"] for view, one in found.items()}
    assert all(
        f"--model demo --text {TEXT!r} --set listen=true" in one for one in commands.values() if "explain" not in one
    )
    [relation] = [row for row in rows(run(commands["head"], None)) if int(row["key"]) == KEY]
    weight = float(relation["weight"])
    assert weight == pytest.approx(shown, abs=0.003)
    of_token = {(row["layer"], row["head"]): float(row["mass"]) for row in rows(run(commands["token"], None))}
    assert of_token[str(AT), str(HEAD)] == pytest.approx(weight, abs=1e-5)
    if views == ALL:
        [of_text] = [row for row in rows(run(commands["text"], None)) if int(row["position"]) == KEY]
        assert float(of_text["weight"]) == pytest.approx(weight, abs=1e-5)
        assert len(rows(run(commands["metrics"], None))) == 24
        for view, name in (("model", "overview.png"), ("matrix", "L01H04.png")):
            run(commands[view], tmp_path / view)
            assert [one.name for one in (tmp_path / view).rglob(name)] == [name]
        assert str(QUERY).encode() in run(commands["steps"], None)
    run(found["token"]["Command of this page"], tmp_path / "again.html")
    state = dict(part.split("=") for part in read(tmp_path / "again.html").said["open"].split("&"))
    assert state == {"view": "token", "at": str(AT), "head": str(HEAD), "query": str(QUERY), "key": str(KEY)}
    program, last = found["token"]["Python"].rsplit("\n", 1)
    names: dict = {}
    exec(program, names)  # what a page of this test's own says
    assert float(eval(last, names)) == pytest.approx(weight, abs=1e-5)


def test_a_question_and_an_answer_are_copied_too(browser, tmp_path):
    page = tmp_path / "page.html"
    call("view", "the old boat", "--answer", " lies by the river", "--query", "answer", "-o", str(page)).ok()
    copies = read(page).said["copied"]
    assert "explain" not in copies["commands"]  # it takes no answer
    assert copies["commands"]["heads"] == "--model demo --text 'the old boat' --answer ' lies by the river'"
    names: dict = {}
    exec("\n".join(copies["python"]), names)
    assert isinstance(names["seen"].prompt, Prompt)
    assert list(names["seen"].prompt.tokens) == read(page).said["sides"][0]["tokens"]["text"]


@pytest.mark.parametrize("view", ["matrix", *(pytest.param(view, marks=pytest.mark.e2e) for view in VIEWS)])
def test_what_is_seen_is_saved(browser, path, tmp_path, view):
    with visiting(browser, path, f"view={view}&at={AT}&head={HEAD}&query={QUERY}&key={KEY}&pin=1") as visit:
        visit.until("() => document.querySelector('[data-role=weight]').textContent.startsWith('weight')")
        visit.view(view).locator("canvas, table").first.wait_for(state="visible")
        weight = visit.page.locator("[data-role=weight]").inner_text()
        visit.drawn()
        visit.page.keyboard.press("s")
        files = {}
        for kind in ("svg", "png"):
            with visit.page.expect_download() as download:
                visit.page.locator(f"[data-save={kind}]").click()
            files[kind] = tmp_path / download.value.suggested_filename
            download.value.save_as(files[kind])
    assert files["svg"].name == f"attnscope-{view}-L1H4.svg"
    drawing = ElementTree.fromstring(files["svg"].read_text())
    texts = [one.text or "" for one in drawing.iter(f"{SVG}text")]
    assert any(weight in one for one in texts), "the line above says what was chosen"
    assert sum("financial" in one for one in texts) >= 2, "tokens stay text"
    assert "attnscope view" in drawing.find(f"{SVG}desc").text
    links = [value for one in drawing.iter() for name, value in one.attrib.items() if name.endswith("href")]
    assert all(one.startswith("data:image/") for one in links)
    drawn = {"matrix": "rect", "head": "path", "token": "rect"}[view]
    assert len(list(drawing.iter(f"{SVG}{drawn}"))) >= 3 + 6 * (view != "head")  # of one query a few lines are seen
    with Image.open(files["png"]) as image:
        assert image.size == (2 * int(drawing.get("width")), 2 * int(drawing.get("height")))
        assert len(image.convert("RGB").getcolors(1 << 20)) > 20


def test_an_axis_names_tokens_where_not_all_have_room_and_their_numbers_keep_their_side(browser, tmp_path):
    page = tmp_path / "page.html"
    text = "שלום bank " + " ".join(["the old boat lies by the river bank"] * 8)
    call("view", "--text", text, "-o", str(page)).ok()
    labels = [f"{place} {label}" for place, label in enumerate(read(page).said["sides"][0]["tokens"]["label"])]
    with visiting(browser, page, "view=matrix&at=1&head=4&query=20&key=2") as visit:
        visit.view("matrix").locator("canvas[data-cells]").wait_for()
        chosen = visit.page.locator(".status .token.key").inner_text()
        visit.page.keyboard.press("s")
        with visit.page.expect_download() as download:
            visit.page.locator("[data-save=svg]").click()
        download.value.save_as(tmp_path / "a.svg")
    texts = {one.text or "" for one in ElementTree.parse(tmp_path / "a.svg").iter(f"{SVG}text")}
    assert any(set(labels[20::step]) <= texts for step in (2, 5, 10))  # before them labels are isolated
    assert chosen == "2 \u2068ש\u2069·2/2"
