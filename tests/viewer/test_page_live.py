"""The live page in Chromium: type a text, look, compare, knock an edge out, ask why, save. Who may ask: tests/serve.

By default the page runs in this process, and the command of a question hands out a page that lies there.
"""

import re
import sys
from contextlib import contextmanager

import pytest

from attnscope.model.options import LoadOptions
from attnscope.serve import wire as place
from helpers.browsing import PATIENCE
from helpers.command_line import call
from helpers.serving import serving

pytest.importorskip("starlette", reason="pip install 'attnscope[serve]'")
from attnscope.serve import page as app
from attnscope.serve import page as asking

pytestmark = pytest.mark.skipif(not place.supported(), reason="this system has no sockets that say who asks")
TEXT = "the financial bank is located on river bank"
HOSTILE = "<script>document.title='ran'</script><img src=x onerror=\"alert(1)\"> \u202e\u0000 ${7*7} </textarea>"


MADE = """
import shutil, sys
text, out = sys.stdin.read(), sys.argv[sys.argv.index("--out") + 1]
if "elephant" in text:
    sys.exit("attnscope: no elephant")
print("read by nobody", file=sys.stderr)
shutil.copy(sys.argv[1], out)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The page that every question is answered with: a heading alone. What the first live page imports is here, too."""
    with app.LivePage(lambda: [LoadOptions()]):
        pass
    path = tmp_path_factory.mktemp("made") / "page.html"
    path.write_text("<!doctype html><meta charset=utf-8><h1>the river</h1>")
    return path


