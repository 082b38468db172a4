/**
 * Two texts, or two models, side by side and their signed difference, for the chosen head; and the heads by their
 * largest difference. Tokens that stand at the same characters are compared.
 *
 * @typedef {import("../types.js").State} State
 * @typedef {import("../types.js").Mount} Mount
 * @typedef {import("../data.js").Page} Page
 * @typedef {import("../data.js").Grid} Grid
 * @typedef {import("./plot.js").Cell} Cell
 * @typedef {import("./difference.js").Pair} Pair
 * @typedef {import("./difference.js").Largest} Largest
 */
import { latest, make, onResize, tooltip } from "../canvas.js";
import { css, diverging, intensity, pixel, sequential } from "../colours.js";
import { said } from "../data.js";
import { colourScale, digits, gradient } from "../scales.js";
import { compared, largest } from "./difference.js";
import { excerpt, named, unitOf } from "./parts.js";
import { Plot } from "./plot.js";

const SIDES = /** @type {const} */ ([0, 1]);
const DIFFERENCE = 2; // the third plot
const TITLE = 24; // characters of a text
const LISTED = 30; // heads
const BREATH = 40; // ms of listing before the page draws again

/** @type {Mount} */
export function mount(element, page, store) {
  return new CompareView(element, page, store);
}

class CompareView {
  /** @param {HTMLElement} element @param {Page} page @param {import("../types.js").Store} store */
  constructor(element, page, store) {
    this.page = page;
    this.store = store;
    this.state = store.state;
    this.drawing = latest();
    this.listing = latest();
    this.listed = "";
    /** @type {(Grid|null)[]} the two sides' and their difference */
    this.grids = [];
    /** @type {Pair[]} */
    this.pairs = [];
    this.names = ["A", "B"];
    this.plots = [0, 1, 2].map((place) => this.#plot(place));
    this.scales = this.plots.map(() => make("span", {}));
    this.note = make("p", { class: "note" });
    this.list = make("div", {
      class: "table-scroll",
      "data-role": "differences",
      tabindex: 0,
      role: "group",
      "aria-label": "heads by their largest difference",
    });
    const titles = [
      ...page.sides.map((side, place) => `${this.names[place]}: ${side.data.name}, “${excerpt(side, TITLE)}”`),
      "B − A",
    ];
    const figures = this.plots.map((plot, place) =>
      make(
        "figure",
        { "data-side": place === DIFFERENCE ? "diff" : String(place) },
        make("figcaption", {}, make("b", { class: "title" }, titles[place]), this.scales[place]),
        plot.element,
      ),
    );
    element.classList.add("compare-view");
    element.append(
      this.note,
      make("div", { class: "three" }, ...figures),
      make("h2", {}, "Heads by their largest difference"),
      this.list,
    );
    onResize(element, () => this.plots.forEach((plot) => plot.draw()));
  }

  /** @param {State} state */
  async render(state) {
    const still = this.drawing.begin();
    const { maps, pairs, difference } = await compared(this.page, state.at, state.head, state);
    if (!still()) return;
    [this.state, this.grids, this.pairs] = [state, [...maps, difference], pairs];
    this.note.textContent = this.#says();
    this.#draw();
    void this.#heads(state);
  }

  /** @param {number} place */
  #plot(place) {
    const plot = new Plot();
    plot.onhover = (cell, event) => this.#hover(place, cell, event);
    plot.onclick = (cell) => this.#choose(place, cell);
    plot.onzoom = (to) => this.plots.forEach((other) => other !== plot && other.cell === plot.cell && other.moveTo(to));
    return plot;
  }

  #draw() {
    const max = Math.max(...SIDES.map((side) => this.grids[side]?.max ?? 0)) || 1;
    const most = this.grids[DIFFERENCE]?.max || 1;
    const share = intensity(max, this.state.log);
    const far = intensity(most, this.state.log);
    const paints = [share, share, null].map((one) =>
      one
        ? (/** @type {number} */ weight) => pixel(sequential(), one(weight))
        : (/** @type {number} */ value) => pixel(diverging(), 0.5 + (Math.sign(value) * far(Math.abs(value))) / 2),
    );
    const chosen = this.#chosen();
    this.plots.forEach((plot, place) => {
      const grid = this.grids[place];
      plot.show(grid ? { grid, paint: paints[place], chosen: this.#cell(place, chosen) } : null);
      this.scales[place].replaceChildren(place === DIFFERENCE ? signedScale(most) : colourScale(0, max));
    });
  }

  /** @returns {{side: number, cell: Cell}|null} */
  #chosen() {
    const { query, key } = this.state;
    const side = this.page.shown(this.state);
    const units = this.grids[side]?.rowUnits;
    return query === null || key === null || !units ? null : { side, cell: [unitOf(units, query), unitOf(units, key)] };
  }

