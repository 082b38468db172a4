/**
 * From q, k and v to the weights and the output of one query, in float64: equation 1 of Vaswani et al. 2017, with
 * scale, soft-cap, bias, mask and sink in the order of attnscope/reference/attention.py. Numbers have the keys that
 * attnscope/steps/records.py gives them.
 *
 * @typedef {import("../types.js").StepsHead} StepsHead
 * @typedef {import("../data.js").Side} Side
 * @typedef {{q: Float32Array, k: Float32Array, v: Float32Array, bias: Float32Array|null}} Operands (tokens * dim,)
 *
 * @typedef {object} Steps of one query
 * @property {number} query
 * @property {Uint8Array} visible 1 for each key that it sees
 * @property {Float64Array} weights
 * @property {Record<string, Float64Array>} numbers one for each key, or of a vector of the query
 * @property {Record<string, (key: number) => Float64Array>} vectors of each key
 */
import { fit, make, place, tooltip } from "../canvas.js";
import { css, diverging } from "../colours.js";
import { paintedBy } from "../picture.js";

/** @param {Side} side @param {StepsHead} head @returns {Promise<Operands>} */
export async function opened(side, { dim, value_dim: valueDim, blob, offset, bias }) {
  const tokens = side.count;
  const sizes = [tokens * dim, tokens * dim, tokens * valueDim, bias ? tokens * tokens : 0];
  const all = await side.blobs.floats(
    { blob, offset },
    sizes.reduce((sum, size) => sum + size, 0),
  );
  let from = 0;
  const [q, k, v, added] = sizes.map((size) => all.subarray(from, (from += size)));
  return { q, k, v, bias: bias ? added : null };
}

/**
 * @param {StepsHead} head @param {Operands} operands @param {number} query
 * @param {[number, number]} seen the keys that the query sees, half-open
 * @returns {Steps}
 */
export function stepsOf(head, operands, query, [from, to]) {
  const tokens = operands.q.length / head.dim;
  const row = (/** @type {Float32Array} */ of, /** @type {number} */ width) => (/** @type {number} */ token) =>
    Float64Array.from(of.subarray(token * width, (token + 1) * width));
  const [q, k, v] = [row(operands.q, head.dim)(query), row(operands.k, head.dim), row(operands.v, head.value_dim)];
  const raw = perKey(tokens, (key) => dot(q, k(key)));
  const scaled = raw.map((score) => score * head.scale);
  const { cap, sink } = head;
  const capped = cap === null ? scaled : scaled.map((score) => cap * Math.tanh(score / cap));
  const bias = perKey(tokens, (key) => operands.bias?.[query * tokens + key] ?? 0);
  const biased = capped.map((score, key) => score + bias[key]);
  const visible = Uint8Array.from({ length: tokens }, (_, key) => (key >= from && key < to ? 1 : 0));
  const masked = biased.map((score, key) => (visible[key] ? score : -Infinity));
  const largest = masked.reduce((most, logit) => Math.max(most, logit), sink ?? -Infinity);
  const exp = masked.map((logit) => Math.exp(logit - largest));
  const sum = exp.reduce((all, one) => all + one, sink === null ? 0 : Math.exp(sink - largest));
  const weights = exp.map((one) => one / sum);
  const weighted = (/** @type {number} */ key) => v(key).map((value) => value * weights[key]);
  const output = new Float64Array(head.value_dim);
  for (let key = 0; key < tokens; key++) weighted(key).forEach((value, at) => (output[at] += value));
  const numbers = { q, raw, scaled, capped, bias, biased, masked, exp, weights, output };
  const products = (/** @type {number} */ key) => k(key).map((value, at) => value * q[at]);
  return { query, visible, weights, numbers, vectors: { k, v, weighted, products } };
}

/** @param {number} tokens @param {(key: number) => number} value */
const perKey = (tokens, value) => Float64Array.from({ length: tokens }, (_, key) => value(key));

/** @param {Float64Array} a @param {Float64Array} b */
const dot = (a, b) => a.reduce((sum, value, at) => sum + value * b[at], 0);

/** @param {Float64Array} values */
export const length = (values) => Math.sqrt(dot(values, values));

// How they are written: with three decimals, below one another; and those of a vector as a strip of colours.

const FIGURE_SPACE = "\u2007"; // as wide as a digit
const DECIMALS = 3; // as all weights of the page have
const [LEAST, MOST, EACH, HIGH] = [48, 112, 3, 14]; // CSS pixels of a strip, of a dimension in it, and its height
const NAMED = 3; // dimensions that a strip names to those who hear it

/** @param {Float64Array} values */
export const total = (values) => values.reduce((sum, value) => sum + value, 0);

/** @param {Float64Array} values @param {number} first @returns {string} its first numbers */
export const numbers = (values, first) =>
  [...values.subarray(0, first)].map((value) => number(value).padStart(7, FIGURE_SPACE)).join(FIGURE_SPACE);

/** With three decimals, hidden logits as −∞. @param {number} value */
export function number(value) {
  if (value === -Infinity) return "−∞";
  const size = Math.abs(value);
  const plain = size === 0 || (size >= 10 ** -DECIMALS / 2 && size < 1e4);
  return (plain ? value.toFixed(DECIMALS) : value.toExponential(1)).replaceAll("-", "−");
}

/** @param {Float64Array} values @returns {number[]} dimensions, the largest first, whatever their sign */
export const largest = (values) => [...values.keys()].sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]));

/** @param {Float64Array} values @returns {string} the dimensions that a sum is mostly made of */
export const foremost = (values) =>
  largest(values)
    .slice(0, NAMED)
    .map((at) => `dimension ${at} ${values[at] > 0 ? "+" : ""}${number(values[at])}`)
    .join(", ");

/**
 * A vector, a colour for each dimension.
 *
 * @param {string} name what it is of @param {Float64Array} values @param {number} most that the strongest colour stands for
 * @param {(dimension: number) => [string, string][]} about what a dimension is told as
 */
export function strip(name, values, most, about) {
  const width = Math.min(MOST, Math.max(LEAST, EACH * values.length));
  const each = width / values.length;
  const canvas = make("canvas", { class: "dimensions", role: "img", "aria-label": `${name}: ${foremost(values)}` });
  const paint = (/** @type {any} */ pen) =>
    values.forEach((value, at) => {
      pen.fillStyle = css(diverging(), 0.5 + value / most / 2);
      pen.fillRect(at * each, 0, each, HIGH);
    });
  paintedBy(canvas, paint);
  paint(fit(canvas, width, HIGH));
  canvas.addEventListener("pointermove", (event) => {
    const at = Math.min(values.length - 1, Math.max(0, Math.floor(place(canvas, event)[0] / each)));
    tooltip.show(event, [`dimension ${at}`, ...about(at)]);
  });
  canvas.addEventListener("pointerleave", () => tooltip.hide());
  return canvas;
}
