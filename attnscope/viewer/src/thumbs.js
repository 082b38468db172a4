/** A head's map made small: each pixel is the largest weight of its cells, so that one bright cell is not lost. */

/**
 * @typedef {import("./weights.js").Reach} Reach
 * @typedef {import("./weights.js").Strongest} Strongest
 * @typedef {import("./types.js").State} State
 * @typedef {import("./types.js").Page} Page
 * @typedef {{rows: number, columns: number, values: Float32Array, max: number}} Thumb NaN where no key is visible
 */

const WORDS_SHOW = 512; // rows, of more a word is less than a pixel

/**
 * @param {Page} page @param {number} side @param {number} at @param {number} head @param {State} state
 * @param {number} size most pixels of a side
 * @returns {Promise<Thumb|null>} null where the page holds nothing of the head
 */
export async function thumb(page, side, at, head, state, size) {
  const one = page.sides[side];
  const map = await one.map(at, head);
  const apart = one.stacks.length > 1 || state.pair !== "all"; // a map of the tokens that are asked for, not of all
  if (map && (state.words || apart) && map.rows <= WORDS_SHOW) {
    const grid = await page.filteredMap(side, at, head, state);
    const window_ = grid && { size, least: 0, keep: null, columns: grid.columns };
    return grid && window_ && pool(grid, grid.rows, () => [0, grid.columns], window_);
  }
  const keep = one.keep(at, head, state);
  const strongest = map ? null : await one.relations(at, head);
  if (strongest) return dots(strongest, await one.reach(at), keep, { size, least: state.least });
  if (!map) return null;
  const seen = (/** @type {number} */ row) => map.seen(row);
  return pool(map, map.rows, seen, { size, least: state.least, keep: map.bin === 1 ? keep : binned(keep, map.bin) });
}

/**
 * @param {{row: (row: number) => Float32Array}} map @param {number} rows
 * @param {(row: number) => [number, number]} seen columns that a row sees, half-open
 * @param {{size: number, least: number, keep: Uint8Array|null, columns?: number}} filter columns: where not as many as rows
 * @returns {Thumb}
 */
export function pool(map, rows, seen, { size: most, least, keep, columns = rows }) {
  const share = Math.min(1, most / Math.max(rows, columns));
  const [high, wide] = [rows, columns].map((count) => Math.max(1, Math.round(count * share)));
  const values = new Float32Array(high * wide).fill(NaN);
  const [down, places] = /** @type {const} */ ([[rows, high], [columns, wide]]).map(([count, size]) =>
    Int32Array.from({ length: count }, (_, place) => Math.floor((place * size) / count)),
  );
  let max = 0;
  for (let q = 0; q < rows; q++) {
    const weights = map.row(q);
    const line = down[q] * wide;
    const [from, to] = seen(q);
    for (let k = from; k < to; k++) {
      const weight = Math.abs(weights[k]) < least || (keep && !keep[k]) ? 0 : weights[k];
      const [cell, size] = [line + places[k], Math.abs(weight)];
      if (!(Math.abs(values[cell]) >= size || Number.isNaN(weight))) values[cell] = weight;
      if (size > max && to - from > 1) max = size;
    }
  }
  return { rows: high, columns: wide, values, max: max || 1 };
}

/**
 * @param {Strongest} strongest @param {Reach} reach @param {Uint8Array} keep
 * @param {{size: number, least: number}} filter @returns {Thumb}
 */
function dots({ keys, stored, step, tokens, k }, reach, keep, { size: most, least }) {
  const size = Math.max(1, Math.min(tokens, most));
  const values = new Float32Array(size * size).fill(NaN);
  const place = (/** @type {number} */ token) => Math.floor((token * size) / tokens);
  for (let q = 0; q < tokens; q++)
    if (reach.to(q) > reach.from(q))
      values.fill(0, place(q) * size + place(reach.from(q)), place(q) * size + place(reach.to(q) - 1) + 1);
  for (let i = 0; i < keys.length; i++) {
    const weight = stored[i] * step;
    if (keys[i] >= tokens || !keep[keys[i]] || Math.abs(weight) < least) continue;
    const row = Math.floor((Math.floor(i / k) * size) / tokens);
    const cell = row * size + Math.floor((keys[i] * size) / tokens);
    if (!(Math.abs(values[cell]) >= Math.abs(weight))) values[cell] = weight;
  }
  const signed = stored instanceof Int16Array; // whose rows need not sum to 1
  const max = signed ? values.reduce((most, value) => Math.max(most, Math.abs(value) || 0), 0) || 1 : 1;
  return { rows: size, columns: size, values, max };
}

/** @param {Uint8Array} keep of tokens @param {number} bin @returns {Uint8Array} of bins: 1 where all stay */
function binned(keep, bin) {
  return Uint8Array.from({ length: Math.ceil(keep.length / bin) }, (_, i) =>
    keep.subarray(i * bin, (i + 1) * bin).every(Boolean) ? 1 : 0,
  );
}
