/** The frame around the views: header, tabs, filters, status line, keyboard. */
import { make, tooltip } from "./canvas.js";
import { Filters, inLayer } from "./filters.js";
import { HelpDialog, SearchDialog } from "./dialogs.js";
import { ShareDialog } from "./share.js";
import { isolated } from "./escaping.js";
import { Status } from "./status.js";
import { alone, greyed } from "./tabs.js";
import { excerpt } from "./views/labels.js";

/**
 * @typedef {import("./types.js").State} State
 * @typedef {import("./types.js").Page} Page
 * @typedef {import("./types.js").Side} Side
 * @typedef {import("./types.js").Store} Store
 * @typedef {import("./types.js").View} View
 * @typedef {import("./tabs.js").Tab} Tab
 */

export class Shell {
  /** @param {HTMLElement} app @param {Page} page @param {Store} store @param {Tab[]} tabs */
  constructor(app, page, store, tabs) {
    this.page = page;
    this.store = store;
    this.tabs = tabs;
    this.help = new HelpDialog(page);
    this.search = new SearchDialog(page, store);
    this.share = new ShareDialog(page, store, () => this.#seen());
    this.filters = new Filters(page, store);
    this.status = new Status(page, store, (axis) => this.search.open(axis));
    /** @type {Map<string, View>} */
    this.views = new Map();
    this.buttons = tabs.map((tab, place) => this.#tab(tab, place));
    this.panels = new Map(tabs.map((tab) => [tab.id, this.#panel(tab)]));
    const list = make("div", { class: "tabs", role: "tablist", "aria-label": "Views" }, ...this.buttons);
    list.append(...greyed(page.data.sides).map(greyedTab));
    list.addEventListener("keydown", (event) => this.#alongTabs(event));
    const bar = make("section", { class: "bar", "aria-label": "Views and filters" }, list, this.filters.element);
    const main = make("main", {}, ...this.panels.values());
    this.filters.element.hidden = this.status.element.hidden = alone(page.data.sides);
    app.replaceChildren(this.#header(), bar, main, this.status.element, this.help.element, this.search.element, this.share.element);
    document.addEventListener("keydown", (event) => this.#key(event));
    addEventListener("scroll", () => tooltip.hide(), { passive: true });
  }

  #header() {
    const { left_out: missing, aligned } = this.page.data;
    const names = [...new Set(this.page.sides.map(({ data }) => data.name))].join(" | ");
    const theme = make(
      "button",
      { type: "button", class: "plain", title: "Light or dark (t)", onclick: () => this.#theme() },
      "◐",
    );
    const help = make(
      "button",
      { type: "button", class: "plain", title: "Keys and help (?)", onclick: () => this.help.open() },
      "?",
    );
    const share = make("button", { type: "button", class: "plain", onclick: () => void this.share.open() });
    share.append(make("span", { "aria-hidden": "true" }, "⤓"), make("span", { class: "wide-only" }, " Save, copy"));
    share.setAttribute("aria-label", "Save, copy"); // the words that are seen, for who speaks to the page
    share.title = "Save this view, copy its command (s)";
    theme.setAttribute("aria-label", "Light or dark");
    help.setAttribute("aria-label", "Keys and help");
    return make(
      "header",
      { class: "top" },
      make("div", { class: "titled" }, make("h1", {}, isolated(names)), ...this.#facts(aligned)),
      make("div", { class: "tools" }, share, theme, help),
      ...this.#texts(),
      missing.length > 0 && leftOut(missing),
    );
  }

  /** The text, or by its letter that of each side. */
  #texts() {
    const texts = this.page.sides.map((side) => excerpt(side, QUOTED));
    const same = new Set(texts).size < 2;
    return (same ? texts.slice(0, 1) : texts).filter(Boolean).map((text, side) =>
      make("p", { class: "quote" }, !same && make("b", {}, `${this.page.letter(side)} `), make("span", { dir: "auto" }, text)),
    );
  }

  /** What the sides are: what both are, then by its letter what each is alone. @param {string|null} [aligned] */
  #facts(aligned) {
    const sides = this.page.sides.map(facts);
    const common = sides[0].filter((part) => sides.every((parts) => parts.includes(part)));
    const spans = (/** @type {string[]} */ parts) => parts.map((part) => make("span", {}, part));
    const own = sides.flatMap((parts, side) => {
      const alone = spans(parts.filter((part) => !common.includes(part)));
      return alone.length ? [make("b", {}, this.page.letter(side)), ...alone] : [];
    });
    return [spans([...common, ...(aligned ? [aligned] : [])]), own].filter(({ length }) => length).map((line) => make("div", { class: "facts" }, ...line));
  }

  /** @param {Tab} tab @param {number} place */
  #tab({ id, title }, place) {
    const onclick = () => this.store.set({ view: id });
    const what = { id: `tab-${id}`, "data-view": id, "aria-controls": `panel-${id}`, title: `${title} (${place + 1})` };
    return make("button", { type: "button", role: "tab", ...what, onclick }, title);
  }

  /** @param {Tab} tab */
  #panel({ id, title }) {
    const what = { id: `panel-${id}`, "data-view": id, "aria-labelledby": `tab-${id}`, tabindex: "-1", hidden: true };
    return make("section", { role: "tabpanel", ...what }, make("h2", { class: "spoken" }, title));
  }

  /** Everything but the view. @param {State} state */
  frame(state) {
    for (const button of this.buttons) {
      const chosen = button.dataset.view === state.view;
      button.setAttribute("aria-selected", String(chosen));
      button.tabIndex = chosen ? 0 : -1;
    }
    for (const [id, panel] of this.panels) panel.hidden = id !== state.view;
    this.filters.render(state);
    this.status.frame(state);
  }

  /** @param {State} state */
  render(state) {
    this.frame(state);
    const tab = this.tabs.find(({ id }) => id === state.view);
    const panel = this.panels.get(state.view);
    if (!tab || !panel) return;
    let view = this.views.get(tab.id);
    if (!view) {
      tooltip.hide();
      this.views.set(tab.id, (view = tab.mount(panel, this.page, this.store)));
      this.buttons
        .find((button) => button.dataset.view === tab.id)
        ?.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
    view.render(state);
    void this.status.render(state);
  }

  /** The view that is on screen, and what is chosen in words. */
  #seen() {
    const panel = /** @type {HTMLElement} */ (this.panels.get(this.store.state.view));
    const about = [...this.status.said.children].map((one) => /** @type {HTMLElement} */ (one).innerText.trim()).filter(Boolean);
    return { panel, about: about.join("   "), ...this.views.get(this.store.state.view)?.pictured?.() };
  }

  #theme() {
    const dark = document.documentElement.dataset.theme === "dark";
    const system = matchMedia("(prefers-color-scheme: dark)").matches;
    this.store.set({ theme: dark === system ? (dark ? "light" : "dark") : "auto" });
  }

  /** @param {KeyboardEvent} event */
  #alongTabs(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const now = this.tabs.findIndex(({ id }) => id === this.store.state.view);
    const next = (now + step + this.tabs.length) % this.tabs.length;
    this.store.set({ view: this.tabs[next].id });
    this.buttons[next].focus();
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    if (document.querySelector("dialog[open]") || typing(event.target, event.key)) return;
    const change = this.#meaning(event.key);
    if (!change) return;
    event.preventDefault();
    if (typeof change === "function") change();
    else this.store.set(change);
  }

  /** @param {string} key @returns {Partial<State>|(() => void)|null} what a key changes or does */
  #meaning(key) {
    const numbered = this.tabs[Number(key) - 1];
    if (numbered) return { view: numbered.id };
    switch (key) {
      case "ArrowLeft":
        return this.#beside(-1);
      case "ArrowRight":
        return this.#beside(1);
      case "ArrowUp":
      case "[":
        return this.#layer(-1);
      case "ArrowDown":
      case "]":
        return this.#layer(1);
      case "j":
      case "k":
        return this.#step("query", key === "j" ? 1 : -1);
      case "J":
      case "K":
        return this.#step("key", key === "J" ? 1 : -1);
      case "/":
        return () => this.search.open("query");
      case "?":
        return () => this.help.open();
      case "s":
        return () => void this.share.open();
      case "t":
        return () => this.#theme();
      case "Escape":
        return { pin: false, heads: [], key: null, keyEnd: null, group: "" };
      default:
        return null;
    }
  }

  /** The token before or after; the first key is the query itself. @param {"query"|"key"} axis @param {number} step */
  #step(axis, step) {
    const { state } = this.store;
    const from = axis === "query" ? this.page.query(state) : state.key;
    const axes = this.page.side(state).axes(state.at, state);
    const [start, stop] = axis === "query" ? axes.queries : axes.keys;
    const token = from === null ? Math.min(this.page.query(state), stop - 1) : from + step;
    if (token < start || token >= stop) return {};
    return axis === "query" ? { query: token } : { key: token, keyEnd: null, group: "" };
  }

  /** @param {number} step @returns {Partial<State>} the layer before or after, in its stack */
  #layer(step) {
    const { state } = this.store;
    const layers = this.page.side(state).layersWith(state.at);
    const at = layers[layers.indexOf(state.at) + step];
    return at === undefined ? {} : inLayer(state, at);
  }

