/** The two dialogs: the list of keys, and the search for a token. */
import { make } from "./canvas.js";
import { namedRanges } from "./status.js";

/**
 * @typedef {import("./types.js").Page} Page
 * @typedef {import("./types.js").Store} Store
 */

const KEYS = [
  [["←", "→"], "head before, head after"],
  [["↑", "↓"], "same head, a layer up or down; also [ and ]"],
  [["j", "k"], "next query, query before; with Shift next key, key before"],
  [["1", "…", "9"], "views, in the order of their tabs"],
  [["/"], "find a token; Enter chooses it as query, Shift Enter as key"],
  [["Esc"], "let go: the pinned query, the key, further heads"],
  [["t"], "light or dark"],
  [["s"], "save what is seen as a picture, copy the command that makes it"],
  [["?"], "this list"],
  [["click"], "on a head opens it; with Shift or Ctrl it is added to the others"],
];
const MOST = 200; // places listed
const CONTEXT = 60; // characters beside a place

/** @param {HTMLDialogElement} dialog @param {string} title */
export function titled(dialog, title) {
  const close = make(
    "button",
    { type: "button", class: "plain", "aria-label": "Close", onclick: () => dialog.close() },
    "✕",
  );
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  return make("h2", {}, title, close);
}

export class HelpDialog {
  /** @param {Page} page */
  constructor({ data }) {
    this.element = make("dialog", { "aria-label": "Keys and help" });
    const rows = KEYS.flatMap(([keys, text]) => [
      make("dt", {}, ...[...keys].flatMap((key) => [make("kbd", {}, key), " "])),
      make("dd", {}, String(text)),
    ]);
    const made = [
      make(
        "p",
        {},
        `attnscope ${data.version}. Nothing on this page is sent anywhere; the address holds what it shows.`,
      ),
    ];
    if (data.command) made.push(make("p", {}, "Made by ", make("code", { class: "token" }, data.command)));
    this.element.append(
      titled(this.element, "Keys"),
      make("dl", { class: "keys" }, ...rows),
      make("footer", {}, ...made),
    );
  }

  open() {
    if (!this.element.open) this.element.showModal();
  }
}

export class SearchDialog {
  /** @param {Page} page @param {Store} store */
  constructor(page, store) {
    this.page = page;
    this.store = store;
    /** @type {"query"|"key"} */
    this.axis = "query";
    /** @type {[number, number][]} */
    this.found = [];
    this.chosen = 0;
    this.element = make("dialog", { class: "search", "aria-label": "Find a token" });
    this.input = make("input", {
      type: "text",
      role: "combobox",
      placeholder: "text, or a position",
      "aria-label": "Text or position",
      "aria-controls": "found",
      "aria-expanded": "true",
      "aria-autocomplete": "list",
      autocomplete: "off",
      spellcheck: "false",
      oninput: () => this.#list(),
      onkeydown: (/** @type {KeyboardEvent} */ event) => this.#key(event),
    });
    this.list = make("ol", { id: "found", role: "listbox", "aria-label": "Places" });
    this.axes = /** @type {const} */ (["query", "key"]).map((axis) =>
      make("button", { type: "button", "data-axis": axis, onclick: () => this.#turn(axis) }, `as ${axis}`),
    );
    const axes = make("div", { class: "axis", role: "group", "aria-label": "Choose as" }, ...this.axes);
    this.count = make("p", { class: "note", role: "status" });
    this.element.append(titled(this.element, "Find a token"), this.input, axes, this.list, this.count);
  }

  /** @param {"query"|"key"} axis */
  open(axis) {
    if (this.element.open) return;
    this.#turn(axis);
    this.element.showModal();
    this.input.focus();
    this.input.select();
    this.#list();
  }

  /** @param {"query"|"key"} axis */
  #turn(axis) {
    this.axis = axis;
    for (const button of this.axes) button.setAttribute("aria-pressed", String(button.dataset.axis === axis));
    if (this.element.open) this.#list();
  }

  #list() {
    const { state } = this.store;
    const side = this.page.side(state);
    const axes = side.axes(state.at, state);
    const [first, last] = this.axis === "query" ? axes.queries : axes.keys;
    const { plain, label: labels } = side.tokens;
    const there = { plain: plain.slice(first, last), label: labels.slice(first, last) };
    this.found = find(there, this.input.value).map(([start, stop]) => [start + first, stop + first]);
    this.chosen = 0;
    const { label } = side.tokens;
    const items = this.found.slice(0, MOST).map(([start, stop], place) => {
      const before = label
        .slice(Math.max(0, start - 4), start)
        .join("")
        .slice(-CONTEXT);
      const after = label
        .slice(stop, stop + 4)
        .join("")
        .slice(0, CONTEXT);
      const [position, text] = namedRanges(side, [[start, stop]]).split(/ (.*)/s);
      return make(
        "li",
        {
          id: `found-${place}`,
          role: "option",
          "data-token": start,
          onclick: (/** @type {MouseEvent} */ event) => this.#take(place, event.shiftKey),
        },
        make("span", { class: "position" }, position),
        make("span", { class: "token" }, text),
        make("span", { class: "context" }, `${before} … ${after}`),
      );
    });
    this.list.replaceChildren(...items);
    const more = this.found.length > MOST ? `, the first ${MOST} listed` : "";
    this.count.textContent = this.found.length ? `${this.found.length} place${this.found.length === 1 ? "" : "s"}${more}` : "nothing found";
    this.#mark();
  }

