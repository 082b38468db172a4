/**
 * One head's map: queries down, keys across; hover for the value, a click chooses both, Ctrl and wheel zoom, drag pans.
 * Keys that a query cannot see are hatched, so that they are never taken for a weight of 0.
 *
 * @typedef {import("../types.js").State} State
 * @typedef {import("../types.js").Mount} Mount
 * @typedef {import("../data.js").Page} Page
 * @typedef {import("../data.js").Grid} Grid
 * @typedef {import("./plot.js").Cell} Cell
 * @typedef {{query: number, key: number, weight: number}} Relation of tokens
 */
import { latest, make, onResize, place, tooltip } from "../canvas.js";
import { css, intensity, pixel, shading } from "../colours.js";
import { said } from "../data.js";
import { colourScale } from "../scales.js";
import { lacking, named, ranking, strongestKeys, swatch, weightText, unitOf } from "./labels.js";
import { Plot } from "./plot.js";

const [BESIDE, NARROW] = [340, 900]; // pixels of the panel beside the map; below that width it stands under it
const LISTED = 6; // of the chosen row and column
const LARGE = 4; // CSS pixels of a token that is drawn over the bins

/** @type {Mount} */
export function mount(element, page, store) {
  return new MatrixView(element, page, store);
}

class MatrixView {
  /** @param {HTMLElement} element @param {Page} page @param {import("../types.js").Store} store */
  constructor(element, page, store) {
    this.page = page;
    this.store = store;
    this.state = store.state;
    this.drawing = latest();
    /** @type {Grid|null} */
    this.grid = null;
    /** @type {Relation[][]} of each query, where the map is binned */
    this.relations = [];
    /** @type {Uint8Array} */
    this.keep = new Uint8Array();
    this.plot = new Plot(undefined, () => element.clientWidth - (innerWidth > NARROW ? BESIDE : 0));
    this.note = make("p", { class: "note" });
    this.legend = make("div", { class: "legend" });
    this.plot.onhover = (cell, event) => this.#tell(cell, event);
    this.plot.onclick = (cell, event) => this.#choose(cell, event);
    const zoom = (/** @type {string} */ sign, /** @type {string} */ title, /** @type {() => void} */ onclick) =>
      make("button", { type: "button", title, "aria-label": title, onclick }, sign);
    this.zoom = make("span", { class: "choice" });
    this.zoom.append(
      zoom("+", "Zoom in", () => this.plot.scaleBy(2)),
      zoom("−", "Zoom out", () => this.plot.scaleBy(0.5)),
      make("button", { type: "button", onclick: () => this.plot.reset() }, "Whole map"),
    );
    element.classList.add("matrix-view");
    this.lists = make("div", { class: "lists" });
    const beside = make("aside", { class: "beside" }, this.legend, this.zoom, this.note, this.lists);
    element.append(make("div", { class: "with-beside" }, this.plot.element, beside));
    onResize(element, () => this.plot.draw());
    addEventListener("resize", () => element.clientWidth && this.plot.draw()); // lower, and as wide
  }

  /** @param {State} state */
  async render(state) {
    const { page } = this;
    const { at, head } = state;
    const side = page.side(state);
    const still = this.drawing.begin();
    const grid = await page.filteredMap(page.shown(state), at, head, state);
    const strongest = grid && grid.bin > 1 ? await side.relations(at, head) : null;
    const keys = await page.keysOf(state);
    if (!still()) return;
    [this.state, this.grid, this.keep] = [state, grid, side.keep(at, head, state)];
    this.relations = strongest ? relationsOf(strongest, this.keep, state.least) : [];
    const max = grid?.max ?? 1;
    const { ramp, low, place } = shading(max, intensity(max, state.log), side.signed(at));
    this.note.textContent = grid ? this.#says(grid, strongest?.k ?? 0) : lacking(side, at, head);
    const made = this.#made(grid);
    const edges = grid && side.window(at) ? grid.edges(side.layers[at].stack === "encoder") : [];
    this.legend.replaceChildren(
      colourScale(low, max, ramp),
      ...(grid?.hides ? [swatch("hatched", "cannot be seen")] : []),
      ...(edges.length ? [swatch("edge", `edge of a ${side.window(at)}`)] : []),
      ...(made.some((one) => one !== null) ? [swatch("made", "here the answer begins")] : []),
    );
    this.plot.show(
      grid && {
        grid,
        paint: (weight) => pixel(ramp, place(weight)),
        chosen: keys && this.#chosen(grid, keys[0][0]),
        suggested: state.query === null || state.key === null,
        made,
        edges,
        over: (context, plot) => this.#tokens(context, plot, (weight) => css(ramp, place(weight))),
      },
    );
    await this.#list(still, keys);
  }

