/**
 * Both sides between the units that they share, and the second minus the first. A unit is a token of either text, or the
 * tokens that cannot be told apart where the texts are cut differently: attnscope/inputs/spans.py says which. Mass is summed
 * over a unit's keys and averaged over its queries, as attnscope/metrics/divergence.py does for `attnscope compare`.
 *
 * @typedef {import("../types.js").State} State
 * @typedef {import("../data.js").Page} Page
 * @typedef {[first: number[], second: number[]]} SharedUnit its rows, or columns, in the maps of both sides
 * @typedef {{maps: (Grid|null)[], rows: SharedUnit[], columns: SharedUnit[], masses: Grid[], difference: Grid|null}} Compared
 * @typedef {import("../types.js").Divergence & {row: number, column: number, value: number}} Ranked and its largest difference
 */
import { Grid } from "../data.js";
import { Units } from "../units.js";

/**
 * Both maps of a head as they are shown, and between shared units: rows and columns of `masses` and `difference`. NaN
 * where a side cannot see the key.
 *
 * @param {Page} page @param {number} at @param {number} head @param {State} state @returns {Promise<Compared>}
 */
export async function compared(page, at, head, state) {
  const maps = await Promise.all([0, 1].map((side) => page.filteredMap(side, at, head, state)));
  const [a, b] = maps;
  const [rows, columns] = a && b ? [a.rowUnits, a.columnUnits].map((units, axis) =>
    sharedUnits(page, state.words, a, b, [units, axis ? b.columnUnits : b.rowUnits])) : [[], []];
  if (!a || !b || !rows.length || !columns.length) return { maps, rows, columns, masses: [], difference: null };
  const named = [unitsOf(rows, a.rowUnits, b.rowUnits), unitsOf(columns, a.columnUnits, b.columnUnits)];
  const masses = [a, b].map((map, side) => massOf(map, side, rows, columns, named));
  return { maps, rows, columns, masses, difference: minus(masses[0], masses[1]) };
}

/**
 * @param {Page} page @param {boolean} words @param {Grid} a @param {Grid} b
 * @param {Units[]} units what the rows, or the columns, of both maps are
 * @returns {SharedUnit[]} in order; of binned maps those of texts whose tokens are all paired one by one
 */
function sharedUnits(page, words, { bin }, { bin: other }, units) {
  const { tokens, words: whole } = page.data.units ?? { tokens: [[], []], words: [[], []] };
  if (bin > 1 || other > 1) {
    const same = bin === other && tokens.every((of) => of.length === tokens[0].length && of.every((unit, token) => unit === token));
    return same ? Array.from({ length: units[0].count }, (_, row) => [[row], [row]]) : [];
  }
  /** @type {Map<number, SharedUnit>} */
  const shared = new Map();
  (words ? whole : tokens).forEach((of, side) =>
    units[side].start.forEach((token, row) => {
      if (of[token] < 0) return;
      if (!shared.has(of[token])) shared.set(of[token], [[], []]);
      shared.get(of[token])?.[side].push(row);
    }),
  );
  return [...shared.values()].filter(([first, second]) => first.length && second.length);
}

/**
 * What shared units are called, and where they begin in the first text.
 *
 * @param {SharedUnit[]} shared @param {Units} a @param {Units} b
 */
function unitsOf(shared, a, b) {
  const labels = shared.map(([first, second]) => {
    const [one, other] = [first.map((unit) => a.label[unit]), second.map((unit) => b.label[unit])].map((of) => of.join(""));
    return bare(one) === bare(other) ? one : `${one}/${other}`;
  });
  const units = Units.tokens(labels);
  units.start = Int32Array.from(shared, ([first]) => a.start[first[0]]);
  units.origins = a.origins;
  return units;
}

/** @param {string} label of a token @returns {string} without the marks of blanks before it */
const bare = (label) => label.replace(/^\u00b7+/, "");

/** @param {Grid} map of a side @param {number} side @param {SharedUnit[]} rows @param {SharedUnit[]} columns @param {Units[]} named */
function massOf(map, side, rows, columns, named) {
  const grid = new Grid(named[0], named[1], map.step, map.bin);
  const keys = columns.map((unit) => unit[side]);
  rows.forEach((unit, row) => grid.row(row).set(massOn(map, unit[side], keys)));
  return grid;
}

/**
 * The mean over the tokens of some queries, the sum over each group of keys.
 *
 * @param {Grid} map @param {number[]} queries rows of the map @param {number[][]} groups columns of the map
 * @returns {number[]} NaN for a group that no query sees
 */
function massOn(map, queries, groups) {
  const { start, stop } = map.rowUnits;
  const tokens = queries.map((q) => stop[q] - start[q]);
  const all = tokens.reduce((sum, count) => sum + count);
  const mass = groups.map(() => NaN);
  queries.forEach((q, place) => {
    const weights = map.row(q);
    groups.forEach((keys, group) => {
      for (const k of keys)
        if (!Number.isNaN(weights[k])) mass[group] = (mass[group] || 0) + (weights[k] * tokens[place]) / all;
    });
  });
  return mass;
}

/** @param {Grid} a @param {Grid} b @returns {Grid} the second minus the first */
function minus(a, b) {
  const grid = new Grid(a.rowUnits, a.columnUnits, a.step + b.step, a.bin);
  grid.values = b.values.map((value, place) => value - a.values[place]);
  grid.max = grid.values.reduce((max, value) => Math.max(max, Math.abs(value) || 0), 0);
  return grid;
}

/**
 * The heads of both sides by their divergence, as `attnscope compare` ranks them: filters change the largest differences
 * alone. One after the other.
 *
 * @param {Page} page @param {State} state @returns {AsyncGenerator<Ranked>}
 */
export async function* ranked(page, state) {
  for (const one of [...page.data.divergences].sort((a, b) => (b.js ?? -1) - (a.js ?? -1))) {
    const { difference } = await compared(page, one.at, one.head, state);
    if (difference) yield { ...one, ...peak(difference) };
  }
}

/** @param {Grid} grid */
function peak({ values, columns }) {
  let best = 0;
  for (let place = 0; place < values.length; place++)
    if (!(Math.abs(values[best]) >= Math.abs(values[place])) && !Number.isNaN(values[place])) best = place;
  return { row: Math.floor(best / columns), column: best % columns, value: values[best] || 0 };
}
