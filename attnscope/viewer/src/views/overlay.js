/**
 * The heads whose lines are drawn over one another: a square for each head of the layer, in its colour, shows or hides
 * it; further heads of other layers are added by name.
 *
 * @typedef {import("../types.js").State} State
 * @typedef {import("../types.js").Page} Page
 * @typedef {import("../types.js").Store} Store
 * @typedef {{at: number, head: number}} Name
 */
import { make } from "../canvas.js";
import { inkOnHex, several } from "../colours.js";
import { roleWords } from "../roles.js";
import { swatch } from "./labels.js";

/** @param {State} state @returns {Name[]} the chosen head, then the others */
export function headsOf({ at, head, heads }) {
  return [{ at, head }, ...heads.filter((one) => one.at !== at || one.head !== head)];
}

export class Overlay {
  /** @param {Page} page @param {Store} store */
  constructor(page, store) {
    this.page = page;
    this.store = store;
    /** @type {string[]} of the heads that are shown, in the order of `headsOf` */
    this.colours = [];
    this.layer = "";
    this.squares = make("span", { class: "squares", role: "group", "aria-label": "Heads of the layer" });
    this.all = make("button", { type: "button", "data-role": "all-heads" }, "all heads");
    this.chips = make("span", { class: "chips" });
    this.made = make("span", {});
    this.element = make("div", { class: "legend overlay" }, this.squares, this.all, this.chips, this.made);
  }

  /** @param {State} state */
  render(state) {
    const heads = headsOf(state);
    const there = this.#layer(state);
    let beyond = there.length;
    this.colours = heads.map(({ at, head }) => several(at === state.at ? there.indexOf(head) : beyond++));
    const layer = [this.page.shown(state), state.at].join();
    if (layer !== this.layer) this.squares.replaceChildren(...there.map((head) => this.#square(state, head)));
    this.layer = layer; // the squares stay while their layer does: a second click meets the one it began on
    there.forEach((head, place) => this.#colour(place, several(place), heads.some((one) => one.at === state.at && one.head === head)));
    const whole = there.every((head) => heads.some((one) => one.at === state.at && one.head === head));
    const others = there.filter((head) => head !== state.head).map((head) => ({ at: state.at, head }));
    const rest = state.heads.filter(({ at }) => at !== state.at);
    this.all.onclick = () => this.store.set({ heads: whole ? rest : [...others, ...rest] });
    this.all.setAttribute("aria-pressed", String(whole));
    const side = this.page.side(state);
    const made = side.answer(state.at) !== null && swatch("made", "answer");
    this.chips.replaceChildren(...this.#chips(state, heads), this.#add(state, heads));
    this.made.replaceChildren(made || "");
  }

  /** @param {State} state @returns {number[]} the heads of the chosen layer */
  #layer(state) {
    const { heads } = this.page.side(state);
    return heads.filter(({ at }) => at === state.at).map(({ head }) => head);
  }

  /** @param {number} place @param {string} colour @param {boolean} shown */
  #colour(place, colour, shown) {
    const square = /** @type {HTMLElement} */ (this.squares.children[place]);
    square.setAttribute("aria-pressed", String(shown));
    square.style.borderColor = colour;
    square.style.backgroundColor = shown ? colour : "";
    square.style.color = shown ? inkOnHex(colour) : "";
  }

  /** @param {State} state @param {number} head */
  #square(state, head) {
    const side = this.page.side(state);
    const { at } = state;
    const title = `${side.name(at, head)}, ${roleWords(side.headAt(at, head))}; a double click shows it alone`;
    return make(
      "button",
      {
        type: "button",
        class: "square",
        title,
        "data-square": `${at}.${head}`,
        "aria-label": `head ${head}: lines of ${side.name(at, head)}`,
        onclick: () => this.#toggle(head),
        ondblclick: () => this.store.set({ head, heads: [] }),
      },
      String(head),
    );
  }

  /** Shows a head of the layer or hides it; one is always shown. @param {number} head */
  #toggle(head) {
    const { state } = this.store;
    const [, ...others] = headsOf(state);
    const without = others.filter((one) => one.at !== state.at || one.head !== head);
    if (head !== state.head)
      this.store.set({ heads: without.length < others.length ? without : [...others, { at: state.at, head }] });
    else if (others.length) this.store.set({ ...others[0], heads: others.slice(1) });
  }

  /** The names of the chosen head and of those of other layers. @param {State} state @param {Name[]} heads */
  #chips(state, heads) {
    const side = this.page.side(state);
    return heads.flatMap(({ at, head }, place) => {
      if (place > 0 && at === state.at) return []; // its square says so
      const away = state.heads.filter((one) => one.at !== at || one.head !== head);
      const dot = make("i", { class: "dot" });
      dot.style.backgroundColor = this.colours[place];
      const name = make("span", { "data-head": `${at}.${head}` }, dot, side.name(at, head));
      const label = `without ${side.name(at, head)}`;
      const close = { type: "button", "aria-label": label, onclick: () => this.store.set({ heads: away }) };
      return [make("span", { class: "chip" }, name, place > 0 && make("button", close, "×"))];
    });
  }

  /** A list of the heads of other layers. @param {State} state @param {Name[]} heads that are shown */
  #add(state, heads) {
    const side = this.page.side(state);
    const shown = new Set(heads.map(({ at, head }) => `${at}.${head}`));
    const others = side.headsWith(state.at).filter(({ at, head }) => at !== state.at && !shown.has(`${at}.${head}`));
    const options = others.map(({ at, head, role }) =>
      make("option", { value: `${at}.${head}` }, `${side.name(at, head)}${role === "-" ? "" : ` ${role}`}`),
    );
    const add = (/** @type {Event} */ event) => {
      const [at, head] = /** @type {HTMLSelectElement} */ (event.target).value.split(".").map(Number);
      this.store.set({ heads: [...state.heads, { at, head }] });
    };
    const what = { "aria-label": "add a head of another layer", "data-role": "add-head", onchange: add };
    return make("select", what, make("option", {}, "+ head"), ...options);
  }
}
