/** The bar with the chosen head and the filters. */
import { make } from "./canvas.js";
import { roleChip, showRole } from "./roles.js";
import { digits } from "./scales.js";
import { short } from "./views/labels.js";

/**
 * @typedef {import("./types.js").State} State
 * @typedef {import("./types.js").Page} Page
 * @typedef {import("./types.js").Store} Store
 */

const SWITCHES = /** @type {const} */ ([
  ["sink", "sink", "Show each head's sink: its top key, else the first token"],
  ["special", "special tokens", "Show special tokens, as the begin token"],
  ["words", "whole words", "Words instead of pieces: sum over keys, mean over queries"],
  ["log", "log scale", "Logarithmic colours and lines"],
]);
const DIFFERING = ["metrics", "compare"]; // views that show the difference
const DECADES = 3; // the slider goes from 0.001 to 1

export class Filters {
  /** @param {Page} page @param {Store} store */
  constructor(page, store) {
    this.page = page;
    this.store = store;
    this.side = ""; // and the stack whose layers are listed
    this.stacks = make("span", { class: "choice stacks", role: "group", "aria-label": "Stack" });
    this.layer = this.#select("Layer", (value) => inLayer(store.state, value));
    this.head = this.#select("Head", (value) => ({ head: value }));
    this.role = roleChip();
    this.more = make(
      "button",
      { type: "button", class: "more", "aria-expanded": "false", onclick: () => this.#open() },
      "Filters",
    );
    this.boxes = SWITCHES.map(([name, label, title]) => this.#box(name, label, title));
    this.sink = make("span", { class: "muted", "data-role": "sink" }); // why the first of them is off
    this.boxes[0].label.append(this.sink);
    this.least = make("input", { type: "range", min: 0, max: 100, step: 1, "aria-label": "min. weight" });
    this.least.addEventListener("input", () => store.set({ least: leastOf(Number(this.least.value)) }));
    this.amount = make("output", { class: "muted" });
    const fields = make(
      "div",
      { class: "fields" },
      ...this.boxes.map(({ label }) => label),
      make("span", { class: "least", title: "Take out smaller weights" }, make("label", {}, "min. weight", this.least), this.amount),
      this.#parts(),
      this.#pairs(),
      this.#sides(),
    );
    const chosen = make("span", { class: "chosen-head" }, this.stacks, this.layer.label, this.head.label, this.role);
    this.element = make(
      "div",
      { class: "filters", role: "group", "aria-label": "Head and filters" },
      chosen,
      this.more,
      fields,
    );
  }

  #open() {
    const open = this.element.classList.toggle("open");
    this.more.setAttribute("aria-expanded", String(open));
  }

  /** @param {string} name @param {(value: number) => Partial<State>} change */
  #select(name, change) {
    const select = make("select", { onchange: () => this.store.set(change(Number(select.value))) });
    return { select, label: make("label", {}, name, select) };
  }

