/**
 * The page's data by side and head, and the filters, which apply here so that all views agree. A unit is a token, a
 * word (with `words`) or, of binned maps, a bin of tokens.
 *
 * @typedef {import("./types.js").PageData} PageData
 * @typedef {import("./types.js").State} State
 *
 * What a query gives to each unit (or, of a column, what each unit gives to a key), filters applied.
 * @typedef {object} Look
 * @property {Float32Array} weights one for each unit; 0 where it is not visible or taken out
 * @property {number} removed mass that the filters took out
 * @property {number} step what the weights are multiples of: one below half of it is stored as 0
 * @property {boolean} whole false where only the strongest keys of each query are known
 * @property {(unit: number) => boolean} visible
 * @property {Units} units
 */
import { Side, once } from "./side.js";
import { Units, takenOut } from "./units.js";
import { Grid } from "./weights.js";

export { Side } from "./side.js";
export { Blobs, Grid, Strongest, WeightMap, exactly, said } from "./weights.js";

/** All sides of the page, and the filters. */
export class Page {
  /** @param {PageData} data @param {import("./weights.js").Blobs} blobs */
  constructor(data, blobs) {
    this.data = data;
    this.sides = data.sides.map((side) => new Side(side, blobs));
    this.blobs = blobs;
    /** @type {Map<string, Promise<Grid|null>>} */
    this.grids = new Map();
  }

  /** @param {State} state @returns {number} the side that views of one side show */
  shown(state) {
    return state.side === "1" ? 1 : 0;
  }

  /** @param {number} side @returns {string} `A` or `B` where there are two */
  letter(side) {
    return this.sides[1] ? "AB"[side] : "";
  }

  /** @param {State} state @returns {Side} */
  side(state) {
    return this.sides[this.shown(state)];
  }

  /** @param {State} state @returns {number} the query that is chosen, else the one that is suggested */
  query(state) {
    return state.query ?? this.side(state).lastQuery(state.at, state);
  }

  /**
   * The keys that are chosen, with all places of a group; else those that are suggested: what the chosen head gives
   * most to. All views, and the line below them, speak of these.
   *
   * @param {State} state @returns {Promise<[number, number][]|null>} null where the page holds no weights of the head
   */
  async keysOf(state) {
    const chosen = this.places(state);
    if (chosen) return chosen;
    const whole = { ...state, sink: state.sink ?? true }; // of a head with a sink, too, the same in all views
    const look = await this.filtered(this.shown(state), state.at, state.head, this.query(state), whole);
    if (!look || !look.units.count) return null;
    const [start, stop] = this.side(state).axes(state.at, state).keys;
    let best = look.units.of[start];
    for (let unit = best; unit < look.units.of[stop - 1] + 1; unit++)
      if (Math.abs(look.weights[unit]) > Math.abs(look.weights[best])) best = unit;
    return [look.units.range(best)];
  }

  /** @returns {Record<string, number[]>} the keys that the command named, by their names */
  get groups() {
    const { defined, asked } = this.data;
    const named = Object.entries(defined).map(([name, { positions }]) => [name, positions]);
    const groups = asked.key ? [[asked.key.text, asked.key.positions], ...named] : named;
    return Object.fromEntries(groups.filter(([, positions]) => positions.length));
  }

  /** @param {State} state @returns {[number, number]|null} the key or span that is chosen, half-open */
  keys({ key, keyEnd }) {
    return key === null ? null : [key, keyEnd ?? key + 1];
  }

  /** @param {State} state @returns {[number, number][]|null} the same with all places of a group */
  places(state) {
    const keys = this.keys(state);
    return keys && (state.group ? runs(this.groups[state.group]) : [keys]);
  }

  /**
   * @param {number|null} token of one side @param {number} from that side
   * @returns {[number, number]|null} the first token of its unit in the other side, and the end of it
   */
  partner(token, from) {
    const tokens = this.data.units?.tokens;
    const unit = token === null ? -1 : (tokens?.[from][token] ?? -1);
    return unit < 0 || !tokens ? null : [tokens[1 - from].indexOf(unit), tokens[1 - from].lastIndexOf(unit) + 1];
  }

