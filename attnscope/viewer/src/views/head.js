/**
 * Query tokens left, key tokens right, a line for each weight. Hovering a token shows its row (or, of a key, who looks
 * at it), a click pins it. Of long texts only the rows near the window exist.
 *
 * @typedef {import("../types.js").State} State
 * @typedef {import("../types.js").Mount} Mount
 * @typedef {import("../data.js").Look} Look
 * @typedef {import("../data.js").Page} Page
 * @typedef {import("../units.js").Units} Units
 * @typedef {import("./look_cache.js").Focus} Focus
 */
import { fit, latest, make, onResize, tooltip } from "../canvas.js";
import { intensity } from "../colours.js";
import { said } from "../data.js";
import { paintedBy } from "../picture.js";
import { bands, boxOf, largest, line } from "./lines.js";
import { LookCache } from "./look_cache.js";
import { Overlay, headsOf } from "./overlay.js";
import { lacking, named, ranking, short, strongest, weightText, unitOf } from "./labels.js";

const ROW = 22; // CSS pixels of a token
const TALL = 30; // of one of few
const FEW = 20;
const BESIDE = 8; // rows that exist above and below the window
const FAINTEST = 0.012; // a line that cannot be seen is not drawn
const NEAREST = 5; // weights in a tooltip
const NEAREST_OF_EACH = 1; // of several heads: more lines would lie over the tokens, whose bars tell the rest
const MOST_TOLD = 6; // heads in a tooltip
const SPREAD = 16; // CSS pixels that the lines of all heads take beside one another

/** @type {Mount} */
export function mount(element, page, store) {
  return new HeadView(element, page, store);
}

class HeadView {
  /** @param {HTMLElement} element @param {Page} page @param {import("../types.js").Store} store */
  constructor(element, page, store) {
    this.page = page;
    this.store = store;
    this.state = store.state;
    /** @type {Units|undefined} */
    this.units = undefined;
    this.row = ROW;
    this.stop = { query: 0, key: 0 };
    this.count = 0;
    /** @type {Focus|null} */
    this.hover = null;
    this.chosen = ""; // the query and key that were last scrolled to
    this.drawing = latest();
    /** @type {Map<string, HTMLElement>} */
    this.placed = new Map();
    this.looks = new LookCache(page);
    this.overlay = new Overlay(page, store);
    this.first = { query: 0, key: 0 }; // the first unit of either side: of several stacks each has a text of its own
    this.axes = "";
    this.note = make("p", { class: "note" });
    this.canvas = make("canvas", { class: "lines", "aria-hidden": "true" });
    this.rows = make("div", { class: "rows" });
    this.scroller = make(
      "div",
      { class: "scroller", tabindex: 0, role: "group", "aria-label": "queries and keys" },
      this.canvas,
      this.rows,
    );
    this.side = make("aside", { class: "beside" });
    element.classList.add("head-view");
    element.append(this.overlay.element, this.note, make("div", { class: "with-beside" }, this.scroller, this.side));
    this.#listen();
    onResize(this.scroller, () => this.#draw());
  }

  /** @param {State} state */
  render(state) {
    this.state = state;
    const side = this.page.side(state);
    const units = side.units(state.words);
    const { queries, keys } = side.axes(state.at, state);
    const [query, key] = [queries, keys].map(([start, stop]) => [units.of[start], units.of[stop - 1] + 1]);
    const axes = `${query} ${key}`;
    if (units !== this.units || axes !== this.axes) {
      [this.units, this.axes] = [units, axes];
      this.first = { query: query[0], key: key[0] };
      this.stop = { query: query[1], key: key[1] };
      this.count = Math.max(query[1] - query[0], key[1] - key[0]);
      this.row = this.count <= FEW ? TALL : ROW;
      this.scroller.style.setProperty("--row", `${this.row}px`);
      this.placed.clear();
      this.rows.replaceChildren();
    }
    this.scroller.classList.toggle("several", headsOf(state).length > 1);
    this.rows.style.height = `${this.count * this.row}px`;
    this.note.textContent = [...new Set(headsOf(state).map(({ at, head }) => lacking(side, at, head)))].join(" ");
    this.overlay.render(state);
    this.#follow();
    this.#draw();
  }

  /** @returns {Focus|null} whose lines are shown; null: every query's */
  #focus() {
    const { query, key, pin } = this.state;
    const units = /** @type {Units} */ (this.units);
    if (pin && query !== null) return { axis: "query", unit: unitOf(units, query) };
    if (this.hover) return this.hover;
    if (query !== null) return { axis: "query", unit: unitOf(units, query) };
    return key === null ? null : { axis: "key", unit: unitOf(units, key) };
  }

