/**
 * Numbers as the page carries them: blobs unpacked once, when they are first asked for, and the weights of one head.
 *
 * @typedef {import("./types.js").MapEntry} MapEntry
 * @typedef {import("./types.js").Place} Place
 * @typedef {import("./units.js").Units} Units
 */

/** @param {string} text base64 */
export function bytesOf(text) {
  const binary = atob(text.trim());
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** @param {Uint8Array<ArrayBuffer>} bytes @returns {Promise<ArrayBuffer>} */
export function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Response(stream).arrayBuffer();
}

/** Numbers by blob, each unpacked once, when it is first asked for. */
export class Blobs {
  /** @param {(blob: number) => string} read the base64 text of a blob */
  constructor(read) {
    this.read = read;
    /** @type {Map<number, Promise<ArrayBuffer>>} */
    this.unpacked = new Map();
  }

  /** @param {number} blob */
  get(blob) {
    let buffer = this.unpacked.get(blob);
    if (!buffer) this.unpacked.set(blob, (buffer = inflate(bytesOf(this.read(blob)))));
    return buffer;
  }

  /** @param {Place} place @param {number} length @returns {Promise<Float32Array>} */
  async floats({ blob, offset }, length) {
    return new Float32Array(await this.get(blob), offset, length);
  }
}

/** Which keys each query of a layer sees: those of [from, to). */
export class Reach {
  /**
   * @param {Int32Array|null} first the first key of each query, null: key 0
   * @param {Int32Array|null} end behind its last key, null: behind the query itself
   */
  constructor(first, end) {
    this.first = first;
    this.end = end;
  }

  /** @param {number} q @returns {number} */
  from(q) {
    return this.first?.[q] ?? 0;
  }

  /** @param {number} q @returns {number} */
  to(q) {
    return this.end?.[q] ?? q + 1;
  }

  /** @param {number} start @param {number} stop @returns {[number, number]} what any of the queries sees, half-open */
  among(start, stop) {
    let [from, to] = [this.from(start), this.to(start)];
    for (let q = start + 1; q < stop; q++) [from, to] = [Math.min(from, this.from(q)), Math.max(to, this.to(q))];
    return [from, to];
  }
}

/** The weights of one head as stored: rows x columns of tokens, or of bins of `bin` tokens. */
export class WeightMap {
  /**
   * @param {MapEntry} entry
   * @param {ArrayBuffer} buffer
   * @param {Reach|null} reach null: as a causal layer
   * @param {number} tokens
   */
  constructor(entry, buffer, reach, tokens) {
    this.rows = entry.rows;
    this.columns = entry.columns;
    this.bin = entry.bin;
    this.step = entry.scale;
    this.whole = true;
    this.triangle = entry.triangle;
    this.reach = reach ?? new Reach(null, null);
    this.tokens = tokens;
    const length = this.start(this.rows);
    const [bytes, words] = entry.signed ? [Int8Array, Int16Array] : [Uint8Array, Uint16Array];
    this.stored = new (entry.bits === 16 ? words : bytes)(buffer, entry.offset, length);
  }

  /** @param {number} row @returns {number} where the row begins among the stored numbers */
  start(row) {
    if (!this.triangle) return row * this.columns;
    const short = Math.min(row, this.columns);
    return (short * (short + 1)) / 2 + (row - short) * this.columns;
  }

  /** @param {number} row @returns {number} how many entries are stored of it */
  length(row) {
    return this.triangle ? Math.min(row + 1, this.columns) : this.columns;
  }

  /** @param {number} q @param {number} k @returns {number} 0 where k is not visible, or below half a step */
  at(q, k) {
    return k < this.length(q) ? this.stored[this.start(q) + k] * this.step : 0;
  }

  /** @param {number} q @returns {[number, number]} the columns that any query of row q sees, half-open */
  seen(q) {
    const [from, to] = this.reach.among(q * this.bin, Math.min((q + 1) * this.bin, this.tokens));
    return [Math.floor(from / this.bin), Math.min(this.columns, Math.ceil(to / this.bin))];
  }

  /** @param {number} q @param {number} k whether any query of row q sees any key of column k */
  visible(q, k) {
    const [from, to] = this.seen(q);
    return from <= k && k < to;
  }

  /** @param {number} q @returns {Float32Array} (columns,) */
  row(q) {
    const weights = new Float32Array(this.columns);
    const start = this.start(q);
    for (let k = this.length(q) - 1; k >= 0; k--) weights[k] = this.stored[start + k] * this.step;
    return weights;
  }

  /** @param {number} k @returns {Float32Array} (rows,) */
  column(k) {
    return Float32Array.from({ length: this.rows }, (_, q) => this.at(q, k));
  }
}

