/**
 * Looks of one state of the filters, each asked for once.
 *
 * @typedef {import("../types.js").State} State
 * @typedef {import("../data.js").Look} Look
 * @typedef {import("../data.js").Page} Page
 * @typedef {{axis: "query"|"key", unit: number}} Focus
 */

const MOST_LOOKS = 2000; // rows that are remembered: of a layer's heads those in sight

export class LookCache {
  /** @param {Page} page */
  constructor(page) {
    this.page = page;
    this.filters = "";
    /** @type {Map<string, Promise<Look|null>>} */
    this.known = new Map();
  }

  /** @param {number} at @param {number} head @param {Focus} focus @param {State} state @returns {Promise<Look|null>} */
  get(at, head, { axis, unit }, state) {
    const { sink, special, least, words, part, pair } = state;
    const shown = this.page.shown(state);
    const filters = [sink, special, least, words, part, pair, shown].join();
    if (filters !== this.filters || this.known.size > MOST_LOOKS) this.known.clear();
    this.filters = filters;
    const asked = axis === "key" ? { ...state, sink: state.sink ?? true } : state; // who looks at a sink, when that is asked
    const name = [at, head, axis, unit, this.page.side(state).withoutSink(at, head, asked)].join();
    let look = this.known.get(name);
    if (!look) {
      const units = this.page.side(state).units(words);
      look =
        axis === "query"
          ? this.page.filtered(shown, at, head, units.start[unit], asked)
          : this.page.filteredColumn(shown, at, head, units.range(unit), asked);
      this.known.set(name, look);
    }
    return look;
  }
}
