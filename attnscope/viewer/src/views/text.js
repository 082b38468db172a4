/**
 * The text as it reads, line breaks kept; the background says where a chosen query looks, or who looks at a chosen key:
 * of one head, of its layer's mean, or of all heads. A click chooses the token. Next to it the strongest tokens, and what
 * every head gives from the query to the key.
 *
 * @typedef {import("../types.js").State} State
 * @typedef {import("../types.js").Mount} Mount
 * @typedef {import("../data.js").Page} Page
 * @typedef {import("../data.js").Side} Side
 * @typedef {import("../data.js").Look} Look
 */
import { latest, make, tooltip } from "../canvas.js";
import { intensity, shading } from "../colours.js";
import { said } from "../data.js";
import { colourScale } from "../scales.js";
import { visible } from "../escaping.js";
import { namedRanges } from "../status.js";
import { choice, lacking, named, ranking, shade, short, swatch, weightText, unitOf } from "./labels.js";
import { Masses } from "./token.js";

const WIDEST = 64; // pixels of a head in the grid
const LEVELS = 64; // colours that are told apart: a token whose colour stays is left alone
const UNSEEN = -32768; // the level of a token that cannot be seen

/** @type {Mount} */
export function mount(element, page, store) {
  return new TextView(element, page, store);
}

class TextView {
  /** @param {HTMLElement} element @param {Page} page @param {import("../types.js").Store} store */
  constructor(element, page, store) {
    this.page = page;
    this.store = store;
    this.state = store.state;
    this.drawing = latest();
    this.follow = "";
    /** @type {Side|null} */
    this.side = null;
    /** @type {HTMLElement[]} */
    this.tokens = [];
    /** @type {HTMLElement[]} the texts, one for each */
    this.parts = [];
    this.levels = new Int16Array();
    this.signed = false; // whether the weights that are shown have a sign
    /** @type {Look|null} */
    this.look = null;
    this.chosen = 0;
    this.from = choice(store, "from", [
      ["query", "where it looks"],
      ["key", "who looks at it"],
    ]);
    this.over = choice(store, "over", [
      ["head", "this head"],
      ["layer", "mean of the layer"],
      ["all", "mean of all heads"],
    ]);
    this.scale = make("span", { class: "scales" });
    this.note = make("p", { class: "note" });
    this.text = make("div", { class: "reading", "data-role": "text" });
    this.beside = make("aside", { class: "beside", "aria-label": "Strongest tokens" });
    this.heads = make("h2", {});
    const choose = (/** @type {import("../headgrid.js").Name} */ name) => store.set(name);
    this.masses = new Masses(page, store, { most: WIDEST, answered: () => this.#entitle(), choose });
    element.classList.add("text-view");
    element.append(
      make("div", { class: "legend" }, this.from.element, this.over.element, this.scale),
      this.note,
      make(
        "div",
        { class: "with-beside" },
        this.text,
        this.beside,
        make("aside", { class: "beside", "data-role": "heads", "aria-label": "All heads" }, this.heads, this.masses.element),
      ),
    );
    this.#listen();
  }

  /** @param {State} state */
  async render(state) {
    const { page } = this;
    const side = page.side(state);
    if (side !== this.side) this.#lay(side);
    this.#which(state);
    this.from.render(state);
    this.over.render(state);
    this.masses.render(state);
    const still = this.drawing.begin();
    const chosen = this.#token(state);
    const look = await page.look(page.shown(state), state, chosen);
    if (!still()) return;
    [this.state, this.look, this.chosen] = [state, look, chosen];
    this.signed = side.signed(state.at);
    const max = look ? largest(look) : 1;
    this.#colour(look, intensity(max, state.log));
    this.note.textContent = this.#says();
    const made = side.answer(state.at) !== null;
    const { ramp, low } = shading(max, Math.abs, this.signed);
    this.scale.replaceChildren(colourScale(low, max, ramp), ...(made ? [swatch("made", "answer")] : []));
    this.#list();
    this.#bring();
  }

  /**
   * The token that is chosen: of queries the last where none is, of keys the one that the head rests on.
   *
   * @param {State} state
   */
  #token(state) {
    if (state.from === "query") return this.page.query(state);
    return state.key ?? this.page.side(state).sink(state.at, state.head);
  }

  /** Writes the text, or each of the texts that stacks read, under its name. @param {Side} side */
  #lay(side) {
    this.side = side;
    this.tokens = side.tokens.plain.map((_, token) => piece(side, token));
    this.levels = new Int16Array(this.tokens.length);
    const { origins } = side;
    this.parts = origins.map((start, place) => {
      const pieces = this.tokens.slice(start, origins[place + 1]);
      const name = side.data.turns.find((turn) => turn[0] === start)?.[2] ?? "";
      return make("div", { "data-text": start }, origins.length > 1 && make("h3", {}, name), ...pieces);
    });
    this.text.replaceChildren(...this.parts);
  }