  #mark() {
    [...this.list.children].forEach((item, place) => item.setAttribute("aria-selected", String(place === this.chosen)));
    this.input.setAttribute("aria-activedescendant", this.list.children.length ? `found-${this.chosen}` : "");
    this.list.children[this.chosen]?.scrollIntoView({ block: "nearest" });
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const shown = Math.min(this.found.length, MOST);
    if (step && shown) {
      this.chosen = (this.chosen + step + shown) % shown;
      this.#mark();
    } else if (event.key === "Enter") this.#take(this.chosen, event.shiftKey);
    else return;
    event.preventDefault();
  }

  /** @param {number} place @param {boolean} asKey */
  #take(place, asKey) {
    const tokens = this.found[place];
    if (!tokens) return;
    const [start, stop] = tokens;
    this.element.close();
    if (asKey || this.axis === "key") this.store.set({ key: start, keyEnd: stop - start > 1 ? stop : null, group: "" });
    else this.store.set({ query: stop - 1 });
  }
}

// Places of a text among tokens.

/**
 * Half-open token ranges: the position itself for a number, then every place where the text stands or a label shows it,
 * case ignored. Everything for an empty text.
 *
 * @param {{plain: string[], label: string[]}} tokens @param {string} wanted
 * @returns {[start: number, stop: number][]}
 */
export function find({ plain, label }, wanted) {
  const places = [...plain.keys()];
  if (!wanted) return places.map((token) => [token, token + 1]);
  const text = wanted.toLowerCase();
  const position = /^-?\d+$/.test(wanted) ? places.at(Number(wanted)) : undefined;
  const spans = standing(plain, text);
  const covered = new Set(spans.flatMap(([start, stop]) => places.slice(start, stop)));
  if (position !== undefined) covered.add(position);
  const shown = places.filter((token) => !covered.has(token) && label[token].toLowerCase().includes(text));
  /** @type {[number, number][]} */
  const alone = (position === undefined ? shown : [position, ...shown]).map((token) => [token, token + 1]);
  return position === undefined ? [...spans, ...alone] : [alone[0], ...spans, ...alone.slice(1)];
}

/** @param {string[]} plain @param {string} wanted in lower case @returns {[number, number][]} each once */
function standing(plain, wanted) {
  const lower = plain.map((one) => one.toLowerCase());
  const owner = lower.flatMap((one, token) => Array.from({ length: one.length }, () => token));
  const text = lower.join("");
  /** @type {[number, number][]} */
  const found = [];
  for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + 1)) {
    const [start, stop] = [owner[at], owner[at + wanted.length - 1] + 1];
    const last = found.at(-1);
    if (last?.[0] !== start || last[1] !== stop) found.push([start, stop]);
  }
  return found;
}