  /** @param {State} state @returns {State} with what the page does not hold replaced by what it does */
  clean(state) {
    const side = this.sides[1] ? state.side : "0";
    const one = this.sides[side === "1" ? 1 : 0];
    const at = Math.min(state.at, Math.max(0, one.layers.length - 1));
    const head = one.headAt(at, state.head) ? state.head : (one.heads.findLast((head) => head.at === at)?.head ?? 0);
    const pair = this.sides.some(({ data }) => (data.pair ?? null) !== null) ? state.pair : "all";
    const { queries, keys } = one.axes(at, { pair });
    const among = (/** @type {number|null} */ token, /** @type {[number, number]} */ [start, stop]) =>
      token !== null && token >= start && token < stop ? token : null;
    const [query, key] = [among(state.query, queries), among(state.key, keys)];
    const keyEnd = key !== null && (state.keyEnd ?? 0) > key + 1 ? Math.min(state.keyEnd ?? 0, keys[1]) : null;
    const metric = one.metrics.some(({ id }) => id === state.metric) ? state.metric : (one.metrics[0]?.id ?? "");
    const stack = one.stackOf(at); // lines of several heads share their tokens
    const heads = state.heads.filter((other) => one.headAt(other.at, other.head) && one.stackOf(other.at) === stack);
    const group = key !== null && side !== "1" && this.groups[state.group]?.[0] === key ? state.group : "";
    return { ...state, side, pair, at, head, query, key, keyEnd, group, metric, heads };
  }

  /**
   * The share that uniform attention gives to keys: the mean over the query's word, with `words`; 0 in a layer whose
   * weights are no shares.
   *
   * @param {number} side @param {number} at @param {number} query @param {[number, number][]} keys half-open ranges
   * @param {State} state @returns {Promise<number>}
   */
  async uniform(side, at, query, keys, state) {
    const one = this.sides[side];
    if (!one.shares(at)) return 0;
    const reach = await one.reach(at);
    const units = one.units(state.words);
    const [start, stop] = units.range(units.of[query]);
    let share = 0;
    for (let q = start; q < stop; q++) {
      const [begin, end] = [reach.from(q), reach.to(q)];
      const seen = units
        .among(keys)
        .map((unit) => Math.min(units.stop[unit], end) - Math.max(units.start[unit], begin));
      share += seen.reduce((sum, tokens) => sum + Math.max(0, tokens), 0) / Math.max(1, end - begin);
    }
    return share / (stop - start);
  }

  /**
   * What a query looks at; with `words`, the mean over the queries of its word.
   *
   * @param {number} side @param {number} at @param {number} head @param {number} query @param {State} state
   * @returns {Promise<Look|null>} null where the page has no weights in tokens
   */
  async filtered(side, at, head, query, state) {
    const one = this.sides[side];
    const [source, reach] = await Promise.all([one.weights(at, head), one.reach(at)]);
    if (!source) return null;
    const units = one.units(state.words);
    const [start, stop] = units.range(units.of[query]);
    const keep = one.keep(at, head, state);
    const look = emptyLook(units, source);
    for (let q = start; q < stop; q++) units.add(look, source.row(q), keep, 1 / (stop - start));
    takenOut(look, state.least);
    const [from, to] = reach.among(start, stop);
    look.visible = (unit) => units.start[unit] < to && units.stop[unit] > from;
    return look;
  }

  /**
   * Who looks at a key: what each query unit gives to it (or to all of `key` to `keyEnd`).
   *
   * @param {number} side @param {number} at @param {number} head @param {[number, number]} keys half-open
   * @param {State} state @returns {Promise<Look|null>}
   */
  async filteredColumn(side, at, head, keys, state) {
    const one = this.sides[side];
    const [source, reach] = await Promise.all([one.weights(at, head), one.reach(at)]);
    if (!source) return null;
    const units = one.units(state.words);
    const [start, stop] = units.widen(keys);
    const keep = one.keep(at, head, state);
    const look = emptyLook(units, source);
    for (let key = start; key < stop; key++) {
      const column = source.column(key);
      if (keep[key]) units.mean(look.weights, column);
      else look.removed += column.reduce((sum, weight) => sum + weight, 0);
    }
    takenOut(look, state.least);
    const [first, last] = one.axes(at, state).queries; // of a pair of texts, those that are asked for
    const among = (/** @type {number} */ unit) => units.start[unit] >= first && units.start[unit] < last;
    look.weights.forEach((_, unit) => among(unit) || (look.weights[unit] = 0));
    look.visible = (unit) => {
      if (!among(unit)) return false;
      for (let q = units.start[unit]; q < units.stop[unit]; q++)
        if (reach.to(q) > start && reach.from(q) < stop) return true;
      return false;
    };
    return look;
  }

