/**
 * Query tokens left, key tokens right, a line for each weight. Hovering a token shows its row (or, of a key, who looks
 * at it), a click pins it. Of long texts only the rows near the window exist.
 *
 * @typedef {import("../types.js").State} State
 * @typedef {import("../types.js").Mount} Mount
 * @typedef {import("../data.js").Look} Look
 * @typedef {import("../data.js").Page} Page
 * @typedef {import("../units.js").Units} Units
 * @typedef {import("./looks.js").Focus} Focus
 * @typedef {{at: number, head: number}} HeadName
 */
import { fit, latest, make, onResize, tooltip } from "../canvas.js";
import { intensity, several } from "../colours.js";
import { bands, largest, line } from "./lines.js";
import { Looks } from "./looks.js";
import { lacking, named, ranking, short, strongest, told, unitOf } from "./parts.js";

const ROW = 22; // CSS pixels of a token
const TALL = 30; // of one of few
const FEW = 20;
const BESIDE = 8; // rows that exist above and below the window
const FAINTEST = 0.012; // a line that cannot be seen is not drawn
const NEAREST = 5; // weights in a tooltip

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
    /** @type {Focus|null} */
    this.hover = null;
    this.chosen = ""; // the query and key that were last scrolled to
    this.drawing = latest();
    /** @type {Map<string, HTMLElement>} */
    this.placed = new Map();
    this.looks = new Looks(page);
    this.legend = make("div", { class: "legend" });
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
    element.append(this.legend, this.note, make("div", { class: "with-beside" }, this.scroller, this.side));
    this.#listen();
    onResize(this.scroller, () => this.#draw());
  }

  /** @param {State} state */
  render(state) {
    this.state = state;
    const side = this.page.side(state);
    const units = side.units(state.words);
    if (units !== this.units) {
      this.units = units;
      this.row = units.count <= FEW ? TALL : ROW;
      this.scroller.style.setProperty("--row", `${this.row}px`);
      this.placed.clear();
      this.rows.replaceChildren();
    }
    this.rows.style.height = `${units.count * this.row}px`;
    this.note.textContent = [...new Set(this.#heads().map(({ at, head }) => lacking(side, at, head)))].join(" ");
    this.#legend();
    this.#follow();
    this.#draw();
  }

  /** @returns {HeadName[]} the chosen head, then the others in colours */
  #heads() {
    const { at, head, heads } = this.state;
    return [{ at, head }, ...heads.filter((one) => one.at !== at || one.head !== head)];
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
    const lines = await Promise.all(
      this.#heads().map(async ({ at, head }) => {
        const look = await this.looks.get(at, head, from, state);
        if (!look) return [];
        const keep = from.axis === "query" ? side.keep(at, head, state) : null;
        const ends = from === under ? strongest(look, NEAREST) : [under.unit];
        const name = (/** @type {number} */ unit) => (from === under ? named(units, unit) : side.name(at, head));
        const told_ = ends.map((unit) => /** @type {[string, string]} */ ([name(unit), told(look, unit, state, keep)]));
        return from === under && state.heads.length ? [side.name(at, head), ...told_] : told_;
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

  #legend() {
    const side = this.page.side(this.state);
    const { heads } = this.state;
    const chips = this.#heads().map(({ at, head }, place) => {
      const away = heads.filter((one) => one.at !== at || one.head !== head);
      const dot = make("i", { class: "dot" });
      dot.style.backgroundColor = several(place);
      const name = make("span", { "data-head": `${at}.${head}` }, dot, side.name(at, head));
      const close = {
        type: "button",
        "aria-label": `without ${side.name(at, head)}`,
        onclick: () => this.store.set({ heads: away }),
      };
      return make("span", { class: "chip" }, name, place > 0 && make("button", close, "×"));
    });
    const add = (/** @type {Event} */ event) => {
      const [at, head] = /** @type {HTMLSelectElement} */ (event.target).value.split(".").map(Number);
      this.store.set({ heads: [...heads, { at, head }] });
    };
    const shown = new Set(this.#heads().map(({ at, head }) => `${at}.${head}`));
    const others = side.heads.filter(({ at, head }) => !shown.has(`${at}.${head}`));
    const options = others.map(({ at, head, role }) =>
      make("option", { value: `${at}.${head}` }, `${side.name(at, head)}${role === "-" ? "" : ` ${role}`}`),
    );
    const select = make(
      "select",
      { "aria-label": "add a head", "data-role": "add-head", onchange: add },
      make("option", {}, "+ head"),
      ...options,
    );
    this.legend.replaceChildren(...chips, select);
  }

  /** Brings what was chosen elsewhere into the window. */
  #follow() {
    const { query, key } = this.state;
    const name = `${query},${key}`;
    if (name === this.chosen || !this.units) return;
    this.chosen = name;
    const unit = unitOf(this.units, query ?? key);
    const { scrollTop, clientHeight } = this.scroller;
    const top = unit * this.row;
    if (unit >= 0 && (top < scrollTop || top + this.row > scrollTop + clientHeight))
      this.scroller.scrollTop = top - clientHeight / 2;
  }

  /** @returns {[first: number, last: number]} the units that exist now, half-open */
  #window() {
    const { scrollTop, clientHeight } = this.scroller;
    const count = this.units?.count ?? 0;
    const first = Math.max(0, Math.floor(scrollTop / this.row) - BESIDE);
    return [first, Math.min(count, Math.ceil((scrollTop + clientHeight) / this.row) + BESIDE)];
  }

  async #draw() {
    const { state, looks } = this;
    const still = this.drawing.begin();
    const focus = this.#focus();
    const window_ = this.#window();
    const heads = this.#heads();
    const sources = focus ? [focus] : range(...window_).map((unit) => /** @type {Focus} */ ({ axis: "query", unit }));
    const found = await Promise.all(
      heads.map(({ at, head }) => Promise.all(sources.map((source) => looks.get(at, head, source, state)))),
    );
    if (!still()) return;
    this.#place(
      window_,
      focus,
      found.map((of) => (focus ? of[0] : null)),
    );
    this.#lines(sources, found);
    this.#beside(focus, found[0]?.[0] ?? null);
  }

  /** Makes the rows of the window; those that stay are kept, so that a click meets the row it began on.
   *
   * @param {[number, number]} window_ @param {Focus|null} focus @param {(Look|null)[]} looks one for each head
   */
  #place([first, last], focus, looks) {
    for (const [name, row] of this.placed) {
      if (Number(row.dataset.unit) >= first && Number(row.dataset.unit) < last) continue;
      row.remove();
      this.placed.delete(name);
    }
    for (let unit = first; unit < last; unit++)
      for (const axis of /** @type {const} */ (["query", "key"])) this.#row(axis, unit, focus, looks);
  }

  /** @param {"query"|"key"} axis @param {number} unit @param {Focus|null} focus @param {(Look|null)[]} looks */
  #row(axis, unit, focus, looks) {
    const name = `${axis}${unit}`;
    const row = this.placed.get(name) ?? this.#newRow(axis, unit);
    this.placed.set(name, row);
    const other = focus !== null && focus.axis !== axis;
    const weights = other ? looks.map((look) => (look?.visible(unit) ? look.weights[unit] : NaN)) : [];
    const value = /** @type {HTMLElement} */ (row.querySelector(".value"));
    value.textContent = weights[0] > 0 ? weights[0].toFixed(3) : "";
    row.classList.toggle("chosen", row.dataset.token === String(this.state[axis]));
    row.classList.toggle("focus", focus?.axis === axis && focus.unit === unit);
    row.classList.toggle("unseen", other && weights.every(Number.isNaN));
    bands(/** @type {HTMLElement} */ (row.querySelector(".band")), weights, axis);
  }

  /** @param {"query"|"key"} axis @param {number} unit */
  #newRow(axis, unit) {
    const units = /** @type {Units} */ (this.units);
    const token = units.start[unit];
    const label = make("span", { class: "name" }, short(units.label[unit]));
    const number = make("span", { class: "position" }, String(token));
    const value = make("span", { class: "value" });
    const band = make("span", { class: "band" });
    const attributes = { class: `token ${axis}`, "data-token": token, "data-unit": unit, "data-axis": axis };
    const row = make(
      "div",
      attributes,
      ...(axis === "query" ? [value, band, number, label] : [label, number, band, value]),
    );
    row.style.top = `${unit * this.row}px`;
    this.rows.append(row);
    return row;
  }

  /** @param {Focus[]} sources @param {(Look|null)[][]} found for each head, for each source */
  #lines(sources, found) {
    const { scrollTop, clientHeight, clientWidth } = this.scroller;
    const context = fit(this.canvas, clientWidth, clientHeight);
    this.canvas.style.marginBottom = `${-clientHeight}px`;
    const strength = intensity(sources.length === 1 ? largest(found) : 1, this.state.log);
    const y = (/** @type {number} */ unit) => (unit + 0.5) * this.row - scrollTop;
    found.forEach((looks, place) => {
      context.strokeStyle = several(place);
      const shift = (place - (found.length - 1) / 2) * 3; // lines of several heads beside one another
      looks.forEach((look, source) => {
        const { axis, unit } = sources[source];
        const weights = look?.weights ?? [];
        for (let other = 0; other < weights.length; other++) {
          const strong = Math.min(1, strength(weights[other]));
          if (strong < FAINTEST) continue;
          const [from, to] = axis === "query" ? [y(unit), y(other)] : [y(other), y(unit)];
          if (Math.max(from, to) < -ROW || Math.min(from, to) > clientHeight + ROW) continue;
          line(context, clientWidth, from + shift, to + shift, strong);
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
      const hint = "Hover a token to see where it looks, or on the right who looks at it; click to pin it.";
      this.side.replaceChildren(make("p", { class: "hint" }, hint));
      return;
    }
    const title = focus.axis === "query" ? "looks at" : "is looked at by";
    const choose = (/** @type {number} */ token) =>
      this.store.set(focus.axis === "query" ? { key: token, keyEnd: null } : { query: token, pin: true });
    const list = ranking(look, focus.axis === "query" ? "key" : "query", choose);
    const removed = look.removed > 0 && make("p", { class: "hint" }, `taken out: ${look.removed.toFixed(6)}`);
    this.side.replaceChildren(make("h2", {}, `${name}: ${named(units, focus.unit)} ${title}`), list, removed || "");
  }
}

/** @param {number} first @param {number} last half-open */
const range = (first, last) => Array.from({ length: last - first }, (_, place) => first + place);