  /** @param {"sink"|"special"|"words"|"log"} name @param {string} text @param {string} title */
  #box(name, text, title) {
    const box = make("input", { type: "checkbox", onchange: () => this.store.set({ [name]: box.checked }) });
    return { name, box, label: make("label", { title }, box, text) };
  }

  #parts() {
    this.part = make("select", {
      onchange: () => this.store.set({ part: /** @type {State["part"]} */ (this.part?.value) }),
    });
    this.part.append(option("all", "all keys"), option("prompt", "prompt"), option("answer", "answer"));
    const has = this.page.sides.some(({ data }) => data.answer !== null);
    return has && make("label", { title: "Keys of the prompt or of the answer" }, "keys", this.part);
  }

  /** Which text of a pair queries are of, and which keys. */
  #pairs() {
    this.pair = make("select", {
      onchange: () => this.store.set({ pair: /** @type {State["pair"]} */ (this.pair?.value) }),
    });
    this.pair.append(option("all", "both texts"));
    for (const [query, key] of ["ab", "ba", "aa", "bb"])
      this.pair.append(option(query + key, `${query.toUpperCase()} → ${key.toUpperCase()}`));
    const has = this.page.sides.some(({ data }) => (data.pair ?? null) !== null);
    return has && make("label", { title: "Of a pair of texts: queries of one, keys of one" }, "pair", this.pair);
  }

  #sides() {
    if (this.page.sides.length < 2) return null;
    this.sides = make("select", { onchange: () => this.store.set(this.#otherSide(this.sides?.value ?? "0")) });
    this.page.sides.forEach(({ data }, index) =>
      this.sides?.append(option(String(index), `${this.page.letter(index)}: ${data.name}`)),
    );
    this.sides.append(option("diff", "difference B − A"));
    return make("label", {}, "side", this.sides);
  }

  /** What is chosen stays chosen: its units in the other side. @param {string} value @returns {Partial<State>} */
  #otherSide(value) {
    const { state } = this.store;
    const from = this.page.shown(state);
    const side = /** @type {State["side"]} */ (value);
    if (side === "diff" && !DIFFERING.includes(state.view)) return { side, view: "compare" };
    if (from === this.page.shown({ ...state, side })) return { side };
    const [query, key, last] = [state.query, state.key, state.keyEnd && state.keyEnd - 1].map((token) => this.page.partner(token, from));
    return { side, query: query && query[0], key: key && key[0], keyEnd: key && (last ?? key)[1], group: "" };
  }

  /** @param {State} state */
  render(state) {
    this.#heads(state);
    const without = this.#sink(state);
    for (const { name, box } of this.boxes) box.checked = name === "sink" ? !without : state[name];
    if (leastOf(Number(this.least.value)) !== state.least) this.least.value = String(sliderOf(state.least));
    this.amount.textContent = state.least ? `≥ ${state.least}` : "off";
    if (this.part) this.part.value = state.part;
    if (this.pair) this.pair.value = state.pair;
    if (this.sides) this.sides.value = state.side;
    const { special, words, log, least, part, pair } = state;
    const on = [without, !special, words, log, least > 0, part !== "all", pair !== "all"].filter(Boolean).length;
    this.more.textContent = on ? `Filters (${on})` : "Filters";
  }

  /** Says which key is out, where nobody chose that. @param {State} state @returns {boolean} whether the sink is out */
  #sink(state) {
    const side = this.page.side(state);
    const [key, mass] = [side.rest(state.at, state.head), side.headAt(state.at, state.head)?.top_key_mass ?? 0];
    const without = side.withoutSink(state.at, state.head, state);
    const name = key === null ? "" : `${side.number(key)} ${short(side.tokens.label[key], 12)}`;
    this.sink.textContent = without && state.sink === null ? `hidden: ${name} has ${digits(mass)} of the mass` : "";
    return without;
  }

  /** The stacks to switch between. @param {import("./side.js").Side} side @param {State} state */
  #stacks(side, state) {
    const { layer } = side.layers[state.at] ?? {};
    const buttons = side.stacks.map((stack) => {
      const of = [...side.layers.keys()].filter((at) => side.stackOf(at) === stack);
      const same = of.find((at) => side.layers[at].layer === layer) ?? of[0];
      const what = { type: "button", "data-stack": stack, "aria-pressed": String(stack === side.stackOf(state.at)) };
      const title = `${stack[0].toUpperCase()}${stack.slice(1)}`;
      return make("button", { ...what, onclick: () => this.store.set({ at: same, heads: [] }) }, title);
    });
    this.stacks.hidden = buttons.length < 2;
    const focused = this.stacks.contains(document.activeElement);
    this.stacks.replaceChildren(...buttons);
    if (focused) buttons.find((one) => one.getAttribute("aria-pressed") === "true")?.focus();
  }

  /** @param {State} state */
  #heads(state) {
    const side = this.page.side(state);
    const shown = this.page.shown(state);
    const stack = `${shown} ${side.stackOf(state.at)}`;
    if (this.side !== stack) {
      this.side = stack;
      const layers = side.layersWith(state.at).map((at) => option(String(at), String(side.layers[at].layer)));
      this.layer.select.replaceChildren(...layers);
      this.#stacks(side, state);
    }
    const heads = side.heads.filter(({ at }) => at === state.at).map(({ head }) => head);
    if (this.head.select.options.length !== heads.length || this.layer.select.value !== String(state.at))
      this.head.select.replaceChildren(...heads.map((head) => option(String(head), String(head))));
    this.layer.select.value = String(state.at);
    this.head.select.value = String(state.head);
    showRole(this.role, side.headAt(state.at, state.head));
  }
}

/**
 * Another layer: further heads of the layer that is left go with it.
 *
 * @param {State} state @param {number} at @returns {Partial<State>}
 */
export function inLayer({ at: before, heads }, at) {
  return { at, heads: heads.map((one) => (one.at === before ? { ...one, at } : one)) };
}

/** @param {string} value @param {string} text */
const option = (value, text) => make("option", { value }, text);

/** @param {number} place of the slider, 0 to 100 @returns {number} a weight with two digits */
export const leastOf = (place) => (place === 0 ? 0 : Number((10 ** (DECADES * (place / 100 - 1))).toPrecision(2)));

/** @param {number} least @returns {number} */
export const sliderOf = (least) => (least <= 0 ? 0 : Math.max(1, Math.round(100 * (Math.log10(least) / DECADES + 1))));