/** The strongest keys of each query of one head, where its map is binned. */
export class Strongest {
  /**
   * @param {Uint32Array} keys (tokens * k,), 0xFFFFFFFF for none
   * @param {Uint16Array|Int16Array} stored @param {number} step @param {number} tokens
   */
  constructor(keys, stored, step, tokens) {
    this.keys = keys;
    this.stored = stored;
    this.step = step;
    this.tokens = tokens;
    this.whole = false;
    this.k = keys.length / Math.max(1, tokens);
  }

  /** @param {number} q @returns {Float32Array} (tokens,) */
  row(q) {
    const weights = new Float32Array(this.tokens);
    for (let i = q * this.k; i < (q + 1) * this.k; i++)
      if (this.keys[i] < this.tokens) weights[this.keys[i]] = this.stored[i] * this.step;
    return weights;
  }

  /** @param {number} key @returns {Float32Array} (tokens,) */
  column(key) {
    const weights = new Float32Array(this.tokens);
    for (let i = 0; i < this.keys.length; i++)
      if (this.keys[i] === key) weights[Math.floor(i / this.k)] = this.stored[i] * this.step;
    return weights;
  }
}

/**
 * @param {number[]} at column of each row, NaN where it has none
 * @param {(...of: number[]) => number} outermost of which nothing is cut off
 * @returns {[number, number, number, number][]} down along each row that is cut off, and across from row to row
 */
function steps(at, outermost) {
  const out = outermost(...at.filter((column) => !Number.isNaN(column)));
  /** @type {[number, number, number, number][]} */
  const lines = [];
  at.forEach((column, q) => {
    if (!Number.isNaN(column) && column !== out) lines.push([q, column, q + 1, column]);
    if (Math.abs(column - at[q - 1]) > 0) lines.push([q, at[q - 1], q, column]);
  });
  return lines;
}

/** A map with the filters applied: rows x columns of units, NaN where no key is visible. */
export class Grid {
  /** @param {Units} rows @param {Units} columns @param {number} step @param {number} bin */
  constructor(rows, columns, step, bin) {
    this.rowUnits = rows;
    this.columnUnits = columns;
    this.rows = rows.count;
    this.columns = columns.count;
    this.step = step;
    this.bin = bin;
    this.values = new Float32Array(this.rows * this.columns);
    this.removed = new Float32Array(this.rows);
    /** the largest size of a weight in a row that sees more than one key: a softmax gives the first row 1 in any case */
    this.max = 0;
  }

  /** @param {number} q @param {number} k */
  at(q, k) {
    return this.values[q * this.columns + k] || 0;
  }

  /** @param {number} q @param {number} k */
  visible(q, k) {
    return !Number.isNaN(this.values[q * this.columns + k]);
  }

  /** Whether some row does not see some key. */
  get hides() {
    return this.values.some(Number.isNaN);
  }

  /** @param {number} q */
  row(q) {
    return this.values.subarray(q * this.columns, (q + 1) * this.columns);
  }

  /** @param {number} k */
  column(k) {
    return Float32Array.from({ length: this.rows }, (_, q) => this.at(q, k));
  }

  /**
   * The edge of a window: left of the first key of each row that does not see the first of all, right of the last key
   * where rows look `ahead`, and between the rows where it moves.
   *
   * @param {boolean} ahead
   * @returns {[row: number, column: number, row: number, column: number][]} lines between corners of cells
   */
  edges(ahead) {
    const rows = Array.from({ length: this.rows }, (_, q) => this.row(q));
    const seen = (/** @type {number} */ weight) => !Number.isNaN(weight);
    const first = rows.map((row) => row.findIndex(seen));
    const behind = rows.map((row) => row.findLastIndex(seen) + 1);
    const some = (/** @type {number} */ column, /** @type {number} */ q) => (first[q] < 0 ? NaN : column);
    return [...steps(first.map(some), Math.min), ...(ahead ? steps(behind.map(some), Math.max) : [])];
  }
}

/**
 * A weight as the page says it: three decimals, `<0.001` for a smaller one, and below half a step for a visible one that
 * is stored as 0.
 *
 * @param {number} weight @param {number} [step]
 */
export function said(weight, step = 0) {
  if (weight < 0) return weight > -0.0005 ? ">−0.001" : `−${(-weight).toFixed(3)}`;
  if (weight === 0 && step > 0) return `<${(Math.max(1, Math.ceil(500 * step)) / 1000).toFixed(3)}`;
  return weight > 0 && weight < 0.0005 ? "<0.001" : weight.toFixed(3);
}

/** @param {number} weight @param {number} step @param {number} [tokens] @returns {string} what the page holds of it */
export function exactly(weight, step, tokens = 1) {
  if (!step) return weight.toFixed(6);
  return `${weight.toFixed(6)} ± ${((tokens * step) / 2).toPrecision(1)}, stored in steps of ${step.toPrecision(2)}`;
}
