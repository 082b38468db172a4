/**
 * The second side minus the first, between tokens that stand at the same characters. Rows and columns count pairs.
 *
 * @typedef {import("../types.js").State} State
 * @typedef {import("../data.js").Page} Page
 * @typedef {[first: number, second: number]} Pair units of the two sides
 * @typedef {{at: number, head: number, row: number, column: number, value: number}} Largest
 */
import { Grid } from "../data.js";
import { Units } from "../units.js";

/**
 * Both maps of a head and their difference, whose rows and columns are the pairs. NaN where a side cannot see the key.
 *
 * @param {Page} page @param {number} at @param {number} head @param {State} state
 */
export async function compared(page, at, head, state) {
  const [a, b] = await Promise.all([0, 1].map((side) => page.filteredMap(side, at, head, state)));
  const pairs = a && b ? pairsOf(page, a, b) : [];
  const difference = a && b && pairs.length ? minus(a, b, pairs) : null;
  return { maps: [a, b], pairs, difference };
}

/** @param {Page} page @param {Grid} a @param {Grid} b @returns {Pair[]} */
export function pairsOf(page, { rowUnits: a, bin }, { rowUnits: b, bin: other }) {
  const aligned = page.data.aligned ?? [];
  if (bin > 1 || other > 1) {
    const same =
      bin === other &&
      a.count === b.count &&
      aligned.length === page.sides[0].count &&
      aligned.every(([one, two]) => one === two);
    return same ? Array.from({ length: a.count }, (_, unit) => [unit, unit]) : [];
  }
  const across = page.across[0];
  return aligned
    .filter(([one, two]) => one === a.start[a.of[one]] && two === b.start[b.of[two]])
    .filter(([one, two]) => across.get(a.stop[a.of[one]] - 1) === b.stop[b.of[two]] - 1) // words of the same characters
    .map(([one, two]) => [a.of[one], b.of[two]]);
}

/** @param {Grid} a @param {Grid} b @param {Pair[]} pairs @returns {Grid} */
function minus(a, b, pairs) {
  const units = Units.tokens(pairs.map(([one]) => a.rowUnits.label[one]));
  units.start = Int32Array.from(pairs, ([one]) => a.rowUnits.start[one]);
  const grid = new Grid(units, units, a.step + b.step, a.bin);
  pairs.forEach(([rowA, rowB], row) => {
    const into = grid.row(row);
    pairs.forEach(([columnA, columnB], column) => {
      const both = a.visible(rowA, columnA) && b.visible(rowB, columnB);
      into[column] = both ? b.at(rowB, columnB) - a.at(rowA, columnA) : NaN;
      grid.max = Math.max(grid.max, Math.abs(into[column]) || 0);
    });
  });
  return grid;
}

/**
 * The largest difference of every head that both sides have, one after the other.
 *
 * @param {Page} page @param {State} state
 */
export async function* largest(page, state) {
  const there = page.sides[1].indices;
  for (const { at, head } of page.sides[0].heads) {
    if (!there.has(`${at}.${head}`)) continue;
    const { difference } = await compared(page, at, head, state);
    if (difference) yield { at, head, ...peak(difference) };
  }
}

/** @param {Grid} grid */
function peak({ values, columns }) {
  let best = 0;
  for (let place = 0; place < values.length; place++)
    if (!(Math.abs(values[best]) >= Math.abs(values[place])) && !Number.isNaN(values[place])) best = place;
  return { row: Math.floor(best / columns), column: best % columns, value: values[best] || 0 };
}