  /** @param {Grid|null} grid @returns {[number|null, number|null]} the row and the column that the answer begins with */
  #made(grid) {
    const { answer } = this.page.side(this.state).data;
    if (!grid || answer === null) return [null, null];
    const found = [grid.rowUnits, grid.columnUnits].map((units) => unitOf(units, answer));
    const [row, column] = found.map((unit) => (unit > 0 ? unit : null));
    return [row, column];
  }

  /**
   * What the query looks at, and who looks at the key.
   *
   * @param {() => boolean} still @param {[number, number][]|null} places chosen or suggested
   */
  async #list(still, places) {
    const { page, state } = this;
    const shown = page.shown(state);
    const { tokenUnits } = page.side(state);
    const keys = places && (page.keys(state) ?? places[0]);
    const [row, column] = await Promise.all([
      page.filtered(shown, state.at, state.head, page.query(state), state),
      keys && page.filteredColumn(shown, state.at, state.head, keys, state),
    ]);
    if (!still()) return;
    /** @type {HTMLElement[]} */
    const parts = [];
    /** @param {string} title @param {import("../data.js").Look} look @param {"query"|"key"} axis */
    const add = (title, look, axis) =>
      parts.push(
        make(
          "div",
          {},
          make("h2", {}, title),
          ranking(look, axis, (token) => this.store.set({ [axis]: token, keyEnd: null }), LISTED),
        ),
      );
    if (row) add(`${named(tokenUnits, page.query(state))} looks at`, row, "key");
    if (column && keys) add(`${named(tokenUnits, keys[0])} is looked at by`, column, "query");
    this.lists.replaceChildren(...parts);
  }

  /** @param {Grid} grid @param {number} key @returns {Cell|null} */
  #chosen({ rowUnits, columnUnits }, key) {
    const [row, column] = [unitOf(rowUnits, this.page.query(this.state)), unitOf(columnUnits, key)];
    return row < 0 || column < 0 ? null : [row, column];
  }

  /** @param {Grid} grid @param {number} k */
  #says({ bin }, k) {
    const zoom = "Click a cell to choose its query and key. Ctrl and wheel, or a pinch, zooms; drag to move.";
    if (bin === 1) return zoom;
    const cells = `Cells are ${bin} × ${bin} tokens: the sum over their keys, the mean over their queries.`;
    return k ? `${cells} ${zoom} Zoom in for the ${strongestKeys(k)} of each token.` : cells;
  }

  /** @returns {number} CSS pixels of a token */
  get #token() {
    return (this.plot.cell * this.plot.transform.k) / (this.grid?.bin ?? 1);
  }

  /**
   * The strongest keys of each query over a binned map, where a token is large enough to be seen.
   *
   * @param {CanvasRenderingContext2D} context @param {Plot} plot @param {(weight: number) => string} colour
   */
  #tokens(context, plot, colour) {
    const size = this.#token;
    if (!this.relations.length || size < LARGE) return;
    const bin = this.grid?.bin ?? 1;
    const [first, last] = plot.inSight().rows;
    for (const { query, key, weight } of this.relations.slice(first * bin, last * bin).flat()) {
      context.fillStyle = colour(weight);
      context.fillRect(...plot.at(query / bin, key / bin), size, size);
    }
  }

  /** @param {MouseEvent} event @returns {Relation|null} of the tokens under the pointer */
  #relation(event) {
    const bin = this.grid?.bin ?? 1;
    if (bin === 1 || this.#token < LARGE) return null;
    const [query, key] = this.plot.under(...place(this.plot.top, event)).map((cell) => Math.floor(cell * bin));
    return this.relations[query]?.find((one) => one.key === key) ?? null;
  }

  /** @param {Cell|null} cell @param {PointerEvent} event */
  #tell(cell, event) {
    const { grid } = this;
    if (!cell || !grid) return tooltip.hide();
    const relation = this.#relation(event);
    tooltip.show(event, relation ? this.#ofTokens(relation) : this.#ofCell(grid, cell));
  }

  /** @param {Relation} relation @returns {[string, string][]} */
  #ofTokens({ query, key, weight }) {
    const { tokenUnits } = this.page.side(this.state);
    return [
      ["query", named(tokenUnits, query)],
      ["key", named(tokenUnits, key)],
      ["weight", said(weight)],
    ];
  }

  /** @param {Grid} grid @param {Cell} cell @returns {(string|[string, string])[]} */
  #ofCell(grid, [row, column]) {
    const { rowUnits: rows, columnUnits: columns, bin } = grid;
    const visible = (/** @type {number} */ unit) => grid.visible(row, unit);
    const look = { weights: grid.row(row), removed: 0, step: grid.step, whole: true, visible, units: columns };
    const weight = weightText(look, column, this.state, this.keep);
    const names = bin > 1 ? [rows.label[row], columns.label[column]] : [named(rows, row), named(columns, column)];
    const removed = grid.removed[row];
    return [
      ["query", names[0]],
      ["key", names[1]],
      [bin > 1 ? "mean over queries" : "weight", weight],
      ...(removed > 0 ? [/** @type {[string, string]} */ (["taken out of the row", said(removed)])] : []),
    ];
  }

  /** @param {Cell} cell @param {MouseEvent} event */
  #choose([row, column], event) {
    const { grid } = this;
    if (!grid) return;
    const bins = [grid.rowUnits.range(row), grid.columnUnits.range(column)];
    const inside = this.relations
      .slice(...bins[0])
      .flat()
      .filter(({ key }) => key >= bins[1][0] && key < bins[1][1]);
    const best = inside.reduce((one, other) => (other.weight > one.weight ? other : one), {
      query: bins[0][0],
      key: bins[1][0],
      weight: 0,
    });
    const { query, key } = this.#relation(event) ?? best;
    this.store.set({ query, key, keyEnd: null });
  }
}

/**
 * @param {import("../data.js").Strongest} strongest @param {Uint8Array} keep @param {number} least
 * @returns {Relation[][]} of each query, filters applied
 */
function relationsOf({ keys, stored, step, k, tokens }, keep, least) {
  return Array.from({ length: tokens }, (_, query) => {
    const places = Array.from({ length: k }, (_, place) => query * k + place).filter((place) => keep[keys[place]]);
    return places
      .map((place) => ({ query, key: keys[place], weight: stored[place] * step }))
      .filter(({ weight }) => weight >= least);
  });
}
