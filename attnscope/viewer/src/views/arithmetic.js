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
