/** Numbers in few digits, and the colour scale that goes with them. */
import { make } from "./canvas.js";
import { css, sequential } from "./colours.js";

/** @param {number} value @param {number} [places] significant digits; no exponent where the value is not tiny */
export function digits(value, places = 3) {
  const size = Math.abs(value);
  const text = size !== 0 && size < 1e-4 ? size.toExponential(1) : String(Number(size.toPrecision(places)));
  return signed(value, text);
}

/** @param {number} value @param {number} places after the point */
export const fixed = (value, places) => signed(value, Math.abs(value).toFixed(places));

/** @param {number} value @param {string} text of its size; what is written as 0 has no sign */
const signed = (value, text) => (value < 0 && /[1-9]/.test(text) ? `−${text}` : text);

/** @param {number} low @param {number} high @param {import("./colours.js").Ramp} [ramp] @returns {HTMLElement} */
export function colourScale(low, high, ramp = sequential()) {
  return make("span", { class: "scale" }, digits(low), gradient(ramp), digits(high));
}

/** @param {import("./colours.js").Ramp} ramp @returns {HTMLElement} its colours from left to right */
export function gradient(ramp) {
  const stops = Array.from({ length: 9 }, (_, place) => css(ramp, place / 8));
  const bar = make("i", { class: "gradient" });
  bar.style.backgroundImage = `linear-gradient(to right, ${stops.join(", ")})`;
  return bar;
}