  /**
   * The same cell in another plot.
   *
   * @param {number} place of the plot @param {{side: number, cell: Cell}|null} from @returns {Cell|null}
   */
  #cell(place, from) {
    if (!from || place === from.side) return from?.cell ?? null;
    const found = from.cell.map((unit) => {
      const row = from.side === DIFFERENCE ? unit : this.pairs.findIndex((pair) => pair[from.side] === unit);
      return place === DIFFERENCE ? row : (this.pairs[row]?.[place] ?? -1);
    });
    return found.some((unit) => unit < 0) ? null : [found[0], found[1]];
  }

  /** @param {number} place @param {Cell|null} cell @param {PointerEvent} event */
  #hover(place, cell, event) {
    const cells = this.plots.map((_, other) => this.#cell(other, cell && { side: place, cell }));
    this.plots.forEach((plot, other) => other !== place && plot.point(cells[other]));
    const grid = this.grids[place];
    if (!cell || !grid) return tooltip.hide();
    /** @type {[string, string][]} */
    const values = [...this.names, "difference"].map((name, other) => [name, this.#value(other, cells[other])]);
    tooltip.show(event, [
      ["query", named(grid.rowUnits, cell[0])],
      ["key", named(grid.columnUnits, cell[1])],
      ...values,
    ]);
  }

  /** @param {number} place @param {Cell|null} cell */
  #value(place, cell) {
    const grid = this.grids[place];
    if (!grid || !cell) return "not aligned";
    if (!grid.visible(...cell)) return "not visible";
    const value = grid.at(...cell);
    if (place === DIFFERENCE) return signed(value);
    return said(value, this.state.least ? 0 : grid.step);
  }

  /** What is clicked in one side is chosen there. @param {number} place @param {Cell} cell */
  #choose(place, cell) {
    const side = place === DIFFERENCE ? this.page.shown(this.state) : place;
    const grid = this.grids[side];
    const [row, column] = this.#cell(side, { side: place, cell }) ?? [];
    if (!grid || row === undefined || column === undefined) return;
    this.store.set({
      side: side ? "1" : "0",
      query: grid.rowUnits.start[row],
      key: grid.columnUnits.start[column],
      keyEnd: null,
    });
  }

  #says() {
    const [a, b] = this.page.sides;
    if (this.grids.slice(0, 2).some((grid) => !grid)) return "This page holds no map of this head on both sides.";
    if (!this.pairs.length)
      return "These maps are binned, or no token has the same characters: there is no difference to draw.";
    const pairs = this.page.data.aligned ?? [];
    const alone = [a, b].map((side, which) => side.count - new Set(pairs.map((pair) => pair[which])).size);
    if (!alone[0] && !alone[1]) return "Every token has a partner at the same characters.";
    return `${alone[0]} of A and ${alone[1]} of B have no partner at the same characters, and are not in the difference.`;
  }

  /** Lists the heads, as far as they are compared; again when a filter changes. @param {State} state */
  async #heads(state) {
    const { sink, special, least, words, part } = state;
    const name = [sink, special, least, words, part].join();
    if (name !== this.listed) {
      this.listed = name;
      const still = this.listing.begin();
      /** @type {Largest[]} */
      this.found = [];
      let since = performance.now();
      for await (const one of largest(this.page, state)) {
        if (!still()) return;
        this.found.push(one);
        if (performance.now() - since < BREATH) continue;
        await new Promise((next) => setTimeout(next));
        since = performance.now();
      }
      if (!still()) return;
    }
    this.#table();
  }

  #table() {
    const found = [...(this.found ?? [])].sort((a, b) => Math.abs(b.value) - Math.abs(a.value)).slice(0, LISTED);
    const units = this.grids[DIFFERENCE]?.rowUnits;
    if (!units) return this.list.replaceChildren();
    const head = make(
      "tr",
      {},
      ...["head", "difference", "query", "key"].map((name, place) =>
        make("th", { scope: "col", class: place > 1 ? "words" : "" }, name),
      ),
    );
    const rows = found.map(({ at, head, row, column, value }) => {
      const chosen = at === this.state.at && head === this.state.head;
      const attributes = {
        "data-head": `${at}.${head}`,
        class: chosen ? "chosen" : "",
        onclick: () => this.#go(at, head, [row, column]),
      };
      const colour = make("i", { class: "dot" });
      colour.style.backgroundColor = css(diverging(), 0.5 + value / 2);
      return make(
        "tr",
        attributes,
        make("td", {}, make("button", { type: "button", class: "plain" }, this.page.sides[0].name(at, head))),
        make("td", {}, colour, signed(value)),
        ...[row, column].map((unit) => make("td", { class: "words" }, named(units, unit, 24))),
      );
    });
    this.list.replaceChildren(make("table", { class: "numbers" }, make("thead", {}, head), make("tbody", {}, ...rows)));
  }

  /** @param {number} at @param {number} head @param {Cell} cell */
  #go(at, head, cell) {
    const side = this.page.shown(this.state);
    const [query, key] = cell.map((row) => this.grids[side]?.rowUnits.start[this.pairs[row][side]] ?? null);
    this.store.set({ at, head, query, key, keyEnd: null });
  }
}

/** @param {number} value */
const signed = (value) => `${value > 0 ? "+" : ""}${digits(value)}`.replace(/^\+([<>])/, "$1");

/** @param {number} most */
function signedScale(most) {
  return make("span", { class: "scale" }, `−${digits(most)}`, gradient(diverging()), `+${digits(most)}`);
}
