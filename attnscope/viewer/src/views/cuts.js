/**
 * Cuts that were computed beforehand: where heads could not look, and what the answer lost. The text with its queries and
 * keys; heads as a grid, layers as a curve, keys as colours in the text; and a table of all cuts beside their nulls.
 *
 * @typedef {import("../types.js").State} State
 * @typedef {import("../types.js").Page} Page
 * @typedef {import("../types.js").Side} Side
 * @typedef {import("../types.js").Store} Store
 * @typedef {import("../types.js").Cuts} Cuts
 * @typedef {import("../types.js").Cut} Cut
 * @typedef {import("../types.js").CutText} CutText
 */
import { make, tooltip } from "../canvas.js";
import { css, diverging, inkOn } from "../colours.js";
import { HeadGrid } from "../headgrid.js";
import { colourScale, digits, fixed } from "../scales.js";
import { Curve } from "./curve.js";
import { short, swatch } from "./labels.js";
import { piece, tokenOf } from "./text.js";

const FIRST_ROWS = 200; // of a text with thousands of keys
const WIDEST = 112; // pixels of a head in the grid
const GAP = 2;
const LABEL = 40; // of its layer's name, as in headgrid.js
const LEAST = 0.0005; // of a number that is written out
const LETTERS = 80; // of an answer, and of what was selected
const MOST_NAMED = 6; // tokens in a line
const HOW = {
  mask: "mask: the rest of the row takes the weight",
  zero: "zero: the weight is lost",
};

class CutsView {
  /** @param {HTMLElement} element @param {Page} page @param {Store} store */
  constructor(element, page, store) {
    this.store = store;
    this.side = /** @type {Side} */ (page.sides.find(({ data }) => data.cuts));
    this.cuts = /** @type {Cuts} */ (this.side.data.cuts);
    this.theme = "";
    this.all = false;
    const { cuts, side } = this;
    this.order = inOrder(cuts);
    this.legend = make("div", { class: "legend" });
    this.picture = make("div", { class: "cut-picture" });
    this.chosen = make("div", { class: "beside", role: "status", "aria-label": "Chosen cut" });
    const size = columns(cuts).length ? "table-box" : "table-box few";
    this.box = make("div", { class: size, tabindex: "0", role: "group", "aria-label": "Table of cuts" });
    element.append(
      facts(side, cuts),
      this.#texts(),
      this.legend,
      make("div", { class: "with-cut" }, this.picture, this.chosen),
      this.box,
      make("ul", { class: "note cut-notes" }, ...cuts.notes.map((one) => make("li", {}, one))),
    );
    this.picture.hidden = kindOf(cuts) === "keys" || kindOf(cuts) === "none";
    this.#draw();
  }

  #draw() {
    const { picture, cuts, store } = this;
    const about = (/** @type {number} */ place) => this.about(place);
    if (kindOf(cuts) === "layers") this.curve = new Curve(picture, cuts, about, (place) => this.#choose(place));
    if (kindOf(cuts) !== "heads") return;
    const most = Math.max(...this.side.layers.map((_, at) => this.side.heads.filter((head) => head.at === at).length));
    picture.style.setProperty("--widest", `${LABEL + most * (WIDEST + GAP)}px`);
    this.grid = new HeadGrid(picture, store, {
      label: `Effect of each head, ${cuts.unit}`,
      least: 9,
      most: () => WIDEST,
      ratio: () => 0.4,
      gap: GAP,
      about: ({ at, head }) => about(this.#of({ ...store.state, at, head })),
      resized: () => this.#paint(),
    });
  }

  /** The one text, or those of a corpus, each with its queries and keys marked. */
  #texts() {
    const { side, cuts } = this;
    const tall = kindOf(cuts) === "keys" ? "reading cut-text tall" : "reading cut-text";
    const what = { class: tall, role: "group", tabindex: "0", "aria-label": cuts.count > 1 ? "Texts" : "Text" };
    const box = make("div", { ...what, "data-role": "text" });
    /** @type {HTMLElement[]} */
    this.tokens = [];
    cuts.texts.forEach((text, place) => {
      const tokens = text.tokens ?? side.tokens;
      const pieces = tokens.label.map((_, token) => piece({ tokens, data: { answer: null }, origins: [0] }, token));
      text.queries.forEach((token) => pieces[token]?.classList.add("asked"));
      if (cuts.over !== "keys") text.keys.forEach((token) => pieces[token]?.classList.add("cut"));
      if (cuts.count === 1) this.tokens = pieces;
      const made = make("span", { class: "cut-answer" }, ` → ${short(text.answer, LETTERS)}${text.foil ? `, foil ${short(text.foil, LETTERS)}` : ""}`);
      box.append(make("div", {}, cuts.count > 1 && make("h3", {}, `text ${place + 1}`), ...pieces, made));
    });
    if (cuts.count > cuts.texts.length)
      box.append(make("p", { class: "hint" }, `${cuts.count - cuts.texts.length} further texts are not shown`));
    if (cuts.count === 1) this.#listen(box);
    return box;
  }

