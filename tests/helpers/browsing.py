"""A page opened in Chromium, and what it did that a page must not do: asked for something, complained, ran a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs
from weakref import WeakKeyDictionary

from attnscope.errors import visible

Sight = tuple[int, int]
DESKTOP, PHONE = (1280, 860), (390, 800)
PATIENCE, PAUSE = 120_000, 20  # ms: other tests may be running
VIEWS = ("model", "metrics", "head", "matrix", "text", "token", "steps")
NAMELESS = """() => [...document.querySelectorAll("button, select, input, th, [tabindex='0']")]
  .filter((one) => one.checkVisibility())
  .filter((one) => !(one.getAttribute("aria-label") || one.textContent.trim() || one.labels?.[0]?.textContent.trim()))
  .map((one) => one.outerHTML)"""
OUTSIDE = """() => [...document.getElementById("app").children].filter((one) => one.checkVisibility())
  .filter((one) => !one.matches("header, main, section[aria-label], [role=status]")).map((one) => one.outerHTML)"""
UNSAID = """() => [...document.querySelectorAll("section:not([hidden]) .grid-cells > button")]
  .filter((one) => one.textContent && !one.getAttribute("aria-label").split(", ").includes(one.textContent))
  .map((one) => one.outerHTML)"""


class Visit:
    """One open page. wrong: what it must not have done, in words."""

    def __init__(self, page: Any, path: Path, state: str) -> None:
        self.wrong: list[str] = []
        self.page = page
        self.page.set_default_timeout(PATIENCE)
        self._heard = {
            "console": lambda message: self.wrong.append(f"console: {message.text}"),
            "pageerror": lambda error: self.wrong.append(f"error: {error}"),
            "dialog": self._dialog,
            "websocket": lambda socket: self.wrong.append(f"socket: {socket.url}"),
        }
        for event, hear in self._heard.items():
            self.page.on(event, hear)
        self.page.route("**/*", self._request)
        self.file = path.resolve().as_uri()
        self.page.goto(f"{self.file}#{state}")

    def _request(self, route: Any) -> None:
        if route.request.url.partition("#")[0] == self.file:
            route.continue_()
        else:
            self.wrong.append(f"request: {route.request.url}")
            route.abort()

    def _dialog(self, dialog: Any) -> None:
        self.wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def leave(self) -> None:
        """What is opened next in this tab finds nothing of this page: no document, no listener, no pointer over it."""
        self.page.unroute_all()
        for event, hear in self._heard.items():
            self.page.remove_listener(event, hear)
        self.page.mouse.move(-1, -1)
        self.page.goto("about:blank")

    @property
    def state(self) -> dict[str, str]:
        """What stands after #."""
        fragment = self.page.evaluate("location.hash.slice(1)")
        return {name: values[0] for name, values in parse_qs(fragment).items()}

    def until(self, expression: str, argument: object = None) -> None:
        """Wait until this holds; `wait_for_function` would need eval, which the page's policy forbids."""
        for _ in range(PATIENCE // PAUSE):
            if self.page.evaluate(expression, argument):
                return
            self.page.wait_for_timeout(PAUSE)
        raise AssertionError(f"never: {expression} of {argument}, the page is at {self.state}")

    def settled(self, **state: object) -> None:
        """Wait until the address says this; None for what it leaves out."""
        wanted = {name: None if value is None else str(value) for name, value in state.items()}
        says = "(new URLSearchParams(location.hash.slice(1)))"
        self.until(
            f"wanted => {{ const said = {says}; return Object.keys(wanted).every(k => said.get(k) === wanted[k]) }}",
            wanted,
        )

    def go(self, **state: object) -> None:
        """Follow a link to this state of the page."""
        self.page.evaluate("hash => { location.hash = hash }", "&".join(f"{k}={v}" for k, v in state.items()))

    def view(self, name: str) -> Any:
        """The panel of a view."""
        return self.page.locator(f"section[data-view={name}]")

    def tip(self, holding: str) -> str:
        """What stands beside the pointer, once it holds this."""
        box = self.page.locator("[data-role=tooltip]").filter(has_text=holding)
        box.wait_for(state="visible")
        return box.inner_text()

    def token(self, view: str, token: int, axis: str) -> Any:
        """A token in a view."""
        return self.view(view).locator(f'[data-token="{token}"][data-axis={axis}]').first

    def hover(self, token: Any) -> None:
        """Point at a token, after it was brought into the window: scrolling hides what stands beside the pointer."""
        token.scroll_into_view_if_needed()
        self.drawn()
        token.hover()

    def cell(self, row: int, column: int, plot: int = 0) -> tuple[float, float]:
        """Where a cell of the visible map is in the window."""
        canvas = self.page.locator("section:not([hidden]) .top-canvas").nth(plot)
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        left, top, size = map(float, canvas.get_attribute("data-cells").split())
        return box["x"] + left + (column + 0.5) * size, box["y"] + top + (row + 0.5) * size

    def drawn(self) -> None:
        """Wait until the page was drawn as it is now: before that it hears of what was scrolled."""
        self.page.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")

    def frames(self, selector: str | None, steps: int) -> int:
        """Scroll from top to end in so many steps; how many frames were drawn meanwhile."""
        return self.page.evaluate(
            """async ([selector, steps]) => {
              const box = selector ? document.querySelector(selector) : document.scrollingElement;
              let frames = 0;
              for (let step = 1; step <= steps; step++) {
                box.scrollTop = (box.scrollHeight - box.clientHeight) * step / steps;
                await new Promise((drawn) => requestAnimationFrame(() => drawn(frames++)));
              }
              return frames;
            }""",
            [selector, steps],
        )


def spelled(text: str) -> str:
    """As the page's text reads: line breaks and tabs stay, other signs without a shape are written out."""
    return "".join(char if char in "\n\t" else visible(char) for char in text)


_tabs: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # of a browser: another takes Chromium a second of work


@contextmanager
def visiting(browser: Any, path: Path, state: str = "", size: Sight = DESKTOP, theme: str = "light") -> Iterator[Visit]:
    """A page at a state, in a browser without a network; AssertionError at the end for anything that it did wrong."""
    page = _tabs.pop(browser, None) or browser.new_context(offline=True).new_page()
    width, height = size
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=theme)
    try:
        visit = Visit(page, path, state)
        yield visit
        assert not visit.wrong, visit.wrong
        visit.leave()
    except BaseException:
        page.context.close()  # nobody gets a tab in which something went wrong
        raise
    _tabs[browser] = page
