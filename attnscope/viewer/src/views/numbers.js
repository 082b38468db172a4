/** Numbers of the steps: with three decimals, below one another; and those of a vector as a strip of colours. */
import { fit, make, place, tooltip } from "../canvas.js";
import { css, diverging } from "../colours.js";
import { paintedBy } from "../picture.js";

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
