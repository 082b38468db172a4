/**
 * Where the page stands in a frame of one that can ask (`attnscope serve --page`): two questions of what is selected.
 * The page learns of it by a port that its frame hands in, and tells it nothing before a button is pressed.
 */
import { make } from "./canvas.js";

/**
 * @typedef {import("./types.js").State} State
 * @typedef {import("./types.js").Page} Page
 * @typedef {import("./types.js").Store} Store
 */

const HELLO = "attnscope/live/1"; // as attnscope/serve/page.js says it

export class Live {
  /** @param {Page} page @param {Store} store */
  constructor(page, store) {
    this.page = page;
    this.store = store;
    const ask = (/** @type {string} */ does, /** @type {string} */ words, /** @type {string} */ title) =>
      make("button", { type: "button", "data-does": does, title, onclick: () => void this.ask(does) }, words);
    this.element = make(
      "span",
      { class: "live", hidden: true },
      ask("knockout", "Does it matter?", "Cut this edge and measure the loss of the answer"),
      " ",
      ask("why", "Why here?", "Take this head's logits apart"),
    );
    if (parent === window || page.data.sides.some((side) => new Set(side.layers.map(({ stack }) => stack)).size > 1)) return;
    addEventListener("message", ({ source, data, ports }) => {
      if (source !== parent || data !== HELLO || !ports[0]) return;
      this.port = ports[0];
      this.element.hidden = false;
    });
  }

  /** @param {string} does */
  async ask(does) {
    const { state } = this.store;
    const [span] = (await this.page.keysOf(state)) ?? [];
    const query = this.page.query(state);
    const [start, stop] = span ?? [query, query + 1];
    const key = stop - start > 1 ? `${start}-${stop - 1}` : String(start);
    const head = this.page.side(state).name(state.at, state.head);
    this.port?.postMessage({ does, head, query: String(query), key, side: this.page.shown(state) });
  }
}