@pytest.fixture(scope="module")
def tab(browser):
    """A tab that several pages are opened in: one of its own takes Chromium half a second of work."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    yield context.new_page()
    context.close()


@pytest.fixture
def live(tab, made, monkeypatch):
    """A page that holds no model, as it opens."""
    monkeypatch.setattr(asking, "COMMAND", (sys.executable, "-ISc", MADE, str(made)))
    with app.LivePage(lambda: [LoadOptions()]) as address:
        live = Live(tab, address)
        yield live
        live.leave()
    assert not live.wrong, live.wrong


def test_a_question_is_shown_and_its_page_saved(live, made, tmp_path):
    frame = live.ask("<b>the bank", query="last")
    assert "the river" in frame.locator("h1").inner_text()
    assert re.fullmatch(r"\d+\.\d s", live.told)
    assert "<b>" in live.page.locator("#earlier .asked").inner_text()
    assert live.page.locator("iframe").get_attribute("sandbox") == "allow-scripts allow-downloads"
    assert live.save(tmp_path / "saved.html") == made.read_bytes()


def test_a_page_without_an_answer_offers_texts(live):
    examples = live.page.locator("#empty button")
    assert examples.count() == 3
    text = examples.nth(1).inner_text()
    examples.nth(1).click()
    live.answer(1)
    assert live.page.locator("#earlier .asked").inner_text() == live.page.input_value("textarea") == text
    assert not examples.first.is_visible()


def test_a_question_that_is_asked_before_the_models_are_known_waits_for_them(live):
    held = []
    live.page.route("**/models", lambda route: held.append(route))
    live.page.reload()
    live.page.fill("textarea", "the river")
    live.page.press("textarea", "Enter")
    [models] = held
    models.continue_()
    live.answer(1)
    live.page.unroute("**/models")


CHOSEN = """new MutationObserver((_, observer) => {
  const field = document.querySelector("[name=model]");
  if (field) { field.focus(); observer.disconnect(); }
}).observe(document, { childList: true, subtree: true })"""


def test_the_text_is_typed_into_whatever_was_chosen_while_the_page_came(live):
    """Of `autofocus` Chromium complains where another field has the focus already."""
    page = live.page.context.new_page()
    page.add_init_script(CHOSEN)
    other = Live(page, f"{live.page.url}#{live.page.evaluate('sessionStorage.getItem(`attnscope-token`)')}")
    page.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    assert page.evaluate("document.activeElement.name") == "text"
    live.wrong += other.wrong
    page.close()


def test_what_a_command_refuses_is_one_line(live):
    live.page.fill("textarea", "elephant")
    live.page.get_by_role("button", name="Look").click()
    live.page.locator("#status.failed").wait_for()
    assert live.told == "no elephant"
    assert live.page.locator("#earlier li").count() == 0


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("live"), "--page") as server:
        yield server.process.stdout.readline().strip()


class Live:
    """The page in a tab. wrong: what it asked of others, and what was said of errors."""

    def __init__(self, page, address):
        self.page, self.wrong, self.origin = page, [], address.partition("/#")[0]
        page.set_default_timeout(PATIENCE)
        self._heard = {
            "console": lambda message: self.wrong.append(message.text),
            "pageerror": lambda error: self.wrong.append(str(error)),
            "dialog": lambda dialog: (self.wrong.append(dialog.message), dialog.dismiss()),
            "request": self._request,
        }
        for event, hear in self._heard.items():
            page.on(event, hear)
        page.goto(address)

    def leave(self):
        """What is opened next in this tab, at another address, finds nothing of this page."""
        for event, hear in self._heard.items():
            self.page.remove_listener(event, hear)
        self.page.goto("about:blank")

    def _request(self, request):
        if not request.url.startswith((f"{self.origin}/", "blob:", "data:")):
            self.wrong.append(request.url)

    def ask(self, text, **fields):
        """Type, press Enter, and wait for the answer in its frame."""
        before = self.page.locator("#earlier li").count()
        if fields:
            self.page.locator("details").evaluate("box => { box.open = true }")
        for name, value in fields.items():
            self.page.fill(f"[name={name}]", value)
        self.page.fill("textarea", text)
        self.page.press("textarea", "Enter")
        return self.answer(before + 1)

    def answer(self, count):
        """The frame of the answer that makes so many."""
        self.page.locator("#earlier li").nth(count - 1).wait_for()
        frame = self.page.frame_locator("iframe:not([hidden])")
        frame.locator("h1").wait_for()
        return frame

    @property
    def told(self):
        return self.page.inner_text("#status")

    def save(self, place, row=0):
        with self.page.expect_download() as waiting:
            self.page.locator("#earlier li").nth(row).get_by_role("button", name="Save").click()
        waiting.value.save_as(place)
        return place.read_bytes()


@contextmanager
def looking(browser, address, **how):
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}} | how)
    try:
        live = Live(context.new_page(), address)
        yield live
        assert not live.wrong, live.wrong
    finally:
        context.close()


@pytest.mark.e2e
def test_type_look_and_save(browser, address, tmp_path):
    """All views are there, and what is saved is what `view` writes."""
    with looking(browser, address) as live:
        frame = live.ask(TEXT, query="last", key="bank#1")
        tabs = frame.get_by_role("tab").all_inner_texts()
        assert tabs == ["Model", "Metrics", "Head", "Matrix", "Text", "Token", "Steps"]
        for tab in tabs:
            frame.get_by_role("tab", name=tab).click()
            frame.locator(f"section[data-view={tab.lower()}]").wait_for()
        assert re.fullmatch(r"\d+\.\d s", live.told)
        saved = live.save(tmp_path / "saved.html")
    written = tmp_path / "written.html"
    call("view", "--file", "-", "--query", "last", "--key", "bank#1", "--out", str(written), stdin=TEXT.encode()).ok()
    assert saved == written.read_bytes()
    assert b"default-src 'none'" in saved
    assert b"connect-src" not in saved


@pytest.mark.e2e
def test_an_edge_is_cut_and_explained(browser, address):
    with looking(browser, address) as live:
        frame = live.ask(TEXT, query="8", key="7", select="L2H1")
        frame.locator("[data-does=knockout]").click()
        cut = live.answer(2)
        assert cut.get_by_role("tab").all_inner_texts() == ["Cuts"]
        cut.get_by_text("L2H1").first.wait_for()
        live.page.locator("#earlier .asked").nth(1).click()
        live.page.frame_locator("iframe:not([hidden])").locator("[data-does=why]").click()
        why = live.answer(3)
        why.get_by_role("heading", name=re.compile("^Why L2H1 looks from 8")).wait_for()


@pytest.mark.e2e
def test_two_questions_are_compared(browser, address):
    with looking(browser, address) as live:
        live.ask("Mary gave John a book")
        live.ask("John gave Mary a book")
        for row in (0, 1):
            live.page.locator("#earlier li").nth(row).get_by_role("button", name="Compare").click()
        frame = live.answer(3)
        frame.get_by_role("tab", name="Compare").click()
        texts = {text[2:] for text in frame.locator(".quote").all_inner_texts()}
        assert texts == {"Mary gave John a book", "John gave Mary a book"}
        same = live.page.locator("#earlier li").nth(2).get_by_role("button", name="Compare")
        same.click()
        same.click()
        assert same.get_attribute("aria-pressed") == "false"


@pytest.mark.e2e
def test_hostile_text_is_text(browser, address):
    """In the field, the list and the answer; nothing of it runs, and the answer's frame reaches nothing."""
    with looking(browser, address) as live:
        frame = live.ask(HOSTILE)
        assert "<script>" in live.page.locator("#earlier .asked").inner_text()
        assert live.page.title() == "attnscope"
        assert "49" not in live.page.locator("#earlier .asked").inner_text()
        assert live.page.locator("iframe").get_attribute("sandbox") == "allow-scripts allow-downloads"
        reached = frame.locator("body").evaluate(
            """async () => {
              const tries = [() => parent.document.title, () => sessionStorage.length, () => fetch(`${origin}/models`)];
              const found = [];
              for (const one of tries) try { await one(); found.push(one.toString()); } catch {}
              return found;
            }"""
        )
        assert reached == []
        live.wrong = [line for line in live.wrong if "Content Security Policy" not in line]  # of the try to fetch


