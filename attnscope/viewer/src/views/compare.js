/**
 * Two texts, or two models, side by side and their signed difference between the units that they share, for the chosen
 * head; and the heads by their divergence, as `attnscope compare` ranks them.
 *
 * @typedef {import("../types.js").State} State
 * @typedef {import("../types.js").Mount} Mount
 * @typedef {import("../data.js").Page} Page
 * @typedef {import("../data.js").Grid} Grid
 * @typedef {import("./plot.js").Cell} Cell
 * @typedef {import("./plot.js").Block} Block
 * @typedef {import("./difference.js").Compared} Compared
 * @typedef {import("./difference.js").Ranked} Ranked
 */
import { latest, make, onResize, tooltip } from "../canvas.js";
import { css, diverging, intensity, pixel, sequential } from "../colours.js";
import { said } from "../data.js";
import { colourScale, digits, divergence, fixed, gradient } from "../scales.js";
import { isolated } from "../escaping.js";
import { compared, ranked } from "./difference.js";
import { excerpt, named, unitOf } from "./labels.js";
import { Plot } from "./plot.js";

const SIDES = /** @type {const} */ ([0, 1]);
const DIFFERENCE = 2; // the third plot
const TITLE = 24; // characters of a text
const LISTED = 30; // heads
const BREATH = 40; // ms of listing before the page draws again
const NAMED = 8; // tokens without a partner
const CUT = "A word with other tokens in the other text is one unit: weights are summed over its keys and averaged over its queries.";
const RANKED =
  "Jensen-Shannon divergence of the weights on shared tokens, before any filter: the order of attnscope compare.";

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
    /** @type {Compared} */
    this.held = { maps: [], rows: [], columns: [], masses: [], difference: null };
    this.names = ["A", "B"];
    this.plots = [0, 1, 2].map((place) => this.#plot(place));
    this.scales = this.plots.map(() => make("span", {}));
    this.note = make("p", { class: "note" });
    this.list = make("div", {
      class: "table-scroll",
      "data-role": "differences",
      tabindex: 0,
      role: "group",
      "aria-label": "heads by their divergence",
    });
    const titles = [
      ...page.sides.map((side, place) => `${this.names[place]}: ${side.data.name}, “${excerpt(side, TITLE)}”`),
      "B − A",
    ];
    const figures = this.plots.map((plot, place) =>
      make(
        "figure",
        { "data-side": place === DIFFERENCE ? "diff" : String(place) },
        make("figcaption", {}, make("b", { class: "title" }, isolated(titles[place])), this.scales[place]),
        plot.element,
      ),
    );
    element.classList.add("compare-view");
    element.append(
      this.note,
      make("div", { class: "three" }, ...figures),
      make("h2", {}, "Heads by their divergence"),
      make("p", { class: "note" }, RANKED),
      this.list,
    );
    onResize(element, () => this.plots.forEach((plot) => plot.draw()));
  }

  /** @param {State} state */
  async render(state) {
    const still = this.drawing.begin();
    const held = await compared(this.page, state.at, state.head, state);
    if (!still()) return;
    [this.state, this.grids, this.held] = [state, [...held.maps, held.difference], held];
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
      plot.show(grid ? { grid, paint: paints[place], chosen: this.#block(place, chosen) } : null);
      this.scales[place].replaceChildren(place === DIFFERENCE ? signedScale(most) : colourScale(0, max));
    });
  }

  /** @returns {{side: number, cell: Cell}|null} */
  #chosen() {
    const { query, key } = this.state;
    const side = this.page.shown(this.state);
    const grid = this.grids[side];
    if (query === null || key === null || !grid) return null;
    return { side, cell: [unitOf(grid.rowUnits, query), unitOf(grid.columnUnits, key)] };
  }

  /**
   * The units that a cell of a plot belongs to: places among the rows and columns of the difference, -1 for none.
   *
   * @param {{side: number, cell: Cell}} from @returns {Cell}
   */
  #shared({ side, cell: [row, column] }) {
    if (side === DIFFERENCE) return [row, column];
    const { rows, columns } = this.held;
    return [rows.findIndex((unit) => unit[side].includes(row)), columns.findIndex((unit) => unit[side].includes(column))];
  }

  /**
   * What a cell of one plot is in another: all tokens of its units.
   *
   * @param {number} place of the plot @param {{side: number, cell: Cell}|null} from @returns {Block|null}
   */
  #block(place, from) {
    if (!from || place === from.side) return from?.cell ?? null;
    const [row, column] = this.#shared(from);
    if (row < 0 || column < 0) return null;
    if (place === DIFFERENCE) return [row, column];
    const [queries, keys] = [this.held.rows[row][place], this.held.columns[column][place]];
    return [queries[0], keys[0], queries[queries.length - 1] + 1, keys[keys.length - 1] + 1];
  }

  /** @param {number} place @param {Cell|null} cell @param {PointerEvent} event */
  #hover(place, cell, event) {
    const from = cell && { side: place, cell };
    this.plots.forEach((plot, other) => other !== place && plot.point(this.#block(other, from)));
    const grid = this.grids[place];
    if (!from || !cell || !grid) return tooltip.hide();
    const shared = this.#shared(from);
    const units = this.held.difference && shared.every((unit) => unit >= 0) ? this.held.difference : null;
    const [of, [row, column]] = units ? [units, shared] : [grid, cell];
    /** @type {[string, string][]} */
    const values = [...this.names, "difference"].map((name, other) => [
      name,
      units ? this.#value(other, shared) : other === place ? this.#said(grid, cell) : "no partner",
    ]);
    tooltip.show(event, [["query", named(of.rowUnits, row)], ["key", named(of.columnUnits, column)], ...values]);
  }

  /** Between two shared units. @param {number} place @param {Cell} cell */
  #value(place, cell) {
    const { masses, difference } = this.held;
    if (place !== DIFFERENCE) return this.#said(masses[place], cell);
    return difference?.visible(...cell) ? signed(difference.at(...cell)) : "not visible";
  }

  /** @param {Grid} grid @param {Cell} cell */
  #said(grid, cell) {
    return grid.visible(...cell) ? said(grid.at(...cell), this.state.least ? 0 : grid.step) : "not visible";
  }

  /** What is clicked in one side is chosen there. @param {number} place @param {Cell} cell @param {Partial<State>} [head] */
  #choose(place, cell, head = {}) {
    const side = place === DIFFERENCE ? this.page.shown(this.state) : place;
    const grid = this.grids[side];
    const block = this.#block(side, { side: place, cell });
    if (!grid || !block) return;
    const [row, column, , end = column + 1] = block;
    const { start, stop } = grid.columnUnits;
    this.store.set({
      ...head,
      side: side ? "1" : "0",
      query: grid.rowUnits.start[row],
      key: start[column],
      keyEnd: end > column + 1 ? stop[end - 1] : null,
    });
  }

  /** How many units there are, and what has no partner. */
  #says() {
    const { maps: [a, b], rows, columns } = this.held;
    if (!a || !b) return "This page has no map of this head for both sides.";
    if (!rows.length || !columns.length)
      return a.bin > 1 || b.bin > 1
        ? "These maps are binned: there is no difference to draw."
        : "The texts share no token: there is no difference to draw.";
    const what = a.bin > 1 ? "bin" : this.state.words ? "word" : "token";
    const cut = rows.some((unit) => unit.some((of) => of.length > 1)) ? ` ${CUT}` : "";
    const only = [a, b].map((map, side) => {
      const shared = new Set(rows.flatMap((unit) => unit[side]));
      const alone = Array.from({ length: map.rows }, (_, row) => row).filter((row) => !shared.has(row));
      const more = alone.length > NAMED ? ` and ${alone.length - NAMED} more` : "";
      const names = alone.slice(0, NAMED).map((row) => named(map.rowUnits, row, TITLE)).join(", ");
      return alone.length ? ` Only in ${this.names[side]}: ${names}${more}.` : "";
    });
    return `${rows.length} shared ${what}${rows.length > 1 ? "s" : ""}.${cut}${only.join("")}`;
  }

  /** Lists the heads, as far as they are compared; again when a filter changes. @param {State} state */
  async #heads(state) {
    const { sink, special, least, words, part, pair } = state;
    const name = [sink, special, least, words, part, pair].join();
    if (name !== this.listed) {
      this.listed = name;
      const still = this.listing.begin();
      /** @type {Ranked[]} */
      this.found = [];
      let since = performance.now();
      for await (const one of ranked(this.page, state)) {
        if (!still()) return;
        this.found.push(one);
        if (this.found.length === LISTED) break;
        if (performance.now() - since < BREATH) continue;
        await new Promise((next) => setTimeout(next));
        since = performance.now();
      }
      if (!still()) return;
    }
    this.#table();
  }

  #table() {
    const found = this.found ?? [];
    const { difference } = this.held;
    if (!difference) return this.list.replaceChildren();
    const lost = found.some((one) => one.lost.some((mass) => mass > 0));
    const titles = ["head", "JS bits", ...(lost ? ["lost", "lost, other"] : []), "largest B − A", "query", "key"];
    const head = make(
      "tr",
      {},
      ...titles.map((name) => make("th", { scope: "col", class: name === "query" || name === "key" ? "words" : "" }, name)),
    );
    const rows = found.map(({ at, head, js, lost: masses, row, column, value }) => {
      const chosen = at === this.state.at && head === this.state.head;
      const attributes = {
        "data-head": `${at}.${head}`,
        class: chosen ? "chosen" : "",
        onclick: () => this.#choose(DIFFERENCE, [row, column], { at, head }),
      };
      const colour = make("i", { class: "dot" });
      colour.style.backgroundColor = css(diverging(), 0.5 + value / 2);
      return make(
        "tr",
        attributes,
        make("td", {}, make("button", { type: "button", class: "plain" }, this.page.sides[0].name(at, head))),
        make("td", {}, js === null ? "–" : divergence(js)),
        ...(lost ? masses : []).map((mass) => make("td", {}, fixed(mass, 3))),
        make("td", {}, colour, `${value > 0 ? "+" : ""}${fixed(value, 3)}`),
        make("td", { class: "words" }, named(difference.rowUnits, row, 24)),
        make("td", { class: "words" }, named(difference.columnUnits, column, 24)),
      );
    });
    this.list.replaceChildren(make("table", { class: "numbers" }, make("thead", {}, head), make("tbody", {}, ...rows)));
  }
}

/** @param {number} value */
const signed = (value) => `${value > 0 ? "+" : ""}${digits(value)}`.replace(/^\+([<>])/, "$1");

/** @param {number} most */
function signedScale(most) {
  return make("span", { class: "scale" }, `−${digits(most)}`, gradient(diverging()), `+${digits(most)}`);
}