  /**
   * What the chosen token looks at (state.from = "query") or who looks at it ("key"), of the head, the mean of its
   * layer, or of all heads.
   *
   * @param {number} side @param {State} state @param {number} token @returns {Promise<Look|null>}
   */
  async look(side, state, token) {
    const one = this.sides[side];
    const heads =
      state.over === "head" ? [state] : one.headsWith(state.at).filter(({ at }) => state.over === "all" || at === state.at);
    const looks = await Promise.all(
      heads.map(({ at, head }) =>
        state.from === "query"
          ? this.filtered(side, at, head, token, { ...state, least: 0 })
          : this.filteredColumn(side, at, head, [token, token + 1], { ...state, least: 0 }),
      ),
    );
    const found = looks.filter((look) => look !== null);
    if (!found.length) return null;
    const mean = emptyLook(found[0].units, found[0]);
    for (const look of found) {
      look.weights.forEach((weight, unit) => (mean.weights[unit] += weight / found.length));
      mean.removed += look.removed / found.length;
      mean.step = Math.max(mean.step, look.step);
      mean.whole &&= look.whole;
    }
    takenOut(mean, state.least);
    mean.visible = (unit) => found.some((look) => look.visible(unit));
    return mean;
  }

  /**
   * The whole map of a head with the filters applied, in tokens, words or bins.
   *
   * @param {number} side @param {number} at @param {number} head @param {State} state @returns {Promise<Grid|null>}
   */
  filteredMap(side, at, head, state) {
    const { sink, special, least, words, part, pair } = state;
    const name = [side, at, head, sink, special, least, words, part, pair].join();
    const grid = once(this.grids, name, () => this.#grid(this.sides[side], at, head, state));
    this.grids.delete(name); // the latest last, the oldest out
    this.grids.set(name, grid);
    if (this.grids.size > KEPT_GRIDS) this.grids.delete(this.grids.keys().next().value ?? "");
    return grid;
  }

  /** @param {Side} side @param {number} at @param {number} head @param {State} state */
  async #grid(side, at, head, state) {
    const map = await side.map(at, head);
    if (!map) return null;
    const bins = map.bin > 1 ? Units.bins(map.bin, side.tokens.label) : side.units(state.words);
    const { queries, keys } = side.axes(at, state);
    const [rows, columns] = map.bin > 1 ? [bins, bins] : [bins.part(queries), bins.part(keys)];
    const [top, left] = map.bin > 1 ? [0, 0] : [bins.of[queries[0]], bins.of[keys[0]]];
    const grid = new Grid(rows, columns, map.step, map.bin);
    const tokens = side.keep(at, head, state);
    const keep = map.bin > 1 ? bins.every(tokens) : tokens;
    const units = map.bin > 1 ? Units.tokens(bins.label) : bins; // a cell of a binned map is a unit already
    for (let unit = top; unit < top + rows.count; unit++) {
      const [start, stop] = units.range(unit);
      const alone = columns.count === units.count;
      const look = { weights: alone ? grid.row(unit - top) : new Float32Array(units.count), removed: 0 };
      for (let q = start; q < stop; q++) units.add(look, map.row(q), keep, 1 / (stop - start));
      takenOut(look, state.least);
      grid.removed[unit - top] = look.removed;
      const [from, to] = map.reach.among(bins.start[unit], bins.stop[unit]);
      let seen = 0;
      let most = 0;
      for (let k = 0; k < units.count; k++) {
        if (bins.start[k] < to && bins.stop[k] > from) seen++;
        else look.weights[k] = NaN;
        most = Math.max(most, Math.abs(look.weights[k]) || 0);
      }
      if (!alone) grid.row(unit - top).set(look.weights.subarray(left, left + columns.count));
      if (seen > 1) grid.max = Math.max(grid.max, most);
    }
    grid.max ||= 1;
    return grid;
  }
}

const KEPT_GRIDS = 12;

/** @param {Units} units @param {{step: number, whole: boolean}} source @returns {Look} */
function emptyLook(units, { step, whole }) {
  return { weights: new Float32Array(units.count), removed: 0, step, whole, visible: () => true, units };
}

/** @param {number[]} positions in order @returns {[number, number][]} half-open ranges */
function runs(positions) {
  /** @type {[number, number][]} */
  const found = [];
  for (const place of positions) {
    const last = found.at(-1);
    if (last?.[1] === place) last[1]++;
    else found.push([place, place + 1]);
  }
  return found;
}

/** @param {Look} look @param {[number, number][]} keys @returns {number} their units' mass */
export function massOn({ weights, units }, keys) {
  return units.among(keys).reduce((sum, unit) => sum + weights[unit], 0);
}