  /** Only the texts that the stack of the chosen head reads. @param {State} state */
  #which({ at }) {
    const { queries, keys } = this.page.side(this.store.state).axes(at);
    for (const part of this.parts) {
      const start = Number(part.dataset.text);
      part.hidden = ![queries, keys].some(([from, to]) => start >= from && start < to);
    }
  }

  /** @param {Look|null} look @param {(weight: number) => number} share */
  #colour(look, share) {
    const axis = this.state.from === "query" ? "key" : "query";
    const { colorScheme } = getComputedStyle(this.text);
    const scheme = `${colorScheme} ${document.documentElement.dataset.theme} ${this.signed}`;
    const repaint = scheme !== this.scheme;
    this.scheme = scheme;
    const marked = unitOf(this.units, this.chosen);
    this.tokens.forEach((element, token) => {
      const unit = this.units.of[token];
      const seen = look?.visible(unit) ?? false;
      const level = look && seen ? Math.ceil(LEVELS * Math.min(1, share(look.weights[unit]))) * (look.weights[unit] < 0 ? -1 : 1) : UNSEEN;
      if (repaint || level !== this.levels[token]) shade(element, level === UNSEEN ? 0 : level / LEVELS, this.signed);
      this.levels[token] = level;
      element.classList.toggle("unseen", look !== null && !seen);
      element.classList.toggle("chosen", unit === marked);
      if (element.dataset.axis !== axis) element.dataset.axis = axis;
    });
  }

  get units() {
    return this.page.side(this.state).units(this.state.words);
  }

  #says() {
    const { state, side, look } = this;
    if (!side) return "";
    if (state.over === "head") return lacking(side, state.at, state.head);
    if (!look) return "This page has no weights between single tokens for these heads.";
    return look.whole
      ? ""
      : "For some heads this page has only the strongest keys of each token: means are lower bounds.";
  }

  #list() {
    const { look, state, units, chosen } = this;
    const over = {
      head: this.side?.name(state.at, state.head) ?? "",
      layer: `${this.side?.stack(state.at) ?? ""}layer ${this.side?.layers[state.at]?.layer}, mean`,
      all: "all heads, mean",
    };
    const says = state.from === "query" ? "looks at" : "is looked at by";
    const suggested = state[state.from] === null ? " (suggested)" : "";
    const title = make("h2", {}, `${over[state.over]}: ${named(units, unitOf(units, chosen))}${suggested} ${says}`);
    const other = state.from === "query" ? "key" : "query";
    const list = look ? ranking(look, other, (token) => this.store.set({ [other]: token })) : "";
    const removed =
      look && look.removed > 0 ? make("p", { class: "hint" }, `taken out: ${said(look.removed)}`) : "";
    this.beside.replaceChildren(title, list, removed);
  }

  /** What the grid of heads is about. */
  #entitle() {
    const { state } = this.store;
    const side = this.page.side(state);
    const query = this.page.query(state);
    const names = [namedRanges(side, [[query, query + 1]]), namedRanges(side, this.masses.keys)];
    this.heads.textContent = `all heads: ${names[0]} at ${names[1]}`;
  }

  /** Brings a token that was chosen elsewhere into sight. */
  #bring() {
    const name = `${this.state.from}${this.state[this.state.from]}`;
    const before = this.follow;
    this.follow = name;
    if (name === before || this.state[this.state.from] === null) return;
    const box = this.tokens[this.chosen]?.getBoundingClientRect();
    if (box && (box.top < 0 || box.bottom > innerHeight)) this.tokens[this.chosen].scrollIntoView({ block: "center" });
  }

  #listen() {
    this.text.addEventListener("click", (event) => {
      const token = tokenOf(event);
      if (token === null) return;
      this.follow = `${this.state.from}${token}`;
      const { queries, keys } = this.page.side(this.state).axes(this.state.at, this.state);
      const [start, stop] = this.state.from === "query" ? queries : keys;
      if (token < start || token >= stop) return; // of cross-attention one text has the queries, the other the keys
      this.store.set(this.state.from === "query" ? { query: token } : { key: token, keyEnd: null });
    });
    this.text.addEventListener("pointermove", (event) => this.#tell(event));
    this.text.addEventListener("pointerleave", () => tooltip.hide());
  }

  /** @param {PointerEvent} event */
  #tell(event) {
    const { look, units, state, side } = this;
    const token = tokenOf(event);
    if (token === null || !look || !side) return tooltip.hide();
    const [unit, chosen] = [units.of[token], unitOf(units, this.chosen)];
    const keep =
      state.from === "query"
        ? side.keep(state.at, state.head, state.over === "head" ? state : { ...state, sink: true })
        : null;
    const [query, key] = state.from === "query" ? [chosen, unit] : [unit, chosen];
    tooltip.show(event, [
      ["query", named(units, query)],
      ["key", named(units, key)],
      ["weight", weightText(look, unit, state, keep)],
    ]);
  }
}

/**
 * A token as it reads: a special one by its name, the rest of a split character as a thin mark.
 *
 * @param {{tokens: {label: string[], plain: string[], special: number[]}, data: {answer: number|null}, origins: number[]}} side
 * @param {number} token
 */
export function piece({ tokens, data: { answer }, origins }, token) {
  const apart = origins.length > 1 && token >= origins[1]; // a text of its own needs no line break before it
  const plain = tokens.plain[token];
  const kind = tokens.special[token] ? "piece special" : plain ? "piece" : "piece rest";
  const text = tokens.special[token] ? short(tokens.label[token]) : visible(apart ? plain.replace(/^\n/, "") : plain);
  const made = answer !== null && token >= answer ? (token === answer ? " made first" : " made") : "";
  return make("span", { class: kind + made, "data-token": token, "data-axis": "key" }, text);
}

/** @param {Event} event @returns {number|null} */
export function tokenOf(event) {
  const token = /** @type {HTMLElement} */ (event.target).dataset?.token;
  return token === undefined ? null : Number(token);
}

/** The end of the scale. @param {Look} look */
function largest({ weights }) {
  return weights.reduce((most, weight) => Math.max(most, Math.abs(weight)), 0) || 1;
}