def test_the_token_leaves_the_address_a_reload_keeps_it_and_without_it_one_line_says_so(live):
    live.page.locator("[name=model] option", has_text="demo").wait_for(state="attached")
    assert live.page.url == f"{live.origin}/"
    live.page.reload()
    live.page.locator("[name=model] option", has_text="demo").wait_for(state="attached")
    live.page.evaluate("sessionStorage.clear()")
    live.page.reload()
    live.page.get_by_text("the token is missing").wait_for()
    live.wrong = [line for line in live.wrong if "401" not in line]  # the browser's own word for it


@pytest.mark.e2e
def test_what_is_typed_wrong_gets_one_line(browser, address):
    with looking(browser, address) as live:
        live.page.locator("details").evaluate("box => { box.open = true }")
        live.page.fill("[name=query]", "elephant")
        live.page.fill("textarea", TEXT)
        live.page.get_by_role("button", name="Look").click()
        live.page.locator("#status.failed").wait_for()
        assert "elephant" in live.told
        assert "Traceback" not in live.told
        assert live.page.locator("#earlier li").count() == 0
        live.page.fill("[name=query]", "")
        live.ask(TEXT)  # and the page goes on


@pytest.mark.e2e
def test_stop_ends_the_question(browser, address):
    with looking(browser, address) as live:
        live.page.fill("textarea", "word " * 400)
        live.page.press("textarea", "Enter")
        live.page.get_by_role("button", name="Stop").click()
        live.page.get_by_text("stopped").wait_for()
        live.ask(TEXT)
        assert live.page.locator("#earlier li").count() == 1


@pytest.mark.e2e
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_names_and_narrow_windows(browser, address, theme):
    """Every field and button has a name, and nothing is wider than a telephone."""
    with looking(browser, address, viewport={"width": 390, "height": 800}, color_scheme=theme) as live:
        live.ask(TEXT)
        fields = "input, select, textarea, button"
        nameless = live.page.evaluate(
            f"() => [...document.querySelectorAll('{fields}')].filter((one) => "
            "!(one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.[0]?.textContent.trim())).length"
        )
        assert nameless == 0
        assert live.page.evaluate("document.documentElement.scrollWidth") <= 390
