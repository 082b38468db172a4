/** The line that always says the chosen head, query, key and their weight. */
import { latest, make } from "./canvas.js";
import { massOn, said } from "./data.js";

/**
 * @typedef {import("./types.js").State} State
 * @typedef {import("./types.js").Page} Page
 * @typedef {import("./types.js").Store} Store
 * @typedef {import("./data.js").Look} Look
 */

export class Status {
  /** @param {Page} page @param {Store} store @param {(axis: "query"|"key") => void} find */
  constructor(page, store, find) {
    this.page = page;
    this.store = store;
    this.turn = latest();
    this.head = make("b", { class: "head-name" });
    this.query = make("button", {
      type: "button",
      class: "token query",
      title: "Choose a query (/)",
      onclick: () => find("query"),
    });
    this.key = make("button", {
      type: "button",
      class: "token key",
      title: "Choose a key",
      onclick: () => find("key"),
    });
    this.weight = make("span", { class: "weight", "data-role": "weight" });
    this.note = make("span", { class: "muted" });
    const asked = make("span", {}, this.query, " → ", this.key);
    const what = { class: "status", role: "status", "aria-label": "Selection" };
    this.element = make("div", what, this.head, asked, this.weight, this.note);
  }

  /** What can be said at once. @param {State} state */
  frame(state) {
    const side = this.page.side(state);
    this.head.textContent = `${this.page.letter(this.page.shown(state))} ${side.name(state.at, state.head)}`.trim();
    const query = this.page.query(state);
    this.query.textContent = namedRanges(side.tokens.label, [[query, query + 1]]);
    const keys = this.page.places(state);
    if (keys) this.key.textContent = namedRanges(side.tokens.label, keys);
  }

  /** @param {State} state */
  async render(state) {
    const mine = this.turn.begin();
    const { page } = this;
    const shown = page.shown(state);
    const query = page.query(state);
    const look = await page.filtered(shown, state.at, state.head, query, state);
    const keys = page.places(state) ?? strongest(look);
    const uniform = keys ? await page.uniform(shown, state.at, query, keys, state) : 0;
    const raw = keys ? await mass(page, shown, state, query, keys) : null;
    if (!mine()) return;
    const most = state.key === null ? " (most)" : "";
    this.key.textContent = keys ? namedRanges(page.side(state).tokens.label, keys) + most : "choose a key";
    this.weight.textContent = raw ?? "the page holds no weights in tokens of this head";
    this.note.textContent = [
      keys && uniform ? `uniform ${uniform.toFixed(6)}` : "",
      look && look.removed > 0 ? `${look.removed.toFixed(4)} of this query's mass filtered out` : "",
    ]
      .filter(Boolean)
      .join(" · ");
  }
}

const LONGEST = 40; // characters of a label

/** @param {string[]} labels @param {[number, number][]} tokens half-open ranges @returns {string} as in `8 ·bank` */
export function namedRanges(labels, tokens) {
  const positions = tokens.map(([start, stop]) => (stop - start === 1 ? start : `${start}–${stop - 1}`));
  const [start, stop] = tokens[0];
  const text = labels.slice(start, Math.min(stop, start + LONGEST)).join("");
  return `${positions.join(", ")} ${text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text}`;
}

/** @param {Look|null} look @returns {[number, number][]|null} the tokens of the unit with the greatest weight */
function strongest(look) {
  if (!look || !look.units.count) return null;
  let best = 0;
  look.weights.forEach((weight, unit) => weight > look.weights[best] && (best = unit));
  return [look.units.range(best)];
}

/**
 * The weight itself, whatever is filtered.
 *
 * @param {Page} page @param {number} shown @param {State} state @param {number} query @param {[number, number][]} keys
 */
async function mass(page, shown, state, query, keys) {
  const all = { ...state, sink: true, special: true, least: 0, part: /** @type {const} */ ("all") };
  const look = await page.filtered(shown, state.at, state.head, query, all);
  if (!look) return null;
  const units = look.units.among(keys);
  if (!units.some(look.visible))
    return keys[0][0] > query ? "not visible: after the query" : "not visible: outside the window";
  const weight = massOn(look, keys);
  if (!look.whole && weight === 0) return "not among this query's strongest keys";
  const tokens = keys.reduce((count, [start, stop]) => count + stop - start, 0);
  return `weight ${said(weight, look.step)}${weight ? ` ± ${((tokens * look.step) / 2).toPrecision(1)}` : ""}`;
}