  #listen() {
    this.scroller.addEventListener("scroll", () => this.#draw(), { passive: true });
    this.rows.addEventListener("pointermove", (event) => this.#point(event));
    this.rows.addEventListener("pointerleave", () => this.#leave());
    this.rows.addEventListener("click", (event) => this.#click(event));
  }

  /** @param {Event} event @returns {Focus|null} */
  #under(event) {
    const row = /** @type {HTMLElement|null} */ (/** @type {Element} */ (event.target).closest("[data-axis]"));
    if (!row) return null;
    return { axis: row.dataset.axis === "key" ? "key" : "query", unit: Number(row.dataset.unit) };
  }

  /** @param {PointerEvent} event */
  #point(event) {
    const under = this.#under(event);
    const same = under?.axis === this.hover?.axis && under?.unit === this.hover?.unit;
    this.hover = under;
    if (!under) return this.#leave();
    if (!same && event.pointerType !== "touch") this.#draw();
    void this.#tell(event, under);
  }

  #leave() {
    tooltip.hide();
    if (!this.hover) return;
    this.hover = null;
    this.#draw();
  }

  /** @param {MouseEvent} event */
  #click(event) {
    const under = this.#under(event);
    if (!under || !this.units) return;
    const token = this.units.start[under.unit];
    const { query, key, pin } = this.state;
    this.chosen = `${under.axis === "query" ? token : query},${under.axis === "key" ? token : key}`; // already in sight
    if (under.axis === "key") this.store.set({ key: key === token ? null : token, keyEnd: null });
    else if (pin && query === token) this.store.set({ query: null, pin: false });
    else this.store.set({ query: token, pin: true });
  }

  /** @param {PointerEvent} event @param {Focus} under */
  async #tell(event, under) {
    const { page, state, hover, units } = this;
    if (!units) return;
    const focus = state.pin ? this.#focus() : null;
    const from = focus && under.axis === "key" ? focus : under;
    const side = page.side(state);
    const count = state.heads.length ? NEAREST_OF_EACH : NEAREST;
    const lines = await Promise.all(
      headsOf(this.state).slice(0, MOST_TOLD).map(async ({ at, head }) => {
        const look = await this.looks.get(at, head, from, state);
        if (!look) return [];
        const keep = from.axis === "query" ? side.keep(at, head, state) : null;
        const ends = from === under ? strongest(look, count) : [under.unit];
        const of = state.heads.length ? `${side.name(at, head)} ` : "";
        const name = (/** @type {number} */ unit) => (from === under ? of + named(units, unit) : side.name(at, head));
        return ends.map((unit) => /** @type {[string, string]} */ ([name(unit), weightText(look, unit, state, keep)]));
      }),
    );
    if (this.hover !== hover) return;
    const title = {
      query: `${named(units, under.unit)} looks at`,
      key:
        from === under
          ? `${named(units, under.unit)} is looked at by`
          : `${named(units, from.unit)} → ${named(units, under.unit)}`,
    };
    tooltip.show(event, [title[under.axis], ...lines.flat()]);
  }

  /** Brings what was chosen elsewhere into the window. */
  #follow() {
    const { query, key } = this.state;
    const name = `${query},${key}`;
    if (name === this.chosen || !this.units) return;
    this.chosen = name;
    const unit = unitOf(this.units, query ?? key);
    const { scrollTop, clientHeight } = this.scroller;
    const top = (unit - this.first[query === null ? "key" : "query"]) * this.row;
    if (unit >= 0 && (top < scrollTop || top + this.row > scrollTop + clientHeight))
      this.scroller.scrollTop = top - clientHeight / 2;
  }

  /** @param {"query"|"key"} axis @returns {[first: number, last: number]} the units that exist now, half-open */
  #window(axis) {
    const { scrollTop, clientHeight } = this.scroller;
    const first = Math.max(0, Math.floor(scrollTop / this.row) - BESIDE);
    const last = Math.ceil((scrollTop + clientHeight) / this.row) + BESIDE;
    return [this.first[axis] + first, Math.min(this.stop[axis], this.first[axis] + last)];
  }

  async #draw() {
    const { state, looks } = this;
    const still = this.drawing.begin();
    const focus = this.#focus();
    const heads = headsOf(state);
    const sources = focus ? [focus] : range(...this.#window("query")).map((unit) => /** @type {Focus} */ ({ axis: "query", unit }));
    const found = await Promise.all(
      heads.map(({ at, head }) => Promise.all(sources.map((source) => looks.get(at, head, source, state)))),
    );
    if (!still()) return;
    // What is drawn in full: of one row its strongest line, of many a weight of 1, if weights are shares of 1.
    const side = this.page.side(state);
    const whole = heads.every(({ at }) => side.shares(at)) ? 1 : largest(found);
    const strength = intensity(focus ? largest(found) : whole, state.log);
    this.#place(focus, found.map((of) => (focus ? of[0] : null)), whole, strength);
    this.#lines(sources, found, strength);
    this.#beside(focus, found[0]?.[0] ?? null);
  }

  /** Makes the rows of the window; those that stay are kept, so that a click meets the row it began on.
   *
   * @param {Focus|null} focus @param {(Look|null)[]} looks one for each head @param {number} whole what fills a bar
   * @param {(weight: number) => number} strength
   */
  #place(focus, looks, whole, strength) {
    for (const axis of /** @type {const} */ (["query", "key"])) {
      const [first, last] = this.#window(axis);
      for (const [name, row] of this.placed) {
        if (row.dataset.axis !== axis || (Number(row.dataset.unit) >= first && Number(row.dataset.unit) < last)) continue;
        row.remove();
        this.placed.delete(name);
      }
      const weights = range(first, last).map((unit) => this.#row(axis, unit, focus, looks));
      const beside = range(first, last).map((unit) => /** @type {HTMLElement} */ (this.placed.get(`${axis}${unit}`)?.querySelector(".band")));
      const box = boxOf(beside[0]?.clientWidth ?? 0, looks.length);
      const colours = this.#inOrder(this.overlay.colours);
      beside.forEach((band, place) => bands(band, this.#inOrder(weights[place]), axis, colours, { box, whole, strength }));
    }
  }

  /**
   * What the shown heads have, in the model's order, as their squares stand, and not the chosen one first.
   *
   * @template T @param {T[]} of one for each head @returns {T[]}
   */
  #inOrder(of) {
    const heads = headsOf(this.state);
    const order = [...of.keys()].sort((a, b) => heads[a].at - heads[b].at || heads[a].head - heads[b].head);
    return order.map((place) => of[place]);
  }

  /** @param {"query"|"key"} axis @param {number} unit @param {Focus|null} focus @param {(Look|null)[]} looks @returns {number[]} what each head gives */
  #row(axis, unit, focus, looks) {
    const name = `${axis}${unit}`;
    const row = this.placed.get(name) ?? this.#newRow(axis, unit);
    this.placed.set(name, row);
    const other = focus !== null && focus.axis !== axis;
    const weights = other ? looks.map((look) => (look?.visible(unit) ? look.weights[unit] : NaN)) : [];
    const value = /** @type {HTMLElement} */ (row.querySelector(".value"));
    value.textContent = weights[0] ? said(weights[0]) : "";
    row.classList.toggle("chosen", row.dataset.token === String(this.state[axis]));
    row.classList.toggle("focus", focus?.axis === axis && focus.unit === unit);
    row.classList.toggle("unseen", other && weights.every(Number.isNaN));
    return weights;
  }

  /** @param {"query"|"key"} axis @param {number} unit */
  #newRow(axis, unit) {
    const units = /** @type {Units} */ (this.units);
    const token = units.start[unit];
    const label = make("span", { class: "name" }, short(units.label[unit]));
    const number = make("span", { class: "position" }, String(units.number(unit)));
    const value = make("span", { class: "value" });
    const band = make("span", { class: "band" });
    const { answer } = this.page.side(this.state).data;
    const made = answer !== null && token >= answer ? (units.of[answer] === unit ? " made first" : " made") : "";
    const attributes = { class: `token ${axis}${made}`, "data-token": token, "data-unit": unit, "data-axis": axis };
    const row = make(
      "div",
      attributes,
      ...(axis === "query" ? [value, band, number, label] : [label, number, band, value]),
    );
    row.style.top = `${(unit - this.first[axis]) * this.row}px`;
    this.rows.append(row);
    return row;
  }

  /**
   * @param {Focus[]} sources @param {(Look|null)[][]} found for each head, for each source
   * @param {(weight: number) => number} strength
   */
  #lines(sources, found, strength) {
    const { clientHeight, clientWidth } = this.scroller;
    this.canvas.style.marginBottom = `${-clientHeight}px`;
    paintedBy(this.canvas, (pen) => this.#stroke(pen, sources, found, strength));
    this.#stroke(fit(this.canvas, clientWidth, clientHeight), sources, found, strength);
  }

  /**
   * @param {CanvasRenderingContext2D} context @param {Focus[]} sources @param {(Look|null)[][]} found
   * @param {(weight: number) => number} strength
   */
  #stroke(context, sources, found, strength) {
    const { scrollTop, clientHeight, clientWidth } = this.scroller;
    const y = (/** @type {"query"|"key"} */ axis, /** @type {number} */ unit) =>
      (unit - this.first[axis] + 0.5) * this.row - scrollTop;
    const apart = Math.min(3, SPREAD / found.length); // lines of several heads beside one another
    found.forEach((looks, place) => {
      context.strokeStyle = this.overlay.colours[place];
      const shift = (place - (found.length - 1) / 2) * apart;
      looks.forEach((look, source) => {
        const { axis, unit } = sources[source];
        const weights = look?.weights ?? [];
        for (let other = 0; other < weights.length; other++) {
          const strong = Math.min(1, strength(weights[other]));
          if (strong < FAINTEST) continue;
          const [query, key] = axis === "query" ? [unit, other] : [other, unit];
          const [from, to] = [y("query", query), y("key", key)];
          if (Math.max(from, to) < -ROW || Math.min(from, to) > clientHeight + ROW) continue;
          line(context, clientWidth, from + shift, to + shift, strong, weights[other] < 0);
        }
      });
    });
  }

  /** What the row in focus says in numbers. @param {Focus|null} focus @param {Look|null} look */
  #beside(focus, look) {
    const { units, state } = this;
    const { at, head } = state;
    const name = this.page.side(state).name(at, head);
    if (!focus || !look || !units) {
      const hint = "Point at a query on the left for its keys, at a key on the right for its queries. A click pins it.";
      this.side.replaceChildren(make("p", { class: "hint" }, hint));
      return;
    }
    const title = focus.axis === "query" ? "looks at" : "is looked at by";
    const choose = (/** @type {number} */ token) =>
      this.store.set(focus.axis === "query" ? { key: token, keyEnd: null } : { query: token, pin: true });
    const list = ranking(look, focus.axis === "query" ? "key" : "query", choose);
    const removed = look.removed > 0 && make("p", { class: "hint" }, `taken out: ${said(look.removed)}`);
    this.side.replaceChildren(make("h2", {}, `${name}: ${named(units, focus.unit)} ${title}`), list, removed || "");
  }
}

/** @param {number} first @param {number} last half-open */
const range = (first, last) => Array.from({ length: last - first }, (_, place) => first + place);