  /** @param {HTMLElement} box */
  #listen(box) {
    box.addEventListener("pointermove", (event) => {
      const token = tokenOf(event);
      if (token === null) tooltip.hide();
      else tooltip.show(event, this.#aboutToken(token));
    });
    box.addEventListener("pointerleave", () => tooltip.hide());
    box.addEventListener("click", (event) => {
      const token = tokenOf(event);
      if (token !== null && this.cuts.over === "keys") this.store.set({ key: token, keyEnd: null, group: "" });
    });
  }

  /** @param {number} token @returns {(string|[string, string])[]} */
  #aboutToken(token) {
    const [{ queries, keys }] = this.cuts.texts;
    const name = `${token} ${short(this.side.tokens.label[token] ?? "")}`;
    const parts = [queries.includes(token) && "a query", keys.includes(token) && "a key"].filter(Boolean).join(", ");
    const place = this.cuts.over === "keys" ? this.cuts.rows.findIndex(({ key }) => key === token) : -1;
    if (place < 0) return [[name, parts || "neither a query nor a key"]];
    return queries.includes(token) ? [...this.about(place), ["this token", "a query too"]] : this.about(place);
  }

  /** @param {State} state */
  render(state) {
    const { side, grid, curve } = this;
    const theme = String(document.documentElement.dataset.theme);
    const built = grid?.show(side, state.at);
    grid?.select(state);
    const place = this.#of(state);
    curve?.select(place);
    if (built || theme !== this.theme) {
      this.theme = theme;
      this.#legend();
      this.#paint();
      if (!this.box.firstChild) this.#table();
    }
    this.#mark(place);
  }

  /** @param {State} state @returns {number} the place of the cut that is chosen, -1 for none */
  #of({ at, head, key }) {
    const { rows, over } = this.cuts;
    if (over === "none") return 0;
    if (over === "keys") return rows.findIndex((row) => row.key === key);
    if (kindOf(this.cuts) === "layers") return rows.findIndex((row) => row.at === at);
    return rows.findIndex(({ heads }) => heads.some((one) => one[0] === at && one[1] === head));
  }

  /** @param {number} place */
  #choose(place) {
    const { at, heads, key } = this.cuts.rows[place];
    const { over } = this.cuts;
    if (over === "keys") this.store.set({ key, keyEnd: null, group: "" });
    else if (heads.length) this.store.set({ at: heads[0][0], head: heads[0][1] });
    else if (at !== null) this.store.set({ at });
  }

  /** @returns {number} the end of the colours */
  get #reach() {
    return Math.max(...this.cuts.rows.map(({ effect }) => Math.abs(effect ?? 0))) || 1;
  }

  #paint() {
    const ramp = diverging();
    const reach = this.#reach;
    for (const { heads, key, effect } of this.cuts.rows) {
      const t = effect === null ? 0.5 : (effect / reach + 1) / 2;
      for (const [at, head] of heads) {
        this.grid?.buttons.get(`${at}.${head}`)?.classList.toggle("unseen", effect === null);
        this.grid?.fill({ at, head }, effect === null ? "" : css(ramp, t), effect === null ? "–" : cell(effect), effect === null ? "" : inkOn(ramp, t));
      }
      const element = key === null ? undefined : this.tokens?.[key];
      if (!element) continue;
      element.classList.toggle("unseen", effect === null);
      element.style.backgroundColor = effect === null ? "" : css(ramp, t);
      element.style.color = effect === null ? "" : inkOn(ramp, t);
    }
    if (this.cuts.over === "keys")
      this.tokens?.forEach((element, token) =>
        element.classList.toggle("unseen", !this.cuts.rows.some(({ key, effect }) => key === token && effect !== null)),
      );
    this.curve?.draw();
  }

  #legend() {
    const { cuts } = this;
    const kind = kindOf(cuts);
    const reach = this.#reach;
    const lost = `${cuts.unit} lost without the look`;
    const parts = [swatch("asked", "query")];
    if (kind !== "keys") parts.push(swatch("cut", "key"));
    if (kind === "heads" || kind === "keys")
      parts.unshift(colourScale(-reach, reach, diverging()), make("span", {}, lost));
    if (cuts.rows.some(({ effect }) => effect === null))
      parts.push(swatch("unseen", kind === "keys" ? "seen by no query" : "no query sees a key"));
    if (kind === "layers") parts.push(...(this.curve?.legend() ?? []));
    this.legend.replaceChildren(...parts);
  }

  /** @param {number} place @returns {(string|[string, string])[]} all that is known of a cut */
  about(place) {
    const row = this.cuts.rows[place];
    if (!row) return ["this was not cut"];
    const { unit, random, count } = this.cuts;
    /** @type {[string, string][]} */
    const lines = [[short(row.set, 40), lost(row.effect, unit)]];
    if (bounded(row)) lines.push(["95 % interval, of all cuts", `${plus(row.low_all)} to ${plus(row.high_all)}`]);
    if (row.p !== null) lines.push(["p, over all cuts", digits(row.p)]);
    if (row.positive !== null && count > 1) lines.push(["texts with an effect above 0", `${number(100 * row.positive, 0)} %`]);
    lines.push(["weight that was cut", number(row.mass)]);
    if (random)
      for (const { name, n, mean, low, high, p } of nulls(row)) {
        lines.push([`p against ${name}`, n ? `${number(p)}, ${n} draws` : "there are none"]);
        if (n) lines.push(["their mean, 95 % of them", `${plus(mean)}, ${plus(low)} to ${plus(high)}`]);
      }
    if (count > 1) lines.push(["texts", String(row.n)]);
    return lines;
  }

  /** @param {number} place the cut that is chosen */
  #mark(place) {
    const [first, ...lines] = place < 0 ? ["no cut is chosen"] : this.about(place);
    const title = Array.isArray(first) ? `${first[0]}: ${first[1]}` : first;
    const said = lines.map((line) => make("div", { class: "pair" }, ...[line].flat().map((part) => make("span", {}, part))));
    this.chosen.replaceChildren(make("h3", {}, title), ...said);
    for (const row of this.box.querySelectorAll("tr[data-cut]"))
      row.setAttribute("aria-selected", String(row.getAttribute("data-cut") === String(place)));
    const key = this.cuts.over === "keys" ? this.cuts.rows[place]?.key : null;
    this.tokens?.forEach((element, token) => element.classList.toggle("chosen", token === key));
  }

  #table() {
    const { cuts } = this;
    const shown = this.all ? this.order : this.order.slice(0, FIRST_ROWS);
    const heads = ["cut", "mass", "effect", ...columns(cuts)];
    const headings = heads.map((title, place) => make("th", { scope: "col", class: place ? "" : "words" }, title));
    const body = make("tbody", {}, ...shown.map((place) => this.#row(place)));
    body.addEventListener("click", (event) => {
      const row = /** @type {Element} */ (event.target).closest("[data-cut]");
      if (row) this.#choose(Number(row.getAttribute("data-cut")));
    });
    const table = make("table", { class: "heads" }, make("thead", {}, make("tr", {}, ...headings)), body);
    const onclick = () => {
      this.all = true;
      this.#table();
      this.#mark(this.#of(this.store.state));
    };
    const more = make("button", { type: "button", class: "plain", onclick }, `all ${this.order.length} cuts`);
    this.box.replaceChildren(table, ...(shown.length < this.order.length ? [more] : []));
  }

  /** @param {number} place */
  #row(place) {
    const row = this.cuts.rows[place];
    const link = make("button", { type: "button", class: "plain token" }, short(row.set, 40));
    const cells = [number(row.mass), plus(row.effect), ...values(row, this.cuts)];
    return make("tr", { "data-cut": place }, make("td", { class: "words" }, link), ...cells.map((one) => make("td", {}, one)));
  }

  /** What a saved picture says, and is called. */
  pictured() {
    const place = this.#of(this.store.state);
    const row = this.cuts.rows[place];
    const over = this.cuts.over.replace(":", "-");
    return { about: row ? `${row.set}: ${lost(row.effect, this.cuts.unit)}, mass ${number(row.mass)}` : "", name: `over-${over}` };
  }
}

