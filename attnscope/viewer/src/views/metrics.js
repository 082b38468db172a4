/** The layers x heads map of any metric with what uniform attention scores, a head enlarged, and the table of heads. */
import { make } from "../canvas.js";
import { css, diverging, inkOn, sequential } from "../colours.js";
import { HeadGrid, goTo } from "../headgrid.js";
import { roleChip, roleWords } from "../roles.js";
import { colourScale, digits, fixed } from "../scales.js";
import { Enlarged } from "./enlarged.js";

/**
 * @typedef {import("../types.js").State} State
 * @typedef {import("../types.js").Page} Page
 * @typedef {import("../types.js").Store} Store
 * @typedef {import("../types.js").Side} Side
 * @typedef {import("../types.js").Head} Head
 * @typedef {import("../headgrid.js").Name} Name
 */

const FIRST_ROWS = 200; // of a model with thousands of heads

class MetricsView {
  /** @param {HTMLElement} element @param {Page} page @param {Store} store */
  constructor(element, page, store) {
    this.page = page;
    this.store = store;
    /** @type {State|null} */
    this.state = null;
    this.built = "";
    this.rising = false;
    this.sort = ""; // a column, or the metric that is shown
    this.all = false;
    this.metric = make("select", { id: "metric", onchange: () => this.#choose(this.metric.value) });
    this.formula = make("code", { class: "token muted" });
    this.reading = make("p", { class: "note" });
    element.classList.add("metrics-view");
    this.legend = make("div", { class: "legend" });
    const label = make("label", {}, "Metric ", this.metric);
    const map = make("div", { class: "metric-map" });
    this.box = make("div", { class: "table-box", tabindex: "0", role: "group", "aria-label": "Table of heads" });
    this.enlarged = new Enlarged(page, store);
    const choice = make("div", { class: "metric-choice" }, label, this.formula);
    const left = make("div", {}, choice, this.reading, map, this.legend);
    element.append(make("div", { class: "model-split" }, left, this.enlarged.element), this.box);
    this.grid = new HeadGrid(map, store, {
      label: "Metric of each head",
      least: 9,
      most: () => 112,
      ratio: () => 0.4,
      gap: 2,
      about: (name) => this.#about(name),
      pointed: (name) => this.enlarged.point(name),
      resized: () => this.#paint(),
    });
  }

  /** @param {State} state */
  render(state) {
    this.state = state;
    const side = this.page.side(state);
    this.enlarged.element.hidden = !side.data.maps.length;
    this.enlarged.render(state);
    if (this.grid.show(side, state.at)) {
      this.built = "";
      this.metric.replaceChildren(...side.metrics.map(({ id, title }) => make("option", { value: id }, title)));
    }
    this.metric.value = state.metric;
    this.grid.select(state);
    const built = [state.side, state.metric, this.sort, this.rising, this.all].join();
    const theme = document.documentElement.dataset.theme;
    if (this.built !== `${built},${theme}`) {
      this.#explain(side);
      this.#paint();
      this.#table(side);
    }
    this.built = `${built},${theme}`;
    this.#mark(state);
  }

  /** @param {Side} side @returns {Head[]} those of the stack that is shown */
  #heads(side) {
    return side.headsWith(this.store.state.at);
  }

  /** @returns {number} place of the metric among the side's */
  get place() {
    return this.page.side(this.store.state).metrics.findIndex(({ id }) => id === this.store.state.metric);
  }

  /** Whether B minus A is shown. */
  get differs() {
    return this.store.state.side === "diff";
  }

  /** @param {Head} head @param {number} place of a metric @returns {number|null} its score, or B − A */
  #score({ at, head, scores }, place) {
    if (!this.differs) return scores[place];
    const other = this.page.sides[1];
    const { id } = this.page.sides[0].metrics[place];
    const there = other.headAt(at, head)?.scores[other.metrics.findIndex((metric) => metric.id === id)] ?? null;
    return scores[place] === null || there === null ? null : there - scores[place];
  }

