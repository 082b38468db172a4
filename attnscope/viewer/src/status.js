/** The line that always says the chosen head, query, key and their weight. */
import { latest, make } from "./canvas.js";
import { exactly, massOn, said } from "./data.js";
import { Live } from "./live.js";
import { Stepper } from "./stepper.js";
import { short } from "./views/labels.js";

/**
 * @typedef {import("./types.js").State} State
 * @typedef {import("./types.js").Page} Page
 * @typedef {import("./types.js").Store} Store
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
    this.suggested = [make("span", { class: "muted" }, "(suggested)"), make("span", { class: "muted" }, "(suggested)")];
    this.stepper = new Stepper(page, store);
    this.weight = make("span", { class: "weight", "data-role": "weight" });
    this.note = make("span", { class: "muted" });
    const [ofQuery, ofKey] = this.suggested;
    const asked = make("span", { class: "asked" }, this.query, " ", ofQuery, " → ", this.key, " ", ofKey);
    this.said = make("div", { class: "said", role: "status", "aria-label": "Selection" });
    this.said.append(this.head, asked, this.weight, this.note);
    this.element = make("section", { class: "status", "aria-label": "Query and selection" });
    this.element.append(this.stepper.element, this.said, new Live(page, store).element);
  }

  /** What can be said at once. @param {State} state */
  frame(state) {
    const side = this.page.side(state);
    this.head.textContent = `${this.page.letter(this.page.shown(state))} ${side.name(state.at, state.head)}`.trim();
    const query = this.page.query(state);
    this.query.textContent = namedRanges(side, [[query, query + 1]]);
    const keys = this.page.places(state);
    if (keys) this.key.textContent = namedRanges(side, keys);
    this.#suggested(state.query === null, state.key === null);
    this.stepper.render(state);
  }

  /** @param {...boolean} suggested whether the query, and the key, were chosen by nobody */
  #suggested(...suggested) {
    [this.query, this.key].forEach((button, axis) => {
      button.classList.toggle("suggested", suggested[axis]);
      this.suggested[axis].hidden = !suggested[axis];
    });
  }

  /** @param {State} state */
  async render(state) {
    const mine = this.turn.begin();
    const { page } = this;
    const shown = page.shown(state);
    const query = page.query(state);
    const [look, keys] = await Promise.all([
      page.filtered(shown, state.at, state.head, query, state),
      page.keysOf(state),
    ]);
    const uniform = keys ? await page.uniform(shown, state.at, query, keys, state) : 0;
    const raw = keys ? await mass(page, shown, state, query, keys) : null;
    if (!mine()) return;
    this.key.textContent = keys ? namedRanges(page.side(state), keys) : "choose a key";
    this.#suggested(state.query === null, state.key === null && !!keys);
    this.weight.textContent = raw?.text ?? "the page holds no weights in tokens of this head";
    this.weight.title = raw?.exact ?? "";
    this.note.textContent = [
      keys && uniform ? `uniform ${said(uniform)}` : "",
      look && look.removed > 0 ? `${said(look.removed)} of this query's mass filtered out` : "",
    ]
      .filter(Boolean)
      .join(" · ");
  }
}

const LONGEST = 40; // characters of a label

/**
 * @param {import("./side.js").Side} side @param {[number, number][]} tokens half-open ranges
 * @returns {string} as in `8 ·bank`, positions counted in their own text
 */
export function namedRanges(side, tokens) {
  const positions = tokens.map(([start, stop]) =>
    stop - start === 1 ? side.number(start) : `${side.number(start)}–${side.number(stop - 1)}`,
  );
  const [start, stop] = tokens[0];
  const text = side.tokens.label.slice(start, Math.min(stop, start + LONGEST)).join("");
  return `${positions.join(", ")} ${short(text, LONGEST)}`;
}

/**
 * The weight itself, whatever is filtered.
 *
 * @param {Page} page @param {number} shown @param {State} state @param {number} query @param {[number, number][]} keys
 * @returns {Promise<{text: string, exact?: string}|null>} exact: what the page holds, in all its digits
 */
async function mass(page, shown, state, query, keys) {
  const all = { ...state, sink: true, special: true, least: 0, part: /** @type {const} */ ("all") };
  const look = await page.filtered(shown, state.at, state.head, query, all);
  if (!look) return null;
  const units = look.units.among(keys);
  if (!units.some(look.visible))
    return { text: keys[0][0] > query ? "not visible: after the query" : "not visible: outside the window" };
  const weight = massOn(look, keys);
  if (!look.whole && weight === 0) return { text: "not among this query's strongest keys" };
  const tokens = keys.reduce((count, [start, stop]) => count + stop - start, 0);
  return { text: `weight ${said(weight, look.step)}`, exact: exactly(weight, look.step, tokens) };
}