/** @param {Cuts} cuts @returns {"heads"|"layers"|"keys"|"none"} how cuts are drawn */
export function kindOf({ over }) {
  if (over === "heads" || over === "kv") return "heads";
  return over === "keys" || over === "none" ? over : "layers";
}

/** @param {Cuts} cuts @returns {number[]} places of the rows as they are listed: layers in order, else the largest first */
export function inOrder(cuts) {
  const places = [...cuts.rows.keys()];
  if (kindOf(cuts) === "layers") return places;
  const effect = (/** @type {number} */ place) => cuts.rows[place].effect ?? -Infinity;
  return places.sort((a, b) => (effect(a) === effect(b) ? a - b : effect(b) - effect(a)));
}

/** @param {number|null} value @returns {string} with its sign: `+1.73`, `−0.02`, `0`, `<0.001` */
export const plus = (value) => (value === null ? "–" : value >= LEAST ? `+${digits(value)}` : digits(value));

/** @param {number} value of a cell */
const cell = (value) => (value >= 0.005 ? `+${fixed(value, 2)}` : fixed(value, 2));

/** @param {number|null} value @param {number} [places] */
const number = (value, places) => (value === null ? "–" : places === undefined ? digits(value) : fixed(value, places));

/** @param {number|null} effect @param {string} unit */
const lost = (effect, unit) => (effect === null ? "no query sees a key" : `${plus(effect)} ${unit}`);

