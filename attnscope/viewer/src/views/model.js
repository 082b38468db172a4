/**
 * Every head of every layer as a thumbnail of its map, and beside them the one that is pointed at, enlarged; one canvas
 * for each layer, drawn when it comes into sight.
 */
import { breathe, fit, make, raster, topOf } from "../canvas.js";
import { intensity, ink, pixel, roleColour, shading } from "../colours.js";
import { HeadGrid } from "../headgrid.js";
import { roleChip, roleWords } from "../roles.js";
import { once } from "../side.js";
import { thumb } from "../thumbs.js";
import { digits } from "../scales.js";
import { Enlarged } from "./enlarged.js";
import { short } from "./labels.js";

/**
 * @typedef {import("../types.js").State} State
 * @typedef {import("../types.js").Page} Page
 * @typedef {import("../types.js").Store} Store
 * @typedef {import("../headgrid.js").Row} Row
 * @typedef {import("../headgrid.js").Name} Name
 * @typedef {import("../thumbs.js").Thumb} Thumb
 */

const LEAST = innerWidth > 640 ? 44 : 34; // pixels of a thumbnail
const MOST = 168;
const FRAME = 90; // height of what stands about the thumbnails, below the views' tabs
const STRIPE = 3; // height of the role's colour under a thumbnail
const AHEAD = "300px"; // drawn before it is scrolled to
const LOG_FLOOR = 1e-3;

class ModelView {
  /** @param {HTMLElement} element @param {Page} page @param {Store} store */
  constructor(element, page, store) {
    this.page = page;
    this.store = store;
    /** @type {State|null} */
    this.state = null;
    this.drawn = "";
    this.filters = "";
    /** @type {Map<string, Promise<Thumb|null>>} */
    this.thumbs = new Map();
    this.legend = make("div", { class: "legend heads-legend" });
    const map = make("div", {});
    this.enlarged = new Enlarged(page, store);
    element.append(this.legend, make("div", { class: "model-split" }, map, this.enlarged.element));
    this.grid = new HeadGrid(map, store, {
      label: "All heads",
      least: LEAST,
      most: () => Math.max(LEAST, Math.min(MOST, this.#room() / this.#ratio() / this.#layers().length)),
      ratio: () => this.#ratio(),
      gap: 5,
      about: (name) => this.#about(name),
      pointed: (name) => this.enlarged.point(name),
      resized: () => this.#stale(),
    });
    /** @type {Set<Row>} */
    this.seen = new Set();
    /** @type {WeakSet<Row>} */
    this.done = new WeakSet();
    this.watcher = new IntersectionObserver((entries) => this.#sight(entries), { rootMargin: AHEAD });
  }

  /** @param {State} state */
  render(state) {
    this.state = state;
    const side = this.page.side(state);
    if (this.grid.show(side, state.at)) {
      this.watcher.disconnect();
      this.seen.clear();
      for (const { cells } of this.grid.rows) this.watcher.observe(cells);
      this.#explain();
    }
    this.grid.select(state);
    this.enlarged.render(state);
    const { sink, special, least, log, words, part, pair } = state;
    const look = [
      this.page.shown(state),
      sink,
      special,
      least,
      log,
      words,
      part,
      pair,
      document.documentElement.dataset.theme,
    ].join();
    if (look !== this.drawn) this.#stale();
    this.drawn = look;
  }

  #layers() {
    const { state } = this.store;
    return this.page.side(state).layersWith(state.at);
  }

  /** Height / width of a thumbnail: a short target over a long text gives flat maps. */
  #ratio() {
    const { state } = this.store;
    const { queries, keys } = this.page.side(state).axes(state.at, state);
    return Math.min(1, (queries[1] - queries[0]) / (keys[1] - keys[0]));
  }

  /** @returns {number} height of all thumbnails, so that the whole model is in the window */
  #room() {
    return innerHeight - topOf(this.legend) - FRAME - 5 * this.grid.rows.length;
  }

