/** Numbers as `attnscope explain` writes them. */

const FIGURE_SPACE = "\u2007"; // as wide as a digit

/** @param {Float64Array} values */
export const total = (values) => values.reduce((sum, value) => sum + value, 0);

/** @param {Float64Array} values @param {number} first @returns {string} its first numbers, with four decimals */
export const numbers = (values, first) =>
  [...values.subarray(0, first)].map((value) => number(value).padStart(7, FIGURE_SPACE)).join(FIGURE_SPACE);

/** Whole numbers as they are, others with four decimals, hidden logits as −∞. @param {number} value */
export function number(value) {
  if (value === -Infinity) return "−∞";
  if (Number.isInteger(value) && Math.abs(value) < 1e4) return String(value).replace("-", "−");
  const plain = Math.abs(value) >= 1e-3 && Math.abs(value) < 1e4;
  return (plain ? value.toFixed(4) : value.toExponential(1)).replaceAll("-", "−");
}