/** @param {Cut} row what it is compared with */
const nulls = (row) => [
  { name: "other keys", n: row.n_permuted, mean: row.null_permuted, low: row.low_permuted, high: row.high_permuted, p: row.p_permuted },
  { name: "other heads", n: row.n_heads, mean: row.null_heads, low: row.low_heads, high: row.high_heads, p: row.p_heads },
];

/** @param {Cut} row whether it has an interval, which may be open at one end */
const bounded = ({ low_all, high_all }) => low_all !== null || high_all !== null;

/** @param {Cuts} cuts @returns {string[]} titles of the further columns */
function columns({ rows, random }) {
  const parts = rows.some(bounded) ? ["95 % interval", "p"] : [];
  const others = ["mean", "95 %", "p"];
  return random ? [...parts, ...compared(rows).flatMap((name) => others.map((one) => `${name}: ${one}`))] : parts;
}

/** @param {Cut[]} rows @returns {string[]} what any of them is compared with */
const compared = (rows) => ["other keys", "other heads"].filter((_, kind) => rows.some((row) => nulls(row)[kind].n));

/** @param {Cut} row @param {Cuts} cuts @returns {string[]} their cells */
function values(row, { rows, random }) {
  const parts = rows.some(bounded) ? [bounded(row) ? `${plus(row.low_all)} to ${plus(row.high_all)}` : "–", number(row.p)] : [];
  if (!random) return parts;
  const kinds = compared(rows);
  return [...parts, ...nulls(row).filter(({ name }) => kinds.includes(name)).flatMap(({ mean, low, high, p }) => [plus(mean), low === null ? "–" : `${plus(low)} to ${plus(high)}`, number(p)])];
}

/** @param {Side} side @param {Cuts} cuts what was asked, in words */
function facts(side, cuts) {
  const [text] = cuts.texts;
  const one = cuts.count === 1;
  const named = (/** @type {number[]} */ tokens) => namedTokens(side.tokens.label, tokens);
  /** @type {[string, string, string?][]} */
  const rows = [];
  if (one) rows.push(["query", named(text.queries), "token query"]);
  else rows.push(["query and key", "marked in each text"]);
  if (cuts.over === "keys") rows.push(["key", "each of the coloured tokens"]);
  else if (one) rows.push(["key", named(text.keys), "token key"]);
  rows.push(["heads", short(cuts.select.replace(/ heads$/, ""), LETTERS)]);
  rows.push(["cut at a time", OVER[cuts.over] ?? `heads of ${cuts.over.slice("window:".length)} layers around one`]);
  rows.push(["how", HOW[cuts.how]]);
  if (one) rows.push(["answer", short(text.answer, LETTERS), "token"]);
  if (one && text.foil) rows.push(["foil", short(text.foil, LETTERS), "token"]);
  rows.push(["intact", `${digits(cuts.intact ?? 0)} ${cuts.unit}${one ? "" : `, mean of ${cuts.count} texts`}`]);
  const pairs = rows.map(([name, value, kind]) => make("div", {}, make("dt", {}, name), make("dd", { class: kind }, value)));
  return make("dl", { class: "cut-facts" }, ...pairs);
}

/** @type {Record<string, string>} */
const OVER = {
  none: "all keys in all these heads",
  heads: "one head",
  kv: "the heads of one kv group",
  layers: "the heads of one layer",
  keys: "one key, in all these heads",
};

/** @param {string[]} labels @param {number[]} tokens @returns {string} `5 ·river, 8 ·bank`; of many the first and how many */
export function namedTokens(labels, tokens) {
  const named = tokens.slice(0, MOST_NAMED).map((token) => `${token} ${short(labels[token] ?? "", 24)}`);
  return named.join(", ") + (tokens.length > MOST_NAMED ? `, … ${tokens.length} tokens` : "");
}

/** @type {import("../types.js").Mount} */
export const mount = (element, page, store) => new CutsView(element, page, store);