  #explain() {
    const heads = this.state ? (this.grid.side?.headsWith(this.state.at) ?? []) : [];
    const roles = [...new Set(heads.map(({ role }) => role))].filter((role) => roleColour(role));
    const scanned = heads.some(({ atlas }) => atlas);
    const whose = scanned ? "roles by a scan of the model" : "roles on this text";
    const chips = roles.map((role) => {
      const chip = roleChip({ role, text_role: role });
      chip.title = whose;
      chip.append(` ${heads.filter((head) => head.role === role).length}`);
      return chip;
    });
    const none = scanned ? "the scan of the model named no head here" : "this text shows no head's role";
    const words = `rows: queries, columns: keys; ${chips.length ? whose : none}`;
    this.legend.replaceChildren(make("span", {}, words), ...chips);
  }

  #stale() {
    this.done = new WeakSet();
    for (const row of this.seen) void this.#draw(row);
  }

  /** @param {IntersectionObserverEntry[]} entries */
  #sight(entries) {
    for (const { target, isIntersecting } of entries) {
      const row = this.grid.rows.find(({ cells }) => cells === target);
      if (!row) continue;
      if (!isIntersecting) this.seen.delete(row);
      else {
        this.seen.add(row);
        void this.#draw(row);
      }
    }
  }

  /** @param {Row} row */
  async #draw(row) {
    const { state, done } = this;
    if (!state || done.has(row)) return;
    done.add(row);
    const shown = this.page.shown(state);
    const pixels = Math.round((this.grid.width - 2) * Math.min(2, devicePixelRatio || 1));
    /** @type {(Thumb|null)[]} */
    const thumbs = [];
    for (const name of row.heads) {
      await breathe();
      if (done !== this.done) return; // another look was asked for meanwhile
      thumbs.push(await this.#small(shown, name, state, pixels));
    }
    if (done !== this.done) return;
    const context = fit(row.canvas, ...this.grid.extent(row));
    context.imageSmoothingEnabled = false;
    context.lineWidth = 1;
    const lines = [ink("line"), ink("line-strong")]; // asked once: an answer costs a layout
    row.heads.forEach((name, index) => {
      context.strokeStyle = lines[thumbs[index] ? 0 : 1];
      this.#thumb(context, thumbs[index], this.grid.corner(index), name);
    });
  }

  /**
   * Kept while only colours change: a long text's map has millions of cells.
   *
   * @param {number} side @param {Name} name @param {State} state @param {number} size
   */
  #small(side, { at, head }, state, size) {
    const { sink, special, least, words, part, pair } = state;
    const filters = [side, size, sink, special, least, words, part, pair].join();
    if (this.filters !== filters) this.thumbs.clear();
    this.filters = filters;
    return once(this.thumbs, `${at}.${head}`, () => thumb(this.page, side, at, head, state, size));
  }

  /**
   * @param {CanvasRenderingContext2D} context @param {Thumb|null} small
   * @param {[number, number]} corner @param {Name} name
   */
  #thumb(context, small, [x, y], name) {
    const { width, height } = this.grid;
    const [wide, high] = shape(small, width, height - STRIPE);
    if (small) context.drawImage(this.#picture(small, this.grid.side?.signed(name.at) ?? false), x, y, wide, high);
    context.strokeRect(x + 0.5, y + 0.5, wide - 1, high - 1);
    const colour = roleColour(this.grid.side?.headAt(name.at, name.head)?.role ?? "-");
    if (!colour) return;
    context.fillStyle = colour;
    context.fillRect(x, y + height - STRIPE, width, STRIPE);
  }

  /** @param {Thumb} small @param {boolean} signed */
  #picture({ rows, columns, values, max }, signed) {
    const strength = intensity(max, this.state?.log ?? false, LOG_FLOOR);
    const { ramp, place } = shading(max, strength, signed);
    return raster(rows, columns, (row, column) => {
      const weight = values[row * columns + column];
      return Number.isNaN(weight) ? 0 : pixel(ramp, place(weight));
    });
  }

  /** @param {Name} name @returns {(string|[string, string])[]} */
  #about({ at, head }) {
    const side = this.grid.side;
    const one = side?.headAt(at, head);
    if (!side || !one) return [];
    const scores = side.metrics.map(({ short }, index) => ({ short, score: one.scores[index] }));
    const place = side.metrics.findIndex(({ id }) => id === this.state?.metric);
    const lines = /** @type {(string|[string, string])[]} */ ([
      [side.name(at, head), roleWords(one)],
    ]);
    if (place >= 0 && scores[place].score !== null) lines.push([scores[place].short, digits(scores[place].score ?? 0)]);
    if (one.top_key !== null)
      lines.push([
        `most mass: ${one.top_key} ${short(side.tokens.label[one.top_key], 24)}`,
        digits(one.top_key_mass ?? 0),
      ]);
    if (one.near_uniform) lines.push("near uniform");
    return lines;
  }
}

/**
 * A map of two texts is not square: it is as large as its place takes.
 *
 * @param {Thumb|null} small @param {number} width @param {number} height @returns {[number, number]}
 */
function shape(small, width, height) {
  if (!small || small.rows === small.columns) return [width, height];
  const cell = Math.min(width / small.columns, height / small.rows);
  return [Math.max(2, Math.round(cell * small.columns)), Math.max(2, Math.round(cell * small.rows))];
}

/** @type {import("../types.js").Mount} */
export const mount = (element, page, store) => new ModelView(element, page, store);
