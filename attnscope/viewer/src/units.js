/** What rows and columns stand for: tokens, words or bins; and which keys the filters take out. */

/** @param {number[]} origins in order @param {number} token @returns {number} where its text begins */
export const originOf = (origins, token) => origins.findLast((one) => one <= token) ?? 0;

export class Units {
  /** @param {ArrayLike<number>} bounds where each unit starts, and the end @param {string[]} label */
  constructor(bounds, label) {
    this.count = label.length;
    this.label = label;
    this.start = Int32Array.from({ length: this.count }, (_, i) => bounds[i]);
    this.stop = Int32Array.from({ length: this.count }, (_, i) => bounds[i + 1]);
    /** the unit of each token, -1 for one of another text */
    this.of = new Int32Array(this.count ? this.stop[this.count - 1] : 0).fill(-1);
    this.first = label; // what an axis names a unit: of a bin its first token
    /** where the texts begin that the units are of: each counts its own tokens from 0 */
    this.origins = [0];
    for (let unit = 0; unit < this.count; unit++) this.of.fill(unit, this.start[unit], this.stop[unit]);
  }

  /** @param {string[]} labels */
  static tokens(labels) {
    return new Units(
      Array.from({ length: labels.length + 1 }, (_, i) => i),
      labels,
    );
  }

  /**
   * Tokens outside every span stand alone.
   *
   * @param {[start: number, stop: number, name: string][]} spans in order @param {string[]} labels of the tokens
   */
  static spans(spans, labels) {
    const bounds = [0];
    const names = [];
    const alone = (/** @type {number} */ until) => {
      for (let token = bounds[bounds.length - 1]; token < until; token++) {
        names.push(labels[token]);
        bounds.push(token + 1);
      }
    };
    for (const [start, stop] of spans) {
      const from = Math.max(start, bounds[bounds.length - 1]);
      if (stop <= from) continue;
      alone(from);
      names.push(labels.slice(from, stop).join(""));
      bounds.push(stop);
    }
    alone(labels.length);
    return new Units(bounds, names);
  }

  /** @param {number} size @param {string[]} labels of the tokens */
  static bins(size, labels) {
    const count = Math.ceil(labels.length / size);
    const bounds = Array.from({ length: count + 1 }, (_, i) => Math.min(i * size, labels.length));
    const names = bounds.slice(0, -1).map((start, i) => `${start}–${bounds[i + 1] - 1}`);
    const bins = new Units(bounds, names);
    bins.first = bounds.slice(0, -1).map((start) => labels[start]);
    return bins;
  }

  /** @param {[number, number]} tokens half-open @returns {Units} those of one text; all of it: the same units */
  part([start, stop]) {
    const [first, last] = [this.of[start], this.of[stop - 1] + 1];
    if (first === 0 && last === this.count) return this;
    const bounds = [...this.start.subarray(first, last), this.stop[last - 1]];
    const part = new Units(bounds, this.label.slice(first, last));
    part.first = this.first.slice(first, last);
    part.origins = this.origins;
    return part;
  }

  /** @param {number} unit @returns {number} its first token, as its own text counts */
  number(unit) {
    return this.start[unit] - originOf(this.origins, this.start[unit]);
  }

  /** @param {number} unit @returns {[start: number, stop: number]} its tokens */
  range(unit) {
    return [this.start[unit], this.stop[unit]];
  }

  /** @param {[number, number]} tokens @returns {[number, number]} the same tokens, with the rest of their units */
  widen([start, stop]) {
    return [this.start[this.of[start]], this.stop[this.of[stop - 1]]];
  }

  /** @param {[number, number][]} ranges half-open, of tokens @returns {number[]} their units, each once */
  among(ranges) {
    const units = new Set();
    for (const [start, stop] of ranges)
      for (let unit = this.of[start]; unit <= this.of[stop - 1]; unit++) units.add(unit);
    return [...units];
  }

  /**
   * Adds the weights of tokens to those of their units; what is not kept counts as removed.
   *
   * @param {{weights: Float32Array, removed: number}} look
   * @param {Float32Array} weights of tokens @param {Uint8Array} keep @param {number} share
   */
  add(look, weights, keep, share) {
    for (let token = 0; token < weights.length; token++)
      if (keep[token]) look.weights[this.of[token]] += weights[token] * share;
      else look.removed += weights[token] * share;
  }

  /** @param {Float32Array} into for units @param {Float32Array} weights of tokens: their mean in each unit is added */
  mean(into, weights) {
    for (let token = 0; token < weights.length; token++) {
      const unit = this.of[token];
      into[unit] += weights[token] / (this.stop[unit] - this.start[unit]);
    }
  }

  /** @param {Uint8Array} tokens @returns {Uint8Array} for each unit, whether all of its tokens are 1 */
  every(tokens) {
    return Uint8Array.from({ length: this.count }, (_, unit) =>
      tokens.subarray(this.start[unit], this.stop[unit]).every(Boolean) ? 1 : 0,
    );
  }
}

/**
 * Which keys the filters leave.
 *
 * @param {{tokens: {special: number[]}, answer: number|null, pair?: number|null}} side
 * @param {{sink: boolean, special: boolean, part: string, pair: string}} state @param {number} sink the key a head rests on
 * @returns {Uint8Array} (tokens,)
 */
export function kept({ tokens, answer, pair: second = null }, { sink: showSink, special, part, pair }, sink) {
  const { length } = tokens.special;
  const keep = new Uint8Array(length).fill(1);
  if (!special) tokens.special.forEach((is, token) => is && (keep[token] = 0));
  if (!showSink && length) keep[sink] = 0;
  if (part === "prompt" && answer !== null) keep.fill(0, answer);
  if (part === "answer" && answer !== null) keep.fill(0, 0, answer);
  if (second !== null && pair !== "all") pair.endsWith("a") ? keep.fill(0, second) : keep.fill(0, 0, second);
  return keep;
}

/**
 * Takes weights out whose size is below the least.
 *
 * @param {{weights: Float32Array, removed: number}} look @param {number} least
 */
export function takenOut(look, least) {
  if (!least) return;
  for (let unit = 0; unit < look.weights.length; unit++)
    if (Math.abs(look.weights[unit]) < least) {
      look.removed += look.weights[unit];
      look.weights[unit] = 0;
    }
}