  /** @param {number} step @returns {Partial<State>} the head before or after, in its layer */
  #beside(step) {
    const { state } = this.store;
    const heads = this.page.side(state).heads.filter(({ at }) => at === state.at);
    const place = heads.findIndex(({ head }) => head === state.head) + step;
    return heads[place] ? { head: heads[place].head } : {};
  }
}

/** Keys that a control needs itself. @param {EventTarget|null} target @param {string} key */
function typing(target, key) {
  if (!(target instanceof HTMLElement) || key === "Escape") return false;
  if (target instanceof HTMLInputElement) return target.type !== "checkbox";
  if (target.matches("select, textarea, [contenteditable]")) return true;
  const scrolls = target.matches(".table-scroll") && target.scrollWidth > target.clientWidth;
  return key.startsWith("Arrow") && (scrolls || target.matches("[role=tab]"));
}

/** @param {Side} side */
function facts({ data, stacks, layers, ...side }) {
  const texts = data.cuts && data.cuts.count > 1 ? `${data.cuts.count} texts` : "";
  const { model, engine } = data;
  const sizes = stacks.map((stack) => {
    const at = layers.findIndex((layer) => (layer.stack ?? "decoder") === stack);
    const { heads, kv_heads: shared } = layers[at];
    const count = stacks.length > 1 ? layers.filter((layer) => layer.stack === stack).length : model.layers;
    const kv = shared && shared !== heads ? ` (${shared} kv)` : "";
    return `${stacks.length > 1 ? `${stack} ` : ""}${counted(count, "layer")} × ${counted(heads, "head")}${kv}`;
  });
  const lengths = side.origins.map((start, place) => (side.origins[place + 1] ?? side.count) - start);
  const tokens = lengths.map((count) => count.toLocaleString("en")).join(" + ");
  return [model.type, sizes.join(", "), texts || `${tokens} tokens`, model.dtype, engine].filter(Boolean);
}

/** A tab that cannot be opened here; a click, or focus, says why. @param {{id: string, title: string, reason: string}} tab */
function greyedTab({ id, title, reason }) {
  const tell = (/** @type {Event} */ event) => {
    const { left, bottom } = /** @type {HTMLElement} */ (event.currentTarget).getBoundingClientRect();
    tooltip.show({ clientX: left, clientY: bottom }, [reason]);
  };
  const what = { type: "button", role: "tab", "data-greyed": id, "aria-disabled": "true", "aria-selected": "false" };
  const about = { title: reason, "aria-label": reason, onclick: tell, onfocus: tell, onblur: () => tooltip.hide() };
  return make("button", { ...what, ...about }, title);
}

/** @param {number} count @param {string} thing */
const counted = (count, thing) => `${count} ${thing}${count === 1 ? "" : "s"}`;

const QUOTED = 400; // characters of the text in the header

/** @param {string[]} sentences */
function leftOut(sentences) {
  if (sentences.length === 1) return make("p", { class: "left-out" }, sentences[0]);
  const summary = make("summary", {}, `${sentences.length} things are left out`);
  return make(
    "details",
    { class: "left-out" },
    summary,
    make("ul", {}, ...sentences.map((one) => make("li", {}, one))),
  );
}