  /** @param {string} metric */
  #choose(metric) {
    this.sort = "";
    this.rising = false;
    this.store.set({ metric });
  }

  /** @param {Side} side */
  #explain(side) {
    const metric = side.metrics[this.place];
    this.formula.textContent = metric.formula;
    this.reading.textContent = metric.reading;
    const scores = values(this.#heads(side), (head) => this.#score(head, this.place));
    const uniform = values(this.#heads(side), ({ uniform }) => uniform[this.place]);
    if (!scores.length) {
      this.legend.replaceChildren(make("span", {}, "This text has no row for this metric."));
      return;
    }
    const [low, high] = this.#limits(side);
    const parts = [
      `${this.differs ? "B − A" : "heads"} ${digits(Math.min(...scores))} to ${digits(Math.max(...scores))}`,
    ];
    if (uniform.length && !this.differs) parts.push(`uniform attention ${range(uniform)}`);
    if (!this.differs && (metric.low !== null || metric.high !== null))
      parts.push(`possible ${metric.low ?? "…"} to ${metric.high ?? "…"}`);
    if (metric.unit) parts.push(`unit: ${metric.unit}`);
    this.legend.replaceChildren(
      colourScale(low, high, this.differs ? diverging() : sequential()),
      ...parts.map((part) => make("span", {}, part)),
    );
  }

  /** @param {Side} side @returns {[low: number, high: number]} of the colours: what is possible, else what is there */
  #limits(side) {
    const { low, high } = side.metrics[this.place];
    const scores = values(this.#heads(side), (head) => this.#score(head, this.place));
    const reach = Math.max(...scores.map(Math.abs)) || 1;
    if (this.differs) return [-reach, reach];
    return [low ?? Math.min(0, ...scores), high ?? Math.max(...scores, 1e-9)];
  }

  #paint() {
    const { side } = this.grid;
    if (!side || !this.state) return;
    const ramp = this.differs ? diverging() : sequential();
    const [low, high] = this.#limits(side);
    for (const one of this.#heads(side)) {
      const { at, head } = one;
      const score = this.#score(one, this.place);
      const t = score === null ? 0 : (score - low) / (high - low || 1);
      const colour = score === null ? "transparent" : css(ramp, t);
      this.grid.fill(
        { at, head },
        colour,
        score === null ? "–" : fixed(score, Math.abs(score) < 1 ? 3 : Math.abs(score) < 10 ? 2 : 1),
        inkOn(ramp, t),
      );
    }
  }

  /** @param {Name} name @returns {(string|[string, string])[]} */
  #about({ at, head }) {
    const side = this.page.side(this.store.state);
    const one = side.headAt(at, head);
    const { title } = side.metrics[this.place];
    return [
      [side.name(at, head), roleWords(one)],
      [this.differs ? `${title}, B − A` : title, score(this.#score(one, this.place))],
      ["uniform attention", score(one.uniform[this.place])],
    ];
  }

  /** @param {Side} side */
  #table(side) {
    const { place } = this;
    const columns = [
      { id: "layer", title: "head", words: true },
      ...wordsOf(side).map((name) => ({ id: name, title: name.replace("_", " "), words: true })),
      ...side.metrics.map(({ id, short, title }) => ({ id, title: short, about: title, words: false })),
    ];
    const sort = this.sort || side.metrics[place].id;
    const headings = columns.map((column) => this.#heading(column, sort));
    const heads = this.#sorted(side, sort);
    const shown = this.all ? heads : heads.slice(0, FIRST_ROWS);
    const body = make("tbody", {}, ...shown.map((head) => this.#row(side, head)));
    body.addEventListener("click", (event) => {
      const row = /** @type {Element} */ (event.target).closest("[data-head]");
      const [at, head] = row?.getAttribute("data-head")?.split(".").map(Number) ?? [];
      if (row) goTo(this.store, { at, head }, event);
    });
    const table = make("table", { class: "heads" }, make("thead", {}, make("tr", {}, ...headings)), body);
    const more = make(
      "button",
      { type: "button", class: "plain", onclick: () => this.#again({ all: true }) },
      `all ${heads.length} heads`,
    );
    this.box.replaceChildren(table, ...(shown.length < heads.length ? [more] : []));
  }

  /** @param {{id: string, title: string, about?: string, words: boolean}} column @param {string} sort */
  #heading({ id, title, about, words }, sort) {
    const sorted = id === sort;
    const order = sorted ? (this.rising ? "ascending" : "descending") : null;
    const mark = sorted ? (this.rising ? " ▴" : " ▾") : "";
    const button = make(
      "button",
      { type: "button", title: about, onclick: () => this.#order(id, sorted) },
      title + mark,
    );
    return make("th", { scope: "col", class: words ? "sorts words" : "sorts", "aria-sort": order }, button);
  }

  /** @param {string} id @param {boolean} sorted */
  #order(id, sorted) {
    const rising = sorted ? !this.rising : ["layer", "role", "text_role"].includes(id);
    this.#again({ sort: id, rising });
    if (this.page.side(this.store.state).metrics.some((metric) => metric.id === id)) this.store.set({ metric: id });
  }

  /** @param {Partial<{sort: string, rising: boolean, all: boolean}>} change */
  #again(change) {
    Object.assign(this, change);
    this.render(this.store.state);
  }

  /** @param {Side} side @param {string} sort @returns {Head[]} heads without a score last */
  #sorted(side, sort) {
    const { metrics } = side;
    const heads = this.#heads(side);
    const way = this.rising ? 1 : -1;
    const place = metrics.findIndex(({ id }) => id === sort);
    const inOrder = (/** @type {Head} */ a, /** @type {Head} */ b) => a.at - b.at || a.head - b.head;
    if (sort === "role" || sort === "text_role")
      return heads.toSorted((a, b) => way * a[sort].localeCompare(b[sort]) || inOrder(a, b));
    if (place < 0) return heads.toSorted((a, b) => way * inOrder(a, b));
    const value = (/** @type {Head} */ head) => {
      const score = this.#score(head, place);
      if (score === null) return -way * Infinity;
      return this.differs ? Math.abs(score) : score;
    };
    return heads.toSorted((a, b) => (value(a) === value(b) ? inOrder(a, b) : way * (value(a) - value(b))));
  }

  /** @param {Side} side @param {Head} one */
  #row(side, one) {
    const { at, head, scores } = one;
    const link = make("button", { type: "button", class: "plain" }, side.name(at, head));
    const cells = scores.map((_, place) =>
      make("td", { class: place === this.place ? "chosen" : "" }, score(this.#score(one, place))),
    );
    const first = [link, ...wordsOf(side).map((name) => (name === "role" ? roleChip(one) : one.text_role))];
    const words = first.map((cell) => make("td", { class: "words" }, cell));
    return make("tr", { "data-head": `${at}.${head}` }, ...words, ...cells);
  }

  /** @param {State} state */
  #mark({ at, head }) {
    for (const row of this.box.querySelectorAll("tr[data-head]"))
      row.setAttribute("aria-selected", String(row.getAttribute("data-head") === `${at}.${head}`));
  }
}

/** @param {Side} side @returns {("role"|"text_role")[]} the columns of words: two where an atlas names the heads */
const wordsOf = (side) => (side.heads.some(({ atlas }) => atlas) ? ["role", "text_role"] : ["role"]);

/** @param {Head[]} heads @param {(head: Head) => number|null} value */
const values = (heads, value) => heads.map(value).filter((one) => one !== null);

/** @param {number|null} value */
const score = (value) => (value === null ? "–" : digits(value));

/** @param {number[]} numbers */
function range(numbers) {
  const [low, high] = [digits(Math.min(...numbers)), digits(Math.max(...numbers))];
  return low === high ? low : `${low} to ${high}`;
}

/** @type {import("../types.js").Mount} */
export const mount = (element, page, store) => new MetricsView(element, page, store);
